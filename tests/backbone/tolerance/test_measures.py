"""What is measured of two sides' numbers, against figures by hand and by plain loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.tolerance import measures


def test_kl_by_hand() -> None:
    a, b = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.5, 0.25]])
    found = measures.distances(a + 7.0, b - 3.0)  # a softmax does not see what all logits have in common
    assert found.kl == pytest.approx([0.25 * math.log(2)])
    assert found.l_inf == pytest.approx([10 + math.log(2)])


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=9), st.floats(-5, 5))
def test_kl_is_not_negative_and_zero_of_equal_ones(row: list[float], shift: float) -> None:
    a = np.array([row], np.float32)
    assert measures.distances(a, a.copy()).kl == pytest.approx([0.0], abs=1e-14)
    assert measures.distances(a, a.copy()).same_bits.all()
    assert measures.distances(a, np.roll(a, 1, axis=1) + np.float32(shift)).kl[0] >= 0


def test_equal_values_of_other_dtypes_are_not_the_same_bits() -> None:
    a = np.array([[1.0, 2.0]], np.float32)
    assert not measures.distances(a, a.astype(np.float64)).same_bits.any()


def test_zero_and_minus_zero_are_not_the_same_bits() -> None:
    a, b = np.array([[0.0, 1.0]], np.float32), np.array([[-0.0, 1.0]], np.float32)
    assert not measures.same_bits(a, b).any()
    assert measures.same_bits(a, a.copy()).all()
    assert not measures.distances(a, b).same_bits.any()


def test_relative_l2_by_hand() -> None:
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32), np.array([[3.0, 4.5], [0.0, 2.0]], np.float32)
    assert measures.relative_l2(a, b) == pytest.approx([0.1, 2.0])  # a row of zeros counts by what is beside it
    assert measures.distances(a, b).l2 == pytest.approx([0.1, 2.0])


def test_token_nll_and_perplexity_by_hand() -> None:
    logits = np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])
    nll = measures.token_nll(logits, np.array([1, 2]))
    assert nll == pytest.approx([math.log(4), -math.log(0.8)])
    found = measures.perplexity(nll)
    assert found.value == pytest.approx(math.sqrt(4 / 0.8))
    spread = abs(nll[0] - nll[1]) / math.sqrt(2)  # of two values
    assert found.error == pytest.approx(found.value * spread / math.sqrt(2))


def test_tops_and_margins() -> None:
    found = measures.tops(np.array([[1.0, 3.0, 2.5], [2.0, 2.0, 0.0]], np.float32))
    assert found.ids.tolist() == [1, 0]
    assert found.margins.tolist() == [0.5, 0.0]


def test_routing_choice_and_gap() -> None:
    scores = np.array([[0.1, 0.4, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]], np.float32)
    assert measures.own_choice(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert measures.own_choice(scores, 3)[0].tolist() == [1, 2, 0]  # the lower id of equals
    assert measures.gaps(scores, 2) == pytest.approx([0.3, 0.1])
    assert measures.gaps(scores, 4).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("exponent", [0.5, 1.0, -0.3])
def test_a_power_is_found_with_its_interval(exponent: float) -> None:
    layers = np.arange(1, 25)
    noise = np.exp(0.2 * np.random.default_rng(1).standard_normal((40, 24)))
    fit = measures.growth(layers.tolist(), 1e-7 * layers**exponent * noise)
    assert fit is not None
    assert fit.low < fit.exponent < fit.high
    assert fit.exponent == pytest.approx(exponent, abs=0.05)
    assert fit.low <= exponent <= fit.high
    assert fit.high - fit.low < 0.1
    again = measures.growth(layers.tolist(), 1e-7 * layers**exponent * noise)
    assert again == fit


def test_nothing_is_fitted_to_nothing() -> None:
    assert measures.growth([1, 2], np.ones((5, 2))) is None
    assert measures.growth([1, 2, 3], np.zeros((5, 3))) is None
    assert measures.growth([1, 2, 3], np.empty((0, 3))) is None


def test_a_histogram_has_every_value() -> None:
    values = np.array([0.0, 1e-30, 1e-12, 3e-4, 2.0])
    found = measures.histogram(values)
    assert sum(found["counts"]) == len(values)
    assert found["counts"][0] == 2
    assert found["edges"][-1] >= 2.0


def test_a_summary_of_nothing_and_of_some() -> None:
    assert measures.summary(np.empty(0))["max"] == 0.0
    found = measures.summary(np.arange(101.0))
    assert found == {"mean": 50.0, "median": 50.0, "p99": 99.0, "max": 100.0}
