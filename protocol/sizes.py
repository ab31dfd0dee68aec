"""Sizes as people write them: what both commands' flags take for a memory budget, and how one is shown."""

from __future__ import annotations

import math

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes of `800M`, `1.5G`, `2GiB` or a plain number. ValueError when it is none of these."""
    word = text.strip().lower().removesuffix("b")
    digits = word.rstrip("kmgti")
    size = float(digits) * _UNITS[word[len(digits) :]] if word[len(digits) :] in _UNITS else math.nan
    if not 0 <= size < 1 << 60:
        raise ValueError(text)
    return int(size)


def size_text(count: int) -> str:
    """Bytes as megabytes, from a gigabyte on as gigabytes; rounded up, so that what needs them fits what is shown."""
    return f"{math.ceil(count / 1e7) / 100:.2f} GB" if count >= 10**9 else f"{math.ceil(count / 1e5) / 10:.1f} MB"
