"""Rows cut up for workers and put together again: every place gets the row of its own expert."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbone.batch import Batch


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    rows, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ids = draw(st.lists(st.lists(st.integers(0, 5), min_size=slots, max_size=slots), min_size=rows, max_size=rows))
    owner = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    groups = [[e for e in range(6) if owner[e] == w] for w in range(3)]
    return ids, groups


@given(cases())
def test_every_place_gets_its_own_experts_row(case: tuple[list[list[int]], list[list[int]]]) -> None:
    ids, groups = np.array(case[0], np.int32), case[1]
    x = np.arange(len(ids) * 3, dtype=np.float32).reshape(len(ids), 3) + 1
    batch = Batch(x, ids, 3)
    batch.out[:] = np.nan
    load = batch.load()
    assert load == {e: int((ids == e).sum()) for e in np.unique(ids)}
    for number, group in enumerate(groups):
        experts = [e for e in group if e in load]
        if not experts:
            continue
        if number == 2:  # as computed locally
            for e in experts:
                places = batch.places((e,))
                batch.fill_places(places, batch.inputs(places) * (e + 1))
            continue
        rows, pairs = batch.request(experts)
        assert pairs.dtype == np.int32
        assert rows.flags.c_contiguous
        assert len(rows) == len(np.unique(pairs[:, 0])) == len(np.unique(rows, axis=0))
        assert batch.inputs_at(batch.places(experts)) == len(rows)
        batch.fill(experts, rows[pairs[:, 0]] * (pairs[:, 1:] + 1))
    assert np.array_equal(batch.out, x[:, None, :] * (ids[:, :, None] + 1))


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_go_out_once_and_uncopied_when_all_are_wanted(rows: int) -> None:
    x = np.ones((rows, 5), np.float32)
    batch = Batch(x, np.tile(np.arange(2, dtype=np.int32), (rows, 1)), 5)
    assert np.shares_memory(batch.request((0, 1))[0], x)
