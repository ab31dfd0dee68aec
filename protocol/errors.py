"""Errors of the wire.

ProtocolError          a frame or a field that is not what the protocol allows
└── VersionMismatch    a greeting of another protocol version, whatever its other fields are
"""

from . import PROTOCOL_VERSION


class ProtocolError(Exception):
    """The message is one line that names what is wrong."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version. The message has both versions and the fix."""

    def __init__(self, theirs: int) -> None:
        self.theirs = theirs
        older = "worker" if theirs < PROTOCOL_VERSION else "backbone"
        super().__init__(
            f"the worker speaks protocol {theirs}, the backbone {PROTOCOL_VERSION}: update expertswarm on the {older}'s"
            " machine so that both have the same version"
        )
