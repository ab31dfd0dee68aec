"""How far the weights have come: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
from typing import TextIO

WIDTH = 30
LINES = 4  #: where there is no terminal


class ProgressBar:
    """Shows bytes done of bytes in all on a stream."""

    def __init__(self, stream: TextIO, label: str, *, is_quiet: bool = False) -> None:
        self._stream, self._label, self._is_quiet = stream, label, is_quiet
        self._is_terminal = stream.isatty()
        self._shown: tuple[int, int] | None = None

    def show(self, done: int, total: int) -> None:
        """Show a state; only as often as a person would notice."""
        step = (done * (100 if self._is_terminal else LINES) // max(total, 1), total)
        if self._is_quiet or step == self._shown:
            return
        self._shown = step
        with contextlib.suppress(OSError):  # nobody reads along any more
            self._write(done, total)

    def _write(self, done: int, total: int) -> None:
        megabytes = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
        if self._is_terminal:
            bar = "#" * (WIDTH * done // max(total, 1))
            end = "\n" if done >= total else ""
            self._stream.write(f"\r{self._label} [{bar:<{WIDTH}}] {megabytes}{end}")
        else:
            self._stream.write(f"{self._label}: {megabytes}\n")
        self._stream.flush()
