"""llama.cpp through llama-cpp-python: `python -m bench._bound FOLDER MODEL.gguf PROMPT DECODE THREADS`.

It is a process of its own, since two versions of llama.cpp in one process take each other's functions.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench._seconds import Seconds


def nothing(level: int, text: bytes, data: Any) -> None:
    """Takes a line of a log."""


def main(folder: str, path: str, prompt: int, decode: int, threads: int) -> None:
    """Prints seconds: on the processor for one thread, on the wall for more."""
    sys.path.insert(0, folder)
    api: Any = __import__("llama_cpp")
    api.llama_backend_init()
    silent = api.llama_log_callback(nothing)
    api.llama_log_set(silent, None)
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    parameters = api.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = threads
    context = api.llama_init_from_model(model, parameters)
    seconds = Seconds()

    def feed(ids: list[int]) -> None:
        array = (api.llama_token * len(ids))(*ids)
        if api.llama_decode(context, api.llama_batch_get_one(array, len(ids))):
            raise RuntimeError("llama.cpp could not decode")
        api.llama_get_logits_ith(context, -1)

    ids = [300 + 7 * i for i in range(prompt)]
    feed(ids)
    api.llama_memory_clear(api.llama_get_memory(context), True)
    with seconds.of("prefill"):
        feed(ids)
    for i in range(decode):
        with seconds.of("decode"):
            feed([ids[i]])
    print(json.dumps(seconds.processor if threads == 1 else seconds.wall))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
