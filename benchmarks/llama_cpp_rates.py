"""Tokens a second of llama.cpp through its Python package, for those who have no `llama-bench`.

    python benchmarks/llama_cpp_rates.py MODEL [-p 512] [-n 64] [-t 1]

As `llama-bench` measures: a warm-up, a prompt of so many tokens in one decode, then tokens one after another from an
empty cache. Prints one JSON object: test to tokens a second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp


def measure(path: str, prompt: int, tokens: int, threads: int) -> dict[str, float]:
    """`pp` and `tg`, named with their lengths."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch = max(prompt, tokens) + 1, max(prompt, 512)
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(ids: list[int]) -> None:
        array = (ctypes.c_int32 * len(ids))(*ids)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(ids))):
            sys.exit("llama.cpp refused a batch")
        llama_cpp.llama_synchronize(context)

    def seconds(batches: list[list[int]]) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started = time.perf_counter()
        for batch in batches:
            decode(batch)
        return time.perf_counter() - started

    ids = [(7919 * i + 1) % vocabulary for i in range(max(prompt, tokens))]
    found = dict[str, float]()
    if prompt:
        seconds([ids[:prompt]])
        found[f"pp{prompt}"] = prompt / seconds([ids[:prompt]])
    if tokens:
        seconds([[1]])
        found[f"tg{tokens}"] = tokens / seconds([[i] for i in ids[:tokens]])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-p", type=int, default=512)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("-t", type=int, default=1)
    args = parser.parse_args()

    # Kept for as long as the library may call it.
    silent: Any = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    print(json.dumps(measure(args.model, args.p, args.n, args.t)))


if __name__ == "__main__":
    main()
