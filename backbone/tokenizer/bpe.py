"""Byte-level BPE, as `tokenizer.ggml.model` "gpt2" asks for, on the Hugging Face `tokenizers` library."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from .errors import TokenizerError
from .pre import Pre
from .vocabulary import KEY, Vocabulary


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte. Printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(text: str) -> bytes:
    """The bytes that a token's characters stand for; a character of no byte stands for itself."""
    table = byte_of_character()
    return b"".join(bytes((table[c],)) if c in table else c.encode("utf-8", "replace") for c in text)


class Bpe:
    """Cuts text into words and merges each."""

    def __init__(self, vocabulary: Vocabulary, pre: Pre) -> None:
        # A merge is two tokens with a space between; the first may itself begin with one.
        pairs = [(merge[: (at := merge.find(" ", 1))], merge[at + 1 :]) for merge in vocabulary.strings("merges")]
        try:
            model = BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library raises bare Exceptions
            raise vocabulary.fail(_wrong_merge(vocabulary, pairs) or f"the merges cannot be used: {error}") from None
        self._tokenizer = Tokenizer(model)
        cuts = [Split(Regex(expression), "isolated") for expression in pre.expressions]
        self._tokenizer.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"the text cannot be tokenized: {error}") from None
        return ids


def _wrong_merge(vocabulary: Vocabulary, pairs: list[tuple[str, str]]) -> str:
    """What is wrong with the first merge that names a token that does not exist."""
    known = vocabulary.ids
    for i, (first, second) in enumerate(pairs):
        if first not in known or second not in known or first + second not in known:
            return f"merge {i} of {KEY}merges, {first!r} with {second!r}, names a token that does not exist"
    return ""
