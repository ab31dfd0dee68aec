"""What a worker started by the backbone is told: one line of JSON on standard input, not argv, where all could read it.

Standard input stays open as long as the backbone lives; its end is the worker's.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

from .errors import WorkerError

MOST_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Where to connect, as whom, and what to compute with. Keys are Z85."""

    endpoint: str
    server_key: str
    public_key: str
    secret_key: str
    backend: str
    memory_bytes: int  #: for experts; 0: no bound
    threads: int  #: that compute; 0: one for each physical core
    activations: str  #: dtype in which they are multiplied
    accumulation: str  #: dtype in which products are summed
    model: str  #: the model file on this machine; empty when the experts come over the wire
    quiet: bool  #: shows no progress

    @property
    def model_path(self) -> Path | None:
        """The model file, or None."""
        return Path(self.model) if self.model else None


def read_session(stream: TextIO) -> Session:
    """A session from a stream's first line. WorkerError when the line is not one."""
    try:
        data = json.loads(stream.readline(MOST_CHARACTERS))
    except (ValueError, RecursionError):
        raise WorkerError("standard input holds no session; 'worker local' is started by the backbone") from None
    numbers = {"memory_bytes": int, "threads": int, "quiet": bool}
    kinds = {field.name: numbers.get(field.name, str) for field in fields(Session)}
    if not isinstance(data, dict) or data.keys() != kinds.keys():
        raise WorkerError(f"a session holds exactly {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(data[name]) is not kind:
            raise WorkerError(f"session: {name} is no {kind.__name__}")
        if kind is int and data[name] < 0:
            raise WorkerError(f"session: {name} is {data[name]}; it cannot be less than 0")
    return Session(**data)


def end_with(stream: TextIO) -> None:
    """End this process when a stream ends, even in the middle of a computation: a worker has nothing to save."""

    def watch() -> None:
        while os.read(stream.fileno(), 4096):  # not by the stream: its lock would be in the way at exit
            pass
        os._exit(0)

    threading.Thread(target=watch, name="end-with-backbone", daemon=True).start()
