"""What is compared: each side gives logits, routing and residuals of tokens, as far as it has them.

Legend: T rows, V vocabulary, W width, E experts, k chosen ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kernels.half import halved
from kernels.interface import F32, I32, DenseBackend
from kernels.state import Taps

from ..engine import Engine
from ..errors import BackboneError
from ..experts import ExpertSource
from ..session import Session
from .measures import F64, Floats
from .passage import Passage

Given = Mapping[int, NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a side has of some rows. What it has not is empty."""

    logits: Floats  # [T, V]
    ids: Given = field(default_factory=dict)  # layer: [T, k]
    scores: Mapping[int, Floats] = field(default_factory=dict)  # layer: [T, E], what top_k chose by
    residuals: Mapping[int, Floats] = field(default_factory=dict)  # layer: [T, W]
    #: [T, V]: which of `logits` are known. Where this is given, logits are log-probabilities.
    known: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """What a side says of one position: its likeliest tokens, the likeliest first."""

    ids: NDArray[np.int64]  # [n]
    log_probs: F64  # [n]


class Walk(Protocol):
    """A window on its way through a side."""

    def run(self, tokens: Sequence[int], given: Given | None) -> Piece:
        """The next rows of the window. `given`: routing to take in place of one's own, where there is a router."""


class Side(Protocol):
    """One of the two that are compared."""

    @property
    def told(self) -> Mapping[str, Any]:
        """What a report says of it: what was asked for, kind, backend, classes, device, precision."""

    @property
    def numeric_class(self) -> str:
        """Equal ones promise equal bits; empty where nothing is known."""

    @property
    def precision(self) -> str:
        """f64, f32, i16, f16 or outside: by which bars it is judged."""

    @property
    def passage(self) -> Passage | None:
        """The tokens that it has figures of, where it has them of no others."""

    @property
    def backend(self) -> DenseBackend | None:
        """What computes single operations, where it is one backend."""

    @property
    def session(self) -> Session | None:
        """The model, where it is run here."""

    @property
    def holds(self) -> Mapping[int, Collection[int]] | None:
        """The experts by layer that it is about, where not all are."""

    def begin(self, window: int) -> Walk | None:
        """Start on a window of the passage; None where logits cannot be had."""

    def rows(self, layer: int, x: F32, ids: I32) -> Floats | None:
        """Unweighted rows [T, k, W] of experts ids [T, k] for x [T, W]; None where they cannot be had."""

    def generate(self, prompt: Sequence[int], count: int) -> list[int] | None:
        """So many greedy tokens after a prompt, fewer at an end token; None where they cannot be had."""


def told_of_outside(place: str, kind: str, backend: str) -> dict[str, Any]:
    """What a report says of a side that is not ours. `place`: the flag and what was asked for."""
    nothing = dict.fromkeys(("class", "class_map", "device"), "")
    asked = place.partition(" ")[2]
    return {"asked": asked, "kind": kind, "backend": backend, "precision": "outside", "routing": "its own", **nothing}


@runtime_checkable
class GivesPartials(Protocol):
    """A side without logits of all tokens. Its `begin` gives None."""

    @property
    def every(self) -> int:
        """It is asked at every so many positions."""

    def partial(self, tokens: Sequence[int], at: int) -> Partial | None:
        """Of what comes after position `at` of a window; None where that cannot be had."""


@runtime_checkable
class OfOneModel(Protocol):
    """A side whose figures are of a model that another side may not have."""

    def refuse_other(self, other: Side) -> None:
        """UsageError where the other side's model is not the one."""


@runtime_checkable
class MayChange(Protocol):
    """A side that others compute, who may be lost in the middle."""

    def refuse_changed(self) -> None:
        """BackboneError when what computes is not what it was at the beginning."""


def refuse_unlike(a: Side, b: Side) -> None:
    """UsageError where two sides are not of one model, as far as that can be known."""
    for one, other in ((a, b), (b, a)):
        if isinstance(one, OfOneModel):
            one.refuse_other(other)


class ModelSide:
    """A model that is run here, or by workers from here."""

    def __init__(
        self,
        session: Session,
        experts: ExpertSource,
        told: Mapping[str, Any],
        *,
        numeric_class: str,
        precision: str,
        holds: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.session: Session | None = session
        self._session = session
        self.holds = holds
        self.told, self.numeric_class, self.precision = told, numeric_class, precision
        self.passage: Passage | None = None
        self._experts, self._model = experts, session.model
        self._engine = Engine(session.model, experts, context=session.engine.context)
        self._class_map = session.class_map().digest

    def refuse_changed(self) -> None:
        """Of a placement whose class of workers was lost nothing more is found."""
        now, swarm = self._session.class_map().digest, self._session.swarm
        if now != self._class_map and swarm is not None:
            lost = [f"{worker.name}: {worker.failures[-1]}" for worker in swarm.report() if worker.state == "lost"]
            why = "; ".join(lost) or "experts went over to another class"
            raise BackboneError(f"{self.told['asked']}: is not any more what was to be measured: {why}")

    @property
    def backend(self) -> DenseBackend | None:
        """The model's own, where all is computed by it."""
        return self._model.backend if self._experts is self._model.local_experts else None

    def begin(self, window: int) -> Walk:
        """A new sequence."""
        return _ModelWalk(self._engine)

    def rows(self, layer: int, x: F32, ids: I32) -> Floats:
        """By whoever computes this side's experts."""
        rows: Floats = self._experts.wait(self._experts.send(layer, x, ids))
        return rows

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Token by token."""
        engine, found = self._engine, list[int]()
        sequence = engine.new_sequence()
        row = engine.extend(sequence, prompt)[-1]
        while len(found) < count:
            found.append(int(row.argmax()))
            if len(found) < count:
                row = engine.step(sequence, found[-1])
        return found


class _ModelWalk:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._sequence = engine, engine.new_sequence()

    def run(self, tokens: Sequence[int], given: Given | None) -> Piece:
        taps = Taps()
        logits = self._engine.extend(self._sequence, tokens, want_all=True, taps=taps, given_ids=given or None)
        ids = {layer: np.concatenate(parts) for layer, parts in taps.ids.items()}
        scores = {layer: np.concatenate(parts) for layer, parts in taps.scores.items()}
        residuals = {layer: np.concatenate(parts) for layer, parts in taps.residuals.items()}
        return Piece(logits, ids, scores, residuals)


class HalfWire:
    """Experts behind a wire that carries F16: rows are rounded on their way there and back, as a swarm's are."""

    is_here = False

    def __init__(self, inner: ExpertSource) -> None:
        self._inner = inner

    @property
    def busiest_ns(self) -> int:
        """As those behind it."""
        return self._inner.busiest_ns

    @property
    def class_changes(self) -> Sequence[Any]:
        """As those behind it."""
        return self._inner.class_changes

    @property
    def doubts(self) -> int:
        """As those behind it."""
        return self._inner.doubts

    def send(self, layer: int, x: F32, ids: I32) -> Any:
        """Ask with rounded rows."""
        return self._inner.send(layer, halved(x), ids)

    def ready(self, ticket: Any) -> bool:
        """As those behind it."""
        return self._inner.ready(ticket)

    def wait(self, ticket: Any) -> F32:
        """Rounded rows."""
        return halved(self._inner.wait(ticket))

    def abandon(self) -> None:
        """As those behind it."""
        self._inner.abandon()
