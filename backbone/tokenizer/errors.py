"""The tokenizer's refusals: metadata that cannot be used, text or ids that cannot be encoded."""

from ..errors import UsageError

_SHOWN = 60


class TokenizerError(UsageError):
    """One line that names the key, the token or the place, and the fix."""


def shown(value: object) -> str:
    """A foreign value for a message: one line, escaped and cut."""
    text = " ".join(repr(value[:_SHOWN] if isinstance(value, str) else value).split())
    return text if len(text) <= 2 * _SHOWN else text[: 2 * _SHOWN] + "..."
