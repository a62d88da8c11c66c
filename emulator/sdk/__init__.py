"""The module `workers` as Python code on Workers sees it, as far as it is emulated."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from emulator.context import current
from emulator.sdk.classes import DurableObject, WorkerEntrypoint
from emulator.sdk.messages import Body, FetchResponse, Headers, Request, Response, fetch
from emulator.values import crossed

__all__ = [
    "Body",
    "DurableObject",
    "FetchResponse",
    "Headers",
    "Request",
    "Response",
    "WorkerEntrypoint",
    "fetch",
    "make_module",
    "python_from_rpc",
    "python_to_rpc",
]

_NOT_EMULATED = frozenset(
    (
        "Blob", "BlobEnding", "BlobValue", "Context", "File", "FormData", "FormDataValue", "FetchKwargs",
        "JSBody", "RequestInitCfProperties", "WorkflowEntrypoint", "handler", "import_from_javascript",
        "patch_env",
    )
)  # fmt: skip


def python_to_rpc(value: Any) -> Any:
    """What the SDK's function of that name lets pass; the value itself is left as it is."""
    crossed(value)
    return value


def python_from_rpc(value: Any) -> Any:
    """A value as it arrives."""
    return crossed(value)


def make_module(env: Any) -> ModuleType:
    """The module `workers` of one isolate, whose bindings are `env`."""
    module = ModuleType("workers", __doc__)
    for name in __all__:
        if name != "make_module":
            setattr(module, name, globals()[name])

    def wait_until(work: Any) -> None:
        current().wait_until(work)

    def missing(name: str) -> Any:
        if name in _NOT_EMULATED:
            raise NotImplementedError(f"workers.{name} is not emulated")
        raise AttributeError(f"module 'workers' has no attribute {name!r}")

    module.__dict__.update(env=env, waitUntil=wait_until, wait_until=wait_until, __getattr__=missing)
    return module
