"""The part of Pyodide's bridge that `workers/boundary.py` uses (Pyodide 314)."""

from typing import Any

class JsException(Exception):
    message: str

def create_proxy(value: Any) -> Any: ...
def run_sync(promise: Any) -> Any: ...
def to_js(value: Any) -> Any: ...
