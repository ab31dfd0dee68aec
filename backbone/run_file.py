"""How commands find the running server: a file of its own user, with the address, a token, and what is served.

What it says is checked by whoever uses it: a server that was killed leaves its file behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from protocol.private_file import FileDamaged, read_private, state_folder, write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A server: where it listens, the token of its private endpoints, its process and its model's file."""

    host: str
    port: int
    token: str
    pid: int
    model: str
    swarm: str = ""  #: where it takes workers, HOST:PORT; empty where it takes none


log = logging.getLogger(__name__)


def path_of(environ: Mapping[str, str] = os.environ) -> Path:
    """The run file."""
    return state_folder(environ, "backbone").with_name("run.json")


def write(run: RunFile, environ: Mapping[str, str] = os.environ) -> None:
    """Leave word of a server, in place of any earlier one. OSError when that cannot be done."""
    other = read(environ)
    if other is not None and Path(f"/proc/{other.pid}").exists() and other.pid != run.pid:
        log.warning(
            "generate, chat and status go to this server from now on, not to that of process %d (port %d)",
            *(other.pid, other.port),
        )
    write_private(path_of(environ), asdict(run))


def remove(run: RunFile, environ: Mapping[str, str] = os.environ) -> None:
    """Take back the word of a server; that of a later one stays."""
    with contextlib.suppress(OSError):
        if read(environ) == run:
            path_of(environ).unlink()


def read(environ: Mapping[str, str] = os.environ) -> RunFile | None:
    """What the file says; None when there is none, it is not this user's alone, or it is no run file."""
    try:
        stat = path_of(environ).stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
            return None
        found = read_private(path_of(environ))
    except (OSError, FileDamaged):
        return None
    kinds = {field.name: int if field.name in ("port", "pid") else str for field in fields(RunFile)}
    if found is None or found.keys() != kinds.keys():
        return None
    if any(type(found[name]) is not kind for name, kind in kinds.items()):
        return None
    return RunFile(**found)
