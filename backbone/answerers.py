"""Who answers a command's prompts: the running server where it can, else this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from .chat_template import template_of
from .client import find_server
from .engine import GenerateOptions, common_prefix
from .prompts import Prompt, prompt_ids
from .results import Result, as_json
from .session import Session, open_session
from .settings import Settings

#: Settings that are a process's own: a command that names one of them starts its own.
OWN = (
    "backend",
    "workers",
    "worker_memory",
    "audit",
    "threads",
    "activations",
    "accumulation",
    "wire",
    "kv_cache",
    "archdefs",
    "context",
)


class Answerer(Protocol):
    """Answers one prompt after another; what a prompt has in common with the one before is not run again."""

    @property
    def name(self) -> str:
        """Who it is, for people."""

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""

    def need_template(self) -> None:
        """ChatTemplateError where the model has no chat template of its own."""

    def answer(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        *,
        on_text: Callable[[str], None],
        on_prompt: Callable[[int, int], None],
    ) -> Result:
        """The whole object that scripts rely on. Ctrl-C ends the answer, which is then stopped as "cancelled"."""


class InProcess:
    """The engine of this process."""

    is_here = True

    def __init__(self, session: Session) -> None:
        self._session, self._tokenizer = session, session.tokenizer()
        self._sequence = session.engine.new_sequence()

    @property
    def name(self) -> str:
        """The model's file."""
        return self._session.model.path.name

    def need_template(self) -> None:
        """ChatTemplateError where the model has no chat template of its own."""
        model = self._session.model
        template_of(model.gguf.metadata, str(model.path))

    def answer(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        *,
        on_text: Callable[[str], None],
        on_prompt: Callable[[int, int], None],
    ) -> Result:
        """The whole object that scripts rely on."""
        ids = prompt_ids(prompt, self._session.model, self._tokenizer)
        self._session.engine.refuse_unfit(ids)
        self._sequence.truncate(common_prefix(self._sequence.tokens, ids))
        answer = self._session.engine.generate(
            ids, self._tokenizer, options, sequence=self._sequence, on_text=on_text, on_prompt=on_prompt
        )
        # Keys and values of an earlier class map are in it, or of somebody who was wrong.
        if answer.class_changes or answer.is_in_doubt:
            self._sequence = self._session.engine.new_sequence()
        return as_json(self._session, answer) | {"provenance": self._session.provenance()}


@contextmanager
def open_answerer(settings: Settings) -> Iterator[Answerer]:
    """The running server, when it serves the model asked for and nothing is named that this process has to have."""
    server = None
    if not any(settings[name].source.startswith("flag") for name in OWN):
        server = find_server(None if settings["model"].source == "default" else settings.model, os.environ)
    if server is not None:
        yield server
        return
    with open_session(settings) as session:
        yield InProcess(session)
