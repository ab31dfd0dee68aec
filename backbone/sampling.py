"""From logits to a token: greedy by default, else seeded. Decided once, on the backbone.

The order is llama.cpp's: repeat penalty, top-k, top-p, min-p, temperature, draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
REPEAT_WINDOW = 64  #: tokens that the repeat penalty looks back


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen. `temperature` 0 is greedy; 0 (top_k, min_p) and 1 (top_p, penalty) are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None  #: None: drawn from the system


class Sampler:
    """Chooses tokens one after another; the same seed and logits give the same tokens."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)

    def choose(self, logits: F32, history: Sequence[int]) -> int:
        """The next token's id for logits [vocabulary] after the tokens `history`. Greedy ties go to the lower id."""
        options = self._options
        if options.repeat_penalty != 1.0:
            logits = _penalised(logits, history[-REPEAT_WINDOW:], options.repeat_penalty)
        if options.temperature <= 0:
            return int(np.argmax(logits))
        # Stable and descending: ties keep the order of ids, so that a draw does not depend on the sort.
        ids = np.argsort(-logits, kind="stable")
        if options.top_k > 0:
            ids = ids[: options.top_k]
        wide = logits[ids].astype(np.float64)
        keep = _nucleus(_probabilities(wide), options.top_p)
        ids, wide = ids[:keep], wide[:keep]
        likely = _probabilities(wide) >= options.min_p * _probabilities(wide)[0]
        ids, wide = ids[likely], wide[likely]
        with np.errstate(over="ignore"):  # a tiny temperature puts all but the greatest at minus infinity
            scaled = (wide - wide[0]) / options.temperature
        cumulative = np.cumsum(_probabilities(scaled))
        at = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(ids[min(at, len(ids) - 1)])


def _penalised(logits: F32, recent: Sequence[int], penalty: float) -> F32:
    ids = np.unique(np.asarray(recent, dtype=np.intp))
    changed = logits.copy()
    changed[ids] = np.where(logits[ids] > 0, logits[ids] / np.float32(penalty), logits[ids] * np.float32(penalty))
    return changed


def _probabilities(wide: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(wide - wide.max())
    return np.asarray(e / e.sum())


def _nucleus(p: NDArray[np.float64], top_p: float) -> int:
    """How many of the descending probabilities it takes to reach `top_p`; at least one."""
    if top_p >= 1:
        return len(p)
    return min(len(p), int(np.searchsorted(np.cumsum(p), top_p, side="left")) + 1)
