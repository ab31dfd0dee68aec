"""Errors of the worker.

WorkerError          it cannot start or go on: exit code 1
└── UsageError       wrong use: exit code 2
"""


class WorkerError(Exception):
    """The worker cannot start or go on. The message is one line that says why and what to do."""


class UsageError(WorkerError):
    """An argument cannot be used as it is; the message names it and the fix."""
