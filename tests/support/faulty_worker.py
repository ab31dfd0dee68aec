"""The real worker with faults around it, for tests: `python faulty_worker.py FAULT ... [-- join STRING ...] < session`.

delay:S         each computation takes S seconds more; S may be a range such as 0-0.02, drawn anew each time
first:PATH      only the process that can make this file has the other faults
mark:PATH       makes a file when a computation begins, so that a test can act in the middle of it
reorder         answers go out in pairs, the later one first
twice           every answer goes out twice
nan             rows that are not finite
flip-epoch      answers of another epoch
flip-seq        answers of a call that was never made
shape           a row too few
garbage         bytes in place of the first answer
hang            no answer ever
die             the process kills itself in the middle of the first computation
die-at-start    the process ends before it connects
corrupt:N       the first N whole slices arrive with a byte changed
version         greets with another protocol version
class           declares another numeric class
device:KIND:N   an OpenCL device that fails: of KIND launch, gone, nan and memory, see faulty_device.py
dtype           sends rows in a dtype that nobody takes
reconnect       breaks its connection and makes it again after the first answer
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
import zmq

from kernels.device import opencl_devices
from kernels.device.backend import DeviceBackend
from kernels.interface import F32, I32, Backend, ExpertBank, ExpertWeights, NumericClass, Options
from kernels.registry import make_backend
from protocol import frames
from protocol.messages import Hello, Message, Rows
from worker import cli, experts
from worker.connection import Connection

_plain_send = Connection.send
_plain_add = experts.ExpertStore.add_chunk
_held: list[tuple[Message, Sequence[Any]]] = []
_count = {"answers": 0, "corrupted": 0}


class FaultyBackend:
    """A backend with something wrong."""

    def __init__(self, inner: Backend, faults: dict[str, str]) -> None:
        self._inner, self._faults = inner, faults
        self.name, self.device, self.threads = inner.name, inner.device, inner.threads
        self.memory_bytes = inner.memory_bytes
        self.numeric_class = NumericClass(name="another") if "class" in faults else self._inner.numeric_class

    def load(self, experts: Mapping[int, ExpertWeights]) -> FaultyBank:
        """Experts that answer late or wrong."""
        return FaultyBank(self._inner.load(experts), self._faults)


class FaultyBank:
    """Experts with something wrong."""

    def __init__(self, inner: ExpertBank, faults: dict[str, str]) -> None:
        self._inner, self._faults = inner, faults

    def rows(self, x: F32, pairs: I32) -> F32:
        """Rows, late or wrong."""
        if "die" in self._faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in self._faults:
            signal.pause()
        if "mark" in self._faults:
            Path(self._faults["mark"]).touch()
        least, _, most = self._faults.get("delay", "0").partition("-")
        time.sleep(random.uniform(float(least), float(most or least)))  # what is tested is a worker that takes long
        rows = self._inner.rows(x, pairs)
        return rows * float("nan") if "nan" in self._faults else rows


def _answer(self: Connection, message: Rows, tensors: Sequence[Any], faults: dict[str, str]) -> bool:
    _count["answers"] += 1
    rows = tensors[0].data
    if "flip-epoch" in faults:
        message = Rows(message.seq, message.epoch + 1, message.compute_ns)
    if "flip-seq" in faults:
        message = Rows(message.seq + 1000, message.epoch, message.compute_ns)
    if "shape" in faults:
        tensors = [frames.Tensor(frames.DType.F32, (rows.shape[0], rows.shape[1] - 1), rows[:, 1:].copy())]
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
    if "reconnect" in faults and _count["answers"] == 1:
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
            Path(faults["first"]).touch(exist_ok=False)
        except FileExistsError:
            faults = {}
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
            message = replace(message, wire_dtypes=("f64",))
        return _plain_send(self, message, tensors)

    def add_chunk(self: Any, sha256: bytes, size: int, offset: int, data: Any) -> None:
        if offset + len(data) == size and _count["corrupted"] < int(faults.get("corrupt", 0)):
            _count["corrupted"] += 1
            data = data.copy()
            data[-1] ^= 1
        _plain_add(self, sha256, size, offset, data)

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
