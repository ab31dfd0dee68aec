"""Byte-level BPE, as `tokenizer.ggml.model` "gpt2" asks for, on the Hugging Face `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from .errors import TokenizerError, shown
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
        pairs = _pairs(vocabulary)
        # Bytes without a token get ids past the end, to be left out: the library would join what is around them.
        self._size = len(vocabulary.tokens)
        absent = [character for character in byte_of_character() if character not in vocabulary.ids]
        ids = vocabulary.ids | {character: self._size + i for i, character in enumerate(absent)}
        try:
            model = BPE(vocab=ids, merges=pairs, ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library raises bare Exceptions
            reason = _wrong_merge(ids, pairs) or f"tokens or merges cannot be used: {_line(error)}"
            raise vocabulary.fail(reason) from None
        self._tokenizer = Tokenizer(model)
        cuts = [Split(Regex(expression), "isolated") for expression in pre.expressions]
        self._tokenizer.pre_tokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    def encode(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"the text cannot be tokenized: {_line(error)}") from None
        return [i for i in ids if i < self._size]


def _pairs(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges in order. Of one that comes twice the first counts."""
    pairs = list[tuple[str, str]]()
    for merge in dict.fromkeys(vocabulary.strings("merges")):
        # Two tokens with a space between; the first may itself begin with one.
        at = merge.find(" ", 1)
        if not 0 < at < len(merge) - 1:
            raise vocabulary.fail(f"{KEY}merges holds {shown(merge)}, not two tokens with a space between")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _wrong_merge(known: Mapping[str, int], pairs: list[tuple[str, str]]) -> str:
    """What is wrong with the first merge that names a token that does not exist."""
    for first, second in pairs:
        if first not in known or second not in known or first + second not in known:
            return f"{KEY}merges joins {shown(first)} and {shown(second)}, and one of them or the whole is no token"
    return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
