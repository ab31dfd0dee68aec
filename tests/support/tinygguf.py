"""Writes GGUF files from raw parts, right or wrong on purpose."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    """A string behind its length."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value behind its type; an array's content is (kind, list)."""
    if kind == STRING:
        return struct.pack("<I", kind) + string(content)
    if kind == ARRAY:
        inner, items = content
        body = b"".join(string(i) if inner == STRING else struct.pack("<" + _FORMS[inner], i) for i in items)
        return struct.pack("<IIQ", kind, inner, len(items)) + body
    return struct.pack("<I" + _FORMS[kind], kind, content)


@dataclass
class Tiny:
    """A file in the making. Fields that are None follow from the others."""

    keys: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[tuple[str | bytes, tuple[int, ...], int, int]] = field(
        default_factory=list
    )  # name, dims, type, offset
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    key_count: int | None = None
    alignment: int = 32

    def key(self, name: str | bytes, kind: int, content: Any) -> Tiny:
        """Add a key."""
        self.keys.append((name, value(kind, content)))
        return self

    def tensor(self, name: str | bytes, dims: tuple[int, ...], type_id: int, data: bytes) -> Tiny:
        """Add a tensor at the next aligned place."""
        self.data += b"\0" * (-len(self.data) % self.alignment)
        self.tensors.append((name, dims, type_id, len(self.data)))
        self.data += data
        return self

    def bytes(self) -> bytes:
        """The whole file."""
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        key_count = len(self.keys) if self.key_count is None else self.key_count
        head = self.magic + struct.pack("<IQQ", self.version, tensor_count, key_count)
        head += b"".join(string(name) + body for name, body in self.keys)
        for name, dims, type_id, offset in self.tensors:
            head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
        return head + b"\0" * (-len(head) % self.alignment) + self.data

    def write(self, path: Path) -> Path:
        """Write the file."""
        path.write_bytes(self.bytes())
        return path


def small() -> Tiny:
    """A small right file with every kind of value and three tensors."""
    tiny = Tiny().key("general.architecture", STRING, "tiny").key("tiny.block_count", U32, 2)
    for kind, content in ((U8, 200), (I8, -3), (U16, 60000), (I16, -300), (I32, -70000), (F32, 0.5), (BOOL, True)):
        tiny.key(f"value.{kind}", kind, content)
    tiny.key("value.u64", U64, 1 << 40).key("value.i64", I64, -(1 << 40)).key("value.f64", F64, 1e300)
    tiny.key("list.strings", ARRAY, (STRING, ["a", "", "Ġü", "🙂"])).key("list.floats", ARRAY, (F32, [0.5, -1.0]))
    tiny.key("list.bools", ARRAY, (BOOL, [True, False])).key("list.empty", ARRAY, (U32, []))
    random = np.random.default_rng(3)
    tiny.tensor("a.weight", (4, 3), 0, random.standard_normal(12).astype("<f4").tobytes())
    tiny.tensor("q.weight", (64, 2, 2), 8, random.integers(0, 256, 2 * 34 * 4, dtype=np.uint8).tobytes())
    return tiny.tensor("b.bias", (5,), 1, random.standard_normal(5).astype("<f2").tobytes())
