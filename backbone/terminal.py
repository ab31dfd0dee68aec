"""What a terminal gets and a pipe does not: colour, and a line of progress that is written over."""

from __future__ import annotations

import os
from typing import TextIO


def is_rich(stream: TextIO) -> bool:
    """Whether colour and progress belong on a stream. NO_COLOR and TERM=dumb say no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """Text that stands back, on a terminal."""
    return f"\x1b[2m{text}\x1b[0m" if is_rich(stream) else text


class ProgressLine:
    """One line that is written over until the work is done. Silent where nobody watches."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if is_rich(stream) else None
        self._shown = False

    def show(self, what: str, done: int, total: int) -> None:
        """Show how far the work is."""
        if self._stream is not None:
            self._stream.write(f"\r\x1b[K{what} {done}/{total}")
            self._stream.flush()
            self._shown = True

    def clear(self) -> None:
        """Take the line away."""
        if self._stream is not None and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows with aligned columns; the first row is the heading, and all columns but the first hold numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
