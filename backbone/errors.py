"""Errors of the backbone.

BackboneError        the request failed on the way: exit code 1
└── UsageError       wrong use or bad input: exit code 2
    └── ContextFull  more tokens than the context holds
"""


class BackboneError(Exception):
    """Base class: the message is one line that says what happened and what to do."""


class UsageError(BackboneError):
    """The caller's input cannot be used as it is; the message names the place and the fix."""


class ContextFull(UsageError):
    """More tokens than the context holds."""
