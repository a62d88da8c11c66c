"""Pyodide's own JavaScript module."""

from typing import Any

_module: Any
