"""Measuring experts: what counts, how often, and how large the layer is. No machine's speed is asserted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kernels import measure
from kernels.formats import GGMLType
from kernels.interface import F32, I32, ExpertWeights
from kernels.measure import CHOSEN, HIDDEN, ROWS, WIDTH
from kernels.registry import make_backend


class Bank:
    """Takes a time for each pair, by a clock of its own."""

    def __init__(self, seconds_a_pair: float) -> None:
        self.now, self._each = 0.0, seconds_a_pair
        self.calls = list[tuple[tuple[int, ...], I32]]()

    def clock(self) -> float:
        return self.now

    def rows(self, x: F32, pairs: I32) -> F32:
        self.calls.append((x.shape, pairs))
        self.now += self._each * len(pairs)
        return np.zeros((len(pairs), WIDTH), np.float32)


class Backend:
    """Of such a bank."""

    name, device, threads, memory_bytes = "fake", "a device", 1, 0

    def __init__(self, seconds_a_pair: float) -> None:
        self.bank = Bank(seconds_a_pair)
        self.loaded: Mapping[int, ExpertWeights] = {}

    def load(self, experts: Mapping[int, ExpertWeights]) -> Bank:
        self.loaded = experts
        return self.bank


def measured(seconds: float, seconds_a_pair: float, layer_bytes: int = 60_000_000) -> tuple[measure.Rates, Backend]:
    backend = Backend(seconds_a_pair)
    rates = measure.measure(backend, seconds, layer_bytes=layer_bytes, clock=backend.bank.clock)  # type: ignore[arg-type]
    return rates, backend


def test_rates_are_bytes_and_operations_by_time() -> None:
    rates, backend = measured(2.0, 1 / 4096)
    size = 3 * WIDTH * HIDDEN // 256 * 144
    assert rates.type == "Q4_K"
    assert rates.layer_bytes == size * len(backend.loaded) == size * (60_000_000 // size)
    assert rates.decode_gb_s == pytest.approx(size * 4096 / 1e9)
    assert rates.prefill_gflop_s == pytest.approx(2 * 3 * WIDTH * HIDDEN * 4096 / 1e9)


def test_decode_takes_the_next_eight_each_time() -> None:
    _, backend = measured(2.0, 1 / 4096)
    decoding = [pairs for shape, pairs in backend.bank.calls if shape == (1, WIDTH)]
    assert [pairs[:, 1].tolist() for pairs in decoding[:3]] == [
        [*range(8)],
        [*range(8, 16)],
        [*range(16, 22), 0, 1],
    ]
    assert all((pairs[:, 0] == 0).all() for pairs in decoding)


def test_the_time_given_is_kept_and_the_first_call_does_not_count() -> None:
    rates, backend = measured(2.0, 1 / 4096)
    assert rates.decode_rounds == 512  # a second by 8 / 4096
    assert sum(shape == (1, WIDTH) for shape, _ in backend.bank.calls) == 513
    assert (rates.prefill_experts, rates.prefill_rounds) == (1, 16)  # a call with eight takes half a second
    assert sum(shape == (ROWS, WIDTH) for shape, _ in backend.bank.calls) == 2 + 17


def test_prefill_is_256_rows_an_expert() -> None:
    rates, backend = measured(2.0, 1 / 2**18)
    assert rates.prefill_experts == CHOSEN
    shape, pairs = backend.bank.calls[-1]
    assert shape == (ROWS, WIDTH)
    assert sorted(map(tuple, pairs.tolist())) == [(row, e) for row in range(ROWS) for e in range(CHOSEN)]


def test_a_slow_backend_is_measured_once_with_one_expert() -> None:
    rates, backend = measured(1.0, 1.0)
    assert (rates.decode_rounds, rates.prefill_rounds, rates.prefill_experts) == (1, 1, 1)
    assert len(backend.bank.calls) == 6  # each with a first call, and one that decides on how many experts
    assert rates.prefill_gflop_s == pytest.approx(2 * 3 * WIDTH * HIDDEN / 1e9)


@pytest.mark.parametrize("type_", [GGMLType.Q4_K, GGMLType.Q8_0])
def test_experts_have_memory_of_their_own(type_: GGMLType) -> None:
    held = measure.layer(type_, 30_000_000)
    starts = {m.data.ctypes.data for e in held.values() for m in (e.gate, e.up, e.down)}
    assert len(starts) == 3 * len(held)
    assert len(held) >= CHOSEN
    assert (held[0].down.data == held[7].down.data).all()
    bank = make_backend("native").load(held)
    x = np.ones((1, WIDTH), np.float32)
    rows = bank.rows(x, np.array([[0, 0], [0, 7]], np.int32))
    assert np.isfinite(rows).all()
    assert rows.any()
    assert (rows[0] == rows[1]).all()


@pytest.mark.parametrize(
    ("free", "device", "cache", "wanted"),
    [
        (64 << 30, 0, 8 << 20, 256 << 20),  # a small cache: the least
        (64 << 30, 0, 480 << 20, 960 << 20),  # twice the last cache
        (64 << 30, 0, 2 << 30, 1 << 30),  # the most
        (400 << 20, 0, 8 << 20, 100 << 20),  # a phone: a quarter of what is free
        (64 << 30, 512 << 20, 480 << 20, 128 << 20),  # or of the device
        (0, 0, 0, 256 << 20),  # nothing known
    ],
)
def test_how_large_a_layer_is(free: int, device: int, cache: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_memory", lambda: free)
    monkeypatch.setattr(measure, "_last_cache", lambda: cache)
    assert measure.fitting_bytes(device) == wanted


def test_the_last_cache_is_read(tmp_path: Path) -> None:
    for i, text in enumerate(("48K\n", "491520K\n", "2048K\n", "many")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{i}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(text)
    assert measure._last_cache(tmp_path) == 480 << 20
    assert measure._last_cache(tmp_path / "nowhere") == 0
