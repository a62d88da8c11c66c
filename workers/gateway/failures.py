"""Errors as OpenAI's clients expect them: status, type, the parameter at fault, and a code for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from protocol.calls import Reply, json_reply
from protocol.fields import BadField, MissingField, UnknownField
from protocol.steps import Refusal, RefusalKind

STATUS: Final = {
    RefusalKind.BUSY: 503,
    RefusalKind.UNAVAILABLE: 503,
    RefusalKind.OVER_BUDGET: 503,
    RefusalKind.LOST: 502,
    RefusalKind.CACHE_MISS: 502,
    RefusalKind.STALE_EPOCH: 502,
    RefusalKind.BAD_WEIGHTS: 502,
    RefusalKind.WRONG_MODEL: 502,
    RefusalKind.WRONG_RANGE: 502,
}
# Seconds after which a client may come back where the refusal does not say.
RETRY_SECONDS: Final = 1


class ApiError(Exception):
    """An answer that says what is wrong. `param` names the parameter at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON has it; an event of a stream says the same."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def reply(self) -> Reply:
        """The error as an answer."""
        return json_reply(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def of_field(error: BadField) -> ApiError:
    """A parameter that is missing, unknown, or not what was expected."""
    code = "invalid_value"
    if isinstance(error, UnknownField):
        code = "unknown_parameter"
    elif isinstance(error, MissingField):
        code = "missing_required_parameter"
    elif error.name is None:
        code = "invalid_json"
    return bad_request(str(error), error.name, code)


def not_serving(error: Exception, passing: bool) -> ApiError:
    """The gateway could not start: what is wrong, which `passing` says may be otherwise a moment later."""
    message = f"the gateway cannot serve: {type(error).__name__}: {error}"
    if not passing:
        return ApiError(500, message, kind="server_error", code=str(RefusalKind.CANNOT_START))
    headers = {"retry-after": str(RETRY_SECONDS)}
    return ApiError(503, message, kind="server_error", code=str(RefusalKind.UNAVAILABLE), headers=headers)


def of_refusal(refusal: Refusal) -> ApiError:
    """What the cluster could not do; `code` is the refusal's kind."""
    status = STATUS.get(refusal.kind, 500)
    headers: dict[str, str] = {}
    if status == 503:
        wait = refusal.retry_after_ms
        seconds = RETRY_SECONDS if wait is None else max(RETRY_SECONDS, -(-wait // 1000))
        headers["retry-after"] = str(seconds)
    return ApiError(status, str(refusal), kind="server_error", code=str(refusal.kind), headers=headers)
