"""Servers as their users run them: a process, its address, and that it ends as it should."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_data import ROOT

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
#: A request whose answer does not end by itself within any test.
ENDLESS = {"max_tokens": 90_000, "ignore_eos": True}


@dataclass
class Server:
    """A server that answers."""

    process: subprocess.Popen[str]
    port: int
    environ: Mapping[str, str]
    stderr: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def get(self, path: str) -> Any:
        """The object at a path."""
        status, _, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and object for a posted object."""
        status, _, data = self.request(
            "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        return status, json.loads(data)

    @contextlib.contextmanager
    def stream(self, body: Any, path: str = "/v1/completions") -> Iterator[Iterator[Any]]:
        """The events of a streamed answer; leaving the block hangs up."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            data = json.dumps(body | {"stream": True}).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            with connection.getresponse() as response:  # it keeps the socket open beyond the connection
                assert response.status == 200, response.read()
                yield events(response)

    def load(self) -> dict[str, int]:
        """How much there is to do."""
        found: dict[str, int] = self.get("/status")["server"]["load"]
        return found

    def workers(self) -> list[int]:
        """The processes of its workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


def events(response: Any) -> Iterator[Any]:
    """The objects of a stream of server-sent events, up to its end."""
    for line in response:
        if line.strip():
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def until(is_so: Any, what: str, seconds: float = 60) -> None:
    """Ask again and again until something is so that another process brings about."""
    give_up = time.monotonic() + seconds
    while not is_so():
        os.sched_yield()
        assert time.monotonic() < give_up, f"not so after {seconds} s: {what}"


def environ_of(folder: Path, **more: str) -> dict[str, str]:
    """An environment whose server no other test finds; the kernels' cache is that of all tests."""
    return os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")} | more


@contextlib.contextmanager
def started(folder: Path, *args: str, cache: Path, own_template: bool = False, **more: str) -> Iterator[Server]:
    """A server on a free port, and none afterwards. `own_template`: chats are rendered by the model's."""
    environ = environ_of(folder, XDG_CACHE_HOME=str(cache), **more)
    (folder / "t.jinja").write_text(TEMPLATE)
    http_flag = () if "--http" in args else ("--http", "127.0.0.1:0")
    template = () if own_template else ("--template", "t.jinja")
    listen = () if "--listen" in args else ("--listen", "127.0.0.1:0")
    command = [sys.executable, "-m", "backbone", "serve", *http_flag, *listen, *template, *args]
    stderr = folder / "stderr.txt"
    with stderr.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environ, cwd=folder)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " is served on http://" in line, stderr.read_text()
        yield Server(process, int(line.rpartition(":")[2].partition("/")[0]), environ, stderr)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def serving(folder: Path, *args: str, cache: Path, **more: Any) -> Iterator[Server]:
    """A server that has to end by SIGTERM with exit code 0, no traceback, and no worker and no run file left."""
    with started(folder, *args, cache=cache, **more) as server:
        workers = server.workers()
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.stderr.read_text()
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in server.stderr.read_text(), server.stderr.read_text()
        assert not (folder / "state" / "expertswarm" / "run.json").exists()
