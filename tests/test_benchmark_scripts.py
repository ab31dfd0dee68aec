"""The scripts that time the swarm run as they are called, with little to do: what they print is not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from shared_data import ROOT


def run(name: str, *args: str) -> Any:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *args, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_dispatch() -> None:
    found = run("dispatch.py", "--workers", "1,2", "--calls", "20")
    assert [row["workers"] for row in found["results"]] == [1, 2]
    assert all(row["median_us"] > 0 for row in found["results"])


def test_weights() -> None:
    found = run("weights.py", "--megabytes", "6", "--repetitions", "1")
    assert found["bytes"] == 2 * 3 * 4 * 115 * 2048
    assert found["ratio"].keys() == {"memory", "disk"}


def test_chaos() -> None:
    found = run("chaos.py", "--generations", "3", "--every", "0.5")
    assert found["answers"] == {"right": 3}
