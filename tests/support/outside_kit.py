"""What stands outside in tests: a llama-server that answers from our engine, and llama-perplexity's file."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backbone.engine import Engine
from backbone.session import Session
from backbone.settings import Settings, resolve
from backbone.tolerance.measures import log_softmax
from backbone.tolerance.passage import Passage, passage_of, shipped_text
from backbone.tolerance.runner import Found, Journal, Work, run
from backbone.tolerance.sides import Side
from backbone.tolerance.specs import open_side

ALL = (1, 2, 3, 4, 5, 6)
CONTEXT = 512


def settings(**given: str) -> Settings:
    return resolve(argparse.Namespace(**given), {}, Path("absent"))


@contextmanager
def side(spec: str, flag: str = "--b", **given: str) -> Iterator[Side]:
    """A side of the demo model, or of the one that is given."""
    with open_side(spec, flag, settings(**given), context=CONTEXT) as opened:
        yield opened


def passage(session: Session, *, positions: int, window: int) -> Passage:
    return passage_of(*shipped_text(), session.tokenizer(), positions=positions, window=window)


def session_of(one: Side) -> Session:
    assert one.session is not None
    return one.session


def findings(a: Side, b: Side, over: Passage, levels: Sequence[int] = ALL, tokens: int = 6) -> dict[str, Found]:
    """Of a whole run, as JSON takes it."""
    work = Work(passage=over, levels=levels, prompts=2, prompt_tokens=8, tokens=tokens, seed=1)
    found: dict[str, Found] = run(a, b, work, Journal(None, ""), lambda unit, done, total: None)
    again: dict[str, Found] = json.loads(json.dumps(found, allow_nan=False))
    return again


def of_kind(found: Mapping[str, Found], kind: str) -> list[Found]:
    """The units of a kind."""
    return [one for unit, one in found.items() if unit.startswith(kind)]


# ---- llama-perplexity


def kld_bytes(tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> bytes:
    """As llama-perplexity writes tokens [n_chunk, n_ctx] and logits [n_chunk, n_ctx - 1 - n_ctx / 2, V].

    perplexity.cpp, log_softmax: float32 throughout, but for the sum.
    """
    one = np.float32(1)
    count, context = tokens.shape
    vocabulary = logits.shape[2]
    high = logits.max(axis=2, keepdims=True)
    low = np.maximum(logits.min(axis=2, keepdims=True), high - np.float32(16))
    log_sum = np.log(np.exp(logits - high).astype(np.float64).sum(axis=2, keepdims=True)).astype(np.float32)
    scale = (high - low) / np.float32(65535)
    inverse = one / np.where(scale > 0, scale, one)
    q = np.where(logits > low, np.rint(inverse * (logits - low)), 0).astype("<u2")
    head = np.concatenate([scale, low - high - log_sum], axis=2).astype("<f4").view("<u2")  # [.., 4]
    padded = np.concatenate([head, q, np.zeros((*q.shape[:2], vocabulary % 2), "<u2")], axis=2)
    return (
        struct.pack("<8s3i", b"_logits_", context, vocabulary, count)
        + tokens.astype("<i4").tobytes()
        + padded.tobytes()
    )


# ---- llama-server

Answer = Callable[["Handler", Any], None]


class Handler(BaseHTTPRequestHandler):
    """One request of `LlamaServer`."""

    server: LlamaServer

    def log_message(self, *args: Any) -> None:
        """Not on the tests' output."""

    def do_GET(self) -> None:
        self._do(None)

    def do_POST(self) -> None:
        self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _do(self, body: Any) -> None:
        self.server.asked.append((self.path, body))
        answer = self.server.answers.get(self.path)
        if answer is None:
            error = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
            self.reply(json.dumps(error).encode(), 404)
        else:
            answer(self, body)

    def reply(self, data: bytes, status: int = 200, **headers: str) -> None:
        """An answer with its length."""
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


class LlamaServer(ThreadingHTTPServer):
    """The shapes are those of llama-server b1-0c1e570 (version 0.5.0), recorded with the demo model."""

    daemon_threads = True

    def __init__(self, session: Session, **answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = list[tuple[str, Any]]()
        self.ended = Event()  #: for answers that wait till nobody wants them
        self._session = session
        self._engine = Engine(session.model, session.model.local_experts, context=CONTEXT)
        self.end_token = -1  #: an answer ends at it
        self.answers: dict[str, Answer] = {
            "/props": _json_of(self._props),
            "/v1/models": _json_of(self._models),
            "/tokenize": _json_of(self._tokenize),
            "/completion": _json_of(self._completion),
            **{f"/{path.replace('__', '/')}": answer for path, answer in answers.items()},
        }

    @property
    def spec(self) -> str:
        return f"server:http://127.0.0.1:{self.server_port}"

    def prompts(self) -> list[list[int]]:
        """Those of the completions that were asked for."""
        return [body["prompt"] for path, body in self.asked if path == "/completion"]

    def _props(self, body: Any) -> Any:
        return {
            "default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": CONTEXT},
            "total_slots": 1,
            "model_path": "/models/verse.gguf",
            "build_info": "b1-0c1e570",
            "bos_token": "<|endoftext|>",
        }

    def _models(self, body: Any) -> Any:
        count = self._session.model.vocabulary
        return {"object": "list", "data": [{"id": "verse", "meta": {"vocab_type": 2, "n_vocab": count}}]}

    def _tokenize(self, body: Any) -> Any:
        special = body.get("parse_special", True)
        tokens = self._session.tokenizer().encode(
            body["content"], add_special=body.get("add_special", False), parse_special=special
        )
        return {"tokens": tokens}

    def _completion(self, body: Any) -> Any:
        sequence = self._engine.new_sequence()
        row = self._engine.extend(sequence, body["prompt"])[-1]
        tokens, listed = list[int](), list[Any]()
        while len(tokens) < body["n_predict"]:
            log_probs = log_softmax(row[None])[0]
            tokens.append(int(row.argmax()))
            top = np.argsort(-log_probs, kind="stable")[: body.get("n_probs", 0)].tolist()
            entries = [
                {"id": one, "token": "?", "bytes": [63], "logprob": float(np.float32(log_probs[one]))} for one in top
            ]
            listed.append({**(entries[0] if entries else {}), "top_logprobs": entries})
            if tokens[-1] == self.end_token:
                break
            row = self._engine.step(sequence, tokens[-1])
        whole = {
            "tokens": tokens if body.get("return_tokens") else [],
            "stop_type": "eos" if tokens[-1] == self.end_token else "limit",
            "truncated": False,
            "tokens_evaluated": len(body["prompt"]),
            "completion_probabilities": listed,
        }
        if not body.get("n_probs"):
            del whole["completion_probabilities"]
        return {key: whole[key] for key in body["response_fields"] if key in whole}


def _json_of(what: Callable[[Any], Any]) -> Answer:
    return lambda handler, body: handler.reply(json.dumps(what(body)).encode())


@contextmanager
def llama_server(session: Session, **answers: Answer) -> Iterator[LlamaServer]:
    """A server that is there till the end of the block. `answers` by path: v1__models=..."""
    with LlamaServer(session, **answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
