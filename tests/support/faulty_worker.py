"""The real worker with faults around it, for tests: `python faulty_worker.py FAULT ... [-- join STRING ...] < session`.

Every fault begins behind the first answer of the process, which is the probe: until then it is like any other. A fault
of computing or answering begins behind N answers with

after:N         0: at once

The faults:

delay:S         each computation takes S seconds more; S may be a range such as 0-0.02, drawn anew each time
first:PATH      only the process that can make this file has the other faults; it leaves its process id there
mark:PATH       makes a file when a computation begins, so that a test can act in the middle of it
reorder         answers go out in pairs, the later one first
twice           every answer goes out twice
nan             rows that are not finite
flip-epoch      answers of another epoch
flip-seq        answers of a call that was never made
shape           a row too few
half            rows in F16, whatever was asked for
garbage         bytes in place of the first answer
hang            no answer ever
die             the process kills itself in the middle of the first computation
die-at-start    the process ends before it connects
corrupt:N       the first N whole slices arrive with a byte changed
version         greets with another protocol version
class           declares another numeric class
all-class       the same, of every process, also of those that have no other faults because of `first`
i16             no lie: declares a class of 16-bit activations that nobody else has, and computes so
device:KIND:N   an OpenCL device that fails: of KIND launch, gone, nan and memory, see faulty_device.py
dtype:KIND      says that it sends rows as this alone
reconnect       breaks its connection and makes it again after the first answer
flip:L.E        one bit is flipped in the stored weights of expert E of layer L
swap:L.A.B      experts A and B of layer L are swapped
f16             rows computed with every weight and the input rounded to F16, and passed off as what is declared
stale           a layer's rows come from the weights that were assigned before it: of another epoch
negate          every row has the other sign: two that do this agree
spoil           the last of more than 16 rows has the other sign
exchange        of more than 16 rows of one expert the first two are exchanged
other           each answer has the rows of the request before it
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from kernels.device import opencl_devices
from kernels.device.backend import DeviceBackend
from kernels.formats import GGMLType
from kernels.interface import F32, I32, Backend, ExpertBank, ExpertWeights, NumericClass, Options
from kernels.matrix import Matrix
from kernels.registry import make_backend
from protocol import frames
from protocol.messages import Hello, Message, Rows
from worker import cli, experts
from worker.connection import Connection

_plain_send = Connection.send
_plain_add = experts.ExpertStore.add_chunk
_plain_load = experts.ExpertStore.load
_held: list[tuple[Message, Sequence[Any]]] = []
_count = {"answers": 0, "corrupted": 0, "layer": 0}
_before: list[Mapping[int, ExpertWeights]] = []  # what was loaded before, the last first
_rows_before: list[F32] = []
LIES = ("flip", "swap", "f16", "stale")


def has_begun(faults: Mapping[str, str]) -> bool:
    """Whether the worker has done its first answers."""
    return _count["answers"] >= int(faults.get("after", 1))


def lie_about(experts: Mapping[int, ExpertWeights], layer: int, faults: Mapping[str, str]) -> dict[int, ExpertWeights]:
    """A layer's experts as a liar has them."""
    lies = dict(experts)
    where, *which = (int(n) for n in faults.get("flip", faults.get("swap", "-1")).split("."))
    if "flip" in faults and where == layer and which[0] in lies:
        lies[which[0]] = flipped(lies[which[0]])
    if "swap" in faults and where == layer:
        first, second = which
        lies[first], lies[second] = lies[second], lies[first]
    if "f16" in faults:
        lies = {e: in_f16(weights) for e, weights in lies.items()}
    if "stale" in faults and _before:
        lies = {e: _before[0].get(e, weights) for e, weights in lies.items()}
    return lies


def flipped(expert: ExpertWeights, bit: int = 16) -> ExpertWeights:
    """An expert of F32 weights with one bit of its largest weight of `down` flipped: by default 2^-7 of the weight."""
    words = expert.down.data.copy().reshape(-1).view("<u4")
    words[np.abs(words.view("<f4")).argmax()] ^= 1 << bit
    return replace(expert, down=Matrix.of(expert.down.type, expert.down.rows, expert.down.cols, words.view(np.uint8)))


def in_f16(expert: ExpertWeights) -> ExpertWeights:
    """An expert with its weights rounded to F16."""

    def rounded(matrix: Matrix) -> Matrix:
        data = np.concatenate([tile for _, tile in matrix.tiles()]).astype("<f2").view(np.uint8).reshape(-1)
        return Matrix.of(GGMLType.F16, matrix.rows, matrix.cols, data)

    return replace(expert, gate=rounded(expert.gate), up=rounded(expert.up), down=rounded(expert.down))


def in_i16(x: F32) -> F32:
    """Rows with each block of 32 values rounded to 16-bit multiples of one step."""
    blocks = x.reshape(-1, 32)
    step = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), np.float32(1e-30)) / np.float32(32767)
    rounded: F32 = (np.rint(blocks / step) * step).reshape(x.shape)
    return rounded


class FaultyBackend:
    """A backend with something wrong."""

    def __init__(self, inner: Backend, faults: dict[str, str]) -> None:
        self._inner, self._faults = inner, faults
        self.name, self.device, self.threads = inner.name, inner.device, inner.threads
        self.memory_bytes = inner.memory_bytes
        self.numeric_class = self._inner.numeric_class
        if "class" in faults or "all-class" in faults:
            self.numeric_class = NumericClass(name="another")
        if "i16" in faults:
            self.numeric_class = NumericClass(name="another", activations="i16")

    def load(self, experts: Mapping[int, ExpertWeights]) -> FaultyBank:
        """Experts that answer late or wrong."""
        lies = lie_about(experts, _count["layer"], self._faults)
        _before[:] = [experts]
        return FaultyBank(self._inner.load(experts), self._inner.load(lies), self._faults)


class FaultyBank:
    """Experts with something wrong."""

    def __init__(self, inner: ExpertBank, lies: ExpertBank, faults: dict[str, str]) -> None:
        self._inner, self._lies, self._faults = inner, lies, faults

    def rows(self, x: F32, pairs: I32) -> F32:
        """Rows, late or wrong."""
        if "i16" in self._faults:
            x = in_i16(x)
        if not has_begun(self._faults):
            _rows_before[:] = [self._inner.rows(x, pairs)]
            return _rows_before[0]
        if "die" in self._faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in self._faults:
            signal.pause()
        if "mark" in self._faults:
            Path(self._faults["mark"]).touch()
        least, _, most = self._faults.get("delay", "0").partition("-")
        time.sleep(random.uniform(float(least), float(most or least)))  # what is tested is a worker that takes long
        bank = self._lies if any(lie in self._faults for lie in LIES) else self._inner
        rows = bank.rows(x, pairs)
        if "other" in self._faults:
            given = np.resize(_rows_before[0], rows.shape) if _rows_before else rows
            _rows_before[:] = [rows]
            return given
        if "negate" in self._faults:
            rows = -rows
        if "spoil" in self._faults and len(rows) > 16:
            rows[-1] = -rows[-1]
        if "exchange" in self._faults and len(rows) > 16:
            first = np.nonzero(pairs[:, 1] == pairs[0, 1])[0][:2]
            rows[first] = rows[first[::-1]]
        return rows * float("nan") if "nan" in self._faults else rows


def _answer(self: Connection, message: Rows, tensors: Sequence[Any], faults: dict[str, str]) -> bool:
    is_honest = not has_begun(faults)
    _count["answers"] += 1
    if is_honest:
        return _plain_send(self, message, tensors)
    rows = tensors[0].data
    if "flip-epoch" in faults:
        message = Rows(message.seq, message.epoch + 1, message.compute_ns)
    if "flip-seq" in faults:
        message = Rows(message.seq + 1000, message.epoch, message.compute_ns)
    if "shape" in faults:
        tensors = [frames.Tensor(frames.DType.F32, (rows.shape[0], rows.shape[1] - 1), rows[:, 1:].copy())]
    if "half" in faults:
        tensors = [frames.Tensor(frames.DType.F16, rows.shape, rows.astype(np.float16))]
    if "garbage" in faults:
        self.socket.send_multipart([b"\xc1", b"junk"])
        return True
    if "reorder" in faults:
        _held.append((message, tensors))
        if len(_held) == 2:
            for each in reversed(_held):
                _plain_send(self, *each)
            _held.clear()
        return True
    sent = _plain_send(self, message, tensors)
    if "twice" in faults:
        _plain_send(self, message, tensors)
    if "reconnect" in faults and _count["answers"] == int(faults.get("after", 1)) + 1:
        endpoint = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.socket.disconnect(endpoint)
        self.socket.connect(endpoint)
    return sent


def main() -> int:
    """Put the faults in place, then run `worker local`."""
    words, _, command = " ".join(sys.argv[1:]).partition(" -- ")
    faults = {name: value for name, _, value in (arg.partition(":") for arg in words.split())}
    argv = command.split() or ["local"]
    if "first" in faults:
        try:
            with Path(faults["first"]).open("x", encoding="utf-8") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            faults = {name: value for name, value in faults.items() if name == "all-class"}
    if "die-at-start" in faults:
        print("something happened\nno luck today", file=sys.stderr)
        return 3

    def send(self: Connection, message: Message, tensors: Sequence[Any] = ()) -> bool:
        if isinstance(message, Rows):
            return _answer(self, message, tensors, faults)
        if isinstance(message, Hello) and "version" in faults:
            self.socket.send(_other_version(message))
            return True
        if isinstance(message, Hello) and "dtype" in faults:
            message = replace(message, wire_dtypes=(faults["dtype"],))
        return _plain_send(self, message, tensors)

    def add_chunk(self: Any, sha256: bytes, size: int, offset: int, data: Any) -> None:
        if offset + len(data) == size and _count["corrupted"] < int(faults.get("corrupt", 0)):
            _count["corrupted"] += 1
            data = data.copy()
            data[-1] ^= 1
        _plain_add(self, sha256, size, offset, data)

    def load(self: Any, assign: Any) -> None:
        _count["layer"] = assign.layer
        _plain_load(self, assign)

    experts.ExpertStore.load = load  # type: ignore[method-assign]
    Connection.send = send  # type: ignore[method-assign]
    experts.ExpertStore.add_chunk = add_chunk  # type: ignore[method-assign]
    if "device" in faults:
        sys.path.append(str(Path(__file__).parent))
        from faulty_device import FaultyDevice

        kind, _, number = faults["device"].partition(":")
        device = FaultyDevice(opencl_devices.open_device(), **{kind: int(number)})
        backend: Backend = DeviceBackend("opencl", device, Options())
        device.arm()
        cli.make_backend = lambda *_: backend  # type: ignore[attr-defined, assignment, return-value]
        return cli.main(argv)
    cli.make_backend = lambda *how: FaultyBackend(make_backend(*how), faults)  # type: ignore[attr-defined, assignment, return-value]
    return cli.main(argv)


def _other_version(hello: Hello) -> bytes:
    fields = {"protocol": hello.protocol + 1, "something": "new"}
    return bytes(msgpack.packb({"kind": "Hello", "fields": fields, "tensors": []}))


if __name__ == "__main__":
    sys.exit(main())
