"""Calls for whose rows no layer waits: what was asked, kept until it is answered, and who wants to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernels.interface import F32, I32

from .calls import Action, Call, Send
from .dispatch import Dispatcher


@dataclass(frozen=True, slots=True)
class Question:
    """Rows x [R, D] and pairs [P, 2] of (row of these, expert), and who wants to know what comes of them."""

    x: F32
    pairs: I32
    on_rows: Callable[[F32], None]  #: the answer [P, width], finite or not; it lasts as long as the call
    on_failed: Callable[[], None]
    is_exact: bool = True  #: the answer may not be rounded on its way; else it is asked for like any other


class Apart:
    """Asks a worker apart. `act` carries the dispatcher's actions out."""

    def __init__(self, dispatcher: Dispatcher, act: Callable[[Sequence[Action]], None]) -> None:
        self._dispatcher, self._act = dispatcher, act
        self._open: dict[int, Question] = {}

    def ask(self, worker: str, layer: int, width: int, question: Question) -> bool:
        """Ask for rows of `width` values; False when the worker cannot be asked, and nothing will come."""
        load: dict[int, int] = {}
        for expert in question.pairs[:, 1].tolist():
            load[expert] = load.get(expert, 0) + 1
        actions = self._dispatcher.asked_apart(worker, layer, load, width, time.monotonic())
        for action in actions:
            if isinstance(action, Send):
                self._open[action.call.seq] = question
        self._act(actions)
        return bool(actions)

    def request(self, call: Call) -> tuple[F32, I32]:
        """What a call's worker needs."""
        question = self._open[call.seq]
        return question.x, question.pairs

    def is_exact(self, call: Call) -> bool:
        """Whether a call's answer may not be rounded."""
        return self._open[call.seq].is_exact

    def answered(self, call: Call, rows: F32) -> None:
        """Its rows came."""
        self._open.pop(call.seq).on_rows(rows)

    def failed(self, call: Call) -> None:
        """They will not come."""
        self._open.pop(call.seq).on_failed()
