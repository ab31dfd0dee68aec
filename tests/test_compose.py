"""compose.yaml: what it says is right, and what it runs, run here by the same commands without an engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from compose_kit import COMPOSE, Composition, services, with_template
from device_checks import compose_program, need
from shared_data import ROOT

import backbone.cli
import worker.cli

SERVICES = services({})
LONG_RUNNING = {name: service for name, service in SERVICES.items() if "restart" in service}
WORKERS = ("worker-native", "worker-numpy", "worker-opencl")
DOCKERFILE = (ROOT / "Dockerfile").read_text()
WRONG = {  # and whether a schema alone can see it
    "unknown key": ("    restart: unless-stopped\n", "    restarts: unless-stopped\n", True),
    "bad duration": ("    start_period: 60s", "    start_period: sixty", False),
    "undefined service": (
        "    invite: {condition: service_completed",
        "    invites: {condition: service_completed",
        False,
    ),
}


def schema(path: Path) -> int:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


def compose(path: Path) -> int:
    command = [str(compose_program()), "-f", str(path), "config", "-q"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


def spoilt(folder: Path, old: str, new: str) -> Path:
    text = COMPOSE.read_text()
    assert old in text
    (folder / "compose.yaml").write_text(text.replace(old, new))
    return folder / "compose.yaml"


def test_the_schema_takes_it_and_sees_an_unknown_key(tmp_path: Path) -> None:
    assert schema(COMPOSE) == 0
    for old, new, is_seen in WRONG.values():
        assert schema(spoilt(tmp_path, old, new)) != 0 or not is_seen


def test_compose_itself_takes_it_and_nothing_wrong(tmp_path: Path) -> None:
    need("compose")
    assert compose(COMPOSE) == 0
    for name, (old, new, _) in WRONG.items():
        assert compose(spoilt(tmp_path, old, new)) != 0, name


# ---- what it says


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_do_no_more_than_it_has_to(name: str) -> None:
    service = SERVICES[name]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert service["image"] == f"expertswarm:{version}"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "user", "pid", "ipc", "entrypoint"} & service.keys()
    assert ("healthcheck" in service) is ("restart" in service)
    assert all(published.startswith("127.0.0.1:") for published in service.get("ports", ()))
    assert not [v for v in service.get("environment", {}) if "PASSWORD" in v and not v.endswith("_FILE")]


def test_the_image_is_one_of_a_user_without_rights_and_without_secrets() -> None:
    assert re.findall(r"^FROM .*", DOCKERFILE, re.MULTILINE) == ["FROM ${BASE}"]
    assert re.findall(r"^USER (.*)", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^ARG BASE=python:(.*)", DOCKERFILE, re.MULTILINE) == ["3.11-slim-bookworm"]
    assert "latest" not in DOCKERFILE + COMPOSE.read_text().lower()
    copied = {word for line in DOCKERFILE.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert {word for word in copied if not (ROOT / word).exists()} == set()
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == copied
    assert not copied & {".", ".env"}


def test_volumes_are_declared_are_the_images_users_and_are_whose_they_should_be() -> None:
    declared = yaml.safe_load(COMPOSE.read_text())["volumes"].keys()
    mounts = [(name, *v.split(":")[:2]) for name, service in SERVICES.items() for v in service.get("volumes", ())]
    assert declared == {source for _, source, _ in mounts if source[0] != "."}
    owned = set(re.findall(r"/\S+", DOCKERFILE.partition("install -d")[2].partition("\n")[0]))
    assert {target for *_, target in mounts} - {"/models"} <= owned
    states = [source for name, source, target in mounts if target == "/state" and name in WORKERS]
    assert len(set(states)) == 3
    holders = {name for name, source, _ in mounts if source == "backbone-keys"}
    assert holders == {"keys", "backbone"}
    writers = {name for name, service in SERVICES.items() if "workers:/keys/workers" in service.get("volumes", ())}
    assert writers == {"keys", "invite"}


@pytest.mark.parametrize("name", SERVICES)
def test_our_parsers_take_its_command_and_its_health_check(name: str) -> None:
    for program, *args in (SERVICES[name]["command"], SERVICES[name].get("healthcheck", {}).get("test", ["", ""])[1:]):
        if program in ("backbone", "worker"):
            parser = (backbone if program == "backbone" else worker).cli._parser()
            assert callable(parser.parse_args(args).func)


# ---- what it runs


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: Path) -> Iterator[Composition]:
    need("mosquitto")
    need("opencl")
    folder = tmp_path_factory.mktemp("compose")
    models = folder / "models"
    models.mkdir()
    with_template(models / "chatty.gguf", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    environ = {"SWARM_MODELS": str(models), "SWARM_MODEL": "/models/chatty.gguf"}
    composition = Composition(folder, environ, compiled_kernels)
    try:
        assert [composition.health(name) for name in LONG_RUNNING if name != "mosquitto"] == [7, 1, 1, 1]
        composition.up()
        assert composition.health("mosquitto") == 0
        for name in WORKERS:
            composition.until_healthy(name)
        yield composition
    finally:
        composition.close()


def api_key(up: Composition) -> str:
    return Path(up.here("backbone", "/keys/backbone/api-key")).read_text().strip()


def client(up: Composition, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{up.ports['8080']}/v1", api_key=key, max_retries=0)


def served(up: Composition) -> dict[str, Any]:
    url = f"http://127.0.0.1:{up.ports['8080']}/status"
    done = up.run("backbone", ["curl", "-fsS", "-H", f"Authorization: Bearer {api_key(up)}", url])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["server"]
    return found


def enrolled(up: Composition) -> dict[str, str]:
    """Keys of the workers in the book, by name."""
    done = up.run("invite", ["backbone", "invite", "list", "--json"])
    return {w["name"]: w["key"] for w in json.loads(done.stdout)["workers"]}


def until_all_hold(up: Composition) -> dict[str, Any]:
    """The server's status, once three workers hold experts."""
    while True:
        found = served(up)
        workers = [w for w in found["workers"] if w["state"] == "serving" and w["experts"]]
        if len(workers) == 3:
            return found
        assert all(process.poll() is None for process in up.processes.values())


def ask(up: Composition) -> str:
    with client(up, api_key(up)) as asker:
        messages: Any = [{"role": "user", "content": "In the beginning"}]
        found = asker.chat.completions.create(model="chatty", messages=messages, max_tokens=12)
    return found.choices[0].message.content or ""


def test_three_backends_answer_a_chat_for_who_has_the_key(up: Composition) -> None:
    before = until_all_hold(up)
    assert {w["backend"] for w in before["workers"]} == {"native", "numpy", "opencl"}
    assert ask(up)
    with client(up, "another") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    after = served(up)
    assert sum(w["calls"] for w in after["workers"]) > sum(w["calls"] for w in before["workers"])
    assert enrolled(up).keys() == {"native", "numpy", "opencl"}


def test_the_broker_tells_who_is_there(up: Composition) -> None:
    while True:
        presence = served(up)["presence"]
        present = {w["name"] for w in presence["workers"] if w["state"] == "serving"}
        if present == {"native", "numpy", "opencl"}:
            break
    assert presence["connected"] is True


def test_keys_and_invite_stay_when_all_is_started_again(up: Composition) -> None:
    paths = [
        Path(up.here("keys", path))
        for path in (
            "/keys/backbone/api-key",
            "/keys/workers/invite",
            "/keys/workers/ca.crt",
            "/mosquitto/config/server.crt",
        )
    ]
    before = [path.read_bytes() for path in paths]
    for name in ("keys", "invite"):
        up.once(name)
    assert [path.read_bytes() for path in paths] == before
    for folder in ("/mosquitto/config", "/keys/backbone", "/keys/workers"):
        assert {path.stat().st_mode & 0o777 for path in Path(up.here("keys", folder)).iterdir()} == {0o600}


def test_a_worker_that_was_killed_comes_back_as_itself(up: Composition) -> None:
    until_all_hold(up)
    before, told = enrolled(up), len(up.log("worker-native").read_text())
    assert up.end("worker-native", signal.SIGKILL) == -signal.SIGKILL
    assert up.health("worker-native") == 1
    assert ask(up)
    up.start("worker-native")
    up.until_healthy("worker-native")
    until_all_hold(up)
    again = up.log("worker-native").read_text()[told:]
    assert " as native" in again
    assert "enrolled" not in again
    assert enrolled(up) == before
    assert ask(up)


def test_workers_outlast_the_backbone_and_are_not_healthy_without_it(up: Composition) -> None:
    before = enrolled(up)
    assert up.end("backbone") == 0
    assert up.health("backbone") == 7
    for name in WORKERS:
        while up.health(name) == 0:
            assert up.processes[name].poll() is None
    up.start("backbone")
    up.until_healthy("backbone")
    for name in WORKERS:
        up.until_healthy(name)
    until_all_hold(up)
    assert enrolled(up) == before
    assert ask(up)


def test_everything_ends_when_told_to(up: Composition) -> None:
    for name in reversed(up.order()):
        if name in up.processes:
            assert up.end(name) == 0, name
            assert up.health(name) != 0, name
    for name in WORKERS:
        assert up.log(name).read_text().endswith("worker: stopped\n")
        assert "Traceback" not in up.log(name).read_text()
