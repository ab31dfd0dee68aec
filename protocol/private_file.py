"""Files that hold keys: one JSON object each, readable by their owner alone, written by rename. Knows no meaning.

Readers see the old file or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 24


class FileDamaged(Exception):
    """The file is there and holds no such object; the message names it."""


def state_folder(environ: Mapping[str, str], part: str) -> Path:
    """Where what has to outlive a run is kept, for `worker` or `backbone`."""
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or tempfile.gettempdir()) / ".local" / "state")
    return Path(home) / "expertswarm" / part


def make_private(folder: Path) -> None:
    """A folder that is its owner's alone. OSError when it cannot be made or is somebody else's."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise PermissionError(1, "belongs to somebody else", str(folder))
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object, mode 0600. OSError when it cannot be written."""
    make_private(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
            raise


def read_private(path: Path) -> dict[str, Any] | None:
    """The object of a file; None when there is no file. FileDamaged when it holds none, OSError if it is unreadable."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise FileDamaged(f"{path}: is damaged: it holds no JSON object")
    return content
