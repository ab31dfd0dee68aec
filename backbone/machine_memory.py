"""This machine's memory: how much there is, and how fast it is read, which a moment of reading tells."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SECONDS = 0.3
SAMPLES = 3
BLOCK_BYTES = 64 << 20  #: that each thread reads again and again: more than its share of any cache
MOST_BYTES = 1 << 30  #: of all threads' blocks


def memory_bytes() -> int:
    """Bytes of memory that the machine has; 0 where the system does not say."""
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return 0


def read_bytes_per_s(threads: int, seconds: float = SECONDS) -> float:
    """Bytes a second that so many threads together read of memory. Each reads its block at least once."""
    count = max(1, min(BLOCK_BYTES, MOST_BYTES // threads) // 8)
    blocks = [np.ones(count, np.uint64) for _ in range(threads)]

    def read(number: int) -> float:
        started = time.perf_counter()
        done = 0
        while not done or time.perf_counter() - started < seconds / SAMPLES:
            blocks[number].max()  # numpy lets other threads run meanwhile
            done += blocks[number].nbytes
        return done / (time.perf_counter() - started)

    # The best of a few: others may use the machine just then.
    with ThreadPoolExecutor(threads) as pool:
        return max(sum(pool.map(read, range(threads))) for _ in range(SAMPLES))
