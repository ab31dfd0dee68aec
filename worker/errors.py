"""Errors of the worker.

WorkerError          it cannot start or go on: exit code 1
├── UsageError       wrong use: exit code 2
└── LinkBroken       a connection came to nothing or to an end; a worker that has joined may try again
"""

from enum import Enum


class WorkerError(Exception):
    """The worker cannot start or go on. The message is one line that says why and what to do."""


class UsageError(WorkerError):
    """An argument cannot be used as it is; the message names it and the fix."""


class Break(Enum):
    """How a connection ended."""

    NOBODY = "nobody answers"
    HUNG_UP = "no CURVE handshake: what answers there is another program, or not that backbone"
    KEY_REFUSED = "the backbone does not let this worker's key in; it is not of this run"
    LOST = "the connection is lost"
    SILENT = "connected, and the backbone says nothing"


class LinkBroken(WorkerError):
    """A connection ended, as `how` says."""

    def __init__(self, how: Break) -> None:
        super().__init__(how.value)
        self.how = how
