"""`server:URL`: a running llama-server, asked for its top log-probabilities by the ids of the prompt.

Its API: tools/server/README.md of llama.cpp, and server-task.cpp for the shapes of answers. Ollama is refused: its API
takes text, which it tokenizes itself, and gives log-probabilities of texts: neither can be held to ids.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kernels.interface import F32, I32, DenseBackend

from ..errors import BackboneError, UsageError
from ..session import Session
from ..settings import Settings
from .loopback import Loopback, one_line
from .partials import ranked
from .passage import Passage
from .sides import Partial, Side, told_of_outside

FORM = "http://127.0.0.1:PORT[/every=N][/top=N][/timeout=SECONDS]"
TOP, LEAST_TOP, MOST_TOP = 64, 2, 1 << 18  #: tokens of a position
TIMEOUT_S, MOST_TIMEOUT_S = 120, 86400
MOST_VOCABULARY = 1 << 21
MOST_CONTEXT = 1 << 24
ROUNDING = 1e-2  #: of a sum of probabilities in float32
NO_PROBABILITY = -1e30  #: llama-server has the lowest float32 for the logarithm of 0
#: Names and numbers in several scripts: another vocabulary splits it in another way.
SAMPLE = "In the beginning, 12345 tokens were split — naïvely, into subwörds; Москва, 東京, f(x) = x² + 1.\n\tEnd."
GREEDY: Mapping[str, Any] = {
    "temperature": 0,
    "samplers": ["top_k"],
    "top_k": 1,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "cache_prompt": True,
    "stream": False,
    "stop": [],
}
FIELDS = ("tokens", "stop_type", "truncated", "tokens_evaluated", "completion_probabilities")


class ServerSide:
    """llama-server: partial log-probabilities and greedy tokens, with its own routing."""

    def __init__(self, place: str, server: Loopback, *, every: int = 1, top: int = TOP) -> None:
        """BackboneError where it does not answer, UsageError where it cannot be used."""
        self._place, self._server, self._every, self._top = place, server, every, top
        props = server.ask("GET", "/props", may_lack=True)
        if not isinstance(props, dict):
            self._refuse_unknown()
        settings = props.get("default_generation_settings")
        self._context = _whole(settings.get("n_ctx") if isinstance(settings, dict) else None, MOST_CONTEXT)
        self._vocabulary = self._asked_vocabulary()
        self.numeric_class, self.precision = "", "outside"
        self.told: Mapping[str, Any] = told_of_outside(place, "server", "llama-server") | {
            "model": _said(props.get("model_path")),
            "build": _said(props.get("build_info")),
            "vocabulary": self._vocabulary,
            "every": every,
            "top": top,
        }
        self.passage: Passage | None = None
        self.backend: DenseBackend | None = None
        self.session: Session | None = None
        self.holds: Mapping[int, Collection[int]] | None = None

    @property
    def every(self) -> int:
        """A request a position is slow, so that some may be left out."""
        return self._every

    def _refuse_unknown(self) -> None:
        version = self._server.ask("GET", "/api/version", may_lack=True)
        if isinstance(version, dict) and "version" in version:
            raise UsageError(
                f"{self._place}: is Ollama {_said(version['version'])}, which takes text and gives no token ids; "
                "serve the same file with llama-server"
            )
        raise UsageError(f"{self._place}: is no llama-server, for it has no /props")

    def _asked_vocabulary(self) -> int | None:
        """As /v1/models has it; None where a server does not say."""
        models = self._server.ask("GET", "/v1/models", may_lack=True)
        data = models.get("data") if isinstance(models, dict) else None
        meta = data[0].get("meta") if isinstance(data, list) and data and isinstance(data[0], dict) else None
        return _whole(meta.get("n_vocab") if isinstance(meta, dict) else None, MOST_VOCABULARY)

    def refuse_other(self, other: Side) -> None:
        """By the size of the vocabulary and how it splits a text; which weights it has nobody can ask."""
        session = other.session
        if session is None:
            return
        count = session.model.vocabulary
        if self._vocabulary is not None and self._vocabulary != count:
            raise UsageError(f"{self._place}: its model has {self._vocabulary} tokens and ours {count}")
        body = {"content": SAMPLE, "add_special": False, "parse_special": False}
        found = self._server.ask("POST", "/tokenize", body, may_lack=True)
        theirs = found.get("tokens") if isinstance(found, dict) else None
        if found is not None and theirs != session.tokenizer().encode(SAMPLE, add_special=False, parse_special=False):
            raise UsageError(f"{self._place}: splits text into other tokens than our model does; serve the same file")

    def begin(self, window: int) -> None:
        """No logits of all tokens."""

    def rows(self, layer: int, x: F32, ids: I32) -> None:
        """Nothing."""

    def partial(self, tokens: Sequence[int], at: int) -> Partial:
        """One request. BackboneError for an answer that cannot be."""
        # An end token that were next would end the answer without its probabilities.
        found = self._complete(tokens[: at + 1], 1, n_probs=self._top, post_sampling_probs=False, ignore_eos=True)
        given = found.get("completion_probabilities")
        first = given[0] if isinstance(given, list) and given else None
        listed = first.get("top_logprobs") if isinstance(first, dict) else None
        if not isinstance(listed, list) or not LEAST_TOP <= len(listed) <= self._top:
            raise self._odd(f"no {LEAST_TOP} to {self._top} log-probabilities by id; is it older than December 2024?")
        ids, log_probs = list[int](), list[float]()
        for one in listed:
            token, log_prob = _pair(one)
            if not 0 <= token < (self._vocabulary or MOST_VOCABULARY):
                raise self._odd("ids that are no tokens of its vocabulary")
            if not log_prob <= ROUNDING:
                raise self._odd("numbers that are no log-probabilities")
            if log_prob > NO_PROBABILITY:
                ids.append(token)
                log_probs.append(log_prob)
        if len(set(ids)) != len(ids) or len(ids) < LEAST_TOP or math.fsum(map(math.exp, log_probs)) > 1 + ROUNDING:
            raise self._odd("log-probabilities that are of no distribution")
        return ranked(np.asarray(ids, np.int64), np.asarray(log_probs, np.float64))

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy; an end token, where there is one, is the last."""
        found = self._complete(prompt, count, return_tokens=True)
        tokens = found.get("tokens")
        most = self._vocabulary or MOST_VOCABULARY
        if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < most for one in tokens):
            raise self._odd("no ids of the tokens that it made")
        if len(tokens) > count or (len(tokens) < count and found.get("stop_type") != "eos"):
            raise self._odd(f"{len(tokens)} tokens where {count} were asked for")
        return tokens

    def _complete(self, prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
        if self._context is not None and len(prompt) + count > self._context:
            raise UsageError(
                f"{self._place}: {len(prompt) + count} tokens do not fit its context of {self._context}; "
                "start it with a larger -c"
            )
        body = {"prompt": list(prompt), "n_predict": count, "response_fields": FIELDS, **GREEDY, **more}
        found = self._server.ask("POST", "/completion", body)
        if not isinstance(found, dict):
            raise self._odd("what is no object")
        if found.get("truncated") is True or found.get("tokens_evaluated", len(prompt)) != len(prompt):
            raise self._odd("for another prompt than the one that was given")
        return found

    def _odd(self, what: str) -> BackboneError:
        return BackboneError(f"{self._place}: /completion answers {what}")


def _pair(one: Any) -> tuple[int, float]:
    """The id and log-probability of a token; impossible ones for what is neither."""
    token, log_prob = (one.get("id"), one.get("logprob")) if isinstance(one, dict) else (None, None)
    if type(token) is not int or not isinstance(log_prob, int | float) or isinstance(log_prob, bool):
        return -1, math.inf
    return token, log_prob


def _whole(found: Any, most: int) -> int | None:
    return found if type(found) is int and 0 < found <= most else None


def _said(text: Any) -> str:
    return one_line(text) if isinstance(text, str) else ""


@contextmanager
def open_server(flag: str, rest: str, settings: Settings, context: int) -> Iterator[Side]:
    """The side `server:URL`, with its options behind the address."""
    place = f"{flag} server:{one_line(rest)}"
    scheme, slashes, tail = rest.partition("://")
    address, *pairs = tail.rstrip("/").split("/")
    found = {"every": 1, "top": TOP, "timeout": TIMEOUT_S}
    bounds = {"every": (1, MOST_CONTEXT), "top": (LEAST_TOP, MOST_TOP), "timeout": (1, MOST_TIMEOUT_S)}
    for pair in pairs:
        key, _, value = pair.partition("=")
        least, most = bounds.get(key, (0, 0))
        if key not in bounds or not (value.isascii() and value.isdecimal() and len(value) < 9):
            raise UsageError(f"{place}: {one_line(pair)!r} is nothing of {FORM}")
        if not least <= int(value) <= most:
            raise UsageError(f"{place}: {key} is from {least} to {most}")
        found[key] = int(value)
    server = Loopback(place, f"{scheme}{slashes}{address}", timeout_s=found["timeout"])
    yield ServerSide(place, server, every=found["every"], top=found["top"])
