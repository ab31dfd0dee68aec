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

from kernels.interface import F32, I32, Backend, ExpertBank, ExpertWeights, NumericClass, Options
from kernels.registry import make_backend
from worker.cli import serve
from worker.session import end_with, read_session


class SlowBackend:
    """Another backend, later."""

    def __init__(self, inner: Backend, least: float, most: float, mark: Path | None) -> None:
        self._inner, self._least, self._most, self._mark = inner, least, most, mark
        self.name: str = inner.name
        self.device: str = inner.device
        self.threads: int = inner.threads
        self.numeric_class: NumericClass = inner.numeric_class

    def load(self, experts: Mapping[int, ExpertWeights]) -> ExpertBank:
        return SlowBank(self, self._inner.load(experts))

    def wait(self) -> None:
        if self._mark is not None:
            self._mark.touch()
        time.sleep(random.uniform(self._least, self._most))


class SlowBank:
    """Experts of one layer, later."""

    def __init__(self, backend: SlowBackend, inner: ExpertBank) -> None:
        self._backend, self._inner = backend, inner

    def rows(self, x: F32, pairs: I32) -> F32:
        self._backend.wait()
        return self._inner.rows(x, pairs)


if __name__ == "__main__":
    least, _, most = sys.argv[1].partition("-")
    mark = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    session = read_session(sys.stdin)
    end_with(sys.stdin)
    backend = make_backend(session.backend, Options(threads=session.threads, activations=session.activations))
    serve(session, SlowBackend(backend, float(least), float(most or least), mark))
