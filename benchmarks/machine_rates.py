"""What this machine can do at best: plain reading of memory and F32 matrix products, at some number of threads.

    python benchmarks/machine_rates.py [--threads 1] [--bytes N] [--json]

Reading: every byte of an array once, by a loop in C, over 1 GiB and over N bytes again and again (a model that fits
a cache is read from there). Without a C compiler numpy copies into a small buffer, which shows less. Products: numpy's
BLAS, 512 x 2048 x 2048. The best of several tries: a rate that others' work lowered is no limit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGE = 1 << 30
LEAST_READ = 1 << 29  #: bytes read in a try, in as many passes as that takes
TRIES = 5
M, K, N = 512, 2048, 2048
SOURCE = """
#include <stddef.h>
#include <stdint.h>
uint64_t read_all(const uint64_t *p, size_t n, int passes) {
    uint64_t all = 0;
    for (int pass = 0; pass < passes; pass++) {
        uint64_t sum = 0;
        for (size_t i = 0; i < n; i++) sum += p[i];
        all ^= sum;
        __asm__ volatile("" ::: "memory");
    }
    return all;
}
"""

Words = NDArray[np.uint64]
Reader = Callable[[Words, int], object]


def compiled_reader(folder: Path) -> Reader | None:
    """A loop in C; None without a compiler."""
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        return None
    source, library = folder / "read.c", folder / "read.so"
    source.write_text(SOURCE)
    for flags in (["-march=native"], ["-mcpu=native"], []):
        command = [compiler, "-O3", *flags, "-shared", "-fPIC", str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            break
    else:
        return None
    function = ctypes.CDLL(str(library)).read_all  # lets go of the interpreter's lock
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_uint64
    return lambda words, passes: function(words.ctypes.data, len(words), passes)


def copying_reader(words: Words, passes: int) -> None:
    """Copies into a buffer that stays in the cache."""
    buffer = np.empty(1 << 15, np.uint64)
    for _ in range(passes):
        for at in range(0, len(words), len(buffer)):
            piece = words[at : at + len(buffer)]
            np.copyto(buffer[: len(piece)], piece)


def read_rate(reader: Reader, size: int, threads: int) -> float:
    """GB/s."""
    parts = np.array_split(np.ones(size // 8, np.uint64), threads)
    passes = -(-LEAST_READ // size)
    best = 0.0
    for _ in range(TRIES):
        crew = [threading.Thread(target=reader, args=(part, passes)) for part in parts]
        started = time.perf_counter()
        for one in crew:
            one.start()
        for one in crew:
            one.join()
        best = max(best, passes * size / (time.perf_counter() - started) / 1e9)
    return best


def product_rate() -> float:
    """GFLOP/s of numpy's BLAS, at the threads that the environment gave it."""
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal((M, K), np.float32), draw.standard_normal((K, N), np.float32)
    best = 0.0
    for _ in range(3 * TRIES):
        started = time.perf_counter()
        a @ b
        best = max(best, 2 * M * K * N / (time.perf_counter() - started) / 1e9)
    return best


def measure(threads: int, size: int) -> dict[str, Any]:
    """All rates, in this process: its environment must be `environment(threads)`."""
    with tempfile.TemporaryDirectory() as folder:
        reader = compiled_reader(Path(folder))
        how = "C" if reader is not None else "numpy's copy: no C compiler"
        large = read_rate(reader or copying_reader, LARGE, threads)
        same = read_rate(reader or copying_reader, max(size, 1 << 20), threads)
    return {
        "threads": threads,
        "read_gb_s": round(large, 2),
        "read_same_gb_s": round(same, 2),
        "same_bytes": size,
        "read_by": how,
        "gemm_gflop_s": round(product_rate(), 1),
    }


def environment(threads: int) -> dict[str, str]:
    """Of the process that measures: BLAS as its makers tuned it, at so many threads."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    return kept | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bytes", type=int, default=1 << 27, help="also read so many bytes again and again")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if (wanted := environment(args.threads)) != dict(os.environ):  # BLAS reads it once, when it is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)  # noqa: S606
    found = measure(args.threads, args.bytes)
    if args.json:
        print(json.dumps(found))
        return
    print(
        "{threads} threads: {read_gb_s} GB/s of memory, {read_same_gb_s} GB/s over the same {same_bytes:,} bytes "
        "(by {read_by}); F32 products {gemm_gflop_s} GFLOP/s".format(**found)
    )


if __name__ == "__main__":
    main()
