"""Messages as ZeroMQ multiparts: a MessagePack header, then raw tensor frames, whose sizes are checked before any view.

Header: a map of "kind", "fields" and "tensors" (a list of [dtype, shape]). No pickle; a peer names no types but by the
closed sets here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_args

import msgpack

from .errors import ProtocolError
from .messages import MAX_PAIRS, Attach, Chunk, Fetch, Message, Rows, Run, ToBackbone, ToWorker
from .schema import from_wire, to_wire

MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 1 << 28
MAX_DIMS = 2


class DType(Enum):
    """Element types of tensor frames, little-endian."""

    F32 = "f32"
    I32 = "i32"
    U8 = "u8"

    @property
    def nbytes(self) -> int:
        """Bytes of an element."""
        return 1 if self is DType.U8 else 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """A frame's bytes with what they hold. `data` is any contiguous buffer of exactly the right size."""

    dtype: DType
    shape: tuple[int, ...]
    data: Any


#: The tensors that each message carries: dtype and number of dimensions. Others carry none.
TENSORS: Mapping[type[Any], tuple[tuple[DType, int], ...]] = {
    Run: ((DType.F32, 2), (DType.I32, 2)),
    Rows: ((DType.F32, 2),),
    Chunk: ((DType.U8, 1),),
}
_DTYPES = {dtype.value: dtype for dtype in DType}
_TO_BACKBONE: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(ToBackbone)}
_TO_WORKER: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(ToWorker)}
#: What may come over the connection for weights.
OF_WEIGHTS = (Attach, Fetch)

M = TypeVar("M", bound=Message)


def encode(message: Message, tensors: Sequence[Tensor] = ()) -> list[Any]:
    """The frames of a message: bytes, then each tensor's buffer as it is."""
    header = {
        "kind": type(message).__name__,
        "fields": to_wire(message),
        "tensors": [[t.dtype.value, list(t.shape)] for t in tensors],
    }
    return [msgpack.packb(header), *(t.data for t in tensors)]


def decode_to_backbone(frames: Sequence[Any]) -> tuple[ToBackbone, tuple[Tensor, ...]]:
    """What a worker sent. ProtocolError says what is wrong with it."""
    return _decode(frames, _TO_BACKBONE)


def decode_to_worker(frames: Sequence[Any]) -> tuple[ToWorker, tuple[Tensor, ...]]:
    """What the backbone sent. ProtocolError says what is wrong with it."""
    return _decode(frames, _TO_WORKER)


def _decode(frames: Sequence[Any], kinds: Mapping[str, type[Any]]) -> tuple[Any, tuple[Tensor, ...]]:
    if not frames:
        raise ProtocolError("a message without frames")
    head = memoryview(frames[0])
    if head.nbytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {head.nbytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = msgpack.unpackb(head, strict_map_key=True, max_ext_len=0)
    except Exception as error:  # msgpack raises ValueError, its own errors and RecursionError alike
        raise ProtocolError(f"a header that is no MessagePack: {str(error)[:100]}") from None
    if not isinstance(header, dict) or header.keys() != {"kind", "fields", "tensors"}:
        raise ProtocolError("a header without exactly kind, fields and tensors")
    kind = kinds.get(header["kind"]) if isinstance(header["kind"], str) else None
    if kind is None:
        raise ProtocolError(f"unknown message {str(header['kind'])[:64]!r}")
    message = from_wire(kind, header["fields"])
    return message, _tensors(kind, header["tensors"], frames[1:])


def _tensors(kind: type[Any], specs: Any, frames: Sequence[Any]) -> tuple[Tensor, ...]:
    wanted = TENSORS.get(kind, ())
    if not isinstance(specs, list) or len(specs) != len(wanted) or len(frames) != len(wanted):
        raise ProtocolError(f"{kind.__name__} carries {len(wanted)} tensors; {len(frames)} frames came")
    return tuple(_tensor(kind, *each) for each in zip(wanted, specs, frames, strict=True))


def _tensor(kind: type[Any], wanted: tuple[DType, int], spec: Any, frame: Any) -> Tensor:
    if not isinstance(spec, list) or len(spec) != 2 or not isinstance(spec[0], str) or not isinstance(spec[1], list):
        raise ProtocolError(f"{kind.__name__}: a tensor is described by its dtype and its shape")
    dtype, shape = _DTYPES.get(spec[0]), spec[1]
    if dtype is not wanted[0] or len(shape) != wanted[1]:
        raise ProtocolError(
            f"{kind.__name__}: a tensor of {spec[0][:16]!r} with {len(shape)} dimensions is not allowed"
        )
    if any(type(extent) is not int or not 1 <= extent <= MAX_FRAME_BYTES for extent in shape):
        raise ProtocolError(f"{kind.__name__}: a tensor's extents are whole numbers from 1 to {MAX_FRAME_BYTES}")
    size, view = math.prod(shape) * dtype.nbytes, memoryview(frame)
    if size > MAX_FRAME_BYTES or shape[0] > max(MAX_PAIRS, MAX_FRAME_BYTES if dtype is DType.U8 else 0):
        raise ProtocolError(f"{kind.__name__}: a tensor of {size} bytes is larger than allowed")
    if view.nbytes != size:
        raise ProtocolError(f"{kind.__name__}: a frame of {view.nbytes} bytes for a tensor of {size}")
    return Tensor(dtype, tuple(shape), view)
