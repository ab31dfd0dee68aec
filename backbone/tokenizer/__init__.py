"""Text to token ids and back, from a GGUF's metadata alone; the ids are llama.cpp's."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .bpe import Bpe, token_bytes
from .errors import TokenizerError, shown
from .pre import PRE_TOKENIZERS
from .spm import Spm
from .vocabulary import KEY, Kind, Special, Vocabulary

__all__ = ["PRE_TOKENIZERS", "StreamDecoder", "Tokenizer", "TokenizerError", "load_tokenizer"]

_BLANKS = " \t\n\v\f\r"
_SPACE = "\u2581"  #: how SPM writes a space


class _Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Tokenizer:
    """Encodes and decodes. `eos_ids` are all ids that end an answer."""

    def __init__(self, vocabulary: Vocabulary, encoder: _Encoder, *, add_bos: bool, add_space_prefix: bool) -> None:
        self._vocabulary, self._encoder = vocabulary, encoder
        self._spm = vocabulary.model == "llama"
        self._add_space_prefix = add_space_prefix
        self._add_bos = vocabulary.flag("add_bos_token", add_bos)
        self._add_eos = vocabulary.flag("add_eos_token", False)
        self.eos_ids = vocabulary.eos_ids
        self.bos_id = vocabulary.bos_id
        for wanted, name, value in ((self._add_bos, "bos", self.bos_id), (self._add_eos, "eos", vocabulary.eos_id)):
            if wanted and value is None:
                raise vocabulary.fail(f"{KEY}add_{name}_token is set, and no {KEY}{name}_token_id in the vocabulary")

    @property
    def size(self) -> int:
        """Tokens in the vocabulary."""
        return len(self._vocabulary.tokens)

    def text_of(self, token: int | None) -> str:
        """A token as the vocabulary writes it; empty for None."""
        return "" if token is None else self._vocabulary.tokens[token]

    @property
    def bos_text(self) -> str:
        """What stands for the beginning, as chat templates write it."""
        return self.text_of(self.bos_id)

    @property
    def eos_text(self) -> str:
        """What stands for the end, as chat templates write it."""
        return self.text_of(self._vocabulary.eos_id)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        `add_special`: BOS and EOS where the metadata asks for them. `parse_special`: control tokens written out in the
        text count as such; without it they are plain text, while a model's own user-defined tokens always count.
        TokenizerError for text that is no Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"character {error.start} of the text is a lone surrogate, not Unicode") from None
        ids = list[int]()
        if add_special and self._add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        after_special = True
        for part in _partition(text, self._vocabulary.specials, parse_special):
            if isinstance(part, Special):
                ids.append(part.id)
            elif self._spm:
                prefix = " " if self._add_space_prefix and after_special else ""
                ids += self._encoder.encode((prefix + part).replace(" ", _SPACE))
            else:
                ids += self._encoder.encode(part)
            after_special = isinstance(part, Special)
        if add_special and self._add_eos and self._vocabulary.eos_id is not None:
            ids.append(self._vocabulary.eos_id)
        return ids

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """What a token stands for. Control tokens are shown only when `special` is set."""
        if not 0 <= token < self.size:
            raise TokenizerError(f"token id {token} is not in the vocabulary (0 to {self.size - 1})")
        kind, text = Kind(int(self._vocabulary.kinds[token])), self._vocabulary.tokens[token]
        if kind in (Kind.CONTROL, Kind.UNKNOWN):
            return text.encode("utf-8") if special else b""
        if kind is Kind.USER_DEFINED:
            return text.encode("utf-8")
        if kind is Kind.BYTE:
            try:
                return bytes((int(text[3:5], 16),))
            except ValueError:
                raise self._vocabulary.fail(f"byte token {token} is written {shown(text)}, not like <0x0A>") from None
        if kind is not Kind.NORMAL:
            return b""
        return text.replace(_SPACE, " ").encode("utf-8") if self._spm else token_bytes(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `encode` made these ids of: without BOS, with control tokens written out."""
        ids = list(ids)
        if self._add_bos and ids and ids[0] == self.bos_id:
            ids = ids[1:]
        data = b"".join(self.token_bytes(i, special=True) for i in ids)
        first_is_text = bool(ids) and self._vocabulary.kinds[ids[0]] in (Kind.NORMAL, Kind.BYTE)
        if self._spm and self._add_space_prefix and first_is_text and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")


class StreamDecoder:
    """Ids one by one to text, never half a character: bytes wait until their character is whole or cannot be."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that became whole."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)


def _partition(text: str, specials: Sequence[Special], parse_special: bool) -> list[str | Special]:
    """Text cut at special tokens: the longest token takes all its places first, then the next longest."""
    parts: list[str | Special] = [text] if text else []
    for special in specials:
        if special.text not in text or (not parse_special and special.kind is not Kind.USER_DEFINED):
            continue
        cut = list[str | Special]()
        for part in parts:
            cut += [part] if isinstance(part, Special) else _cut(part, special)
        parts = cut
    return parts


def _cut(text: str, special: Special) -> list[str | Special]:
    found, start = list[str | Special](), 0
    while (at := text.find(special.text, start)) >= 0:
        if at > start:
            found.append(text[start:at])
        found.append(special)
        start = at + len(special.text)
        while special.rstrip and start < len(text) and text[start] in _BLANKS:
            start += 1
    return [*found, text[start:]] if start < len(text) else found


def load_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer of a model. TokenizerError for a kind or `pre` that is not known: nothing is guessed."""
    vocabulary = Vocabulary(metadata, source)
    if vocabulary.model == "llama":
        scores = vocabulary.numbers("scores")
        if scores is None:
            raise vocabulary.fail(f"the metadata has no {KEY}scores, by which pieces are merged")
        if not np.isfinite(scores).all():
            raise vocabulary.fail(f"{KEY}scores holds values that are not finite")
        encoder: _Encoder = Spm(vocabulary.ids, scores, vocabulary.unknown_id)
        return Tokenizer(vocabulary, encoder, add_bos=True, add_space_prefix=vocabulary.flag("add_space_prefix", True))
    if vocabulary.model != "gpt2":
        raise vocabulary.fail(f"{KEY}model is {shown(vocabulary.model)}; supported are 'gpt2' and 'llama'")
    name = metadata.get(KEY + "pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        found = "absent" if name is None else shown(name)
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise vocabulary.fail(f"{KEY}pre is {found}, and how it cuts text is not known; known are {known}")
    pre = PRE_TOKENIZERS[name]
    return Tokenizer(vocabulary, Bpe(vocabulary, pre), add_bos=pre.add_bos, add_space_prefix=False)
