"""A small model's experts, and what runs swarms of them: real worker processes, or sockets that play a worker."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygguf import Tiny

from backbone.experts import LocalExperts
from backbone.placement import Candidate, Plan
from backbone.swarm import Swarm, WorkerSpec
from backbone.trust import Checks
from kernels.formats import GGMLType
from kernels.interface import F32, Backend, ExpertWeights, NumericClass
from kernels.matrix import Matrix
from kernels.registry import make_backend

FAULTY = Path(__file__).parent / "faulty_worker.py"
PARTS = ("gate", "up", "down")
ACTIVATION = "silu"
NO_AUDITS = Checks(every=0)  #: where a test counts calls, or says which is in flight: what is audited is drawn
NEVER_S = 1e9  #: for `hedge_s`, where a test says who computes, however slow this machine is


@dataclass
class TinyExperts:
    """Experts of random weights, in memory and in a GGUF file: what `Swarm` wants of a model."""

    path: Path
    layers: int = 3
    experts: int = 4
    width: int = 32  #: D
    inner: int = 48  #: F
    has_biases: bool = False
    data: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng(7)
        tiny = Tiny().key("general.architecture", 8, "tiny")
        shapes = {"gate": (self.inner, self.width), "up": (self.inner, self.width), "down": (self.width, self.inner)}
        for names in self.expert_tensors.values():
            for part, name in names.items():
                shape = shapes.get(part, (len_of(part, self),))
                self.data[name] = random.standard_normal((self.experts, *shape)).astype(np.float32)
                tiny.tensor(name, (*shape[::-1], self.experts), 0, self.data[name].tobytes())
        tiny.write(self.path)

    def release(self, layer: int) -> None:
        """Nothing is mapped."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def expert_tensors(self) -> Mapping[int, Mapping[str, str]]:
        parts = (*PARTS, *(f"{part}_bias" for part in PARTS)) if self.has_biases else PARTS
        return {layer: {part: f"blk.{layer}.{part}" for part in parts} for layer in range(self.layers)}

    @property
    def numeric_class(self) -> NumericClass:
        return make_backend("numpy").numeric_class

    @property
    def judges(self) -> Sequence[Backend]:
        return (make_backend("numpy"),)

    def expert_count(self, layer: int) -> int:
        return self.experts

    def expert_width(self, layer: int) -> int:
        return self.width

    def activation(self, layer: int) -> str:
        return ACTIVATION

    def slice_data(self, tensor: str, expert: int) -> memoryview:
        return memoryview(self.data[tensor][expert].reshape(-1).view(np.uint8))

    def slice_shape(self, tensor: str) -> tuple[int, int]:
        shape = self.data[tensor].shape[1:]
        return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])

    def slice_type(self, tensor: str) -> GGMLType:
        return GGMLType.F32

    def weights(self, layer: int, expert: int) -> ExpertWeights:
        """One expert, put together without the swarm's code."""
        parts: dict[str, Any] = {}
        for part, name in self.expert_tensors[layer].items():
            data = self.data[name][expert]
            flat = data.reshape(-1).view(np.uint8)
            parts[part] = Matrix.of(GGMLType.F32, data.shape[0], data.shape[1], flat) if part in PARTS else data
        return ExpertWeights(activation=ACTIVATION, **parts)

    def local(self) -> LocalExperts:
        """All experts in this process."""
        backend = make_backend("numpy")
        return LocalExperts(backend, lambda layer: {e: self.weights(layer, e) for e in range(self.experts)})


def len_of(part: str, experts: TinyExperts) -> int:
    """Values of a bias."""
    return experts.width if part == "down_bias" else experts.inner


class NoLocal:
    """Stands where local computation must not happen."""

    def rows(self, layer: int, expert: int, x: F32) -> F32:
        raise AssertionError(f"expert {expert} of layer {layer} was computed locally")


def faulty(*faults: str) -> list[str]:
    """A command that runs the real worker with faults put around it; see faulty_worker.py."""
    return [sys.executable, "-P", str(FAULTY), *faults]


@contextlib.contextmanager
def swarm_of(model: TinyExperts, workers: int, **options: Any) -> Iterator[Swarm]:
    """A swarm of real processes, whose weights stream; afterwards none of its processes is left."""
    options.setdefault("local", model.local())
    options.setdefault("share_path", False)
    options.setdefault("hedge_s", NEVER_S)
    options.setdefault("checks", NO_AUDITS)
    before = open_handles()
    with Swarm(model, [WorkerSpec(backend="numpy")] * workers, **options) as swarm:
        pids = pids_of(swarm)
        yield swarm
    assert not [pid for pid in pids if is_alive(pid)]
    until = time.monotonic() + 10
    while (after := open_handles()) != before and time.monotonic() < until:
        os.sched_yield()  # a client of this test's own, which is still there, tries to connect again now and then
    assert after == before


def pids_of(swarm: Swarm) -> list[int]:
    """The worker processes."""
    return [peer.worker.pid for peer in swarm._roster]


def kill_when(mark: Path, pid: int) -> None:
    """End a process as soon as a file is there."""
    until = time.monotonic() + 30
    while not mark.exists() and time.monotonic() < until:
        os.sched_yield()
    os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_handles() -> list[str]:
    """Sockets, files without a name and process handles that this process has open.

    Not counted are ZeroMQ's event descriptors: a process has some of its own once it has sent without a copy.
    """
    found = list[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed again
            found.append(str(link.readlink()))
    return sorted(
        name for name in found if name.startswith(("socket:", "pipe:", "anon_inode:[pidfd]")) or "(deleted)" in name
    )


def ask(swarm: Swarm, layer: int, x: F32, ids: NDArray[np.int32]) -> F32:
    """One layer's experts, whole."""
    return swarm.wait(swarm.send(layer, x, ids))


def some_rows(model: TinyExperts, rows: int = 5, chosen: int = 2, seed: int = 1) -> tuple[F32, NDArray[np.int32]]:
    """Rows and distinct expert ids for each."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, model.width)).astype(np.float32)
    ids = np.array([random.permutation(model.experts)[:chosen] for _ in range(rows)], np.int32)
    return x, ids


def by_index(holder: Mapping[tuple[int, int], int]) -> Any:
    """A placement that gives (layer, expert) to the worker of this index, and what is not named to nobody."""

    def place(expert_bytes: Mapping[int, Sequence[int]], candidates: Sequence[Candidate], **_: Any) -> Plan:
        holds: dict[str, dict[int, tuple[int, ...]]] = {c.name: {} for c in candidates}
        for (layer, expert), index in holder.items():
            layers = holds[candidates[index].name]
            layers[layer] = (*layers.get(layer, ()), expert)
        return Plan(holds, {})

    return place
