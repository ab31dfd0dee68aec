"""A real mosquitto with the repository's sample configuration, in a folder and on ports of its own."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiomqtt
from device_checks import mosquitto_program
from shared_data import ROOT

T = TypeVar("T")
SAMPLE = ROOT / "deploy"
THERE = "/mosquitto/config/"  #: where the sample has its files
PASSWORDS = {"backbone": "of-the-backbone", "worker": "of-the-workers"}
PATIENCE_S = 30.0
_CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
_EXTENSIONS = """subjectAltName=DNS:localhost,IP:127.0.0.1
basicConstraints=critical,CA:FALSE
authorityKeyIdentifier=keyid
"""


def make_ca(folder: Path, name: str) -> Path:
    """A CA's certificate; its key lies beside it."""
    _openssl(
        folder,
        *["req", "-x509", *_CURVE, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}"],
        *["-days", "2", "-addext", "keyUsage=critical,keyCertSign,cRLSign"],
    )
    return folder / f"{name}.crt"


def _openssl(folder: Path, *args: str) -> None:
    done = subprocess.run(["openssl", *args], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def _free_port() -> int:
    with socket.socket() as asker:
        asker.bind(("127.0.0.1", 0))
        return int(asker.getsockname()[1])


class Mosquitto:
    """One broker, which may be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.tls_port = folder, _free_port(), _free_port()
        self.ca = make_ca(folder, "ca")
        (folder / "extensions").write_text(_EXTENSIONS)
        request = ["req", *_CURVE, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost"]
        _openssl(folder, *request)
        sign = ["x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
        _openssl(folder, *sign, "-out", "server.crt", "-days", "2", "-extfile", "extensions")
        (folder / "passwd").write_text("".join(f"{user}:{password}\n" for user, password in PASSWORDS.items()))
        subprocess.run(["mosquitto_passwd", "-U", "passwd"], cwd=folder, check=True, timeout=60)
        shutil.copy(SAMPLE / "mosquitto.acl", folder)
        sample = (SAMPLE / "mosquitto.conf").read_text()
        assert THERE in sample
        assert "\nlistener 8883\n" in sample
        assert "\nlistener 1883 127.0.0.1\n" in sample
        ours = sample.replace(THERE, f"{folder}/").replace("listener 8883", f"listener {self.tls_port} 127.0.0.1")
        ours = ours.replace("listener 1883 127.0.0.1", f"listener {self.port} 127.0.0.1")
        (folder / "mosquitto.conf").write_text(f"{ours}\nuser {getpass.getuser()}\n")
        self.said: list[str] = []
        self.start()

    def start(self) -> None:
        command = [str(mosquitto_program()), "-c", "mosquitto.conf", "-v"]
        self.process = subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True)
        stream = self.process.stderr
        assert stream is not None
        for line in stream:
            self.said.append(line)
            if " running" in line:
                break
        else:
            raise AssertionError("".join(self.said))
        # Whatever it says has to be read, or it stops one day.
        self._reader = threading.Thread(target=lambda: self.said.extend(stream), daemon=True)
        self._reader.start()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()

    def url(self, user: str) -> str:
        return f"mqtt://{user}@127.0.0.1:{self.port}"

    def tls_url(self, user: str) -> str:
        return f"mqtts://{user}@localhost:{self.tls_port}"

    @contextlib.asynccontextmanager
    async def client(self, user: str, client_id: str | None = None) -> AsyncIterator[aiomqtt.Client]:
        """Somebody else at the broker."""
        client = aiomqtt.Client(
            "127.0.0.1", self.port, username=user, password=PASSWORDS[user], identifier=client_id, timeout=PATIENCE_S
        )
        async with client:
            yield client


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Mosquitto]:
    """A broker that is ended afterwards."""
    broker = Mosquitto(folder)
    try:
        yield broker
    finally:
        if broker.process.poll() is None:
            broker.stop()


def within_patience(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a client's part of a test, which must come to its end."""

    async def run() -> T:
        return await asyncio.wait_for(work(), PATIENCE_S)

    return asyncio.run(run())
