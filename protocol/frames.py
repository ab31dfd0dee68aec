"""Messages as ZeroMQ multiparts: a MessagePack header, then raw tensor frames, whose sizes are checked before any view.

Rows take as many frames as they need, all but the last of PIECE_BYTES. On a slow line a frame of 30 MB takes longer
than the silence after which ZeroMQ gives a connection up, for it counts whole frames; and it encrypts one, sends it and
decrypts it one after the other, where the pieces of a tensor go through all of that side by side.

Header: a map of "kind", "fields" and "tensors" (a list of [dtype, shape]). No pickle; a peer names no types but by the
closed sets here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, get_args

import msgpack

from . import PROTOCOL_VERSION
from .errors import ProtocolError, VersionMismatch
from .messages import (
    MAX_CHUNK_BYTES,
    MAX_PAIRS,
    MAX_ROWS,
    MAX_WIDTH,
    Attach,
    Chunk,
    Enrol,
    Hello,
    Message,
    Rows,
    Run,
    ToBackbone,
    ToWorker,
)
from .schema import from_wire, one_line, to_wire

MAX_HEADER_BYTES = 1 << 20
PIECE_BYTES = 1 << 18  #: 5 s of silence mean less than 52 KB/s
MAX_TENSOR_BYTES = 1 << 28
MAX_FRAMES = 6 + MAX_TENSOR_BYTES // PIECE_BYTES  #: of a message: header, a large tensor, and MAX_PAIRS pairs
#: What MessagePack may build of a header; nothing legal comes near.
_LIMITS: Mapping[str, Any] = {
    "max_str_len": 4096,
    "max_bin_len": 4096,
    "max_array_len": 1 << 15,
    "max_map_len": 32,
    "max_ext_len": 0,
}


class DType(StrEnum):
    """Element types of tensor frames, little-endian."""

    F32 = "f32"
    F16 = "f16"
    I32 = "i32"
    U8 = "u8"


class Tensor(NamedTuple):
    """A frame's bytes with what they hold. `data` is any contiguous buffer of exactly the right size."""

    dtype: DType
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a tensor of a message has to be: of one of these dtypes, and for each dimension its least and its greatest
    extent.
    """

    dtypes: tuple[DType, ...]
    extents: tuple[tuple[int, int], ...]


_ITEM_BYTES = {DType.F32: 4, DType.F16: 2, DType.I32: 4, DType.U8: 1}
_FLOATS = (DType.F32, DType.F16)
#: The tensors that each message carries. Others carry none.
_TENSORS: Mapping[type[Any], tuple[_Rule, ...]] = {
    Run: (_Rule(_FLOATS, ((1, MAX_ROWS), (1, MAX_WIDTH))), _Rule((DType.I32,), ((1, MAX_PAIRS), (2, 2)))),
    Rows: (_Rule(_FLOATS, ((1, MAX_PAIRS), (1, MAX_WIDTH))),),
    Chunk: (_Rule((DType.U8,), ((1, MAX_CHUNK_BYTES),)),),
}
_TO_BACKBONE: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(ToBackbone)}
_TO_WORKER: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(ToWorker)}
_GREETINGS = {Hello, Attach, Enrol}  #: they begin with the version
_KEYS = {"kind", "fields", "tensors"}


def encode(message: Message, tensors: Sequence[Tensor] = ()) -> list[Any]:
    """The frames of a message: bytes, then each tensor's buffer as it is, or views of it in pieces."""
    header = {
        "kind": type(message).__name__,
        "fields": to_wire(message),
        "tensors": [(t.dtype, t.shape) for t in tensors],
    }
    frames = [msgpack.packb(header, default=to_wire)]
    for tensor in tensors:
        frames += _pieces(tensor.data, _piece_bytes(tensor.dtype))
    return frames


def _piece_bytes(dtype: DType) -> int:
    """Of each frame of a tensor but the last. Bytes of weights come in one: how many follows the line."""
    return MAX_CHUNK_BYTES if dtype is DType.U8 else PIECE_BYTES


def _pieces(data: Any, piece_bytes: int) -> Sequence[Any]:
    nbytes = memoryview(data).nbytes
    if nbytes <= piece_bytes:
        return (data,)
    flat = memoryview(data).cast("B")
    return [flat[at : at + piece_bytes] for at in range(0, nbytes, piece_bytes)]


def decode_to_backbone(frames: Sequence[Any]) -> tuple[ToBackbone, tuple[Tensor, ...]]:
    """What a worker sent. ProtocolError says what is wrong with it."""
    return _decode(frames, _TO_BACKBONE)


def decode_to_worker(frames: Sequence[Any]) -> tuple[ToWorker, tuple[Tensor, ...]]:
    """What the backbone sent. ProtocolError says what is wrong with it."""
    return _decode(frames, _TO_WORKER)


def _decode(frames: Sequence[Any], kinds: Mapping[str, type[Any]]) -> tuple[Any, tuple[Tensor, ...]]:
    header = _header(frames)
    kind = kinds.get(header["kind"]) if type(header["kind"]) is str else None
    if kind is None:
        raise ProtocolError(f"unknown message {one_line(header['kind'], 64)!r}")
    if kind in _GREETINGS:
        _check_version(header["fields"])
    message = from_wire(kind, header["fields"])
    return message, _tensors(kind, header["tensors"], frames)


def _header(frames: Sequence[Any]) -> dict[str, Any]:
    if not frames:
        raise ProtocolError("a message without frames")
    head = memoryview(frames[0])
    if head.nbytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {head.nbytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = msgpack.unpackb(head, strict_map_key=True, **_LIMITS)
    except Exception as error:  # msgpack raises ValueError, its own errors and RecursionError alike
        raise ProtocolError(f"a header that is no MessagePack: {one_line(error, 100)}") from None
    if type(header) is not dict or header.keys() != _KEYS:
        raise ProtocolError("a header without exactly kind, fields and tensors")
    return header


def _check_version(fields: Any) -> None:
    """Versions are compared before anything else: another version's greeting may have other fields."""
    theirs = fields.get("protocol") if type(fields) is dict else None
    if type(theirs) is int and theirs != PROTOCOL_VERSION:
        raise VersionMismatch(theirs)


def _tensors(kind: type[Any], specs: Any, frames: Sequence[Any]) -> tuple[Tensor, ...]:
    rules = _TENSORS.get(kind, ())
    if type(specs) is not list or len(specs) != len(rules):
        raise ProtocolError(f"{kind.__name__} carries {len(rules)} tensors")
    found, at = list[Tensor](), 1
    for rule, spec in zip(rules, specs, strict=True):
        dtype, shape, size = _described(kind, rule, spec)
        piece_bytes = _piece_bytes(dtype)
        after = at + max(1, -(-size // piece_bytes))
        found.append(Tensor(dtype, shape, _joined(kind, size, piece_bytes, frames[at:after])))
        at = after
    if at != len(frames):
        raise ProtocolError(f"{kind.__name__}: {len(frames) - 1} frames came, and its tensors have {at - 1}")
    return tuple(found)


def _described(kind: type[Any], rule: _Rule, spec: Any) -> tuple[DType, tuple[int, ...], int]:
    """A tensor's dtype, shape and bytes."""
    if type(spec) is not list or len(spec) != 2 or type(spec[1]) is not list:
        raise ProtocolError(f"{kind.__name__}: a tensor is described by its dtype and its shape")
    dtype, shape = spec
    if dtype not in rule.dtypes or len(shape) != len(rule.extents):
        named = f"{one_line(dtype, 16)!r} with {len(shape)} dimensions"
        raise ProtocolError(f"{kind.__name__}: a tensor of {named} is not allowed")
    kind_of_item = DType(dtype)
    size = _ITEM_BYTES[kind_of_item]
    for extent, (least, most) in zip(shape, rule.extents, strict=True):
        if type(extent) is not int or not least <= extent <= most:
            raise ProtocolError(f"{kind.__name__}: an extent of {one_line(extent, 32)}, not from {least} to {most}")
        size *= extent
    if size > MAX_TENSOR_BYTES:
        raise ProtocolError(f"{kind.__name__}: a tensor of {size} bytes; at most {MAX_TENSOR_BYTES} are allowed")
    return kind_of_item, tuple(shape), size


def _joined(kind: type[Any], size: int, piece_bytes: int, frames: Sequence[Any]) -> Any:
    """The bytes of a tensor of this size: a view of its frame, or of several a copy."""
    views = [memoryview(frame) for frame in frames]
    left = size
    for view in views:
        if view.nbytes != min(left, piece_bytes):
            due = f"due were {min(left, piece_bytes)}, of a tensor of {size}"
            raise ProtocolError(f"{kind.__name__}: a frame of {view.nbytes} bytes; {due}")
        left -= view.nbytes
    if left or not views:
        raise ProtocolError(f"{kind.__name__}: {size - left} bytes came of a tensor of {size}")
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
