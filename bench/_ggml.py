"""ggml's own matrix product, out of the library that the package `xllamacpp` brings (AVX2)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import numpy as np

MEMORY: Final = 64 << 20


class _Init(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Product:
    """w · xᵀ for rows of a ggml type: `run` computes it on one thread."""

    def __init__(self, kind: int, rows: np.ndarray, cols: int, x: np.ndarray):
        package: Any = __import__("xllamacpp")
        [library] = Path(package.__file__).parent.glob("xllamacpp*.so")
        ggml = self._ggml = ctypes.CDLL(str(library))
        for name in ("init", "new_tensor_2d", "mul_mat", "new_graph", "get_data"):
            getattr(ggml, f"ggml_{name}").restype = ctypes.c_void_p
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        ggml.ggml_init.argtypes = [_Init]
        ggml.ggml_new_tensor_2d.argtypes = [pointer, ctypes.c_int, count, count]
        ggml.ggml_mul_mat.argtypes = [pointer, pointer, pointer]
        ggml.ggml_new_graph.argtypes = ggml.ggml_get_data.argtypes = [pointer]
        ggml.ggml_build_forward_expand.argtypes = [pointer, pointer]
        ggml.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]
        self._context = ggml.ggml_init(_Init(rows.size + x.nbytes + MEMORY, None, False))
        w = ggml.ggml_new_tensor_2d(self._context, kind, cols, len(rows))
        ctypes.memmove(ggml.ggml_get_data(w), rows.ctypes.data, rows.size)
        given = ggml.ggml_new_tensor_2d(self._context, 0, cols, len(x))
        ctypes.memmove(ggml.ggml_get_data(given), x.ctypes.data, x.nbytes)
        self._result = ggml.ggml_mul_mat(self._context, w, given)
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, self._result)
        self._shape = (len(x), len(rows))

    def run(self) -> None:
        """One product."""
        # Its plan and buffer are made anew in the context each time: room for many runs was asked for.
        self._ggml.ggml_graph_compute_with_ctx(self._context, self._graph, 1)

    def result(self) -> np.ndarray:
        """f32 [batch, rows]."""
        size = 4 * self._shape[0] * self._shape[1]
        data = ctypes.string_at(self._ggml.ggml_get_data(self._result), size)
        return np.frombuffer(data, "<f4").reshape(self._shape)

    def close(self) -> None:
        """Frees what it took."""
        self._ggml.ggml_free(ctypes.c_void_p(self._context))
