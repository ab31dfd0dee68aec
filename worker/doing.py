"""What a joined worker's process does just now, in a word, for whoever asks beside it: a file that the process holds.

The lock ends with the process, however it ended. What it wrote last stays behind, and means nothing without the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import IO

from protocol.private_file import make_private

from .errors import WorkerError

CONNECTING = "connecting"
SERVING = "serving"
NOT_RUNNING = "not running"
_WORDS = (CONNECTING, SERVING)


class Doing:
    """The word of this process, until the file is closed. WorkerError when the file cannot be had."""

    def __init__(self, path: Path) -> None:
        try:
            make_private(path.parent)
            self._file: IO[str] = path.open("a", encoding="ascii")
            # Waits for whoever is just looking, which is soon over: no other worker holds it, for that there is the
            # lock of the identity.
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise WorkerError(f"{path}: {error.strerror or error}; set XDG_STATE_HOME to a folder of yours") from None
        self.say(CONNECTING)

    def say(self, word: str) -> None:
        """Put a word in place of the last. A full disk does not end a worker."""
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(word)
            self._file.flush()

    def close(self) -> None:
        """Let go."""
        self._file.close()


def doing(path: Path) -> str:
    """What the process that holds a file does; NOT_RUNNING when none does."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                word = file.read(20)
                return word if word in _WORDS else CONNECTING
    except OSError:
        pass
    return NOT_RUNNING
