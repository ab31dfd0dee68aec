"""Our own commands as clients of the running server, and what of its run file they believe."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.server
import json
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_kit import TEMPLATE, Server, environ_of, serving, started, until
from shared_data import GOLDEN

from backbone import run_file
from backbone.answerers import OWN
from backbone.client import RunningServer, find_server
from backbone.commands.generate import MODEL_FLAGS
from backbone.discovery import DEMO
from backbone.engine import GenerateOptions
from backbone.errors import BackboneError
from backbone.prompts import IdsPrompt
from backbone.run_file import RunFile

GOLD = json.loads((GOLDEN / "verse-moe-golden.json").read_text())["prompts"][0]
PROMPT = GOLD["prompt"]
FREE = "--workers", "0"


def backbone(
    environ: dict[str, str] | Any, *args: str, code: int = 0, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "backbone", *args],
        input=stdin, capture_output=True, text=True, timeout=120, check=False, env=environ,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    """The demo model with two workers, and room for long answers."""
    with serving(tmp_path_factory.mktemp("server"), "--workers", "2", "-c", "100000", cache=cache) as server:
        yield server


def requests(server: Server, what: str = "POST /private/generate") -> int:
    """How often the server was asked for something."""
    return server.stderr.read_text().count(what)


def same(here: Any, there: Any) -> None:
    """Two results that differ in nothing but who computed them, and how fast."""
    assert here.keys() == there.keys()
    varying = {"timings", "workers", "computed_locally", "failures"}
    assert {k: v for k, v in here.items() if k not in varying} == {k: v for k, v in there.items() if k not in varying}
    assert here["timings"]["decode"]["tokens"] == there["timings"]["decode"]["tokens"]
    assert [w.keys() for w in there["workers"]] == [w.keys() for w in here["workers"]]


@pytest.mark.parametrize(
    "args",
    [
        (PROMPT, "--digest"),
        ("--ids", ",".join(map(str, GOLD["prompt_ids"])), "--digest"),
        (PROMPT, "--temp", "1.3", "--seed", "5", "--top-k", "9", "--repeat-penalty", "1.2"),
        (PROMPT, "--stop", "day of the", "--ignore-eos"),
        ("Hello", "--chat", "--system", "Be kind", "--template", "t.jinja", "--digest"),
    ],
    ids=["prompt", "ids", "sampling", "stop", "chat"],
)
def test_generate_gives_the_same_object_through_the_server(
    server: Server, args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    asked = requests(server)
    there = json.loads(backbone(server.environ, "generate", *args, "-n", "12", "--json").stdout)
    assert requests(server) == asked + 1
    here = json.loads(backbone(server.environ, "generate", *args, "-n", "12", "--json", "--workers", "2").stdout)
    assert requests(server) == asked + 1  # a command that names workers has its own
    same(here, there)
    calls = [w["calls"] for w in there["workers"]]
    assert any(calls)  # on a busy machine one of them may be taken for a straggler
    assert max(calls) <= 4 * 40  # its own, not all since the start


def test_text_comes_as_it_is_made_and_the_summary_says_from_whom(server: Server) -> None:
    done = backbone(server.environ, "generate", PROMPT, "-n", "64")
    assert done.stdout == GOLD["text"] + "\n"
    first, *rest = done.stderr.splitlines()
    assert first == f"answered by demo on {server.url}"
    assert "answer: 64 tokens" in done.stderr
    assert "weights 85dbef22393e, archdef qwen3moe" in rest[-1]
    assert "local-2" in done.stderr


def test_answers_asked_for_at_once_have_the_bits_of_each_alone(server: Server) -> None:
    client = find_server(None, server.environ)
    assert client is not None
    options = GenerateOptions(max_tokens=16, digest=True, ignore_eos=True)
    prompts = [GOLD["prompt_ids"], [0, 17, 300] * 60, [0, 99], [0, 17, 300, 17, 300], list(range(200, 280)), [0]]

    def ask(ids: list[int]) -> Any:
        result = client.answer(
            IdsPrompt(tuple(ids)), options, on_text=lambda text: None, on_prompt=lambda done, total: None
        )
        return result["ids"], result["logits_sha256"], result["text"]

    alone = [ask(ids) for ids in prompts]
    assert len({len(sha) for _, sha, _ in alone}) == 1
    for _ in range(3):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(ask, prompts)) == alone


def test_errors_are_those_of_the_command_alone(server: Server) -> None:
    for args, stdin in ((("--ids", "99999"), None), (("-f", "-"), "word " * 100_001)):
        there = backbone(server.environ, "generate", *args, code=2, stdin=stdin).stderr
        here = backbone(server.environ, "generate", *args, *FREE, "-c", "100000", code=2, stdin=stdin).stderr
        assert there.splitlines()[-1] == here.splitlines()[-1]


def test_chat_keeps_its_conversation_with_the_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    lines = "In the beginning\nAnd the earth\n/reset\nIn the beginning\n/quit\n"
    args = ("chat", "--template", "t.jinja", "-n", "6")
    before = server.get("/status")["server"]["counts"]["cached_tokens"]
    there = backbone(server.environ, *args, stdin=lines).stdout
    assert server.get("/status")["server"]["counts"]["cached_tokens"] > before
    assert there == backbone(server.environ, *args, *FREE, stdin=lines).stdout
    long = backbone(server.environ, *args, stdin="word " * 100_001 + "\n", code=1)
    assert "the conversation fills the context" in long.stderr


def test_ctrl_c_ends_the_answer_on_both_sides(server: Server) -> None:
    command = [sys.executable, "-m", "backbone", "generate", PROMPT, "-n", "90000", "--ignore-eos"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=server.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == GOLD["text"][:4]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        stderr = process.stderr.read()
        assert process.wait(60) == 1
    assert "stopped: Ctrl-C" in stderr
    assert "Traceback" not in stderr
    until(lambda: server.load()["running"] == 0, "the server has forgotten it")


def test_status_shows_the_running_server(server: Server) -> None:
    shown = json.loads(backbone(server.environ, "status", "--json").stdout)["server"]
    assert (shown["url"], shown["pid"], shown["load"]["parallel"]) == (server.url, server.process.pid, 4)
    assert len(shown["workers"]) == len(server.workers())
    assert {w["rank"] for w in shown["workers"]} == {"exact"}
    assert all(0 < w["error"] < 1e-6 for w in shown["workers"])
    text = backbone(server.environ, "status").stdout
    assert f"running server\n  demo on {server.url}, process {server.process.pid}, context 100000\n" in text
    assert "0 of 4 answers under way, 0 of 64 waiting" in text
    assert f"  local-{len(server.workers())}   native  exact  " in text


@pytest.mark.parametrize(
    "flags",
    [FREE, ("--backend", "native"), ("--threads", "1"), ("--activations", "f32"), ("--kv-cache", "f32"),
     ("--archdefs", ""), ("-c", "100"), ("--worker-memory", "1G")],
)  # fmt: skip
def test_a_command_that_names_something_of_its_own_runs_alone(server: Server, flags: tuple[str, ...]) -> None:
    before = requests(server, "/private/")
    found = json.loads(backbone(server.environ, "generate", PROMPT, "-n", "2", "--json", *flags).stdout)
    assert found["ids"] == GOLD["ids"][:2]
    assert requests(server, "/private/") == before


def test_the_model_decides(server: Server, tmp_path: Path) -> None:
    other = Path(shutil.copy(DEMO, tmp_path / "other.gguf"))
    link = tmp_path / "same.gguf"
    link.symlink_to(DEMO)
    for model, is_served in ((str(DEMO), True), ("demo", True), (str(link), True), (str(other), False)):
        before = requests(server)
        for how, environ in ((("-m", model), {}), ((), {"EXPERTSWARM_MODEL": model})):
            backbone(server.environ | environ, "generate", PROMPT, "-n", "1", *how)
        assert requests(server) == before + 2 * is_served
    assert "no model 'absent'" in backbone(server.environ, "generate", "a", "-m", "absent", code=2).stderr


# ---- the run file


def test_it_is_for_its_user_alone_and_gone_with_the_server(tmp_path: Path, cache: Path) -> None:
    with serving(tmp_path, *FREE, cache=cache) as server:
        path = run_file.path_of(server.environ)
        assert path == tmp_path / "state" / "expertswarm" / "run.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        run = run_file.read(server.environ)
        assert run is not None
        assert (run.host, run.port, run.pid, run.model) == ("127.0.0.1", server.port, server.process.pid, str(DEMO))
        assert len(run.token) >= 32
        assert run.token not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert sorted(p.name for p in path.parent.iterdir()) == ["backbone", "run.json"]
    assert not path.exists()


def test_the_file_of_a_later_server_stays(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    first = RunFile(host="127.0.0.1", port=1, token="a" * 32, pid=1, model="m")
    later = replace(first, pid=2)
    run_file.write(first, environ)
    run_file.write(later, environ)
    run_file.remove(first, environ)
    assert run_file.read(environ) == later
    run_file.remove(later, environ)
    assert run_file.read(environ) is None
    run_file.remove(later, environ)


GOOD = {"host": "127.0.0.1", "port": 1, "token": "t", "pid": 1, "model": "m"}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "[" * 50_000, json.dumps(GOOD | {"port": "1"}), json.dumps(GOOD | {"more": 1}),
     json.dumps(GOOD | {"pid": True}), json.dumps({})],
    ids=range(9),
)  # fmt: skip
def test_a_file_that_says_nothing_is_none(tmp_path: Path, content: str) -> None:
    path = run_file.path_of({"XDG_STATE_HOME": str(tmp_path)})
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    assert run_file.read({"XDG_STATE_HOME": str(tmp_path)}) is None
    assert find_server(None, {"XDG_STATE_HOME": str(tmp_path)}) is None


def test_a_file_that_others_can_read_is_none(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    run_file.write(RunFile(**GOOD), environ)  # type: ignore[arg-type]
    path = run_file.path_of(environ)
    assert run_file.read(environ) == RunFile(**GOOD)  # type: ignore[arg-type]
    path.chmod(0o644)
    assert run_file.read(environ) is None


@contextlib.contextmanager
def refusing() -> Iterator[int]:
    """A port that refuses connections: it is taken, and nobody listens."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.contextmanager
def another_program() -> Iterator[int]:
    """A port on which something else speaks HTTP."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_a_stale_file_is_no_server(tmp_path: Path, cache: Path) -> None:
    """Of a server that was killed; of a port that refuses; of another program's port; with another token."""
    environ = environ_of(tmp_path, XDG_CACHE_HOME=str(cache))
    folder = tmp_path / "of the server"
    folder.mkdir()
    with serving(folder, *FREE, cache=cache) as server:
        run = run_file.read(server.environ)
        assert run is not None
        assert find_server(None, server.environ) is not None
        with refusing() as port, another_program() as strange:
            dead = subprocess.Popen([sys.executable, "-c", ""])
            dead.wait()
            for stale in (
                replace(run, pid=dead.pid),
                replace(run, pid=-1),
                replace(run, port=port),
                replace(run, port=strange),
                replace(run, token="x" * 43),
            ):
                run_file.write(stale, environ)
                assert find_server(None, environ) is None, stale
        alone = backbone(environ, "generate", PROMPT, "-n", "3", "--json").stdout
        assert json.loads(alone)["ids"] == GOLD["ids"][:3]
        assert json.loads(backbone(environ, "status", "--json").stdout)["server"] is None
        run_file.write(run, environ)
        assert find_server(None, environ) is not None


def test_a_server_that_ends_in_the_middle_is_one_line(tmp_path: Path, cache: Path) -> None:
    with started(tmp_path, *FREE, "-c", "100000", cache=cache) as server:
        client = find_server(None, server.environ)
        assert client is not None
        run = run_file.read(server.environ)
        assert run is not None
        options, seen = GenerateOptions(max_tokens=90_000, ignore_eos=True), threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                client.answer, IdsPrompt((0, 43)), options, on_text=lambda t: seen.set(), on_prompt=lambda d, t: None
            )
            assert seen.wait(60)
            server.process.kill()
            with pytest.raises(BackboneError, match="the server ended in the middle of the answer"):
                answer.result(60)
        with pytest.raises(BackboneError, match=f"the server on 127.0.0.1:{server.port} does not answer"):
            RunningServer(run)
        server.process.wait()
        assert run_file.read(server.environ) == run  # which nobody believes
        assert find_server(None, server.environ) is None


def test_status_holds_what_a_token_took_beside_what_was_predicted(server: Server) -> None:
    backbone(server.environ, "generate", PROMPT, "-n", "20", "--ignore-eos")
    token = server.get("/status")["server"]["token"]
    assert token["timed"] >= 19
    for time in (token["actual"], token["predicted"]):
        assert time["seconds"] > 0
        assert time["seconds"] == pytest.approx(time["dense"] + time["wire"] + time["straggler"], abs=5e-6)
        assert time["straggler"] > 0
    told = backbone(server.environ, "status").stdout
    assert re.search(
        r"a token alone takes [\d.]+ ms \(dense [\d.]+, wire -?[\d.]+, straggler [\d.]+\), predicted", told
    )
    assert re.search(r"a token alone takes .*, mean of \d+", told)


def test_whoever_names_how_to_compute_computes_itself() -> None:
    """A server that runs otherwise would answer, and nobody would notice."""
    assert set(OWN) == set(MODEL_FLAGS) - {"model"}
