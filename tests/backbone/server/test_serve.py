"""`backbone serve` as its clients see it: the real `openai` client, curl, and people who mean no good."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_kit import ENDLESS, Server, environ_of, serving, until
from shared_data import GOLDEN, ROOT

from backbone.server.guard import MAX_BODY_BYTES

GOLD = json.loads((GOLDEN / "verse-moe-golden.json").read_text())["prompts"][0]
PROMPT, TEXT, IDS = GOLD["prompt"], GOLD["text"], GOLD["ids"]
HELLO = [{"role": "user", "content": "Hello"}]
PROMPTS = [PROMPT, "And the earth was", "Let there be", "noun: a state of " * 30, "Of the", "And God said unto Noah"]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(server: Server, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8} | fields)


# ---- the openai client


def test_a_completion(client: openai.OpenAI) -> None:
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=64, temperature=0)
    assert (found.object, found.model) == ("text_completion", "demo")
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "length", 0)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(GOLD["prompt_ids"]), 64)
    assert found.usage.total_tokens == len(GOLD["prompt_ids"]) + 64
    origin = found.model_dump()["expertswarm"]
    assert origin["provenance"]["weights"].startswith("85dbef22393e")
    assert origin["provenance"]["archdef"].keys() == {"name", "sha256"}
    assert len(origin["provenance"]["class_map"]) == 64
    assert origin["failures"] == {}
    assert str(ROOT) not in json.dumps(origin)


def test_a_completion_of_ids_and_a_default_length(client: openai.OpenAI) -> None:
    found = client.completions.create(model="demo", prompt=GOLD["prompt_ids"])
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
    assert TEXT.startswith(found.choices[0].text)


def test_a_streamed_completion_with_usage(client: openai.OpenAI) -> None:
    with client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last, usage = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == TEXT[: len("".join(c.choices[0].text for c in chunks))]
    assert len(chunks) > 5
    assert all(c.choices[0].finish_reason is None and c.usage is None for c in chunks)
    assert last.choices[0].finish_reason == "length"
    assert last.model_dump()["expertswarm"]["provenance"]["weights"].startswith("85dbef22393e")
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (len(GOLD["prompt_ids"]), 20)
    assert len({c.id for c in (*chunks, last, usage)}) == 1


def test_a_chat_whole_and_streamed_is_the_template_written_out(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model="demo", messages=messages, max_tokens=9)
    written = client.completions.create(model="demo", prompt="system: Be kind\nuser: Hello\nassistant:", max_tokens=9)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == written.choices[0].text
    with client.chat.completions.create(model="demo", messages=messages, max_tokens=9, stream=True) as stream:
        first, *chunks = list(stream)
    assert (first.object, first.choices[0].delta.role) == ("chat.completion.chunk", "assistant")
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == written.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(c.usage is None for c in chunks)
    # What a client got it can send back as it is.
    more = [*messages, whole.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    again = client.chat.completions.create(model="demo", messages=more, max_tokens=3)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 8  # the conversation so far was kept


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings(client: openai.OpenAI, streamed: bool) -> None:
    found: Any = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=64, stop=["never comes", "day of the"], stream=streamed
    )
    if streamed:
        with found as stream:
            chunks = list(stream)
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = found.choices[0].text, found.choices[0].finish_reason
    assert (text, reason) == (TEXT.split("day of the")[0], "stop")


def test_seeds_and_our_own_fields(client: openai.OpenAI) -> None:
    def drawn(seed: int, **ours: Any) -> str:
        return client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=12, temperature=1.5, seed=seed, extra_body=ours
        ).choices[0].text  # fmt: skip

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(5, top_k=1) == drawn(6, top_k=1, repeat_penalty=1.0) == drawn(7, min_p=1.0)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "expertswarm"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'; there is 'demo'"):
        client.models.retrieve("gpt-4")


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="n: is not supported") as refused:
        client.chat.completions.create(model="demo", messages=HELLO, n=2)  # type: ignore[arg-type]
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt=[5] * 100_001)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="token id 99999 is not in the vocabulary"):
        client.completions.create(model="demo", prompt=[99999])


# ---- several at once


def test_answers_made_at_once_are_those_made_alone(server: Server) -> None:
    def text(prompt: str) -> Any:
        status, found = ask(server, prompt=prompt, max_tokens=24, temperature=0.9, seed=4)
        assert status == 200, found
        return found["choices"][0]["text"], found["usage"]["completion_tokens"]

    alone = {prompt: text(prompt) for prompt in PROMPTS}
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert dict(zip(PROMPTS, pool.map(text, PROMPTS), strict=True)) == alone


def test_who_hangs_up_is_forgotten_at_once(server: Server) -> None:
    before = server.get("/status")["server"]["counts"]["answers"].get("cancelled", 0)
    with server.stream({"prompt": PROMPT, **ENDLESS}) as events:
        next(events)
        assert server.load()["running"] == 1
    until(lambda: server.load()["running"] == 0, "the streamed answer ended")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": PROMPT, **ENDLESS})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    until(lambda: server.load()["running"] == 1, "the answer in one piece began")
    connection.close()
    until(lambda: server.load()["running"] == 0, "the answer in one piece ended")
    assert server.get("/status")["server"]["counts"]["answers"]["cancelled"] == before + 2


def test_curl_streams_and_hangs_up(server: Server) -> None:
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d"]
    short = subprocess.run(
        [*command, json.dumps({"prompt": PROMPT, "max_tokens": 4, "stream": True})],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    *_, last, done = [line for line in short.stdout.splitlines() if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    endless = json.dumps({"prompt": PROMPT, **ENDLESS, "stream": True})
    with subprocess.Popen([*command, endless], stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith(b"data: {")
        assert server.load()["running"] == 1
        curl.kill()
    until(lambda: server.load()["running"] == 0, "curl's answer ended")


def test_a_full_queue_is_told_and_moves_on(tmp_path: Path, cache: Path) -> None:
    limits = ("--parallel", "1", "--queue", "1", "--workers", "0", "-c", "100000")
    with serving(tmp_path, *limits, cache=cache) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        with server.stream({"prompt": PROMPT, **ENDLESS}) as events:
            next(events)
            second = pool.submit(ask, server)
            until(lambda: server.load()["waiting"] == 1, "the second request waits")
            body = json.dumps({"prompt": PROMPT}).encode()
            status, headers, data = server.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(data)["error"] == {
                "message": "2 requests are under way or wait; try again later",
                "type": "server_error", "param": None, "code": "queue_full",
            }  # fmt: skip
            assert not second.done()
            assert b"expertswarm_refused_total 1.0" in server.request("GET", "/metrics")[2]
        assert second.result(60)[1]["choices"][0]["text"] == TEXT[: len(second.result()[1]["choices"][0]["text"])]
        # The real client waits for as long as it is told, and asks again.
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=50) as client:
            with server.stream({"prompt": PROMPT, **ENDLESS}) as events:
                next(events)
                second = pool.submit(ask, server)
                until(lambda: server.load()["waiting"] == 1, "the second request waits")
                third = pool.submit(client.completions.create, model="demo", prompt=PROMPT, max_tokens=2)
                until(lambda: server.stderr.read_text().count(" 503 ") >= 2, "the client was refused once")
            assert second.result(60)[0] == 200
            assert third.result(60).choices[0].finish_reason == "length"


# ---- workers


def test_a_worker_that_dies_changes_no_answer(tmp_path: Path, cache: Path) -> None:
    with serving(tmp_path, "--workers", "2", cache=cache) as server:
        lasting = {"max_tokens": 150, "ignore_eos": True}
        alone = [ask(server, prompt=prompt, **lasting)[1]["choices"][0]["text"] for prompt in PROMPTS[:5]]
        victim, _ = server.workers()
        begun = queue.SimpleQueue[str]()

        def streamed(prompt: str) -> tuple[str, Any]:
            text, origin = "", None
            with server.stream({"prompt": prompt, **lasting}) as events:
                for event in events:
                    if not text:
                        begun.put(prompt)
                    text += event["choices"][0]["text"]
                    origin = event.get("expertswarm", origin)
            return text, origin

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(streamed, prompt) for prompt in PROMPTS[:4]]
            for _ in answers:
                begun.get(timeout=60)
            os.kill(victim, signal.SIGKILL)
            found = [answer.result(60) for answer in answers]
        assert [text for text, _ in found] == alone[:4]
        live = server.get("/status")["server"]
        assert {w["state"] for w in live["workers"]} == {"lost", "serving"}
        told = [origin["failures"] for _, origin in found]
        assert any("local-1" in failures for failures in told), (told, live["workers"])
        later = ask(server, prompt=PROMPTS[4], **lasting)[1]
        assert later["choices"][0]["text"] == alone[4]
        assert later["expertswarm"]["failures"] == {}  # it had none of its own
        metrics = server.request("GET", "/metrics")[2].decode()
        assert 'expertswarm_worker_failures_total{worker="local-1"} 1.0' in metrics
        assert 'expertswarm_worker_serving{worker="local-1"} 0.0' in metrics


def test_a_worker_that_dies_while_nobody_asks_is_missed(tmp_path: Path, cache: Path) -> None:
    with serving(tmp_path, "--workers", "2", cache=cache) as server:
        _, victim = server.workers()
        os.kill(victim, signal.SIGKILL)
        until(
            lambda: [w["state"] for w in server.get("/status")["server"]["workers"]] == ["serving", "lost"],
            "its end was noticed",
        )
        assert ask(server, max_tokens=64)[1]["choices"][0]["text"] == TEXT


# ---- what operators look at


def test_status_health_and_metrics(server: Server) -> None:
    assert ask(server)[0] == 200
    assert server.get("/health") == {"status": "ok"}
    status = server.get("/status")
    assert status["problems"] == []
    assert status["settings"]["parallel"]["value"] == 4
    live = status["server"]
    assert (live["url"], live["pid"], live["model"]) == (server.url, server.process.pid, "demo")
    assert live["load"] | {"kept": 0} == {"running": 0, "waiting": 0, "kept": 0, "parallel": 4, "queue": 64}
    calls = sum(w["calls"] for w in live["workers"])
    assert (calls > 0) == bool(server.workers())
    status_code, headers, body = server.request("GET", "/metrics")
    assert (status_code, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    assert float(samples['expertswarm_answers_total{stop="limit"}']) >= 1
    assert float(samples['expertswarm_tokens_total{kind="answer"}']) >= 8
    assert float(samples["expertswarm_running"]) == 0
    assert sum(float(v) for k, v in samples.items() if k.startswith("expertswarm_worker_calls_total")) == calls


def test_each_request_has_a_line_of_log_without_a_word_of_it(server: Server) -> None:
    status, found = ask(server, prompt="zebra crossing")
    assert status == 200
    line = f"POST /v1/completions 200 {found['usage']['prompt_tokens']}+8 tokens "
    until(lambda: line in server.stderr.read_text().splitlines()[-1], "the request is logged")
    assert "zebra" not in server.stderr.read_text()
    server.request("GET", "/a%0ab%1b[31m")
    until(lambda: "GET /a?b?[31m 404" in server.stderr.read_text(), "the path is written plainly")


# ---- who means no good


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code"),
    [
        ("POST", "/v1/completions", {"Content-Type": "application/json"}, b'{"prompt": ', 400, "invalid_json"),
        ("POST", "/v1/completions", {"Content-Type": "text/plain"}, b'{"prompt": "a"}', 415, "content_type"),
        ("POST", "/v1/completions", {}, b'{"prompt": "a"}', 415, "content_type"),
        ("POST", "/v1/completions", {"Content-Type": "application/json"}, b'{"prompt": "\\ud800"}', 400, "usage"),
        ("POST", "/v1/completions", {"Content-Type": "application/json"}, b'{"model": "\\ud800", "prompt": "a"}', 404,
         "model_not_found"),
        ("POST", "/v1/chat/completions", {"Content-Type": "application/json"},
         b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "chat_template"),
        ("GET", "/v1/completions", {}, None, 405, None),
        ("GET", "/v1/../../etc/passwd", {}, None, 404, None),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", {}, None, 404, "model_not_found"),
        ("OPTIONS", "/v1/completions", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}, None,
         405, None),
        ("GET", "/health", {"Host": "evil.example"}, None, 403, "host_not_allowed"),
        ("GET", "/health", {"Host": "evil.example:8080"}, None, 403, "host_not_allowed"),
        ("GET", "/private/status", {}, None, 401, "invalid_api_key"),
        ("GET", "/private/status", {"Authorization": "Bearer wrong"}, None, 401, "invalid_api_key"),
        ("POST", "/private/generate", {"Content-Type": "application/json"}, b"{}", 401, "invalid_api_key"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(
    server: Server, method: str, path: str, headers: dict[str, str], body: bytes | None, status: int, code: str | None
) -> None:
    found, sent, data = server.request(method, path, body, headers)
    assert found == status, data
    error = json.loads(data)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "\n" not in error["message"]
    assert not [name for name in sent if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:8080", "LocalHost:80"])
def test_names_of_this_machine_are_fine(server: Server, host: str) -> None:
    assert server.request("GET", "/health", None, {"Host": host})[0] == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_limit_is_not_read(server: Server, is_chunked: bool) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {1 << 40}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        connection.sendall(head.encode())
        if is_chunked:
            block = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            with contextlib.suppress(OSError):  # it has heard enough
                for _ in range(MAX_BODY_BYTES // 0x10000 + 1):
                    connection.sendall(block)
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413 ")
    assert server.get("/health") == {"status": "ok"}


def test_a_failing_template_is_the_requests_fault_and_one_line(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}{{ raise_exception('no\nway') }}{% endfor %}")
    with serving(tmp_path, "--workers", "0", "--template", "bad.jinja", cache=cache) as server:
        status, found = server.post("/v1/chat/completions", {"messages": HELLO})
        assert (status, found["error"]["code"]) == (400, "chat_template")
        assert "no way" in found["error"]["message"]


def test_with_a_key_nothing_but_health_is_open(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "key").write_text("sesame-öffne-dich\n")
    options = ("--workers", "0", "--http", "0.0.0.0:0", "--api-key-file", "key")
    with serving(tmp_path, *options, cache=cache, EXPERTSWARM_API_KEY="not this one") as server:
        assert server.request("GET", "/health")[0] == 200
        for path in ("/v1/models", "/status", "/metrics", "/nowhere"):
            status, headers, body = server.request("GET", path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert server.post("/v1/completions", {"prompt": "a"}, Authorization="Bearer not this one")[0] == 401
        assert server.post("/v1/completions", {"prompt": "a"}, Authorization="Basic sesame")[0] == 401
        key = "Bearer sesame-öffne-dich".encode().decode("latin-1")
        status, found = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, Authorization=key)
        assert (status, found["usage"]["completion_tokens"]) == (200, 2)
        # Its name is not ours to know where others reach it: the key is what counts.
        assert server.request("GET", "/health", None, {"Host": "models.example"})[0] == 200
        shown = server.request("GET", "/status", None, {"Authorization": key})[2].decode()
        assert "sesame" not in shown
        assert json.loads(shown)["settings"]["api_key"]["value"] == "(set)"


# ---- how it starts and ends


def refusal(folder: Path, *args: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "backbone", "serve", *args],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=environ_of(folder, **environ),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_what_it_refuses_to_start_with(tmp_path: Path) -> None:
    assert "others can reach it, so it needs --api-key-file FILE" in refusal(tmp_path, "--http", "0.0.0.0:0")
    assert "others can reach it" in refusal(tmp_path, "--http", "[::]:0")
    assert "http (flag --http): '8080' is not HOST:PORT" in refusal(tmp_path, "--http", "8080")
    assert "'localhost:99999' is not HOST:PORT" in refusal(tmp_path, "--http", "localhost:99999")
    assert "absent: cannot be read" in refusal(tmp_path, "--api-key-file", "absent")
    (tmp_path / "empty").write_text("\n")
    assert "its first line is empty" in refusal(tmp_path, "--api-key-file", "empty")
    assert "--parallel: 0 is out of range" in refusal(tmp_path, "--parallel", "0")
    assert "no model 'absent'" in refusal(tmp_path, "-m", "absent", "--http", "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}: cannot listen there" in refusal(tmp_path, "--http", f"127.0.0.1:{port}")


def test_without_its_extra_it_says_which(tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('no', name='starlette')")
    found = refusal(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert found.startswith("backbone: error: serve needs starlette: pip install 'expertswarm[serve]'")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_answers_workers_and_process(tmp_path: Path, cache: Path, stop: signal.Signals) -> None:
    with serving(tmp_path, "--workers", "2", "-c", "100000", cache=cache) as server:
        with server.stream({"prompt": PROMPT, **ENDLESS}) as events:
            next(events)
            server.process.send_signal(stop)
            *_, last = events
        assert last["error"]["code"] == "cancelled"
        assert server.process.wait(60) == 0


def test_an_answer_that_ends_soon_is_finished_first(tmp_path: Path, cache: Path) -> None:
    with serving(tmp_path, "--workers", "0", cache=cache) as server:
        with server.stream({"prompt": PROMPT, "max_tokens": 100}) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
