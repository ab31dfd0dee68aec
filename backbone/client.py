"""The running server as commands use it: over loopback, with the token of its run file."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from kernels.interface import F32, I32

from . import run_file
from .chat_template import ChatTemplateError
from .discovery import resolve_model
from .engine import GenerateOptions
from .errors import BackboneError, ContextFull, UsageError
from .prompts import ChatPrompt, IdsPrompt, Prompt
from .results import Result
from .run_file import RunFile

CONNECT_TIMEOUT_S = 5.0  #: for a server that ought to answer at once
MOST_LINE = 1 << 26
#: Errors that mean more than their message, by the code that stands for them.
ERRORS = {"usage": UsageError, "context_length_exceeded": ContextFull, "chat_template": ChatTemplateError}

log = logging.getLogger(__name__)


class RunningServer:
    """A server that answers. Every error of the way there or of the server itself is a BackboneError."""

    is_here = False

    def __init__(self, run: RunFile) -> None:
        self._run = run
        #: Server, model, load and workers, as it has them now.
        self.status: Result = self._json("GET", "/private/status")

    @property
    def name(self) -> str:
        """What serves where."""
        return f"{self.status['model']} on {self.status['url']}"

    def need_template(self) -> None:
        """ChatTemplateError where the model has no chat template of its own."""
        if not self.status["has_template"]:
            name = self.status["model"]
            raise ChatTemplateError(f"{name}: the model has no chat template; give one with --template FILE")

    def answer(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        *,
        on_text: Callable[[str], None],
        on_prompt: Callable[[int, int], None],
    ) -> Result:
        """The whole object that scripts rely on. Ctrl-C ends the answer, which is then stopped as "cancelled"."""
        job = uuid.uuid4().hex
        asked = {"job": job, **_prompt(prompt), "options": _options(options)}
        with self._events(asked) as events:
            while True:
                try:
                    event = events.get()
                    if "text" in event:
                        on_text(event["text"])
                    elif "prompt" in event:
                        on_prompt(*event["prompt"])
                    elif "error" in event:
                        raise _error(event["error"])
                    else:
                        result: Result = event["result"]
                        return result
                except KeyboardInterrupt:
                    # The events go on, up to the result of what was made so far.
                    self._json("POST", "/private/cancel", {"job": job})

    def worker(self, name: str) -> Result:
        """What a worker of its swarm is and holds. UsageError when there is none of this name."""
        return self._json("POST", "/private/worker", {"worker": name})

    def rows(self, worker: str, layer: int, x: F32, pairs: I32) -> F32:
        """Unweighted rows [P, width] of a worker's experts for pairs [P, 2] of (row of x [R, D], expert)."""
        data = base64.b64encode(np.ascontiguousarray(x, "<f4").tobytes()).decode()
        asked = {"worker": worker, "layer": layer, "x": data, "width": x.shape[1], "pairs": pairs.tolist()}
        found = self._json("POST", "/private/rows", asked)
        try:
            rows = np.frombuffer(base64.b64decode(found["rows"], validate=True), "<f4")
            return rows.reshape(len(pairs), found["width"])
        except (KeyError, TypeError, ValueError):
            raise BackboneError("the server answers in a way that is not understood; is it another version?") from None

    @contextmanager
    def _events(self, asked: Result) -> Iterator[SimpleQueue[Result]]:
        """The events of an answer, the last of them a result or an error. Leaving the block hangs up.

        A thread reads them: Ctrl-C, which the main thread gets, would leave a half-read response behind.
        """
        events = SimpleQueue[Result]()
        with closing(self._connect(timeout_s=None)) as connection:
            response = self._ask(connection, "POST", "/private/generate", asked)
            line = connection.sock
            reader = Thread(target=_read_events, args=(response, events), name="server", daemon=True)
            reader.start()
            try:
                yield events
            finally:
                with suppress(OSError):  # it is closed already
                    if line is not None:  # an error in place of the events, behind which the server hangs up
                        line.shutdown(socket.SHUT_RDWR)
                reader.join()

    def _connect(self, timeout_s: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._run.host, self._run.port, timeout=timeout_s)

    def _ask(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._run.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, data, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._run.host}:{self._run.port}"
            raise BackboneError(f"the server on {where} does not answer: {error or type(error).__name__}") from None

    def _json(self, method: str, path: str, body: Any = None) -> Result:
        with closing(self._connect(CONNECT_TIMEOUT_S)) as connection:
            response = self._ask(connection, method, path, body)
            found = _parsed(_read(lambda: response.read(MOST_LINE)))
        if response.status != 200:
            raise _error(found.get("error"))
        return found


def _read_events(response: http.client.HTTPResponse, events: SimpleQueue[Result]) -> None:
    with response:
        try:
            while line := _read(lambda: response.readline(MOST_LINE)):
                event = _parsed(line)
                events.put(event)
                if "result" in event or "error" in event:
                    return
            raise BackboneError("the server ended in the middle of the answer")
        except BackboneError as error:
            events.put({"error": {"message": str(error)}})


def _read(read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except (OSError, http.client.HTTPException) as error:
        raise BackboneError(f"the server ended in the middle of the answer: {error or type(error).__name__}") from None


def _parsed(data: bytes) -> Result:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BackboneError("the server answers in a way that is not understood; is it another version?")
    return found


def _error(error: Any) -> BackboneError:
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return BackboneError("the server failed and does not say why")
    return ERRORS.get(str(error.get("code")), BackboneError)(error["message"])


def _prompt(prompt: Prompt) -> Result:
    if isinstance(prompt, IdsPrompt):
        return {"ids": list(prompt.ids)}
    if isinstance(prompt, ChatPrompt):
        given = {} if prompt.template is None else {"template": prompt.template}
        return {"messages": list(prompt.messages), **given}
    return {"text": prompt.text}


def _options(options: GenerateOptions) -> Result:
    sampling = asdict(options.sampling)
    whole = {name: getattr(options, name) for name in ("max_tokens", "ignore_eos", "digest")}
    return whole | {"stop": list(options.stop)} | {name: value for name, value in sampling.items() if value is not None}


def find_server(model: str | None, environ: Mapping[str, str] = os.environ) -> RunningServer | None:
    """The server that the run file names, when it answers and serves a model (None: any). UsageError for no model."""
    run = run_file.read(environ)
    if run is None or not _is_alive(run.pid):
        return None
    if model is not None and not _same_file(resolve_model(model, environ), Path(run.model)):
        return None
    try:
        return RunningServer(run)
    except BackboneError as error:
        log.warning("the server of process %d does not answer (%s); this goes on without it", run.pid, error)
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
