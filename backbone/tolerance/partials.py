"""Windows of a side that names only its likeliest tokens: what can be said of those, and nothing else.

KL is over the tokens that both sides name, with all others as one more outcome: never above that over all tokens.
Legend: n tokens of a position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import measures
from .passage import Passage
from .sides import GivesPartials, Partial, Piece, Side

LEAST_REST = 1e-9  #: probability of all others: what is left of 1 below that is rounding


def window(a: Side, b: Side, passage: Passage, number: int, chunk: int) -> dict[str, Any]:
    """Both sides over a window, each with its own routing, under the names that a whole window's findings have.

    What cannot be had is empty. `positions` are those that were compared, `given` says by how many tokens each.
    """
    every = max(side.every for side in (a, b) if isinstance(side, GivesPartials))
    positions = range(passage.first, len(passage.windows[number]), every)
    found: dict[str, Any] = {
        **{name: [] for name in ("positions", "given", "kl", "l_inf", "l2", "nll_a", "nll_b")},
        **{name: [] for name in ("flips", "routing_flips")},
        **dict.fromkeys(("counted", "identical", "decisions", "agreed"), 0),
        "drift": {},
        "residuals_identical": False,
        "partial": True,
    }
    of_a, of_b = (_partials(side, passage, number, positions, chunk) for side in (a, b))
    for at, mine, theirs in zip(positions, of_a, of_b, strict=False):  # a side that has nothing ends at once
        if mine is not None and theirs is not None:
            _add(found, at, mine, theirs)
    return found if found["counted"] else {}


def _partials(
    side: Side, passage: Passage, number: int, positions: Sequence[int], chunk: int
) -> Iterator[Partial | None]:
    """At each of some positions, ascending."""
    tokens = passage.windows[number]
    if isinstance(side, GivesPartials):
        yield from (side.partial(tokens, at) for at in positions)
        return
    walk = side.begin(number)
    if walk is None:
        return
    for start in range(0, len(tokens), chunk):
        piece = walk.run(tokens[start : start + chunk], None)
        wanted = [at - start for at in positions if start <= at < start + chunk]
        yield from (_of_row(piece, row) for row in wanted)


def _of_row(piece: Piece, row: int) -> Partial:
    """All that a whole row says."""
    if piece.known is None:
        return ranked(np.arange(piece.logits.shape[1]), measures.log_softmax(piece.logits[row]))
    ids = np.nonzero(piece.known[row])[0]
    return ranked(ids, piece.logits[row, ids].astype(np.float64))


def ranked(ids: measures.Floats, log_probs: measures.F64) -> Partial:
    """Tokens [n] with their log-probabilities, the likeliest first, ties to the lower id."""
    order = np.lexsort((ids, -log_probs))
    return Partial(ids[order].astype(np.int64), log_probs[order])


def _add(found: dict[str, Any], at: int, a: Partial, b: Partial) -> None:
    found["counted"] += 1
    found["positions"].append(at)
    common, in_a, in_b = np.intersect1d(a.ids, b.ids, assume_unique=True, return_indices=True)
    found["given"].append(len(common))
    if len(common):  # without any there is only the top to compare
        found["kl"].append(kl(a.log_probs[in_a], b.log_probs[in_b]))
        found["l_inf"].append(float(np.abs(a.log_probs[in_a] - b.log_probs[in_b]).max()))
    if a.ids[0] != b.ids[0]:
        tops = {"a": int(a.ids[0]), "b": int(b.ids[0])}
        found["flips"].append({"position": at, **tops, "margin_a": _margin(a), "margin_b": _margin(b)})


def _margin(of: Partial) -> float:
    return float(of.log_probs[0] - of.log_probs[1])


def kl(log_a: measures.F64, log_b: measures.F64) -> float:
    """Nats, of A's distribution to B's over n tokens and the rest; log-probabilities [n] of the same tokens."""
    p, q = (_with_rest(np.exp(log)) for log in (log_a, log_b))
    # Rounding alone makes the sum a little negative where there is no difference.
    return max(0.0, float((p * np.log(p / q)).sum()))


def _with_rest(of: measures.F64) -> measures.F64:
    outcomes = np.maximum(np.append(of, 1 - of.sum()), LEAST_REST)
    return np.asarray(outcomes / outcomes.sum())
