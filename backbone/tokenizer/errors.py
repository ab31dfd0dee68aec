"""The tokenizer's refusals: metadata that cannot be used, text or ids that cannot be encoded."""

from ..errors import UsageError


class TokenizerError(UsageError):
    """One line that names the key, the token or the place, and the fix."""
