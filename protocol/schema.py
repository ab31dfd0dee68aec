"""Dataclasses to MessagePack maps and back, every field checked: unknown, missing, of another type, out of bounds.

A field's type is one of int, str, bytes, a dataclass, or tuple[one of these, ...]; its bounds stand in the field's
metadata: `most` for a number, a length or a count of entries, `length` for an exact length. Texts are printable, so
that a peer cannot write to a terminal or forge a line of a log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from .errors import ProtocolError

T = TypeVar("T")
MOST_TEXT = 1024
MOST_DEFAULT = {int: (1 << 63) - 1, str: MOST_TEXT, bytes: 1024, tuple: 1 << 16}


def bounded(most: int) -> Any:
    """A field whose value, length or count of entries is at most this."""
    return dataclasses.field(metadata={"most": most})


def exactly(length: int) -> Any:
    """A field of bytes of this length."""
    return dataclasses.field(metadata={"length": length})


def one_line(text: object, most: int = MOST_TEXT) -> str:
    """A text as messages may carry it: printable, on one line, not too long."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line if len(line) <= most else line[: most - 3] + "..."


def to_wire(message: Any) -> dict[str, Any]:
    """A dataclass as the map that MessagePack packs; what it holds of other dataclasses is left to another call."""
    kind: Any = type(message)
    return {name: getattr(message, name) for name in _names(kind)}


def from_wire(kind: type[T], data: Any) -> T:
    """A dataclass from an unpacked map. ProtocolError names the field that is wrong."""
    checks = _checks(cast(Any, kind))
    if type(data) is not dict:
        raise ProtocolError(f"{kind.__name__} is a map, not {type(data).__name__}")
    if data.keys() != checks.keys():
        unknown = [one_line(key, 64) for key in data if key not in checks]
        missing = [name for name in checks if name not in data]
        wrong = f"unknown field {unknown[0]!r}" if unknown else f"no field {missing[0]!r}"
        raise ProtocolError(f"{kind.__name__} has {wrong}")
    return kind(*[check(data[name]) for name, check in checks.items()])


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _checks(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    return {f.name: _check(f"{kind.__name__}.{f.name}", hints[f.name], f.metadata) for f in dataclasses.fields(kind)}


def _check(where: str, hint: Any, bounds: Any) -> Callable[[Any], Any]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return lambda value: from_wire(hint, value)
    if get_origin(hint) is tuple:
        return _tuple_check(where, _check(f"{where}[]", get_args(hint)[0], {}), bounds.get("most", MOST_DEFAULT[tuple]))
    most = bounds.get("most", MOST_DEFAULT[hint])
    return _number_check(where, most) if hint is int else _sized_check(where, hint, most, bounds.get("length"))


def _number_check(where: str, most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # bool is an int to Python, not on the wire.
        if type(value) is not int:
            raise ProtocolError(f"{where} is {type(value).__name__}, not int")
        if not 0 <= value <= most:
            raise ProtocolError(f"{where} is {one_line(value, 32)}; from 0 to {most} is allowed")
        return value

    return check


def _sized_check(where: str, hint: type[Any], most: int, length: int | None) -> Callable[[Any], Any]:
    unit = "characters" if hint is str else "bytes"

    def check(value: Any) -> Any:
        if type(value) is not hint:
            raise ProtocolError(f"{where} is {type(value).__name__}, not {hint.__name__}")
        if len(value) > most or (length is not None and len(value) != length):
            allowed = f"at most {most}" if length is None else str(length)
            raise ProtocolError(f"{where} has {len(value)} {unit}; {allowed} are allowed")
        if hint is str and not value.isprintable():
            raise ProtocolError(f"{where} holds characters that are not printable")
        return value

    return check


def _tuple_check(where: str, item: Callable[[Any], Any], most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not list:
            raise ProtocolError(f"{where} is {type(value).__name__}, not a list")
        if len(value) > most:
            raise ProtocolError(f"{where} has {len(value)} entries; at most {most} are allowed")
        return tuple([item(entry) for entry in value])

    return check
