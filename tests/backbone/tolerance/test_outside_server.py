"""The side `server:URL` against a llama-server that answers from our own engine, also where it lies."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outside_kit import ALL, Answer, Handler, findings, llama_server, of_kind, passage, session_of, side
from server_kit import until

from backbone.discovery import DEMO
from backbone.errors import BackboneError, UsageError
from backbone.session import Session
from backbone.tolerance.loopback import Loopback
from backbone.tolerance.outside_server import ServerSide
from backbone.tolerance.sides import Side

#: A build of llama.cpp's server, for the one test against the real thing.
LLAMA_SERVER = os.environ.get("TESTS_LLAMA_SERVER", "")


@pytest.fixture(scope="module")
def native() -> Iterator[Side]:
    with side("native", "--a") as opened:
        yield opened


@pytest.fixture(scope="module")
def session(native: Side) -> Session:
    return session_of(native)


def test_our_own_figures_come_back_as_our_own(native: Side, session: Session) -> None:
    over = passage(session, positions=72, window=36)
    with llama_server(session) as server, side(f"{server.spec}/top=40") as outside:
        found = findings(native, outside, over)
        windows = of_kind(found, "window")
        assert [one["positions"] for one in windows] == [list(range(36))] * 2
        assert server.prompts()[:2] == [list(over.windows[0][:1]), list(over.windows[0][:2])]
    for one in windows:
        assert one["partial"] is True
        assert one["given"] == [40] * 36
        assert one["counted"] == len(one["kl"]) == len(one["l_inf"]) == 36
        assert max(one["kl"]) < 1e-12
        assert max(one["l_inf"]) < 1e-5  # they went over the wire as float32
        assert one["flips"] == []
    assert [one["diverged"] for one in of_kind(found, "generation")] == [None, None]
    assert [len(one["b"]) for one in of_kind(found, "generation")] == [6, 6]


def test_what_a_server_does_not_say_is_empty(native: Side, session: Session) -> None:
    """Levels 1, 2 and 6, routing, and that bits are the same: a judge finds nothing to pass."""
    with llama_server(session) as server, side(server.spec) as outside:
        found = findings(native, outside, passage(session, positions=8, window=8), ALL)
    operations = of_kind(found, "operation")
    assert operations
    assert all(one["b"] is None and one["identical"] is False and one["a"] for one in operations)
    assert found["merging"]["b"] is None
    (window,) = of_kind(found, "window")
    assert window["drift"] == {}
    assert window["nll_a"] == window["nll_b"] == window["l2"] == []
    assert (window["identical"], window["residuals_identical"], window["decisions"]) == (0, False, 0)


def test_another_model_behind_it_is_seen(native: Side, session: Session) -> None:
    """A server whose every answer is that of the prompt before the last token."""

    def late(handler: Handler, body: Any) -> None:
        whole = handler.server._completion(body | {"prompt": body["prompt"][:-1] or body["prompt"]})
        handler.reply(json.dumps(whole | {"tokens_evaluated": len(body["prompt"])}).encode())

    over = passage(session, positions=24, window=24)
    with llama_server(session, completion=late) as server, side(server.spec) as outside:
        (window,) = of_kind(findings(native, outside, over, (3, 4)), "window")
    assert window["kl"][0] < 1e-12
    assert np.mean(window["kl"][1:]) > 1
    assert len(window["flips"]) > 10
    flip = window["flips"][0]
    row = session.engine.extend(session.engine.new_sequence(), over.windows[0][: flip["position"] + 1])[-1]
    assert flip["a"] == row.argmax()
    assert flip["margin_a"] == pytest.approx(np.diff(np.sort(row)[-2:])[0], abs=1e-5)
    assert flip["margin_b"] >= 0


def test_two_servers_can_be_compared(session: Session) -> None:
    over = passage(session, positions=6, window=6)
    with llama_server(session) as server, side(server.spec, "--a") as a, side(f"{server.spec}/top=5/every=2") as b:
        (window,) = of_kind(findings(a, b, over, (3,)), "window")
    assert (window["given"], window["positions"], max(window["kl"])) == ([5] * 3, [0, 2, 4], 0.0)


def test_positions_are_thinned(native: Side, session: Session) -> None:
    over = passage(session, positions=100, window=100)
    with llama_server(session) as server, side(f"{server.spec}/every=30") as outside:
        (window,) = of_kind(findings(native, outside, over, (3,)), "window")
        assert [len(prompt) for prompt in server.prompts()] == [1, 31, 61, 91]
    assert window["positions"] == [0, 30, 60, 90]
    assert max(window["kl"]) < 1e-12


def test_it_asks_greedily_and_for_raw_probabilities(session: Session) -> None:
    with llama_server(session) as server, side(f"{server.spec}/top=7") as outside:
        assert isinstance(outside, ServerSide)
        outside.partial([1, 2, 3], 1)
        outside.generate([1, 2, 3], 4)
        (_, once), (_, made) = server.asked[-2:]
    assert (once["prompt"], once["n_predict"], once["n_probs"], once["cache_prompt"]) == ([1, 2], 1, 7, True)
    assert once["post_sampling_probs"] is False
    assert (once["temperature"], once["samplers"], once["top_k"]) == (0, ["top_k"], 1)
    assert (made["prompt"], made["n_predict"], made["return_tokens"]) == ([1, 2, 3], 4, True)


def test_an_end_token_ends_a_generation(native: Side, session: Session) -> None:
    over = passage(session, positions=16, window=8)
    with llama_server(session) as server, side(server.spec) as outside:
        mine = native.generate(over.windows[0], 6)
        assert mine is not None
        server.end_token = mine[2]
        found = of_kind(findings(native, outside, over, (5,)), "generation")[0]
    assert found["b"] == mine[: mine.index(mine[2]) + 1]
    assert found["diverged"] is None


def test_it_says_what_the_server_says_of_itself(session: Session) -> None:
    with llama_server(session) as server, side(server.spec) as outside:
        told = outside.told
    assert (told["kind"], told["precision"], told["routing"]) == ("server", "outside", "its own")
    assert (told["model"], told["build"], told["vocabulary"]) == ("/models/verse.gguf", "b1-0c1e570", 4096)
    assert outside.numeric_class == ""


# ---- what is refused


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://127.0.0.1:1", "is not http://HOST:PORT"),
        ("http://192.168.1.2:80", "192.168.1.2 is not this machine; give http://127.0.0.1:PORT"),
        ("http://example.org", "is not this machine"),
        ("http://127.0.0.1.example.org:80", "is not this machine"),
        ("http://0.0.0.0:80", "is not this machine"),
        ("http://me@127.0.0.1:80", "is not http://HOST:PORT"),
        ("http://127.0.0.1:80?x=1", "is not http://HOST:PORT"),
        ("http://127.0.0.1:99999", "Port out of range"),
        ("127.0.0.1:80", "is not http://HOST:PORT"),
        ("http://[::1", "Invalid IPv6"),
        ("http://127.0.0.1:80/v1", "'v1' is nothing of http://127.0.0.1:PORT[/every=N]"),
        ("http://127.0.0.1:80/every=0", "every is from 1 to"),
        ("http://127.0.0.1:80/every=-1", "'every=-1' is nothing of"),
        ("http://127.0.0.1:80/top=1", "top is from 2 to"),
        ("http://127.0.0.1:80/timeout=³", "is nothing of"),
    ],
)
def test_only_servers_of_this_machine(url: str, why: str) -> None:
    with pytest.raises(UsageError) as error, side(f"server:{url}"):
        pass
    assert str(error.value).startswith(f"--b server:{url}: ")
    assert why in str(error.value)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with (
            pytest.raises(BackboneError, match=r"/props is not answered: .*refused"),
            side(f"server:http://127.0.0.1:{port}"),
        ):
            pass


def test_ollama_is_refused_for_it_takes_no_ids(session: Session) -> None:
    def version(handler: Handler, body: Any) -> None:
        handler.reply(b'{"version":"0.12.11"}')

    with llama_server(session, api__version=version) as server:
        del server.answers["/props"]
        with (
            pytest.raises(UsageError, match=r"is Ollama 0\.12\.11, which takes text and gives no token ids"),
            side(server.spec),
        ):
            pass


def test_something_else_is_refused(session: Session) -> None:
    with llama_server(session) as server:
        del server.answers["/props"]
        with pytest.raises(UsageError, match="is no llama-server"), side(server.spec):
            pass


def _replies(data: Any, status: int = 200, **headers: str) -> Answer:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return lambda handler, body: handler.reply(raw, status, **headers)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (
            {"v1__models": _replies({"data": [{"meta": {"n_vocab": 49152}}]})},
            "its model has 49152 tokens and ours 4096",
        ),
        ({"tokenize": _replies({"tokens": [1, 2, 3]})}, "splits text into other tokens"),
        ({"tokenize": _replies({"tokens": None})}, "splits text into other tokens"),
    ],
)
def test_another_vocabulary_is_refused(native: Side, session: Session, answers: dict[str, Answer], why: str) -> None:
    over = passage(session, positions=4, window=4)
    with llama_server(session, **answers) as server, side(server.spec) as outside:
        with pytest.raises(UsageError, match=why):
            findings(native, outside, over, (3,))
        assert server.prompts() == []


def test_an_older_server_that_does_not_say_its_vocabulary(native: Side, session: Session) -> None:
    over = passage(session, positions=4, window=4)
    with llama_server(session, v1__models=_replies({"data": [{"id": "x"}]})) as server:
        del server.answers["/tokenize"]
        with side(server.spec) as outside:
            assert outside.told["vocabulary"] is None
            assert of_kind(findings(native, outside, over, (3,)), "window")[0]["counted"] == 4


def test_a_prompt_that_does_not_fit_is_not_sent(session: Session) -> None:
    with llama_server(session, props=_replies({"default_generation_settings": {"n_ctx": 8}})) as server:
        with side(server.spec) as outside:
            assert isinstance(outside, ServerSide)
            with pytest.raises(UsageError, match="9 tokens do not fit its context of 8; start it with a larger -c"):
                outside.partial([1] * 20, 7)
        assert server.prompts() == []


def _entries(*pairs: tuple[Any, Any]) -> Any:
    listed = [{"id": token, "logprob": log_prob} for token, log_prob in pairs]
    return {"completion_probabilities": [{"top_logprobs": listed}]}


FINE = ((1, -0.7), (2, -1.0))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_replies(b"<html>"), "answers what is no JSON"),
        (_replies(b"[" * 100_000), "answers what is no JSON"),
        (_replies(b"\xff\xfe"), "answers what is no JSON"),
        (_replies([1]), "answers what is no object"),
        (_replies({}), "no 2 to 64 log-probabilities by id"),
        (_replies({"completion_probabilities": [{"probs": [{"tok_str": "a", "prob": 0.5}]}]}), "older than December 2024"),
        (_replies(_entries((1, -0.7))), "no 2 to 64 log-probabilities"),
        (_replies(_entries(*[(i, -9.0) for i in range(65)])), "no 2 to 64 log-probabilities"),
        (_replies(b'{"completion_probabilities":[{"top_logprobs":[{"id":1,"logprob":NaN},{"id":2,"logprob":-1}]}]}'), "no JSON"),
        (_replies(b'{"completion_probabilities":[{"top_logprobs":[{"id":1,"logprob":1e999},{"id":2,"logprob":-1}]}]}'), "no log-probabilities"),
        (_replies(_entries((1, None), (2, -1.0))), "ids that are no tokens"),
        (_replies(_entries((4096, -0.7), (2, -1.0))), "ids that are no tokens"),
        (_replies(_entries((-1, -0.7), (2, -1.0))), "ids that are no tokens"),
        (_replies(_entries((True, -0.7), (2, -1.0))), "ids that are no tokens"),
        (_replies(_entries((1.0, -0.7), (2, -1.0))), "ids that are no tokens"),
        (_replies(_entries((1, 0.7), (2, -1.0))), "numbers that are no log-probabilities"),
        (_replies(_entries((1, 10**400), (2, -1.0))), "numbers that are no log-probabilities"),
        (_replies(_entries((1, -0.7), (1, -1.0))), "of no distribution"),
        (_replies(_entries((1, -0.1), (2, -0.1))), "of no distribution"),
        (_replies(_entries((1, -0.7), (2, -3.4028234663852886e38))), "of no distribution"),
        (_replies(_entries(*FINE) | {"tokens_evaluated": 4}), "for another prompt than the one that was given"),
        (_replies(_entries(*FINE) | {"truncated": True}), "for another prompt"),
        (_replies({"error": {"message": "Loading\nmodel\x1b[31m"}}, 503), "fails with status 503: Loading model"),
        (_replies({"error": "no"}, 401), "fails with status 401: no"),
        (_replies(b"", 500), "fails with status 500"),
        (_replies(b"{}", Content_Length="99999999999"), "answers with more than 67108864 bytes"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_is_one_line(session: Session, answer: Answer, why: str) -> None:
    with llama_server(session, completion=answer) as server, side(server.spec) as outside:
        assert isinstance(outside, ServerSide)
        with pytest.raises(BackboneError) as error:
            outside.partial([1, 2, 3], 2)
    assert why in str(error.value)
    assert str(error.value).isprintable()
    assert str(error.value).startswith(f"--b {server.spec}: ")


class Says(Loopback):
    """A server whose completions are whatever is given."""

    def __init__(self, answer: Any) -> None:
        super().__init__("s", "http://127.0.0.1:1", timeout_s=1)
        self.answer = answer

    def ask(self, method: str, path: str, body: Any = None, *, may_lack: bool = False) -> Any:
        return self.answer if path == "/completion" else {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
ENTRY = JSON | st.fixed_dictionaries({"id": st.integers(-1, 20) | JSON, "logprob": st.floats(-9, 0) | JSON})


@given(
    JSON | st.fixed_dictionaries({"completion_probabilities": JSON | st.just([{"top_logprobs": []}])}),
    st.lists(ENTRY, max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_any_answer_is_a_distribution_or_one_line(answer: Any, entries: list[Any]) -> None:
    if isinstance(answer, dict) and answer.get("completion_probabilities") == [{"top_logprobs": []}]:
        answer["completion_probabilities"][0]["top_logprobs"] = entries
    outside = ServerSide("s", Says(answer))
    try:
        found = outside.partial([1, 2, 3], 1)
    except BackboneError as error:
        assert str(error).startswith("s: /completion answers ")
        return
    assert len(set(found.ids.tolist())) == len(found.ids) >= 2
    assert np.exp(found.log_probs).sum() <= 1.02
    assert (np.diff(found.log_probs) <= 0).all()


def test_a_probability_of_nothing_is_one_of_the_others(session: Session) -> None:
    lowest = _replies(_entries((1, -0.7), (2, -1.0), (3, -3.4028234663852886e38)))
    with llama_server(session, completion=lowest) as server, side(server.spec) as outside:
        assert isinstance(outside, ServerSide)
        assert outside.partial([1], 0).ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"tokens": [1, 2]}, "2 tokens where 4 were asked for"),
        ({"tokens": [1, 2, 3, 4, 5]}, "5 tokens where 4 were asked for"),
        ({"tokens": [1, 2, 3, 4096]}, "no ids of the tokens that it made"),
        ({"tokens": "abcd"}, "no ids of the tokens that it made"),
        ({"content": "abcd"}, "no ids of the tokens that it made"),
    ],
)
def test_tokens_that_cannot_be(session: Session, answer: Any, why: str) -> None:
    with llama_server(session, completion=_replies(answer)) as server, side(server.spec) as outside:
        ask = outside.generate
        with pytest.raises(BackboneError, match=why):
            ask([1, 2, 3], 4)


def test_a_redirect_is_not_followed(session: Session) -> None:
    with llama_server(session) as server:
        server.answers["/completion"] = _replies(b"", 307, Location=f"http://127.0.0.1:{server.server_port}/elsewhere")
        with side(server.spec) as outside:
            assert isinstance(outside, ServerSide)
            with pytest.raises(BackboneError, match="is elsewhere .status 307.; give the server's own address"):
                outside.partial([1, 2], 1)
        assert "/elsewhere" not in [path for path, _ in server.asked]


def _silent(handler: Handler, body: Any) -> None:
    handler.server.ended.wait()


def _dripping(handler: Handler, body: Any) -> None:
    """Never silent for as long as a timeout, and never at an end."""
    handler.send_response(200)
    handler.end_headers()
    try:
        while not handler.server.ended.wait(0.02):
            handler.wfile.write(b" ")
            handler.wfile.flush()
    except OSError:
        pass


def _dripping_headers(handler: Handler, body: Any) -> None:
    try:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\nX: ")
        while not handler.server.ended.wait(0.02):
            handler.wfile.write(b"x")
            handler.wfile.flush()
    except OSError:
        pass


@pytest.mark.parametrize("answer", [_silent, _dripping, _dripping_headers])
def test_a_server_that_hangs_is_given_up(session: Session, answer: Answer) -> None:
    with llama_server(session, props=answer) as server:
        loopback = Loopback("--b s", server.spec.partition(":")[2], timeout_s=0.3)
        with pytest.raises(
            BackboneError, match=r"--b s: /props took more than 0\.3 s; allow more with /timeout=SECONDS"
        ):
            ServerSide("--b s", loopback)


def test_an_endless_body_is_given_up(session: Session) -> None:
    def endless(handler: Handler, body: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b" " * 4096)
        except OSError:
            pass

    with llama_server(session, props=endless) as server:
        loopback = Loopback("--b s", server.spec.partition(":")[2], timeout_s=60, most_bytes=100_000)
        with pytest.raises(BackboneError, match="/props answers with more than 100000 bytes"):
            ServerSide("--b s", loopback)


def test_one_that_ends_in_the_middle(session: Session) -> None:
    why = "/props is not answered: IncompleteRead"
    with (
        llama_server(session, props=_replies(b"{}", Content_Length="50")) as server,
        pytest.raises(BackboneError, match=why),
        side(server.spec),
    ):
        pass


# ---- the real one


@contextmanager
def _real(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        LLAMA_SERVER,
        "-m",
        str(DEMO),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-c",
        "512",
        "-np",
        "1",
        "-t",
        "2",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Loopback("real", f"http://127.0.0.1:{port}", timeout_s=30)

            def is_up() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                try:
                    return bool(server.ask("GET", "/health"))
                except BackboneError:
                    return False

            until(is_up, "llama-server is up")
            yield f"server:http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(not LLAMA_SERVER, reason="TESTS_LLAMA_SERVER names no llama-server")
def test_a_real_llama_server(native: Side, session: Session, tmp_path: Path) -> None:
    """It rounds activations to 8 bits, so that it is near and not equal: a mean KL of some 2e-3 nats."""
    over = passage(session, positions=128, window=64)
    with _real(tmp_path) as spec, side(f"{spec}/every=2") as outside:
        found = findings(native, outside, over)
    kl = np.concatenate([one["kl"] for one in of_kind(found, "window")])
    assert len(kl) == 64
    assert 1e-6 < kl.mean() < 2e-2
    assert all(len(one["b"]) == 6 for one in of_kind(found, "generation"))
    assert math.isfinite(kl.max())
