"""What is measured of two sides' numbers. Pure: arrays in, figures out, all in float64.

Legend: T positions, V vocabulary, W width, L layers, N windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Floats = NDArray[Any]  # float32 or float64

RESAMPLES = 2000  #: of windows, for an interval
INTERVAL = (2.5, 97.5)  #: percentiles
LEAST_LAYERS = 3  #: for a fitted exponent
FLAT = 1e-30  #: what is smaller has no logarithm worth a fit


def log_softmax(logits: Floats) -> F64:
    """log of softmax over each row [T, V]."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


@dataclass(frozen=True, slots=True)
class Distances:
    """Of logits, one value a position, [T]."""

    kl: F64  #: nats, of A's distribution to B's; never below 0
    l_inf: F64
    l2: F64  #: relative to A's
    same_bits: NDArray[np.bool_]


def distances(a: Floats, b: Floats, known: NDArray[np.bool_] | None = None) -> Distances:
    """How far logits b [T, V] are from a.

    With `known` [T, V], how far log-probabilities are among those tokens, as if there were no others.
    """
    if known is not None:
        return _distances_among(known, a, b)
    log_a, log_b = log_softmax(a), log_softmax(b)
    # Rounding alone makes a sum over V a little negative where there is no difference.
    kl = np.maximum(0.0, (np.exp(log_a) * (log_a - log_b)).sum(axis=-1))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(wide_a, axis=-1)
    l2 = np.linalg.norm(wide_b - wide_a, axis=-1) / np.where(lengths > 0, lengths, 1)
    return Distances(kl, np.abs(wide_b - wide_a).max(axis=-1), l2, same_bits(a, b))


def same_bits(a: Floats, b: Floats) -> NDArray[np.bool_]:
    """Of each row [..., W] whether it has the same bits: 0 and -0 are two."""
    if a.dtype != b.dtype:
        return np.zeros(a.shape[:-1], np.bool_)
    mine, theirs = (np.ascontiguousarray(rows).view(f"u{rows.dtype.itemsize}") for rows in (a, b))
    return np.asarray((mine == theirs).all(axis=-1))


def _distances_among(known: NDArray[np.bool_], a: Floats, b: Floats) -> Distances:
    log_a, log_b = (np.where(known, log_softmax(np.where(known, rows, -np.inf)), 0.0) for rows in (a, b))
    kl = np.maximum(0.0, (np.where(known, np.exp(log_a), 0.0) * (log_a - log_b)).sum(axis=-1))
    lengths = np.linalg.norm(log_a, axis=-1)
    l2 = np.linalg.norm(log_b - log_a, axis=-1) / np.where(lengths > 0, lengths, 1)
    return Distances(kl, np.abs(log_b - log_a).max(axis=-1), l2, same_bits(a, b))


def token_nll(logits: Floats, targets: NDArray[np.int64], *, are_log_probs: bool = False) -> F64:
    """-log of the probability of each next token [T]. Log-probabilities are taken as they are."""
    log_probs = logits.astype(np.float64) if are_log_probs else log_softmax(logits)
    return np.asarray(-np.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0])


@dataclass(frozen=True, slots=True)
class Tops:
    """The first choice of each row and its margin: by how much its logit exceeds the next, [T]."""

    ids: NDArray[np.int64]
    margins: F64


def tops(logits: Floats) -> Tops:
    """Ties go to the lower id."""
    ids = logits.argmax(axis=-1)
    best_two = np.partition(logits.astype(np.float64), -2, axis=-1)[:, -2:] if logits.shape[1] > 1 else logits
    return Tops(ids, np.asarray(best_two[:, -1] - best_two[:, 0], np.float64))


def own_choice(scores: Floats, count: int) -> NDArray[np.int64]:
    """The `count` experts that a router of these scores [T, E] takes, in its order; ties to the lower id."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def gaps(scores: Floats, count: int) -> F64:
    """By how much the last that is taken exceeds the first that is not, [T]; infinite where all are taken."""
    if scores.shape[1] <= count:
        return np.full(len(scores), math.inf)
    order = np.sort(scores.astype(np.float64), axis=-1)[:, ::-1]
    return np.asarray(order[:, count - 1] - order[:, count])


def relative_l2(a: Floats, b: Floats) -> F64:
    """Of each row b [T, W] to a, [T]."""
    wide = a.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1)
    return np.asarray(np.linalg.norm(b.astype(np.float64) - wide, axis=-1) / np.where(lengths > 0, lengths, 1))


@dataclass(frozen=True, slots=True)
class Fit:
    """y = c x^exponent, by least squares of the logarithms; with its interval by resampling windows."""

    exponent: float
    low: float
    high: float


def growth(x: Sequence[float], by_window: F64, seed: int = 1) -> Fit | None:
    """How y grows with x. `by_window` [N, L]: what each window found at each x. None where there is nothing to fit."""
    if len(x) < LEAST_LAYERS or not len(by_window) or not (by_window.mean(axis=0) > FLAT).all():
        return None
    log_x = np.log(np.asarray(x, np.float64))
    centred = log_x - log_x.mean()

    def slopes(y: F64) -> F64:
        return np.asarray(np.log(np.maximum(y, FLAT)) @ centred / (centred @ centred))

    picks = np.random.default_rng(seed).integers(len(by_window), size=(RESAMPLES, len(by_window)))
    counts = np.stack([np.bincount(pick, minlength=len(by_window)) for pick in picks])
    low, high = np.percentile(slopes(counts @ by_window / len(by_window)), INTERVAL)
    return Fit(float(slopes(by_window.mean(axis=0))), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its standard error."""

    value: float
    error: float


def mean_of(values: F64) -> Mean:
    """The mean of independent values; an error of 0 for one alone."""
    spread = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(float(values.mean()), spread)


def perplexity(nll: F64) -> Mean:
    """exp of the mean of -log p, and its error to first order."""
    mean = mean_of(nll)
    value = math.exp(min(mean.value, 700.0))
    return Mean(value, value * mean.error)


def summary(values: F64) -> dict[str, float]:
    """Mean, median, p99 and maximum."""
    if not len(values):
        return {"mean": 0.0, "median": 0.0, "p99": 0.0, "max": 0.0}
    median, p99 = np.percentile(values, (50, 99))
    return {"mean": float(values.mean()), "median": float(median), "p99": float(p99), "max": float(values.max())}


def histogram(values: F64, *, least: float = 1e-18, per_decade: int = 2) -> dict[str, list[float]]:
    """Counts over bins of equal width in the logarithm; what is below `least`, zero included, is in the first."""
    top = max(float(values.max(initial=least)), least * 10)
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(top) + 1e-12)
    edges = np.logspace(low, high, (high - low) * per_decade + 1)
    edges[-1] = max(edges[-1], top)
    counts, _ = np.histogram(np.clip(values, least, None), edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
