"""The device source: which files make up which program, and every program there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..formats import GGMLType


@cache
def _text(*names: str) -> str:
    return "".join((Path(__file__).parent / f"{name}.h").read_text(encoding="ascii") for name in names)


@dataclass(frozen=True, slots=True)
class Program:
    """Complete text to compile, with what has to be defined."""

    name: str
    source: str
    defines: Mapping[str, str] = field(default_factory=dict)


def dense() -> Program:
    """Everything but products: `dense.h`."""
    return Program("dense", _text("compat", "functions", "dense"))


def products(type: GGMLType, rows: int, columns: int) -> Program:  # noqa: A002
    """Products with matrices of one type: so many rows of weights an item, by so many rows of x at a time."""
    source = _text("compat", "functions", "formats", "products")
    defines = {"TYPE": str(int(type)), "ROWS": str(rows), "COLUMNS": str(columns)}
    return Program(f"products-{type.name}-{rows}x{columns}", source, defines)


#: Rows of weights an item and rows of x at a time: for one row of x, and for several.
NARROW, WIDE = (1, 1), (2, 8)


def all_programs() -> Iterator[Program]:
    """What a device can be asked to compile."""
    yield dense()
    for type in GGMLType:  # noqa: A001
        for rows, columns in (NARROW, WIDE):
            yield products(type, rows, columns)
