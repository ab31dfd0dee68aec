"""What a worker does, as numbers that somebody else may look at: written by its loop alone, read at any time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """Each number is right by itself; two of them may be of different moments."""

    is_serving: bool = False  #: a backbone has it
    experts: int = 0  #: held
    calls: int = 0  #: answered with rows
    last_error: str = ""
