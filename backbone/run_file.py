"""How commands find the running server: a file of its own user, with the address, a token, and what is served.

What it says is checked by whoever uses it: a server that was killed leaves its file behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .discovery import home_folder

MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A server: where it listens, the token of its private endpoints, its process and its model's file."""

    host: str
    port: int
    token: str
    pid: int
    model: str


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where running processes leave what others have to know."""
    return Path(environ.get("XDG_STATE_HOME") or home_folder(environ) / ".local" / "state") / "expertswarm"


def path_of(environ: Mapping[str, str] = os.environ) -> Path:
    """The run file."""
    return state_folder(environ) / "run.json"


def write(run: RunFile, environ: Mapping[str, str] = os.environ) -> Path:
    """Leave word of a server, in place of any earlier one. OSError when that cannot be done."""
    path = path_of(environ)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # For its user alone from the beginning; readers see the old file or the new one, never half of one.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="run-", delete=False) as file:
        json.dump(asdict(run), file)
    Path(file.name).replace(path)
    return path


def remove(run: RunFile, environ: Mapping[str, str] = os.environ) -> None:
    """Take back the word of a server; that of a later one stays."""
    with contextlib.suppress(OSError):
        if read(environ) == run:
            path_of(environ).unlink()


def read(environ: Mapping[str, str] = os.environ) -> RunFile | None:
    """What the file says; None when there is none, it is not this user's alone, or it is no run file."""
    try:
        with path_of(environ).open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
                return None
            found = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {field.name: int if field.name in ("port", "pid") else str for field in fields(RunFile)}
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        return None
    if any(type(found[name]) is not kind for name, kind in kinds.items()):
        return None
    return RunFile(**found)
