"""Messages for tests of the wire: one right example of each, and hypothesis strategies for all their fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from protocol import PROTOCOL_VERSION
from protocol.frames import DType, Tensor
from protocol.messages import Attach, Chunk, Enrol, Hello, Message, Rows, Run, Slice, ToBackbone, ToWorker
from protocol.schema import MOST_DEFAULT

KINDS: tuple[type[Any], ...] = (*get_args(ToBackbone), *get_args(ToWorker))
_TEXT = st.text(st.characters(categories=("L", "N", "P", "S"), include_characters=" "), max_size=12)


def fields_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Right values of a message or of a dataclass inside one."""
    hints = get_type_hints(kind)
    chosen = {f.name: _values(hints[f.name], f.metadata) for f in dataclasses.fields(kind)}
    if kind in (Hello, Attach, Enrol):
        chosen["protocol"] = st.just(PROTOCOL_VERSION)
    return st.builds(kind, **chosen)


def _values(hint: Any, bounds: Any) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return fields_of(hint)
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0], {}), max_size=3).map(tuple)
    most, length = bounds.get("most", MOST_DEFAULT.get(hint)), bounds.get("length")
    if hint is int:
        return st.integers(0, most)
    if hint is bytes:
        return st.binary(min_size=length or 0, max_size=length if length is not None else min(most, 40))
    return _TEXT.map(lambda text: text[:most])


def tensors_of(message: Message, floats: DType = DType.F32) -> tuple[Tensor, ...]:
    """Tensors as the message has to carry them; its rows as F32, or as F16."""
    rows = np.arange(6, dtype="<f2" if floats is DType.F16 else "<f4").reshape(2, 3)
    if isinstance(message, Run):
        pairs = np.array([[0, 1], [1, 0], [1, 2]], "<i4")
        return (Tensor(floats, rows.shape, rows), Tensor(DType.I32, pairs.shape, pairs))
    if isinstance(message, Rows):
        return (Tensor(floats, rows.shape, rows),)
    return (Tensor(DType.U8, (5,), b"bytes"),) if isinstance(message, Chunk) else ()


def raw(frames: list[Any]) -> list[bytes]:
    """Frames as they come out of a socket."""
    return [memoryview(frame).tobytes() for frame in frames]


def slice_of(part: str, sha256: bytes = b"", *, expert: int = 0, rows: int = 4, cols: int = 4) -> Slice:
    """A slice in F32."""
    return Slice(expert, part, f"blk.0.{part}", 0, rows, cols, sha256)
