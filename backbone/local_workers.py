"""Worker processes on this machine, started for one run: keys and all else go to their standard input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .errors import BackboneError, UsageError
from .gate import new_key_pair

STOP_TIMEOUT_S = 2.0
MOST_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A local worker to start."""

    backend: str
    memory_bytes: int = 0  #: for experts; 0: no bound
    threads: int = 0  #: that compute; 0: one for each physical core
    activations: str = "f32"  #: dtype in which they are multiplied
    accumulation: str = "f32"  #: dtype in which products are summed


def parse_workers(text: str, default_backend: str) -> list[str]:
    """`2`, `numpy:2` or `numpy:2,opencl:1` as the backend of each worker. UsageError when it is none of these."""
    found = list[str]()
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not (count.isascii() and count.isdecimal()) or (colon and not name):
            raise UsageError(f"--workers {text}: {part!r} is neither a number nor BACKEND:NUMBER")
        if len(found) + int(count[:9]) > MOST_WORKERS:
            raise UsageError(f"--workers {text}: at most {MOST_WORKERS} local workers can be started")
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

    def has_ended(self) -> bool:
        """Whether the process is no more."""
        return self._process.poll() is not None

    def last_line(self) -> str:
        """The last line that the process wrote to standard error; empty when it wrote none."""
        with contextlib.suppress(ValueError):  # closed already
            self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, self._stderr.tell() - 4096))
            lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""

    def obituary(self) -> str:
        """How the process ended, in one line."""
        code = self._process.poll()
        if code is None:
            return "its process runs"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}" + (f": {line}" if (line := self.last_line()) else "")

    def dismiss(self) -> None:
        """Close the process's input, which it takes as a sign to end. Does not wait."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def stop(self) -> None:
        """End the process: by closing its input, then by force. Returns when it is no more."""
        self.dismiss()
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
                break
            end()
        self._process.wait()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self._stderr.close()


def _near(endpoint: str) -> str:
    """An endpoint as this machine reaches it."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def start_worker(
    name: str,
    spec: WorkerSpec,
    *,
    endpoint: str,
    server_key: bytes,
    model: Path | None,
    command: Sequence[str] | None = None,
) -> LocalWorker:
    """Start a worker process with a key pair of its own. `command` puts another program in the worker's place."""
    public, secret = new_key_pair()
    session = {
        "endpoint": _near(endpoint),
        "server_key": server_key.decode(),
        "public_key": public.decode(),
        "secret_key": secret.decode(),
        "backend": spec.backend,
        "memory_bytes": spec.memory_bytes,
        "threads": spec.threads,
        "activations": spec.activations,
        "accumulation": spec.accumulation,
        "model": "" if model is None else str(model.absolute()),
        "quiet": True,  # a bar in a file is of no use: the backbone shows how far its workers are
    }
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
    try:
        # -P keeps a worker.py in the current folder from being taken for the package. In a session of its own no
        # Ctrl-C reaches the worker: the backbone ends it, or the end of its input does.
        process = subprocess.Popen(
            command or [sys.executable, "-P", "-m", "worker", "local"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"PYTHONPATH": _python_path()},
            start_new_session=True,
        )
    except OSError as error:
        stderr.close()
        raise BackboneError(f"worker {name} could not be started: {error}") from None
    worker = LocalWorker(name, spec, public, process, stderr)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it ended already: whoever waits for it will say so
            process.stdin.write(json.dumps(session).encode() + b"\n")
            process.stdin.flush()
    with contextlib.suppress(AttributeError, OSError):  # no pidfd on this system: looked at now and then instead
        worker.pidfd = os.pidfd_open(process.pid)
    return worker


def _python_path() -> str:
    root = str(Path(__file__).parents[1])
    return os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH", "")) if path)
