"""Sampling against a plain computation in Python's own numbers, one candidate at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.sampling import REPEAT_WINDOW, Sampler, SamplingOptions

LOGITS = [2.0, 1.0, 3.0, 3.0, -1.0, 0.0, 2.5, -4.0]


def array(values: Sequence[float]) -> Any:
    return np.asarray(values, np.float32)


def expected(
    logits: Sequence[float],
    history: Sequence[int] = (),
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repeat_penalty: float = 1.0,
) -> dict[int, float]:
    """The probability of each token that may be drawn: repeat penalty, top-k, top-p, min-p, temperature, in that order."""
    values = dict(enumerate(logits))
    for token in set(history[-64:]):
        values[token] = values[token] / repeat_penalty if values[token] > 0 else values[token] * repeat_penalty
    order = sorted(values, key=lambda token: (-values[token], token))
    if top_k > 0:
        order = order[:top_k]

    def shares(tokens: Sequence[int], heat: float = 1.0) -> dict[int, float]:
        weights = {token: math.exp((values[token] - values[tokens[0]]) / heat) for token in tokens}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    kept, reached = list[int](), 0.0
    for token, share in shares(order).items():
        kept.append(token)
        reached += share
        if top_p < 1 and reached >= top_p:
            break
    left = shares(kept)
    kept = [token for token in kept if left[token] >= min_p * left[kept[0]]]
    return shares(kept, temperature)


def drawn(logits: Sequence[float], history: Sequence[int] = (), *, draws: int = 4000, **options: Any) -> Counter[int]:
    sampler = Sampler(SamplingOptions(**{"temperature": 1.0, "seed": 5} | options))
    return Counter(sampler.choose(array(logits), history) for _ in range(draws))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 4.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.5},
        {"top_p": 0.05},
        {"top_p": 0.9, "temperature": 3.0},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.2, "temperature": 5.0},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.5, "temperature": 2.0},
        {"repeat_penalty": 2.0},
        {"repeat_penalty": 0.5, "top_k": 4},
    ],
    ids=str,
)
def test_draws_follow_the_plain_computation(options: dict[str, float]) -> None:
    history = [2, 4, 2, 6]
    shares = expected(LOGITS, history, **options)  # type: ignore[arg-type]
    draws = 4000
    counts = drawn(LOGITS, history, draws=draws, **options)
    assert set(counts) <= set(shares)
    for token, share in shares.items():
        # Six standard deviations: the seed is fixed, so this cannot fail now and then.
        assert abs(counts[token] / draws - share) <= 6 * math.sqrt(share * (1 - share) / draws) + 1e-9, token


@given(
    st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=1, max_size=12),
    st.integers(0, 14),
    st.sampled_from([0.01, 0.3, 0.77, 1.0]),
    st.sampled_from([0.0, 0.07, 0.6]),
    st.integers(0, 2**32 - 1),
)
def test_only_candidates_are_drawn(values: list[float], top_k: int, top_p: float, min_p: float, seed: int) -> None:
    options = SamplingOptions(temperature=50.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    sampler = Sampler(options)
    # A hair's breadth around the bounds belongs to neither side of the comparison.
    wide = expected(values, top_k=top_k, top_p=min(1.0, top_p * (1 + 1e-9)), min_p=min_p * (1 - 1e-9))
    for _ in range(20):
        assert sampler.choose(array(values), []) in wide


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_greedy_takes_the_greatest_and_of_equals_the_lowest_id(values: list[int]) -> None:
    assert Sampler(SamplingOptions()).choose(array(values), []) == values.index(max(values))


def test_top_k_of_equals_keeps_the_lowest_ids() -> None:
    assert set(drawn([1.0, 5.0, 5.0, 5.0], top_k=2, draws=200)) == {1, 2}


@given(st.integers(0, 2**63), st.floats(0.1, 5.0))
def test_a_seed_reproduces(seed: int, temperature: float) -> None:
    options = SamplingOptions(temperature=temperature, seed=seed)
    first, second = Sampler(options), Sampler(options)
    logits = array(LOGITS)
    assert [first.choose(logits, []) for _ in range(20)] == [second.choose(logits, []) for _ in range(20)]


def test_seeds_differ() -> None:
    def run(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=5.0, seed=seed))
        return [sampler.choose(array(LOGITS), []) for _ in range(60)]

    assert run(1) != run(2)
    assert run(None) != run(None)


def test_greedy_with_a_repeat_penalty() -> None:
    sampler = Sampler(SamplingOptions(repeat_penalty=1.5))
    assert sampler.choose(array([3.0, 2.5]), [0]) == 1
    assert sampler.choose(array([-1.0, -1.2]), [0, 0]) == 1
    assert sampler.choose(array([3.0, 2.5]), []) == 0


def test_the_repeat_penalty_looks_back_so_far_and_no_further() -> None:
    sampler = Sampler(SamplingOptions(repeat_penalty=2.0))
    assert REPEAT_WINDOW == 64
    assert sampler.choose(array([3.0, 2.5, -9.0]), [0] + [2] * 63) == 1
    assert sampler.choose(array([3.0, 2.5, -9.0]), [0] + [2] * 64) == 0


def test_the_logits_are_left_as_they_are() -> None:
    logits = array(LOGITS)
    Sampler(SamplingOptions(repeat_penalty=2.0, temperature=1.0)).choose(logits, [0, 1, 2])
    assert logits.tolist() == LOGITS


def test_great_and_infinite_logits() -> None:
    sampler = Sampler(SamplingOptions(temperature=0.01, seed=1))
    assert sampler.choose(array([3e38, 1.0, -3e38]), []) == 0
    assert {sampler.choose(array([-np.inf, 1.0, 1.0]), []) for _ in range(50)} == {1, 2}


def test_a_tiny_temperature_is_nearly_greedy() -> None:
    assert set(drawn([1.0, 1.1, 0.9], temperature=1e-4, draws=100)) == {1}
    assert set(drawn([1.0, 1.1, 0.9], temperature=5e-324, draws=100)) == {1}
