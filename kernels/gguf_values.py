"""Values in the head of a GGUF file, out of bytes that nobody vouches for: numbers, strings, arrays of them.

Nothing of a declared size is made before that size was found to lie in the file. Knows no key and no tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .errors import GGUFError

#: Bytes that metadata and tensor table may take. The largest vocabularies known need a tenth of it; a sparse file
#: of a terabyte, which costs its sender nothing, must not cost its reader memory or time.
HEAD_LIMIT = 256 << 20
#: Strings in all lists together: five times as many as the largest vocabulary known has with its merges.
MAX_STRINGS = 1 << 22
DAMAGED = "it is damaged or cut off; get it again"

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SHOWN = 100  #: characters of a foreign name in a message


def shown(name: str) -> str:
    """A foreign name fit for one line of a message: nothing that a terminal would act on, and cut when it is long."""
    start = name[:_SHOWN]
    return (start if start.isprintable() else repr(start)[1:-1]) + ("..." if len(name) > _SHOWN else "")


class Strings(Sequence[str]):
    """An array of strings, decoded when asked for. GGUFError for one that is not UTF-8: none is ever altered."""

    def __init__(self, data: bytes, ends: NDArray[np.int64], where: str) -> None:
        self._data, self._ends, self._where = data, ends, where

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        # Each string stands behind its length, in 8 bytes.
        start = 8 + (int(self._ends[at - 1]) if at else 0)
        return self._decoded(at, start, int(self._ends[at]))

    def __iter__(self) -> Iterator[str]:
        data, ends = self._data, self._ends.tolist()
        starts = [8, *(end + 8 for end in ends[:-1])]
        try:  # one loop without a call: a vocabulary has 262,144 of them
            return iter([data[start:end].decode() for start, end in zip(starts, ends, strict=False)])
        except UnicodeDecodeError:
            return (self._decoded(at, start, end) for at, (start, end) in enumerate(zip(starts, ends, strict=False)))

    def _decoded(self, at: int, start: int, end: int) -> str:
        try:
            return self._data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            raise GGUFError(f"{self._where}: string {at} is not UTF-8; convert the model again") from None


class Cursor:
    """Reads on, never past the end of the file nor past HEAD_LIMIT."""

    def __init__(self, view: memoryview, path: str) -> None:
        self.view, self.path, self.at = view, path, 0
        self.end = min(len(view), HEAD_LIMIT)
        self._strings_left = MAX_STRINGS

    def fail(self, message: str) -> GGUFError:
        """The refusal to raise."""
        return GGUFError(f"{self.path}: {message}")

    def past_end(self, what: str) -> GGUFError:
        """The refusal of something that would reach past the end."""
        if self.end < len(self.view):
            return self.fail(f"{what}, and metadata and tensor table may take {HEAD_LIMIT} bytes; {DAMAGED}")
        return self.fail(f"{what}, and the file ends at {self.end}; {DAMAGED}")

    def need(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they begin."""
        start = self.at
        if size > self.end - start:
            raise self.past_end(f"{what} needs {size} bytes at {start}")
        self.at = start + size
        return start

    def number(self, form: str, what: str) -> Any:
        """The next number, by its `struct` form."""
        return struct.unpack_from(form, self.view, self.need(struct.calcsize(form), what))[0]

    def count(self, what: str, least: int, most: int | None = None) -> int:
        """How many things follow that take at least so many bytes each: refused when they cannot all be there."""
        return self.check_count(self.number("<Q", what), what, least, most)

    def check_count(self, count: int, what: str, least: int, most: int | None = None) -> int:
        """Return a count of things yet to come, refused when they cannot all be there or are more than `most`."""
        if count > (self.end - self.at) // least:
            raise self.past_end(f"{what} is {count}, which need {count * least} bytes or more at {self.at}")
        if most is not None and count > most:
            raise self.fail(f"{what} is {count}; no model has more than {most} there; {DAMAGED}")
        return count

    def string(self, what: str) -> str:
        """The next string, behind its length."""
        length: int = self.number("<Q", f"the length of {what}")
        start = self.need(length, what)
        try:
            return bytes(self.view[start : start + length]).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {start} is not UTF-8; convert the model again") from None

    def value(self, key: str) -> Any:
        """The next value, behind its type."""
        name = f"'{shown(key)}'"
        kind: int = self.number("<I", f"the type of {name}")
        if kind == _STRING:
            return self.string(f"the value of {name}")
        if kind == _ARRAY:
            return self._array(name)
        if kind not in _SCALARS:
            raise self.fail(f"{name} has the unknown value type {kind}; {DAMAGED}")
        return self.number(_SCALARS[kind], f"the value of {name}")

    def _array(self, name: str) -> Any:
        kind: int = self.number("<I", f"the type of {name}")
        if kind == _STRING:
            return self._strings(name, self.count(f"the length of {name}", 8, self._strings_left))
        if kind not in _DTYPES:
            word = "arrays" if kind == _ARRAY else f"the unknown value type {kind}"
            raise self.fail(f"{name} is an array of {word}, which is not supported; convert the model again")
        dtype = np.dtype(_DTYPES[kind])
        count = self.count(f"the length of {name}", dtype.itemsize)
        start = self.need(count * dtype.itemsize, f"the values of {name}")
        # A copy: metadata does not keep the file mapped.
        found = np.frombuffer(self.view, dtype, count, start)
        array = found != 0 if kind == _BOOL else found.copy()
        array.flags.writeable = False
        return array

    def _strings(self, name: str, count: int) -> Strings:
        self._strings_left -= count
        first, end, view = self.at, self.end, self.view
        ends, at, length_at = np.empty(count, np.int64), first, struct.Struct("<Q").unpack_from
        for i in range(count):  # a vocabulary has some 100,000 of these: nothing is looked up in this loop
            if at + 8 > end or (at := at + 8 + length_at(view, at)[0]) > end:
                raise self.past_end(f"string {i} of {count} of {name} reaches to {at}")
            ends[i] = at - first
        self.at = at
        return Strings(bytes(view[first:at]), ends, f"{self.path}: {name}")
