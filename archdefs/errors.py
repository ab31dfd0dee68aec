"""Problems of a definition, each with file, line, column and the fix. All of a file's problems travel together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

MOST_BEFORE, MOST_SHOWN = 100, 200  #: characters of a line that are shown before its place, and in all


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a definition: line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a definition, or with a definition and a model together."""

    file: str
    span: Span
    message: str
    excerpt: str  #: the source line as written, empty when it cannot be shown

    def __str__(self) -> str:
        head = f"{self.file}:{self.span.line}:{self.span.column}: {self.message}"
        if not self.excerpt:
            return head
        # Of a very long line only what is near the place is of use.
        start = max(0, self.span.column - 1 - MOST_BEFORE)
        shown = self.excerpt[start : start + MOST_SHOWN]
        # A tab keeps its width under the caret only when it is a tab there too.
        before = "".join("\t" if c == "\t" else " " for c in shown[: self.span.column - 1 - start])
        return f"{head}\n{shown}\n{before}^"


class ArchdefError(Exception):
    """A definition that cannot be used. `problems` holds every problem found; `str()` shows them all."""

    def __init__(self, problems: Sequence[Problem], note: str = "") -> None:
        self.problems = tuple(problems)
        self.note = note
        super().__init__("\n".join([*map(str, self.problems), *([note] if note else [])]))


class Mismatch(Exception):
    """A shape rule failed; `argument` names the argument to point at (empty: the operation itself)."""

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        super().__init__(message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail `; did you mean 'silu'?`, or nothing when no known word is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
