"""A real worker process against a bare gate: how it greets, and how it ends."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm_kit import TinyExperts
from wire import slice_of

from backbone.gate import Gate
from backbone.local_workers import LocalWorker, WorkerSpec, start_worker
from protocol.frames import DType, Tensor, decode_to_backbone, encode
from protocol.messages import Assign, Attach, Drain, Failed, Goodbye, Hello, Ready, Refused, Run, Slice, Welcome
from worker.session import read_session

PATIENCE_MS = 15_000


class Bare:
    """A gate and one worker, whose messages are taken one by one."""

    def __init__(self, gate: Gate, worker: LocalWorker) -> None:
        self.gate, self.worker = gate, worker
        self.calls = b""  # its route

    def hear(self) -> Any:
        """The next message. The connection for calls is the one that Hello came by."""
        assert self.gate.socket.poll(PATIENCE_MS), self.worker.obituary()
        received = self.gate.receive()
        assert received is not None
        key, route, frames = received
        assert key == self.worker.public_key
        message = decode_to_backbone(frames)[0]
        if isinstance(message, Hello):
            self.calls = route
        return message

    def hear_greetings(self) -> Hello:
        """Hello and Attach, which come by two connections in any order."""
        both = [self.hear(), self.hear()]
        assert {type(message) for message in both} == {Hello, Attach}
        return next(message for message in both if isinstance(message, Hello))

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.gate.send(self.calls, encode(message))

    def end(self) -> str:
        """How it ends by itself, with its input still open."""
        self.worker._process.wait(15)
        return self.worker.obituary()


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf")


@pytest.fixture
def bare(model: TinyExperts, request: pytest.FixtureRequest) -> Iterator[Bare]:
    options: dict[str, Any] = getattr(request, "param", {})
    gate = Gate("tcp://127.0.0.1:*")
    worker = start_worker(
        "w",
        WorkerSpec(**{"backend": "numpy"} | options.get("spec", {})),
        endpoint=gate.endpoint,
        server_key=gate.public_key,
        model=model.path,
        command=options.get("command"),
    )
    if options.get("is_listed", True):
        gate.admit(worker.public_key)
    yield Bare(gate, worker)
    worker.stop()
    gate.close()


def test_it_says_what_it_is_and_leaves_when_let_go(bare: Bare, model: TinyExperts) -> None:
    hello = bare.hear_greetings()
    assert (hello.protocol, hello.backend, hello.memory_bytes, hello.cached) == (2, "numpy", 0, ())
    assert str(hello.numeric_class) == str(model.numeric_class)
    assert hello.wire_dtypes == ("f32", "f16")
    bare.say(Welcome("w"), Drain("done"))
    assert bare.hear() == Goodbye("drained")
    assert bare.end() == "its process ended with exit code 0"


def test_a_refusal_ends_it_with_the_reason(bare: Bare) -> None:
    bare.hear_greetings()
    bare.say(Refused("of another version"))
    assert (
        bare.end() == "its process ended with exit code 1: worker: error: refused by the backbone: of another version"
    )


@pytest.mark.parametrize("bare", [{"is_listed": False}], indirect=True)
def test_a_key_that_is_not_listed_is_told_so(bare: Bare) -> None:
    assert bare.end().endswith("the backbone does not let this worker's key in; it is not of this run")


@pytest.mark.parametrize("bare", [{"spec": {"backend": "nunpy"}}], indirect=True)
def test_an_unknown_backend_is_named(bare: Bare) -> None:
    assert bare.end().endswith("worker: error: no backend 'nunpy'; did you mean 'numpy'?")


@pytest.mark.parametrize("bare", [{"spec": {"activations": "i16"}}], indirect=True)
def test_what_its_backend_cannot_do_is_named(bare: Bare) -> None:
    assert bare.end().endswith("worker: error: numpy computes with f32 activations only; i16 needs --backend native")


LOCAL = [sys.executable, "-P", "-m", "worker", "local"]


@pytest.mark.parametrize(
    "bare", [{"spec": {"memory_bytes": 5}, "command": [*LOCAL, "--memory", "1.5k"]}], indirect=True
)
def test_its_own_bound_of_memory_is_over_the_backbones(bare: Bare) -> None:
    assert bare.hear_greetings().memory_bytes == 1500


ECHO = [sys.executable, "-c", "import sys; sys.stderr.write(sys.stdin.readline())"]


@pytest.mark.parametrize("bare", [{"spec": {"threads": 3, "activations": "i16"}, "command": ECHO}], indirect=True)
def test_it_is_told_its_threads_and_activations(bare: Bare) -> None:
    bare.end()
    session = read_session(io.StringIO(bare.worker.last_line() + "\n"))
    assert (session.backend, session.threads, session.activations) == ("numpy", 3, "i16")


def whole(model: TinyExperts, epoch: int, layer: int) -> Assign:
    slices = tuple(
        Slice(e, part, name, 0, *model.slice_shape(name), b"")
        for e in range(model.experts)
        for part, name in model.expert_tensors[layer].items()
    )
    return Assign(epoch, layer, "silu", slices)


@pytest.mark.parametrize("bare", [{"spec": {"memory_bytes": 100_000}}], indirect=True)
def test_it_refuses_what_it_cannot_hold_or_was_not_assigned(bare: Bare, model: TinyExperts) -> None:
    assert bare.hear_greetings().memory_bytes == 100_000
    one = model.experts * 3 * 4 * model.width * model.inner
    bare.say(Welcome("w"), whole(model, 5, 0), whole(model, 5, 1))
    assert bare.hear() == Ready(5, 0)
    assert bare.hear() == Failed(
        0, 5, f"layer 1 needs {one} bytes beside {one} assigned before; this worker's memory is 100000 bytes"
    )
    tensors = [Tensor(DType.F32, (1, 32), bytes(128)), Tensor(DType.I32, (1, 2), bytes(8))]
    for run in (Run(1, 4, 0), Run(2, 5, 1)):
        bare.gate.send(bare.calls, encode(run, tensors))
    assert bare.hear() == Failed(1, 4, "layer 0 is of epoch 5 here, asked for is epoch 4")
    assert bare.hear() == Failed(2, 5, "no experts of layer 1 are held here")
    bare.say(Assign(6, 0, "silu", (slice_of("gate"),)))
    assert "no tensor blk.0.gate" not in (told := bare.hear().reason)
    assert told == "layer 0: an expert without one of gate, up, down"


def test_frames_that_cannot_be_read_are_told_and_passed_over(bare: Bare) -> None:
    bare.hear_greetings()
    bare.say(Welcome("w"))
    for frames in ([b""], [b"\xc1"], [b"a", b"b"]):
        bare.gate.send(bare.calls, frames)
    bare.say(Drain("done"))
    assert bare.hear() == Goodbye("drained")
    assert bare.end().startswith("its process ended with exit code 0: worker: WARNING: refused a message")
