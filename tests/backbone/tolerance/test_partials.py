"""What is measured where a side names only some tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbone.tolerance.measures import log_softmax
from backbone.tolerance.partials import kl, ranked


@given(st.integers(0, 2**32), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_kl_over_some_tokens_is_never_above_that_over_all(seed: int, n: int) -> None:
    a, b = log_softmax(np.random.default_rng(seed).normal(0, 3, (2, 30)))
    whole = float((np.exp(a) * (a - b)).sum())
    some = kl(a[:n], b[:n])
    assert 0 <= some <= whole + 1e-7
    if n == 30:
        assert some == pytest.approx(whole, rel=1e-6, abs=1e-7)


def test_the_rest_is_an_outcome_of_its_own() -> None:
    """A half and the other half, against nine tenths and one: as for a coin."""
    found = kl(np.log([0.5]), np.log([0.9]))
    assert found == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))


def test_rounding_is_no_difference() -> None:
    """Probabilities that add up to a little more than 1, as float32 has them."""
    a = np.log([0.6, 0.4]) + 1e-7
    assert kl(a, np.log([0.6, 0.4])) < 1e-8


def test_ranked_by_probability_then_id() -> None:
    found = ranked(np.array([9, 3, 5]), np.log([0.25, 0.25, 0.5]))
    assert found.ids.tolist() == [5, 3, 9]
    assert np.exp(found.log_probs).tolist() == pytest.approx([0.5, 0.25, 0.25])
