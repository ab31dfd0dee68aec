"""The bars by which sides are judged: a TOML file, with defaults that come with the package."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import UsageError

MOST_BYTES = 1 << 20
PRECISIONS = ("f64", "f32", "i16", "f16", "outside")  #: from finest to coarsest
MOST_BAR = 10**9
DEFAULT = "policy.toml"  #: of this package


@dataclass(frozen=True, slots=True)
class Policy:
    """Bars by precision and name."""

    source: str
    bars: Mapping[str, Mapping[str, float]]

    def of(self, precision: str) -> Mapping[str, float]:
        """The bars of a precision; the oracle is held to those of f32."""
        return self.bars["f32" if precision == "f64" else precision]


def coarser(a: str, b: str) -> str:
    """Of two precisions the one that says less."""
    return max(a, b, key=PRECISIONS.index)


def _default() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = tomllib.loads(files(__package__).joinpath(DEFAULT).read_text("utf-8"))
    return found


def load_policy(path: Path | None) -> Policy:
    """The defaults, with what a file says in their place. UsageError names the key that cannot be."""
    bars = _default()
    if path is None:
        return Policy("default", bars)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--policy {path}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise UsageError(f"--policy {path}: larger than {MOST_BYTES >> 20} MiB; this is no policy")
    try:
        given = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # of the text, of TOML, of a number of thousands of digits
        raise UsageError(f"--policy {path}: {' '.join(str(error).split())[:200]}") from None
    for section, keys in given.items():
        _known(section, bars, f"--policy {path}", "section")
        if not isinstance(keys, dict):
            raise UsageError(f"--policy {path}: [{section}] is no table of bars")
        for key, value in keys.items():
            _known(key, bars["f32"], f"--policy {path}: [{section}]", "bar")
            bars[section][key] = _number(value, f"--policy {path}: [{section}] {key}")
    return Policy(str(path), bars)


def _known(name: str, known: Mapping[str, Any], place: str, what: str) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"{place}: no {what} {name[:60]!r}; {hint}")


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_BAR:
        told = str(value)[:40] if not isinstance(value, int) or abs(value) < MOST_BAR else "a number of many digits"
        raise UsageError(f"{place}: {told!r} is no number from 0 to {MOST_BAR:g}")
    return float(value)
