"""A model file twice the memory that the process may use still answers: weights are read in place, never copied."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new memory cgroup; its limit is still to be set."""
    v1 = CGROUPS / "memory"
    parent = v1 if (v1 / "memory.limit_in_bytes").is_file() else CGROUPS
    folder = parent / f"expertswarm-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not ((folder / "memory.limit_in_bytes").is_file() or (folder / "memory.max").is_file()):
            pytest.skip("no memory cgroup can be made here: the controller is not delegated")
        yield folder
    finally:
        folder.rmdir()


def test_a_file_twice_the_limit_answers(limited: Path, tmp_path: Path) -> None:
    model = tmp_path / "large.gguf"
    made = [sys.executable, str(ROOT / "benchmarks" / "make_moe.py"), str(model), "--layers", "1", "--vocab", "1000"]
    subprocess.run(made, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    limit = model.stat().st_size // 2
    bound = limited / "memory.limit_in_bytes"
    (bound if bound.is_file() else limited / "memory.max").write_text(str(limit))

    def join() -> None:
        (limited / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, "-P", "-m", "backbone", "generate", "-m", str(model), "--ids", "1,2,3", "-n", "4"]
        + ["--ignore-eos", "--json", "--workers", "0"],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=join,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"stop": "limit"' in done.stdout
    peak = limited / "memory.max_usage_in_bytes"
    if peak.is_file():
        assert int(peak.read_text()) <= limit
