"""Worker processes on this machine, started for one run: keys and all else go to their standard input."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .errors import BackboneError, UsageError
from .gate import new_key_pair

STOP_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A local worker to start."""

    backend: str
    memory_bytes: int = 0  #: 0: no bound


def parse_workers(text: str, default_backend: str) -> list[str]:
    """`2`, `numpy:2` or `numpy:2,opencl:1` as the backend of each worker. UsageError when it is none of these."""
    found = list[str]()
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        if not count.isdecimal() or int(count) > 64:
            raise UsageError(f"--workers {text}: {part!r} is neither a number up to 64 nor BACKEND:NUMBER")
        found += [name or default_backend] * int(count)
    return found


@dataclass(slots=True)
class LocalWorker:
    """A worker process and how to end it."""

    name: str
    spec: WorkerSpec
    public_key: bytes
    _process: subprocess.Popen[bytes]
    _stderr: IO[bytes]
    pidfd: int | None = field(default=None)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def stop(self) -> None:
        """End the process: by closing its input, then by force."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        for force in (self._process.terminate, self._process.kill, None):
            try:
                self._process.wait(STOP_TIMEOUT_S)
                break
            except subprocess.TimeoutExpired:
                if force is not None:
                    force()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self._stderr.close()


def start_worker(
    name: str,
    spec: WorkerSpec,
    *,
    endpoint: str,
    server_key: bytes,
    model: Path | None,
    command: list[str] | None = None,
) -> LocalWorker:
    """Start a worker process with a key pair of its own. `command` is for tests that put their own worker in place."""
    public, secret = new_key_pair()
    # -P keeps a file named worker.py in the current folder from being taken for the package.
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
    try:
        process = subprocess.Popen(
            command or [sys.executable, "-P", "-m", "worker", "local"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": path},
        )
    except OSError as error:
        stderr.close()
        raise BackboneError(f"worker {name} could not be started: {error}") from None
    session = {
        "endpoint": endpoint,
        "server_key": server_key.decode(),
        "public_key": public.decode(),
        "secret_key": secret.decode(),
        "backend": spec.backend,
        "memory_bytes": spec.memory_bytes,
        "model": "" if model is None else str(model.resolve()),
    }
    worker = LocalWorker(name, spec, public, process, stderr)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it ended already: whoever waits for it will say so
            process.stdin.write(json.dumps(session).encode() + b"\n")
            process.stdin.flush()
    with contextlib.suppress(AttributeError, OSError):  # no pidfd on this system: the deadline finds the dead
        worker.pidfd = os.pidfd_open(process.pid)
    return worker
