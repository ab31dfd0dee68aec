"""What a token will take: the dense path, the wire, and in each layer the slowest worker. And what one did take. Pure.

A step of decode reads each matrix that it needs once, so that a part takes its bytes by the speed at which they are
read. Not in it: keys and values, which at the beginning of a context are few, and whatever has no bytes to read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .clock import Clock

BACKBONE = "backbone"  #: the name under which shares have the backbone itself
DRAWS = 1024  #: rows that are drawn for each layer; the mean of so many is within a few percent
SEED = 1
#: Bytes of a call and its answer beside the rows: headers, shapes, and what CURVE and TCP add.
CALL_BYTES = 400
PAIR_BYTES = 8  #: that name a row and an expert

#: Which part of a prediction each part of the clock, with its "other", belongs to.
PART_OF = {
    "dense": "dense_s",
    "router": "dense_s",
    "combine": "dense_s",
    "sampling": "dense_s",
    "other": "dense_s",
    "dispatch": "wire_s",
    "wire": "wire_s",
    "experts": "straggler_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeed:
    """How fast a worker, or the backbone itself, computes and is reached."""

    name: str
    bytes_per_s: float  #: of weights that its experts' rows read
    latency_s: float = 0.0  #: of a call with nothing in it, there and back
    wire_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The experts of a layer, and what a row asks of them."""

    expert_bytes: tuple[int, ...]
    chosen: int  #: experts that a row asks for
    row_bytes: int  #: of a row on its way to a worker
    result_bytes: int  #: of each row that comes back
    usage: tuple[int, ...] | None = None  #: rows that each expert had so far; None: each is as likely as the others


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTime:
    """Where the seconds of a token go."""

    dense_s: float  #: attention, norms, router, head and all else that the backbone does alone
    wire_s: float  #: calls and answers: what a layer waits beyond its slowest worker's computing
    straggler_s: float  #: experts: each layer's slowest worker

    @property
    def token_s(self) -> float:
        """The whole token."""
        return self.dense_s + self.wire_s + self.straggler_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(TokenTime):
    """What a token is expected to take."""

    shares: Mapping[str, float]  #: of all experts' rows, by whose they are; what no worker holds is BACKBONE's


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual(TokenTime):
    """What a token took, as the clock has it."""

    @classmethod
    def of(cls, clock: Clock, tokens: int, seconds: float) -> Actual:
        """The mean of so many tokens in so many seconds of wall time; the parts' sum is a token's time."""
        found = {"dense_s": 0.0, "wire_s": 0.0, "straggler_s": 0.0}
        for part, microseconds in clock.split(tokens, seconds).items():
            found[PART_OF[part]] += microseconds / 1e6
        return cls(**found)


def predict(
    layers: Mapping[int, LayerWork],
    holds: Mapping[str, Mapping[int, Collection[int]]],
    nodes: Sequence[NodeSpeed],
    *,
    dense_bytes: int,
    backbone: NodeSpeed,
) -> Prediction:
    """The time of a token of decode. `dense_bytes`: of the weights that the backbone reads for one token.

    Experts that no node holds are the backbone's. Who is asked follows the dispatcher: of several holders the one with
    the fewest rows in this layer so far, of equals the first.

    A layer waits for the last of those it asked, and the mean of the latest is not the latest of the means: which
    experts meet on one worker is chance. Its expectation is taken over DRAWS rows of experts, without replacement and
    as likely as their use so far; the draws are the same each time, so that the same inputs give the same prediction.
    """
    everyone = [*nodes, backbone]
    counts = np.zeros(len(everyone))
    wire_s = straggler_s = 0.0
    drawn: dict[tuple[int, int, tuple[int, ...] | None], NDArray[np.intp]] = {}
    for layer, work in layers.items():
        key = len(work.expert_bytes), work.chosen, work.usage
        if key not in drawn:
            drawn[key] = draw(*key)
        holders = np.array([[e in holds.get(n.name, {}).get(layer, ()) for n in nodes] for e in range(key[0])], bool)
        holders = np.column_stack([holders.reshape(key[0], len(nodes)), ~holders.any(axis=1)])
        rows, seconds = _given_out(drawn[key], holders, work, everyone)
        slowest = seconds.max(axis=1)
        last = (seconds + _wire(rows, work, nodes)).max(axis=1)
        straggler_s += float(slowest.mean())
        wire_s += float((last - slowest).mean())
        counts += rows.sum(axis=0)
    total = counts.sum()
    names = [*(n.name for n in nodes), BACKBONE]
    return Prediction(
        dense_s=dense_bytes / backbone.bytes_per_s,
        wire_s=wire_s,
        straggler_s=straggler_s,
        shares={name: float(count / total) if total else 0.0 for name, count in zip(names, counts, strict=True)},
    )


def draw(experts: int, chosen: int, usage: tuple[int, ...] | None) -> NDArray[np.intp]:
    """The experts of DRAWS rows, [DRAWS, chosen], no row twice the same. Equal arguments give equal draws."""
    # Who is first of exponential times with these rates, who is second and so on: the likelier the more was its use.
    rates = np.ones(experts) if usage is None else np.asarray(usage, float) + 1
    times = np.random.default_rng(SEED).exponential(size=(DRAWS, experts)) / rates
    return np.argsort(times, axis=1)[:, : min(chosen, experts)]


def _given_out(
    ids: NDArray[np.intp], holders: NDArray[np.bool_], work: LayerWork, everyone: Sequence[NodeSpeed]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows and seconds of each node, [DRAWS, nodes] both, for the drawn experts [DRAWS, chosen]."""
    nbytes = np.asarray(work.expert_bytes, float)
    speeds = np.array([node.bytes_per_s for node in everyone])
    rows, seconds = np.zeros((len(ids), len(everyone))), np.zeros((len(ids), len(everyone)))
    every = np.arange(len(ids))
    for expert in ids.T:
        who = np.where(holders[expert], rows, np.inf).argmin(axis=1)
        rows[every, who] += 1
        seconds[every, who] += nbytes[expert] / speeds[who]
    return rows, seconds


def _wire(rows: NDArray[np.float64], work: LayerWork, nodes: Sequence[NodeSpeed]) -> NDArray[np.float64]:
    """Seconds of each node's call and answer, [DRAWS, nodes and the backbone]: none for who is not asked."""
    spent = np.zeros_like(rows)
    for i, node in enumerate(nodes):
        nbytes = work.row_bytes + CALL_BYTES + rows[:, i] * (work.result_bytes + PAIR_BYTES)
        spent[:, i] = np.where(rows[:, i] > 0, node.latency_s + nbytes / node.wire_bytes_per_s, 0.0)
    return spent
