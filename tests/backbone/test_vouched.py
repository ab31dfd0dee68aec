"""Which calls of a worker are sure: those in which every row was found right, by nobody who lies."""

from __future__ import annotations

from backbone.vouched import Vouched

NOBODY = frozenset[str]()


def test_only_whole_answers_are_sure() -> None:
    calls = Vouched()
    assert (calls.sure(set()), calls.last(set())) == (0, 0)
    calls.add(3, NOBODY, is_whole=True)
    calls.add(7, NOBODY, is_whole=False)
    calls.add(5, NOBODY, is_whole=True)
    assert (calls.sure(set()), calls.last(set())) == (2, 7)


def test_the_word_of_a_liar_counts_for_nothing() -> None:
    calls = Vouched()
    calls.add(2, NOBODY, is_whole=True)
    calls.add(4, frozenset("a"), is_whole=True)
    calls.add(6, frozenset("ab"), is_whole=True)
    found = [(calls.sure(liars), calls.last(liars)) for liars in (set(), {"c"}, {"b"}, {"a"})]
    assert found == [(3, 6), (3, 6), (2, 4), (1, 2)]
