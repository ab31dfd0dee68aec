"""Durations as people write them: 90s, 30m, 1h, 7d."""

from __future__ import annotations

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_S = 366 * 86_400


def parse_duration(text: str) -> int:
    """Seconds, from 1 to a year. ValueError when it is no such duration."""
    word = text.strip().lower()
    number, unit = word[:-1], word[-1:]
    if unit not in _UNITS or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise ValueError(text)
    seconds = int(number) * _UNITS[unit]
    if not 1 <= seconds <= MOST_S:
        raise ValueError(text)
    return seconds


def show_duration(seconds: int) -> str:
    """A duration in a unit that fits, rounded up, so that what is left never shows as nothing."""
    for unit in "dhm":
        if seconds >= _UNITS[unit] * 2 or seconds == _UNITS[unit]:
            return f"{-(-seconds // _UNITS[unit])}{unit}"
    return f"{seconds}s"
