"""Lines of log that a peer can bring about: the first is said, then one in a while."""

from __future__ import annotations

from protocol.repeats import EVERY_S, MOST_KINDS, Repeats


def test_the_first_is_said_then_one_in_a_while_with_how_many_were_not() -> None:
    repeats = Repeats()
    assert repeats.tail("a", 5.0) == ""
    assert [repeats.tail("a", 5.0 + i / 10) for i in range(1, 8)] == [None] * 7
    assert repeats.tail("b", 5.0) == ""
    assert repeats.tail("a", 5.0 + EVERY_S) == " (and 7 more like it before)"
    assert repeats.tail("a", 5.0 + 2 * EVERY_S) == ""


def test_kinds_without_end_are_forgotten() -> None:
    repeats = Repeats()
    for i in range(3 * MOST_KINDS):
        assert repeats.tail(i, 1.0) == ""
    assert len(repeats._said) <= MOST_KINDS
