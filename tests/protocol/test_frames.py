"""Messages and their frames: what goes in comes out; whatever else comes is refused in one line."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire import KINDS, fields_of, raw, tensors_of

from protocol import PROTOCOL_VERSION
from protocol.errors import ProtocolError, VersionMismatch
from protocol.frames import PIECE_BYTES, DType, Tensor, decode_to_backbone, decode_to_worker, encode
from protocol.messages import Attach, Chunk, Enrol, Enrolled, Fetch, Ready, Refused, Rows, Run, ToBackbone, Welcome
from protocol.schema import one_line

NAMES = [kind.__name__ for kind in KINDS]
DECODERS = (decode_to_backbone, decode_to_worker)


def header(kind: str, fields: Any, tensors: Any = ()) -> bytes:
    return bytes(msgpack.packb({"kind": kind, "fields": fields, "tensors": list(tensors)}))


def refusal(frames: list[bytes], decode: Any = decode_to_backbone) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), floats=st.sampled_from([DType.F32, DType.F16]))
def test_round_trip(kind: type[Any], data: st.DataObject, floats: DType) -> None:
    message = data.draw(fields_of(kind))
    sent = tensors_of(message, floats)
    decode = decode_to_backbone if isinstance(message, ToBackbone) else decode_to_worker
    came, tensors = decode(raw(encode(message, sent)))
    assert came == message
    assert [(t.dtype, t.shape, bytes(t.data)) for t in tensors] == [
        (t.dtype, t.shape, memoryview(t.data).tobytes()) for t in sent
    ]


def test_tensors_are_views_of_their_frames() -> None:
    frames = raw(encode(Rows(1, 1, 1), tensors_of(Rows(1, 1, 1))))
    _, (tensor,) = decode_to_backbone(frames)
    assert tensor.data.obj is frames[1]


def test_directions_are_closed_sets() -> None:
    assert "unknown message 'Welcome'" in refusal(raw(encode(Welcome("w"))), decode_to_backbone)
    assert "unknown message 'Ready'" in refusal(raw(encode(Ready(1, 1))), decode_to_worker)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"epoch": 1}, "no field 'layer'"),
        ({"epoch": 1, "layer": 1, "more": 1}, "unknown field 'more'"),
        ({"epoch": True, "layer": 1}, "Ready.epoch is bool, not int"),
        ({"epoch": 1.0, "layer": 1}, "Ready.epoch is float"),
        ({"epoch": -1, "layer": 1}, "Ready.epoch is -1"),
        ({"epoch": 1, "layer": 4097}, "Ready.layer is 4097; from 0 to 4096"),
        ({"epoch": 1 << 63, "layer": 1}, "Ready.epoch is 9223372036854775808"),
        ([], "Ready is a map, not list"),
    ],
)
def test_fields_are_checked(fields: Any, told: str) -> None:
    assert told in refusal([header("Ready", fields)])


def test_texts_cannot_write_to_a_terminal() -> None:
    told = refusal([header("Refused", {"reason": "\x1b[2Jgone"})], decode_to_worker)
    assert told == "Refused.reason holds characters that are not printable"
    line = one_line("a\x1b[2J\nb" + "c" * 2000)
    assert decode_to_worker(raw(encode(Refused(line))))[0] == Refused(line)
    assert len(line) == 1024


@pytest.mark.parametrize(
    ("specs", "frames", "told"),
    [
        ([], [], "carries 1 tensors"),
        ([["f32", [2, 3]]], [b"x" * 23], "a frame of 23 bytes; due were 24, of a tensor of 24"),
        ([["f32", [2, 3]]], [b"x" * 24, b""], "2 frames came, and its tensors have 1"),
        ([["f16", [2, 3]]], [b"x" * 24], "a frame of 24 bytes; due were 12, of a tensor of 12"),
        ([["f64", [2, 3]]], [b"x" * 48], "'f64' with 2 dimensions is not allowed"),
        ([["i32", [2, 3]]], [b"x" * 24], "'i32' with 2 dimensions is not allowed"),
        ([["f32", [6]]], [b"x" * 24], "'f32' with 1 dimensions is not allowed"),
        ([["f32", [0, 3]]], [b""], "an extent of 0"),
        ([["f32", [-2, -3]]], [b"x" * 24], "an extent of -2"),
        ([["f32", [1 << 17, 1 << 20]]], [b"x"], "at most 268435456 are allowed"),
        ([["f32", [True, 6]]], [b"x" * 24], "an extent of True"),
        ([["f32", [2, 3], 1]], [b"x" * 24], "described by its dtype and its shape"),
        ([[["f32"], [2, 3]]], [b"x" * 24], "is not allowed"),
    ],
)
def test_tensors_are_checked(specs: Any, frames: list[bytes], told: str) -> None:
    fields = {"seq": 1, "epoch": 1, "compute_ns": 1}
    assert told in refusal([header("Rows", fields, specs), *frames])


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 512, 600])
def test_a_large_tensor_comes_in_pieces(rows: int) -> None:
    width = PIECE_BYTES // 1024  # 256 rows are a frame
    x = np.arange(rows * width, dtype="<f4").reshape(rows, width)
    frames = encode(Rows(1, 1, 1), [Tensor(DType.F32, x.shape, x)])
    sizes = [memoryview(frame).nbytes for frame in frames[1:]]
    assert sizes == [PIECE_BYTES] * (x.nbytes // PIECE_BYTES) + [x.nbytes % PIECE_BYTES] * (rows % 256 > 0)
    _, (tensor,) = decode_to_backbone(raw(frames))
    assert (tensor.shape, bytes(tensor.data)) == (x.shape, x.tobytes())


BIG = [["f32", [512, PIECE_BYTES // 1024]]]
PIECE = bytes(PIECE_BYTES)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([PIECE], "262144 bytes came of a tensor of 524288"),
        ([PIECE * 2], "a frame of 524288 bytes; due were 262144, of a tensor of 524288"),
        ([PIECE, PIECE[1:]], "a frame of 262143 bytes; due were 262144"),
        ([PIECE, PIECE[1:], b"x"], "a frame of 262143 bytes; due were 262144"),
        ([PIECE, PIECE, b""], "3 frames came, and its tensors have 2"),
        ([], "0 bytes came"),
    ],
)
def test_pieces_are_of_their_size(frames: list[bytes], told: str) -> None:
    assert told in refusal([header("Rows", {"seq": 1, "epoch": 1, "compute_ns": 1}, BIG), *frames])


def test_pairs_are_pairs() -> None:
    frames = raw(encode(Run(1, 1, 1), tensors_of(Run(1, 1, 1))))
    wrong = frames[0].replace(msgpack.packb(["i32", [3, 2]]), msgpack.packb(["i32", [2, 3]]))
    assert wrong != frames[0]
    assert "an extent of 3, not from 2 to 2" in refusal([wrong, *frames[1:]], decode_to_worker)


def test_a_chunk_is_small() -> None:
    chunk = Chunk(bytes(32), 0)
    fields = {"sha256": bytes(32), "offset": 0}
    size = (1 << 20) + 1
    assert "not from 1 to 1048576" in refusal(
        [header("Chunk", fields, [["u8", [size]]]), bytes(size)], decode_to_worker
    )
    assert decode_to_worker([header("Chunk", fields, [["u8", [3]]]), b"abc"])[0] == chunk


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"\x80",
        msgpack.packb({"kind": "Ready", "fields": {}}),
        msgpack.packb({"kind": ["Ready"], "fields": {}, "tensors": []}),
        msgpack.packb({"kind": "__class__", "fields": {}, "tensors": []}),
        msgpack.packb({1: 2, "fields": {}, "tensors": []}),
        msgpack.packb({"kind": "Ready", "fields": msgpack.ExtType(4, b"x"), "tensors": []}),
        b"\x91" * 100_000 + b"\x01",
        b"\xdd\xff\xff\xff\xff",
        bytes((1 << 20) + 1),
    ],
)
def test_headers_are_checked(first: bytes) -> None:
    for decode in DECODERS:
        refusal([first], decode)
    refusal([])


@pytest.mark.parametrize("kind", ["Hello", "Attach", "Enrol"])
def test_another_version_is_told_from_a_malformed_greeting(kind: str) -> None:
    with pytest.raises(VersionMismatch) as caught:
        decode_to_backbone([header(kind, {"protocol": PROTOCOL_VERSION + 1, "unheard": "of"})])
    told = str(caught.value)
    assert f"speaks protocol {PROTOCOL_VERSION + 1}, the backbone {PROTOCOL_VERSION}" in told
    assert "update expertswarm on the backbone's machine" in told
    with pytest.raises(VersionMismatch, match="on the worker's machine"):
        decode_to_backbone([header(kind, {"protocol": PROTOCOL_VERSION - 1})])
    if kind == "Hello":
        assert "Hello has" in refusal([header(kind, {"protocol": PROTOCOL_VERSION, "unheard": "of"})])


EXAMPLES: list[Any] = [
    Attach(1),
    Enrol(1, bytes(32), "phone"),
    Enrolled(bytes(32), "phone"),
    Fetch(bytes(32), 0, 9),
    Ready(3, 2),
    Rows(7, 3, 12),
    Run(7, 3, 2),
    Chunk(bytes(32), 0),
]


@settings(max_examples=3000, deadline=None)
@given(
    st.sampled_from(EXAMPLES),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3),
    st.integers(0, 120),
    st.sampled_from(DECODERS),
)
def test_changed_frames_are_read_or_refused(
    message: Any, changes: list[tuple[int, int]], cut: int, decode: Any
) -> None:
    frames = raw(encode(message, tensors_of(message)))
    head = bytearray(frames[0])
    for at, value in changes:
        head[at % len(head)] = value
    frames[0] = bytes(head)[: len(head) - cut if cut < 20 else None]
    try:
        decode(frames)
    except ProtocolError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 300


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=4), st.sampled_from(DECODERS))
def test_any_frames_are_refused(frames: list[bytes], decode: Any) -> None:
    refusal(frames, decode)


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(KINDS), st.data(), st.sampled_from(DECODERS))
def test_any_value_in_any_field_is_read_or_refused(kind: type[Any], data: st.DataObject, decode: Any) -> None:
    whole = msgpack.unpackb(raw(encode(data.draw(fields_of(kind))))[0])
    part = whole if data.draw(st.booleans()) else whole["fields"]
    if part:
        part[data.draw(st.sampled_from(sorted(part)))] = data.draw(_ANY)
    try:
        decode([msgpack.packb(whole)])
    except ProtocolError as error:
        assert "\n" not in str(error)


def test_no_message_names_a_router_score_or_weight() -> None:
    told = {name for kind in KINDS for name in kind.__dataclass_fields__}
    assert not {name for name in told if "score" in name or "router" in name or "weight" in name}
