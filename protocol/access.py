"""Who may call a part: those who know the cluster's secret."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from protocol.calls import Reply, json_reply

HEADER = "x-knot-secret"


def headers(secret: str) -> dict[str, str]:
    """The headers with which a part proves itself to another."""
    return {HEADER: secret}


def refusal(secret: str, received: Mapping[str, str]) -> Reply | None:
    """The answer to a stranger; None for one who knows the secret. Compared in constant time."""
    if hmac.compare_digest(received.get(HEADER, "").encode(errors="surrogatepass"), secret.encode()):
        return None
    return json_reply(
        {
            "error": {
                "kind": "forbidden",
                "detail": f"this part answers only calls with the right {HEADER} header",
            }
        },
        401,
    )
