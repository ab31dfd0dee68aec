"""How fast a backend computes experts here, by the calls that a worker makes: bytes of decode, operations of prefill.

Decode is one row through eight experts, which is all reading of weights: the layer is larger than the CPU's caches and
each call takes the next eight. Prefill is 256 rows through the same expert, or through eight where there is time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from .cgroups import read
from .formats import GGMLType, row_bytes
from .interface import Backend, ExpertBank, ExpertWeights
from .matrix import Matrix
from .memory import free_memory
from .synthetic import expert, floats, stream

WIDTH, HIDDEN = 2048, 768  #: of Qwen3-30B-A3B's experts
CHOSEN, ROWS = 8, 256
LEAST_BYTES, MOST_BYTES = 1 << 28, 1 << 30  #: of the layer, as far as there is memory
MOST_ROUNDS = 1000

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured: medians over rounds."""

    type: str  #: of the weights
    layer_bytes: int  #: of the experts that were loaded
    decode_gb_s: float  #: bytes of weights by seconds
    decode_rounds: int
    prefill_gflop_s: float  #: two operations for each weight and row
    prefill_rounds: int
    prefill_experts: int  #: of a call


def measure(
    backend: Backend,
    seconds: float,
    *,
    type: GGMLType = GGMLType.Q4_K,  # noqa: A002
    layer_bytes: int | None = None,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Rates in about so many seconds, half for each; loading and what the first call compiles come on top.

    KernelError when the device fails, MemoryError when this machine has no room for the experts.
    """
    if layer_bytes is None:
        layer_bytes = fitting_bytes(backend.memory_bytes)
    experts = layer(type, layer_bytes)
    bank, one = backend.load(experts), experts[0].nbytes
    decode = _times(_decoding(bank, len(experts)), seconds / 2, clock)
    (alone,) = _times(_prefilling(bank, 1), 0, clock)
    together = CHOSEN if 6 * CHOSEN * alone < seconds else 1  # so that several rounds fit
    prefill = _times(_prefilling(bank, together), seconds / 2, clock)
    flops = 2 * 3 * WIDTH * HIDDEN * ROWS * together
    return Rates(
        type=type.name,
        layer_bytes=one * len(experts),
        decode_gb_s=CHOSEN * one / median(decode) / 1e9,
        decode_rounds=len(decode),
        prefill_gflop_s=flops / median(prefill) / 1e9,
        prefill_rounds=len(prefill),
        prefill_experts=together,
    )


def fitting_bytes(device_bytes: int = 0) -> int:
    """Bytes of a layer that caches do not hold: twice the CPU's last one, between bounds and with room to spare.

    `device_bytes` is the memory of the device that is to hold it too, 0 where that is this machine's.
    """
    wanted = min(max(2 * _last_cache(), LEAST_BYTES), MOST_BYTES)
    return min([wanted, *(room // 4 for room in (free_memory(), device_bytes) if room)])


def _last_cache(root: Path = Path("/")) -> int:
    """Bytes of the first CPU's largest cache, 0 where the system does not say."""
    sizes = [read(f) for f in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * 1024 for size in sizes if size.endswith("K") and size[:-1].isdecimal()), default=0)


def layer(type: GGMLType, nbytes: int) -> dict[int, ExpertWeights]:  # noqa: A002
    """So many experts as fill `nbytes`, at least eight, each in memory of its own. Their values are all the same."""
    one = expert(stream("measure", type.name), type, WIDTH, HIDDEN)
    parts = [one.gate, one.up, one.down]
    flat = np.concatenate([m.data.reshape(-1) for m in parts])
    ends = np.cumsum([m.nbytes for m in parts])
    whole = np.tile(flat, (max(CHOSEN, nbytes // len(flat)), 1))

    def of(row: int) -> ExpertWeights:
        gate, up, down = (
            Matrix(type, m.rows, m.cols, whole[row, end - m.nbytes : end].reshape(m.rows, row_bytes(type, m.cols)))
            for m, end in zip(parts, ends.tolist(), strict=True)
        )
        return ExpertWeights(gate=gate, up=up, down=down, activation=one.activation)

    return {i: of(i) for i in range(len(whole))}


def _decoding(bank: ExpertBank, experts: int) -> Callable[[], object]:
    """A call that takes the next eight experts each time."""
    x, at = floats(stream("decode"), 1, WIDTH), 0

    def once() -> None:
        nonlocal at
        chosen = (at + np.arange(CHOSEN)) % experts
        at = (at + CHOSEN) % experts
        bank.rows(x, np.stack([np.zeros(CHOSEN), chosen], axis=1).astype(np.int32))

    return once


def _prefilling(bank: ExpertBank, experts: int) -> Callable[[], object]:
    x = floats(stream("prefill"), ROWS, WIDTH)
    rows, chosen = np.tile(np.arange(ROWS), experts), np.repeat(np.arange(experts), ROWS)
    pairs = np.stack([rows, chosen], axis=1).astype(np.int32)
    return lambda: bank.rows(x, pairs)


def _times(once: Callable[[], object], seconds: float, clock: Clock) -> list[float]:
    """Seconds of each call but the first, which compiles and warms up; at least one."""
    once()
    found, start = list[float](), clock()
    before = start
    while not found or (before - start < seconds and len(found) < MOST_ROUNDS):
        once()
        now = clock()
        found.append(now - before)
        before = now
    return found
