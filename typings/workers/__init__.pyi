"""The part of the Python Workers SDK that this project uses (workers-runtime-sdk 1.9.5)."""

from collections.abc import Mapping
from typing import Any

class Request:
    @property
    def method(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...

class Response:
    def __init__(
        self, body: Any = None, status: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None: ...

class WorkerEntrypoint:
    ctx: Any
    env: Any
    def __init__(self, ctx: Any, env: Any) -> None: ...

class DurableObject:
    ctx: Any
    env: Any
    def __init__(self, ctx: Any, env: Any) -> None: ...

def import_from_javascript(module_name: str) -> Any: ...
