"""Sizes as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1234", 1234),
        ("800M", 800_000_000),
        ("800MB", 800_000_000),
        ("1.5G", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("2 gi", 2 << 30),
        (" 64k ", 64_000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "M", "-1", "1X", "1MM", "nan", "inf", "1e400", "1 2", "9999999TiB", "0x10", "1ik"]
)
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the message is the caller's affair)
        parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_size(text) < 1 << 60


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 MB"),
        (1, "0.1 MB"),
        (800_000_000, "800.0 MB"),
        (800_000_001, "800.1 MB"),
        (10**9, "1.00 GB"),
        (10**9 + 1, "1.01 GB"),
        (17_321_000_000, "17.33 GB"),
    ],
)
def test_what_is_shown_is_enough(count: int, text: str) -> None:
    assert size_text(count) == text
    assert parse_size(text.replace(" ", "")) >= count
