"""Stop strings in streamed text: nothing that may be the beginning of one is given out before it is clear."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed text piece by piece; get what is safe to show. `found` is the stop string that ended the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that can be shown; after `found` is set nothing more comes."""
        if self.found is not None:
            return ""
        held = self._held + text
        places = sorted((at, -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0)
        if places:
            at, _, self.found = places[0]
            self._held = ""
            return held[:at]
        keep = max((self._overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of the text that begins the stop string."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
