"""What a worker is told on standard input, how far it says it is, and its command line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.errors import WorkerError
from worker.progress import ProgressBar
from worker.session import Session, read_session

SESSION = {
    "endpoint": "tcp://127.0.0.1:1",
    "server_key": "s",
    "public_key": "p",
    "secret_key": "k",
    "backend": "numpy",
    "memory_bytes": 0,
    "threads": 2,
    "activations": "f32",
    "accumulation": "f32",
    "model": "",
    "quiet": True,
}


def test_a_session_is_one_line_of_json() -> None:
    session = read_session(io.StringIO(json.dumps(SESSION | {"model": "/m.gguf"}) + "\nrest"))
    assert session == Session(**(SESSION | {"model": "/m.gguf"}))  # type: ignore[arg-type]
    assert session.model_path == Path("/m.gguf")
    assert read_session(io.StringIO(json.dumps(SESSION))).model_path is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "started by the backbone"),
        ("hello", "started by the backbone"),
        ("[" * 50_000, "started by the backbone"),
        ("[]", "a session holds exactly endpoint, "),
        (json.dumps(SESSION | {"more": 1}), "a session holds exactly"),
        (json.dumps(SESSION | {"memory_bytes": "1"}), "memory_bytes is no int"),
        (json.dumps(SESSION | {"quiet": 1}), "quiet is no bool"),
        (json.dumps(SESSION | {"threads": True}), "threads is no int"),
        (json.dumps(SESSION | {"threads": -1}), "threads is -1; it cannot be less than 0"),
        (json.dumps(SESSION | {"activations": 16}), "activations is no str"),
        (json.dumps(SESSION | {"accumulation": None}), "accumulation is no str"),
        (json.dumps(SESSION | {"endpoint": None}), "endpoint is no str"),
    ],
)
def test_anything_else_is_refused(line: str, told: str) -> None:
    with pytest.raises(WorkerError) as caught:
        read_session(io.StringIO(line))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def run(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", *args], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_line_says_what_is_wrong_in_one_line() -> None:
    assert run("--version").stdout.startswith("expertswarm ")
    wrong = run("local", text="nonsense\n")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "worker: error: standard input holds no session; 'worker local' is started by the backbone\n"
    unknown = run("local", text=json.dumps(SESSION | {"backend": "nunpy"}) + "\n")
    # Standard input has ended behind the session, so that the process may end before it can complain.
    assert unknown.returncode == 0 or "no backend 'nunpy'; did you mean 'numpy'?" in unknown.stderr
    assert run().returncode == 2
    cache = run("local", "--cache", "much", text=json.dumps(SESSION) + "\n")
    assert (cache.returncode, cache.stderr) == (
        2,
        "worker: error: --cache: 'much' is not a size such as 800M or 2GiB\n",
    )
    size = run("local", "--memory", "much", text=json.dumps(SESSION) + "\n")
    assert (size.returncode, size.stderr) == (
        2,
        "worker: error: --memory: 'much' is not a size such as 800M or 2GiB\n",
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    bar = ProgressBar(stream, "experts")
    for done in (0, 1, 500_000, 500_001, 1_000_000):
        bar.show(done, 1_000_000)
    shown = stream.getvalue().split("\r")[1:]
    assert shown == [
        "experts [                              ] 0.0 of 1.0 MB",
        "experts [###############               ] 0.5 of 1.0 MB",
        "experts [##############################] 1.0 of 1.0 MB\n",
    ]


def test_a_pipe_gets_a_line_now_and_then_and_the_quiet_nothing() -> None:
    stream, silent = io.StringIO(), io.StringIO()
    bars = (ProgressBar(stream, "experts"), ProgressBar(silent, "experts", is_quiet=True))
    for done in range(101):
        for bar in bars:
            bar.show(done * 10_000, 1_000_000)
    assert stream.getvalue().splitlines() == [
        f"experts: {part} of 1.0 MB" for part in ("0.0", "0.2", "0.5", "0.8", "1.0")
    ]
    assert silent.getvalue() == ""


def test_the_worker_imports_only_what_a_phone_has(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.partition('.')[0]\n"
        "        allowed = {'numpy', 'zmq', 'msgpack', 'worker', 'protocol', 'kernels'} | set(sys.stdlib_module_names)\n"
        "        if top not in allowed and not top.startswith('_'): raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import worker.cli\n"
        "from kernels.registry import make_backend\n"
        "make_backend('numpy')\n"
        "worker.cli.main(['--version'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
