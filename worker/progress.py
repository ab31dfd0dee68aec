"""How far the weights have come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from typing import TextIO

WIDTH = 30


class Progress:
    """Shows bytes done of bytes in all on a stream."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream, self._label = stream, label
        self._is_terminal = stream.isatty()
        self._shown = -1

    def show(self, done: int, total: int) -> None:
        """Show a state; only as often as a person would notice."""
        percent = 100 * done // max(total, 1)
        step = percent if self._is_terminal else percent // 25
        if step == self._shown:
            return
        self._shown = step
        megabytes = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
        if self._is_terminal:
            bar = "#" * (WIDTH * done // max(total, 1))
            end = "\n" if done >= total else ""
            self._stream.write(f"\r{self._label} [{bar:<{WIDTH}}] {megabytes}{end}")
        else:
            self._stream.write(f"{self._label}: {megabytes}\n")
        self._stream.flush()
