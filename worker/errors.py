"""Errors of the worker."""


class WorkerError(Exception):
    """The worker cannot start or go on. The message is one line that says why and what to do."""
