"""A worker whose experts take their time: `slow_worker.py SECONDS [MARK]`.

SECONDS may be a range such as 0-0.02, drawn anew for each call. With MARK, a file of that name is made when a call
begins, so that a test can act in the middle of it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kernels.backends.numpy_cpu import NumpyBackend, NumpyBank
from kernels.interface import F32, I32, ExpertWeights
from worker.cli import serve
from worker.session import end_with, read_session


class SlowBackend(NumpyBackend):
    """The reference, later."""

    def __init__(self, least: float, most: float, mark: Path | None) -> None:
        super().__init__()
        self._least, self._most, self._mark = least, most, mark

    def load(self, experts: Mapping[int, ExpertWeights]) -> NumpyBank:
        slow, inner = self, super().load(experts)

        class SlowBank(NumpyBank):
            def rows(self, x: F32, pairs: I32) -> F32:
                slow.wait()
                return inner.rows(x, pairs)

        return SlowBank(experts)

    def wait(self) -> None:
        if self._mark is not None:
            self._mark.touch()
        time.sleep(random.uniform(self._least, self._most))


if __name__ == "__main__":
    least, _, most = sys.argv[1].partition("-")
    mark = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    session = read_session(sys.stdin)
    end_with(sys.stdin)
    serve(session, SlowBackend(float(least), float(most or least), mark))
