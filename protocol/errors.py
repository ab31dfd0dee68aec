"""The one error of the wire."""


class ProtocolError(Exception):
    """A frame or a field that is not what the protocol allows. The message is one line that names it."""
