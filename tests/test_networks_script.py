"""The benchmark over networks: what its relay does to a frame, what it predicts, and that it says what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load_benchmark
from shared_data import ROOT

wan = load_benchmark("wan")
networks = load_benchmark("networks")
EVEN = (0.5, 0.0)  #: chances: not lost, no jitter


def test_a_frame_takes_the_delay_and_its_bytes_time_once() -> None:
    switch = wan.Switch(delay_s=1.0, bytes_per_s=100.0)
    assert switch.due(5.0, 0, 1, 50, EVEN) == 5.0 + 0.5 + 1.0
    assert wan.Switch(delay_s=1.0).due(5.0, 0, 1, 50, EVEN) == 6.0


def test_frames_queue_on_their_senders_way_and_on_their_receivers() -> None:
    switch = wan.Switch(bytes_per_s=100.0)
    assert [switch.due(0.0, 0, target, 100, EVEN) for target in (1, 2, 1)] == [1.0, 2.0, 3.0]
    # The ways of another pair are free, and so is the way back.
    assert switch.due(0.0, 3, 4, 100, EVEN) == 1.0
    assert switch.due(0.0, 1, 0, 100, EVEN) == 1.0
    assert switch.due(0.0, 2, 0, 100, EVEN) == 2.0


def test_jitter_keeps_the_order_and_loss_takes_no_time() -> None:
    switch = wan.Switch(delay_s=1.0, jitter_s=0.5, loss=0.25)
    assert switch.due(0.0, 0, 1, 10, (0.5, 1.0)) == 1.5
    assert switch.due(0.1, 0, 1, 10, (0.5, 0.0)) == 1.5
    assert switch.due(0.1, 0, 2, 10, (0.5, 0.0)) == 1.1
    assert switch.due(0.2, 0, 1, 10, (0.24, 0.0)) is None
    assert switch.due(0.2, 0, 1, 10, (0.25, 1.0)) == 1.7


def test_what_a_token_sends_and_what_the_network_makes_of_it() -> None:
    # Four layers of two workers: a row to each, eight rows back, of 2,048 numbers.
    work = networks.work_of(layers=4, row_bytes=4 * 2048, calls=8, rows_sent=8, rows_back=32)
    assert work.bytes_out == 8 * 200 + 8 * 8192 + 32 * 8
    assert work.bytes_back == 8 * 200 + 32 * 8192
    took = networks.predicted_s(work, compute_s=0.5, round_trip_s=0.02, bytes_per_s=1e6)
    assert took == pytest.approx(0.5 + 4 * 0.02 + (work.bytes_out + work.bytes_back) / 1e6)
    assert networks.work_of(layers=4, row_bytes=4, calls=0, rows_sent=0, rows_back=0, trips=3).layers == 12


def raw(trip_s: float, bulk: float, token_s: float) -> networks.Raw:  # type: ignore[name-defined]
    work = networks.Work(layers=4, bytes_out=1e5, bytes_back=1e5)
    return networks.Raw(
        round_trip_s=trip_s, bulk_bytes_per_s=bulk, token_s=2 * token_s, token_least_s=token_s, token_wire=0, token=work,
        first_s=2 * token_s, first_least_s=token_s, first_wire=0, first=work, failures=[], computed_locally=0,
    )  # fmt: skip


def test_no_delay_predicts_itself_and_a_slow_relay_is_no_faster_than_it_is() -> None:
    base = raw(0.001, 1e8, 0.5)
    alone = networks.beside_prediction("none", networks.PROFILES["none"], base, base)
    assert alone.token_predicted_s == pytest.approx(0.5)
    wan_ = networks.beside_prediction("wan", networks.PROFILES["wan"], raw(0.021, 1e8, 9.0), base)
    assert wan_.token_predicted_s == pytest.approx(0.5 - 2e5 / 1e8 + 4 * 0.02 + 2e5 * 8 / 50e6)
    lan = networks.beside_prediction("lan", networks.PROFILES["lan"], raw(0.001, 1e7, 9.0), base)
    assert lan.token_predicted_s == pytest.approx(0.5 - 2e5 / 1e8 + 2e5 / 1e7)


def test_the_demo_models_shape() -> None:
    assert networks.shape_of(networks.DEMO) == (4, 256)


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["networks.py"])
    monkeypatch.setattr(networks.os, "geteuid", lambda: 1000)
    assert networks.main() == 2
    assert capsys.readouterr().err == "networks.py: error: needs root, for network namespaces\n"
    monkeypatch.setattr(networks.os, "geteuid", lambda: 0)
    monkeypatch.setattr(networks.os, "access", lambda *_: False)
    assert networks.main() == 2
    assert capsys.readouterr().err == "networks.py: error: needs /dev/net/tun, which is not here\n"


@pytest.mark.skipif(networks.refusal() is not None, reason=f"namespaces: this process {networks.refusal()}")
def test_a_swarm_between_namespaces_small(compiled_kernels: Path) -> None:
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "networks.py"), "--profiles", "wifi", "--json"]
    command += ["--workers", "1", "-p", "40", "-n", "4", "--runs", "1"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        out, err = script.communicate(timeout=280)
    assert script.returncode == 0, err
    assert not list(Path("/run/netns").glob(f"es{script.pid}-*"))
    (figures,) = json.loads(out)["results"].values()
    assert [f["profile"] for f in figures] == ["none", "wifi"]
    for found in figures:
        assert found["failures"] == []
        assert found["computed_locally"] == 0
        # Whoever counted frames of another traffic, or not all of this, would be far off.
        assert 1 < found["token_wire_bytes"] / found["token_frame_bytes"] < 2
        assert 1 < found["first_wire_bytes"] / found["first_frame_bytes"] < 1.5
    none, wifi = figures
    assert wifi["round_trip_s"] > none["round_trip_s"] + 0.002  # what the relay is told to add at least
