"""A worker of a running server as a side: found by name, asked for what it holds, and by nobody without the token."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import load
from server_kit import Server, serving, until

from backbone.client import RunningServer
from backbone.discovery import DEMO
from backbone.errors import UsageError
from backbone.run_file import read
from backbone.server.errors import ApiError
from backbone.server.rows import parse_rows
from kernels.registry import make_backend

SHORT = ("--positions", "128", "--window", "64", "--prompts", "1", "--tokens", "4", "--no-report", "--json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a native and a numpy worker."""
    folder, cache = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("cache")
    with serving(folder, "--workers", "native:1,numpy:1", "--worker-memory", "6M", cache=cache) as server:
        yield server


def tolerance(server: Server, *args: str, code: int = 0) -> Any:
    command = [sys.executable, "-m", "backbone", "tolerance", "run", *SHORT, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=server.environ)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


@pytest.fixture(scope="module")
def client(server: Server) -> RunningServer:
    run = read(server.environ)
    assert run is not None
    return RunningServer(run)


def test_a_worker_of_the_backbones_class_is_identical(server: Server) -> None:
    found = tolerance(server, "--a", "native", "--b", "worker:local-1")
    assert found["b"]["kind"] == "worker"
    assert 0 < found["b"]["experts"] < 64
    levels = found["levels"]
    assert all(level["identical"] for level in levels.values())
    experts = [case for case in levels["1"]["found"]["cases"] if case["is_expert"]]
    assert experts
    assert all(case["b"] is not None for case in experts)


def test_a_worker_of_another_class_is_measured(server: Server) -> None:
    found = tolerance(server, "--a", "native", "--b", "worker:local-2", "--levels", "1,2,5")
    levels = found["levels"]
    assert found["b"]["backend"] == "numpy"
    assert [levels[number]["identical"] for number in "12"] == [False, False]
    assert [levels[number]["pass"] for number in "125"] == [True, True, True]


def test_a_name_that_is_nobodys_is_told(server: Server) -> None:
    told = tolerance(server, "--b", "worker:phone", code=2)
    assert "no worker 'phone' serves; there are: local-1, local-2" in told


def test_without_a_server_it_is_told(tmp_path: Path, server: Server) -> None:
    command = [sys.executable, "-m", "backbone", "tolerance", "run", "--b", "worker:a"]
    environ = dict(server.environ) | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 2
    assert "--b worker:a: no server serves this model; start 'backbone serve'" in done.stderr


def test_rows_are_the_workers_own(client: RunningServer) -> None:
    model = load(DEMO, backend="native")
    x = np.random.default_rng(3).standard_normal((5, 256)).astype(np.float32)
    for name, backend in (("local-1", "native"), ("local-2", "numpy")):
        layer, experts = next((int(la), e) for la, e in client.worker(name)["holds"].items() if len(e) > 1)
        pairs = np.array([(4, experts[0]), (0, experts[1]), (4, experts[1])], np.int32)
        bank = make_backend(backend).load({e: model.expert(layer, e) for e in experts})
        assert client.rows(name, layer, x, pairs).tobytes() == bank.rows(x, pairs).tobytes()


def test_what_a_worker_does_not_hold_is_not_asked_of_it(client: RunningServer) -> None:
    holds = client.worker("local-1")["holds"]
    layer, expert = next((la, e) for la in range(4) for e in range(16) if e not in holds.get(str(la), []))
    with pytest.raises(UsageError, match=f"worker local-1 does not hold expert {expert} of layer {layer}"):
        client.rows("local-1", layer, np.zeros((1, 256), np.float32), np.array([(0, expert)], np.int32))


def test_a_call_for_rows_stops_no_answer(server: Server, client: RunningServer) -> None:
    with server.stream(
        {"prompt": "In the beginning", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    ) as events:
        next(events)
        layer, experts = next(iter(client.worker("local-1")["holds"].items()))
        rows = client.rows("local-1", int(layer), np.ones((1, 256), np.float32), np.array([(0, experts[0])], np.int32))
        assert np.isfinite(rows).all()
        assert sum(1 for _ in events) > 10
    until(lambda: not server.load()["running"], "the answer has ended")


@pytest.mark.parametrize("path", ["/private/rows", "/private/worker"])
def test_nobody_asks_without_the_token(server: Server, path: str) -> None:
    status, _ = server.post(path, {"worker": "local-1"})
    assert status in (401, 403)


GOOD = {
    "worker": "a", "layer": 0, "width": 2, "x": base64.b64encode(np.zeros((2, 2), "<f4").tobytes()).decode(),
    "pairs": [[1, 3]],
}  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        {"worker": ""}, {"worker": 3}, {"layer": "0"}, {"layer": True}, {"width": 0}, {"width": 3}, {"width": None},
        {"x": 5}, {"x": ""}, {"x": "%%"}, {"x": "AAA"}, {"pairs": []}, {"pairs": None}, {"pairs": [[0]]},
        {"pairs": [[2, 0]]}, {"pairs": [[-1, 0]]}, {"pairs": [[0, 1 << 31]]}, {"pairs": [[0, 1.0]]},
        {"pairs": [[0, 0]] * ((1 << 16) + 1)},
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_is_refused_by_its_field(bad: dict[str, Any]) -> None:
    assert parse_rows(GOOD).pairs.tolist() == [[1, 3]]
    with pytest.raises(ApiError) as caught:
        parse_rows(GOOD | bad)
    (name,) = bad
    assert name in str(caught.value) or (name == "width" and "x" in str(caught.value))
