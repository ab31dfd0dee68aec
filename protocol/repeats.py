"""How often a line of log is said that a peer can bring about at will: a flood of messages is no flood of lines."""

from __future__ import annotations

from collections.abc import Hashable

EVERY_S = 10.0
MOST_KINDS = 1024  #: that are remembered; beyond that all are forgotten, which says a line too many


class Repeats:
    """Of lines of one kind the first is said, then one in a while, with how many were left out."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._said: dict[Hashable, tuple[float, int]] = {}  #: kind to when it was said, and how many were not since

    def tail(self, kind: Hashable, now_s: float) -> str | None:
        """What to put behind the line, now that there is one of this kind; None: it is not to be said."""
        said_s, left_out = self._said.get(kind, (now_s - self._every_s, 0))
        if now_s - said_s < self._every_s:
            self._said[kind] = said_s, left_out + 1
            return None
        if len(self._said) >= MOST_KINDS and kind not in self._said:
            self._said.clear()
        self._said[kind] = now_s, 0
        return f" (and {left_out} more like it before)" if left_out else ""
