"""compose.yaml's services as processes of this machine: the same commands, folders for volumes, free ports, no engine."""

from __future__ import annotations

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from device_checks import mosquitto_program
from shared_data import ROOT

from backbone.discovery import DEMO
from kernels.native import build

COMPOSE = ROOT / "compose.yaml"
PORTS = ("7610", "8080", "8883", "1883")
PATIENCE_S = 120.0
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def services(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The services, with what the environment names put in and defaults elsewhere."""
    text = _VARIABLE.sub(lambda found: environ.get(found[1]) or found[2], COMPOSE.read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def image_environment() -> dict[str, str]:
    """What the Dockerfile sets, but where programs are."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    words = [word for line in text.splitlines() if line.startswith("ENV ") for word in line.split()[1:]]
    return {name: value for name, value in (word.split("=", 1) for word in words) if name != "PATH"}


def with_template(path: Path, template: str) -> None:
    """The demo model with a chat template."""
    command = ["-m", "gguf.scripts.gguf_new_metadata", "--chat-template", template, str(DEMO), str(path)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=PATIENCE_S)


def _free_port() -> str:
    with socket.socket() as asker:
        asker.bind(("127.0.0.1", 0))
        return str(asker.getsockname()[1])


class Composition:
    """The services in a folder. Hosts are this one, whatever they are called in compose.yaml."""

    def __init__(self, folder: Path, environ: Mapping[str, str], kernels: Path) -> None:
        """`kernels`: compiled ones, so that not every cache begins with a compilation."""
        self.folder, self.services = folder, services(environ)
        self.ports = {port: _free_port() for port in PORTS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._image = image_environment()
        for name, service in self.services.items():
            for source, target in self._mounts(name).items():
                Path(target).mkdir(parents=True, exist_ok=True, mode=0o700)
                if source == "/cache" and service["command"][0] in ("backbone", "worker"):
                    compiled = build.cache_folder({"XDG_CACHE_HOME": target})
                    compiled.parent.mkdir(parents=True)
                    compiled.symlink_to(kernels)

    def _mounts(self, name: str) -> dict[str, str]:
        """Folders of a service's container and what stands for them here; longer ones first."""
        own = {path: str(self.folder / "own" / name / path[1:]) for path in ("/state", "/cache")}
        for volume in self.services[name].get("volumes", ()):
            source, target = volume.split(":")[:2]
            own[target] = source if source[0] in "./" else str(self.folder / "volumes" / source)
        own["/opt/expertswarm"] = str(ROOT)
        return dict(sorted(own.items(), key=lambda pair: -len(pair[0])))

    def here(self, name: str, text: str) -> str:
        """A text of a service with this machine's paths, ports and name."""
        for path, folder in self._mounts(name).items():
            if text == path or text.startswith(f"{path}/"):
                return folder + text.removeprefix(path)
        text = re.sub(r"@(mosquitto|backbone):", "@localhost:", text)
        return re.sub(rf"(^|:)({'|'.join(PORTS)})\b", lambda found: found[1] + self.ports[found[2]], text)

    def _argv(self, name: str, words: list[str]) -> list[str]:
        program, *args = words
        found = [self.here(name, word) for word in args]
        if "--advertise" in found:
            found[found.index("--advertise") + 1] = "127.0.0.1"
        if program in ("backbone", "worker"):
            return [sys.executable, "-P", "-m", program, *found]
        return [str(mosquitto_program()) if program == "mosquitto" else program, *found]

    def environ(self, name: str) -> dict[str, str]:
        """What a service's processes find in their environment: nothing of the tests'."""
        given = self._image | self.services[name].get("environment", {})
        mapped = {variable: self.here(name, value) for variable, value in given.items()}
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)} | mapped

    def run(self, name: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's place, to its end."""
        argv, environ = self._argv(name, words), self.environ(name)
        folder = self.folder
        return subprocess.run(
            argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def once(self, name: str) -> None:
        """Run a service that has to come to its end."""
        done = self.run(name, self.services[name]["command"])
        assert done.returncode == 0, done.stderr
        if name == "keys":
            self._move_broker()

    def _move_broker(self) -> None:
        """The sample configuration names its folder and its ports itself."""
        path = Path(self.here("keys", "/mosquitto/config/mosquitto.conf"))
        text = path.read_text().replace("/mosquitto/config/", f"{path.parent}/")
        for port in ("8883", "1883"):
            assert f"\nlistener {port}" in text
            text = text.replace(f"\nlistener {port}", f"\nlistener {self.ports[port]}")
        path.write_text(f"{text}\nuser {getpass.getuser()}\n")

    def start(self, name: str) -> None:
        """Start a service that goes on."""
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._argv(name, self.services[name]["command"]),
                env=self.environ(name),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> Path:
        """What a service said."""
        return self.folder / f"{name}.log"

    def health(self, name: str) -> int:
        """The exit code of a service's health check."""
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return self.run(name, words).returncode

    def until_healthy(self, name: str) -> None:
        """Ask until a service is healthy. It must not end meanwhile."""
        while self.health(name) != 0:
            assert self.processes[name].poll() is None, self.log(name).read_text()

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        """How a service ends by a signal."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(PATIENCE_S)

    def order(self) -> list[str]:
        """The services, each behind those that it depends on."""
        found = list[str]()
        while len(found) < len(self.services):
            ready = [
                name
                for name, service in self.services.items()
                if name not in found and set(service.get("depends_on", ())) <= set(found)
            ]
            assert ready, "services depend on each other in a circle"
            found += ready
        return found

    def up(self) -> None:
        """Start everything in its order, each service when those that it depends on are as it asks."""
        done = set[tuple[str, str]]()
        for name in self.order():
            service = self.services[name]
            for needed, how in service.get("depends_on", {}).items():
                if how["condition"] == "service_healthy" and (needed, "healthy") not in done:
                    self.until_healthy(needed)
                    done.add((needed, "healthy"))
                assert how["condition"] == "service_healthy" or (needed, "done") in done
            if "restart" in service:
                self.start(name)
            else:
                self.once(name)
                done.add((name, "done"))

    def close(self) -> None:
        """Leave no process."""
        for process in self.processes.values():
            process.kill()
            process.wait()
