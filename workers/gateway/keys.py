"""Who may ask the gateway: those with a key of it, or with the cluster's secret. There is no open mode."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from failures import ApiError
from route import GatewaySettings


def check_key(settings: GatewaySettings, headers: Mapping[str, str]) -> None:
    """Raises `ApiError` 401 for a stranger. The key is never repeated: a mistyped one is nearly a key."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    data = given.encode(errors="surrogatepass") if scheme.lower() == "bearer" else b""
    keys = (*settings.api_keys, settings.secret)
    # Every key is compared, so that the time says nothing.
    if not sum(hmac.compare_digest(data, key.encode()) for key in keys):
        found = "the API key is wrong" if data else "there is no API key"
        raise ApiError(
            401,
            f"{found}: send Authorization: Bearer and a key of this gateway",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
