"""The tokens that both sides are run on: windows of a text, each a sequence of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from ..errors import UsageError
from ..tokenizer import Tokenizer

MOST_TEXT_BYTES = 1 << 28
DEFAULT_TEXT = "verse-heldout.txt"  #: of this package: chapters and glosses that the demo model has not seen


@dataclass(frozen=True, slots=True)
class Passage:
    """Windows of tokens, and from which position on each counts."""

    name: str
    sha256: str
    windows: tuple[tuple[int, ...], ...]
    first: int = 0  #: position of each window from which it is counted
    after: tuple[int, ...] = ()  #: the token after each window, where it is known: the last position's target

    @property
    def positions(self) -> int:
        """How many are counted."""
        return sum(max(0, len(window) - self.first) for window in self.windows)

    def begun(self, positions: int) -> Passage:
        """As many of the windows as have so many positions, or all."""
        count = 0
        while count < len(self.windows) and positions > 0:
            positions -= max(0, len(self.windows[count]) - self.first)
            count += 1
        return replace(self, windows=self.windows[:count], after=self.after[:count])

    def tokens_and_next(self, number: int) -> tuple[int, ...]:
        """A window's tokens with the one after it, where that is known."""
        return (*self.windows[number], *self.after[number : number + 1])

    def prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        """The beginnings of so many windows, spread evenly."""
        count = min(count, len(self.windows))
        return [self.windows[i * len(self.windows) // count][:length] for i in range(count)]


def shipped_text() -> tuple[str, bytes]:
    """The default text, by name."""
    return DEFAULT_TEXT, files(__package__).joinpath(DEFAULT_TEXT).read_bytes()


def read_text(path: Path | None) -> tuple[str, bytes]:
    """A text file, or the shipped one. UsageError when it cannot be read."""
    if path is None:
        return shipped_text()
    try:
        with path.open("rb") as file:
            data = file.read(MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--text {path}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_TEXT_BYTES:
        raise UsageError(f"--text {path}: larger than {MOST_TEXT_BYTES >> 20} MiB; give a part of it")
    return path.name, data


def passage_of(name: str, data: bytes, tokenizer: Tokenizer, *, positions: int, window: int) -> Passage:
    """The first `positions` tokens of a text in windows, each with what the model begins a text with.

    UsageError when the text is too short: a figure over fewer positions than asked for would be another figure.
    """
    start = tokenizer.encode("")
    body = tokenizer.encode(data.decode("utf-8", errors="replace"))[len(start) :]
    step = window - len(start)
    windows = [(*start, *body[at : at + step]) for at in range(0, len(body), step)]
    kept, left = list[tuple[int, ...]](), positions
    for each in windows:
        if left <= 0:
            break
        kept.append(each[:left])
        left -= len(each)
    if left > 0:
        raise UsageError(
            f"{name}: {positions - left} tokens in all; give a longer --text, or --positions {positions - left}"
        )
    return Passage(name, hashlib.sha256(data).hexdigest(), tuple(kept))
