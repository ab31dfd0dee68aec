"""Stop strings: whatever the cuts between pieces, the text before the first one is given out, and nothing of it later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backbone.stops import StopStrings


def pieces_of(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What each piece brought and what the end did, and the stop string that was found."""
    watch = StopStrings(stops)
    shown = [watch.feed(piece) for piece in pieces]
    return [*shown, watch.flush()], watch.found


def test_what_may_begin_a_stop_string_waits() -> None:
    assert pieces_of(["END"], ["abE", "N", "x"]) == (["ab", "", "ENx", ""], None)
    assert pieces_of(["END"], ["abE", "N"]) == (["ab", "", "EN"], None)
    assert pieces_of(["END"], ["abE", "N", "Dx", "y"]) == (["ab", "", "", "", ""], "END")


def test_only_as_much_waits_as_must() -> None:
    watch = StopStrings(["aab"])
    assert [watch.feed(c) for c in "aaab"] == ["", "", "a", ""]
    assert watch.found == "aab"


def test_the_first_of_several_counts_and_of_two_at_one_place_the_longer() -> None:
    assert pieces_of(["b", "c"], ["axcb"]) == (["ax", ""], "c")
    assert pieces_of(["b", "bc"], ["abc"]) == (["a", ""], "bc")


def test_the_longest_possible_beginning_is_held() -> None:
    assert pieces_of(["xyz", "zzzz"], ["axyzz"[:3], "q"]) == (["a", "xyq", ""], None)


def test_without_stop_strings_nothing_waits() -> None:
    assert pieces_of([], ["a", "b"]) == (["a", "b", ""], None)
    assert pieces_of([""], ["a"]) == (["a", ""], None)


ALPHABET = st.text("abé\n", max_size=4)


@given(st.lists(ALPHABET, max_size=3), st.lists(ALPHABET, max_size=12))
def test_any_stops_and_any_pieces(stops: list[str], pieces: list[str]) -> None:
    watch = StopStrings(stops)
    wanted = [stop for stop in stops if stop]
    fed = given_out = ""
    for piece in pieces:
        fed += piece
        given_out += watch.feed(piece)
        first = min((fed.find(stop) for stop in wanted if stop in fed), default=None)
        if first is not None:
            # Plain search in the whole text up to the piece that completed it.
            assert watch.found is not None
            assert fed.startswith(watch.found, first)
            assert given_out == fed[:first]
            assert watch.feed(piece + "more") == ""
            assert watch.flush() == ""
            return
        assert watch.found is None
        held = fed[len(given_out) :]
        assert fed.startswith(given_out)
        assert not held or any(stop.startswith(held) for stop in wanted)
        assert not any(fed.endswith(stop[:n]) for stop in wanted for n in range(len(held) + 1, len(stop)))
    assert given_out + watch.flush() == fed
