"""OpenAI's response objects, whole and in chunks. Ours beside them is `expertswarm`: what the answer came of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..results import Result

#: Why an answer stopped, as OpenAI has it. What was cancelled has no answer.
FINISH = {"eos": "stop", "stop": "stop", "limit": "length", "length": "length"}


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; what is no Unicode (lone surrogates, which foreign strings may hold) is written as escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One answer of one of the two endpoints."""

    is_chat: bool
    id: str
    created: int  #: Unix seconds
    model: str
    wants_usage: bool = False

    def whole(self, result: Result, cached: int) -> dict[str, Any]:
        """An answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": FINISH[result["stop"]]}
        if self.is_chat:
            choice |= {"message": {"role": "assistant", "content": result["text"], "refusal": None}}
        else:
            choice |= {"text": result["text"]}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._object(kind, [choice]) | {"usage": usage(result, cached), "expertswarm": origin(result)}

    def first(self) -> dict[str, Any] | None:
        """The chunk that comes before any text, where there is one."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}) if self.is_chat else None

    def text(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self._chunk({"content": text} if self.is_chat else text)

    def last(self, result: Result) -> dict[str, Any]:
        """The chunk that says why the answer stopped, and what it came of."""
        ended = self._chunk({} if self.is_chat else "", FINISH[result["stop"]])
        return ended | {"expertswarm": origin(result)}

    def usage(self, result: Result, cached: int) -> dict[str, Any]:
        """The chunk behind the last, for who asked for it."""
        return self._object(self._chunk_kind, []) | {"usage": usage(result, cached)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, part: Any, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self.is_chat else "text": part, "logprobs": None, "finish_reason": finish}
        empty: dict[str, Any] = {"usage": None} if self.wants_usage else {}
        return self._object(self._chunk_kind, [choice]) | empty

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def usage(result: Result, cached: int) -> dict[str, Any]:
    """Tokens in and out; the end token that stopped an answer is one of them."""
    prompt, answer = len(result["prompt_ids"]), len(result["ids"])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def origin(result: Result) -> dict[str, Any]:
    """What an answer came of, without the names of this machine's files."""
    provenance = dict(result["provenance"])
    del provenance["model"]
    archdef = provenance["archdef"]
    found: dict[str, Any] = {
        "provenance": provenance | {"archdef": {"name": archdef["name"], "sha256": archdef["sha256"]}},
        "failures": {w["name"]: w["failures"] for w in result["workers"] if w["failures"]},
    }
    if result.get("in_doubt"):
        found["in_doubt"] = True
    if "class_changed_at" in result:
        found["class_changed_at"] = result["class_changed_at"]
    return found
