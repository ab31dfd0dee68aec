"""Invariant 1: routing stays on the backbone. The whole list of what can cross the wire; whoever adds to it changes this."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable

import pytest
from wire import KINDS

from protocol import frames
from protocol.capabilities import ClassInfo
from protocol.errors import ProtocolError
from protocol.frames import decode_to_backbone, decode_to_worker
from protocol.messages import Slice

FIELDS = {
    "Hello": "protocol build backend device numeric_class wire_dtypes memory_bytes cached",
    "Attach": "protocol",
    "Enrol": "protocol public_key name",
    "Fetch": "sha256 offset length",
    "Ready": "epoch layer",
    "Rows": "seq epoch compute_ns",
    "Failed": "seq epoch reason",
    "Goodbye": "reason",
    "Welcome": "name",
    "Enrolled": "server_key name",
    "Refused": "reason",
    "Assign": "epoch layer activation slices",
    "Chunk": "sha256 offset",
    "Run": "seq epoch layer",
    "Drain": "reason",
    "Slice": "expert part tensor type_id rows cols sha256",
    "ClassInfo": "name accumulation activations",
}
#: Rows in, with whose they are; rows out; weights of experts. Router scores would be floats [rows, experts]: no slot.
TENSORS = {"Run": [("f32 f16", 2), ("i32", 2)], "Rows": [("f32 f16", 2)], "Chunk": [("u8", 1)]}


def test_no_message_has_room_for_the_routers_matrix_or_scores() -> None:
    found = {kind.__name__: " ".join(f.name for f in dataclasses.fields(kind)) for kind in (*KINDS, Slice, ClassInfo)}
    assert found == FIELDS
    slots = {k.__name__: [(" ".join(r.dtypes), len(r.extents)) for r in rules] for k, rules in frames._TENSORS.items()}
    assert slots == TENSORS
    assert frames._TENSORS[next(k for k in KINDS if k.__name__ == "Run")][1].extents[1] == (2, 2)  # (row, expert)


@pytest.mark.parametrize("decode", [decode_to_backbone, decode_to_worker])
@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # text
    ],
    ids=["array", "map", "bytes", "text"],
)
def test_what_a_header_declares_is_not_allocated(header: bytes, decode: Callable[[list[bytes]], object]) -> None:
    assert _peak_bytes(header, decode) < 1 << 20


def test_lists_in_lists_cost_a_fixed_amount_at_most() -> None:
    # Each is within the limit, and msgpack makes room for 10,000 entries before it looks on, up to 1,024 lists deep.
    deepest = b"\xdc\x40\x00" * 300_000
    assert _peak_bytes(deepest, decode_to_backbone) < 100 * 1000 * 1000


def _peak_bytes(header: bytes, decode: Callable[[list[bytes]], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode([header])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
