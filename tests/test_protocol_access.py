"""Who may call a part: those who know the secret, and nobody else."""

from __future__ import annotations

import hmac

import pytest

from protocol import access

SECRET = "a secret of the tests"


def test_a_part_lets_in_what_another_part_sends() -> None:
    assert access.refusal(SECRET, access.headers(SECRET)) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-knot-secret": ""},
        {"x-knot-secret": "a secret of the test"},
        {"x-knot-secret": "a secret of the tests "},
        {"x-knot-secret": "A SECRET OF THE TESTS"},
        {"authorization": SECRET},
        {"x-knot-secret": "geheimnis · ключ · 鍵"},
        {"x-knot-secret": "half a character \ud800"},
    ],
)
def test_strangers_get_401_with_the_header_they_lack_and_not_the_secret(headers: dict[str, str]) -> None:
    reply = access.refusal(SECRET, headers)
    assert reply is not None
    assert reply.status == 401
    error = reply.json()["error"]
    assert error["kind"] == "forbidden"
    assert "x-knot-secret" in error["detail"]
    assert SECRET not in reply.bytes().decode()


def test_the_secret_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    access.refusal(SECRET, {"x-knot-secret": "guess"})
    access.refusal(SECRET, {})
    assert compared == [(b"guess", SECRET.encode()), (b"", SECRET.encode())]
