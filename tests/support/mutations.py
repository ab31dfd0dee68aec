"""Messages with something wrong: in a field, in the header's bytes, in the tensors, in how many frames there are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack
from wire import raw

from protocol.frames import encode

WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 1.5, float("nan"), "", "x" * 2000, "\x1b[2J\n",
    "local-1", "../../etc/passwd", b"", bytes(31), bytes(32), bytes(33), [], {}, [[]] * 50, {"a": {"b": {"c": []}}},
    msgpack.ExtType(4, b"x"), [1] * 5000, [bytes(32)] * 300,
)  # fmt: skip


def mutated(rng: random.Random, message: Any, tensors: Sequence[Any] = ()) -> list[bytes]:
    """The frames of a message after one to three changes, or now and then after none."""
    frames = raw(encode(message, tensors))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice((_field, _field, _field, _bytes, _bytes, _cut, _frames, _tensor))(rng, frames)
    return frames or [b""]


def _field(rng: random.Random, frames: list[bytes]) -> None:
    try:
        head: Any = msgpack.unpackb(frames[0], strict_map_key=False)
    except Exception:  # it was changed before
        return
    place, steps = head, rng.randint(1, 4)
    while steps and isinstance(place, dict | list) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if steps == 1 or not isinstance(place[key], dict | list) or not place[key]:
            _change(rng, place, key)
            break
        place, steps = place[key], steps - 1
    frames[0] = msgpack.packb(head)


def _change(rng: random.Random, place: Any, key: Any) -> None:
    value, how = place[key], rng.randrange(4)
    if how == 0 and isinstance(place, dict):
        del place[key]
    elif how == 1 and isinstance(place, dict):
        place[rng.choice(["", "more", "__class__", "x" * 100])] = rng.choice(WEIRD)
    elif how == 2 and type(value) is int and 0 < value < 1 << 60:
        place[key] = rng.choice([value - 1, value + 1, value * 2, value ^ (1 << rng.randrange(60))])
    elif how == 2 and isinstance(value, bytes) and value:
        place[key] = bytes([value[0] ^ 1]) + value[1:]
    else:
        place[key] = rng.choice(WEIRD)


def _bytes(rng: random.Random, frames: list[bytes]) -> None:
    head = bytearray(frames[0])
    for _ in range(rng.randint(1, 4)):
        if head:
            head[rng.randrange(len(head))] = rng.randrange(256)
    frames[0] = bytes(head)


def _cut(rng: random.Random, frames: list[bytes]) -> None:
    at = rng.randrange(len(frames))
    frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]


def _frames(rng: random.Random, frames: list[bytes]) -> None:
    how = rng.randrange(5)
    if how == 0:
        frames.append(bytes(rng.choice((0, 1, 5000))))
    elif how == 1:
        frames.insert(0, b"")
    elif how == 2 and len(frames) > 1:
        frames.pop()
    elif how == 3:
        frames.extend([b"x"] * rng.choice((3, 40, 300)))
    else:
        frames[0] = rng.choice(
            (b"\x91" * 5000 + b"\x01", b"\xdd\xff\xff\xff\xff", b"\xc1", b"\xdf\x7f\xff\xff\xff", b"\x81" * 900)
        )


def _tensor(rng: random.Random, frames: list[bytes]) -> None:
    if len(frames) > 1:
        at = rng.randrange(1, len(frames))
        frames[at] = rng.choice(
            (b"\xff" * len(frames[at]), frames[at] * 2, b"", frames[at][:-1], bytes(len(frames[at])))
        )
