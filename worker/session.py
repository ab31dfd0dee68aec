"""What a worker started by the backbone is told: JSON on standard input, not argv, where all could read it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Where to connect, as whom, and what to compute with. Keys are Z85."""

    endpoint: str
    server_key: str
    public_key: str
    secret_key: str
    backend: str
    memory_bytes: int  #: 0: no bound
    model: str  #: the model file on this machine; empty when the experts come over the wire

    @property
    def model_path(self) -> Path | None:
        """The model file, or None."""
        return Path(self.model) if self.model else None


def read_session(line: str) -> Session:
    """A session from its line. WorkerError when the line is not one."""
    try:
        data = json.loads(line)
    except ValueError:
        raise WorkerError("standard input holds no session; 'worker local' is started by the backbone") from None
    kinds = {field.name: int if field.name == "memory_bytes" else str for field in fields(Session)}
    if not isinstance(data, dict) or data.keys() != kinds.keys():
        raise WorkerError(f"a session holds exactly {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(data[name]) is not kind:
            raise WorkerError(f"session: {name} is no {kind.__name__}")
    return Session(**data)
