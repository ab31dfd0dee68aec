"""A vocabulary from a GGUF's metadata: tokens, their kinds, special ids, what ends an answer. Knows no algorithm.

Which tokens end an answer, and which count as control tokens although the file does not say so, follows llama.cpp:
released files leave much of it to the token's text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from .errors import TokenizerError, shown

log = logging.getLogger(__name__)
KEY = "tokenizer.ggml."


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Tokens that end an answer by their text, whatever the metadata says.
_END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".split()
)
#: Ids by key, with the texts that stand for them where the key is absent: of the first found, an id is taken.
_BY_TEXT: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("eot_token_id",): (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
        "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    ("eom_token_id",): ("<|eom_id|>",),
    ("fim_pre_token_id", "prefix_token_id"): (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    ("fim_suf_token_id", "suffix_token_id"): (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    ("fim_mid_token_id", "middle_token_id"): (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    ("fim_pad_token_id",): ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("fim_rep_token_id",): ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("fim_sep_token_id",): ("<|file_sep|>",),
}  # fmt: skip
_ENDING_KEYS = ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
#: Of gpt-oss's harmony format: structure that a reader of the stream needs to see.
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is matched literally in text. `lstrip`, `rstrip`: takes the blanks before or behind it along."""

    id: int
    text: str
    kind: Kind
    rstrip: bool = False


class Vocabulary:
    """Tokens with their kinds and scores, and the ids that mean something. TokenizerError for what cannot be used."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata, self.source = metadata, source
        self.model = self._word("model")
        self.tokens = self._tokens()
        self.kinds = self._kinds()
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise self.fail(f"the token {shown(twice)} comes twice in {KEY}tokens")
        default = 11 if self.model == "gpt2" else None
        spm = self.model == "llama"
        self.bos_id = self.id_of("bos_token_id", 1 if spm else default)
        self.eos_id = self.id_of("eos_token_id", 2 if spm else default)
        self.unknown_id = self.id_of("unknown_token_id", 0 if spm else None)
        self._by_text = self._ids_by_text()
        self.eos_ids = self._ends()

    def fail(self, message: str) -> TokenizerError:
        """An error that names the model."""
        return TokenizerError(f"{self.source}: {message}")

    def _word(self, name: str) -> str:
        value = self._metadata.get(KEY + name)
        if not isinstance(value, str):
            raise self.fail(f"the metadata has no {KEY}{name}; the file holds no tokenizer that can be used")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A true-or-false key."""
        value = self._metadata.get(KEY + name, default)
        if not isinstance(value, bool):
            raise self.fail(f"{KEY}{name} is {shown(value)}, not true or false")
        return value

    def strings(self, name: str) -> Sequence[str]:
        """A list of strings, decoded."""
        value = self._metadata.get(KEY + name)
        if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise self.fail(f"the metadata has no list {KEY}{name}")
        found = list(value)
        if not all(isinstance(item, str) for item in found):
            raise self.fail(f"{KEY}{name} is no list of strings")
        return found

    def numbers(self, name: str, kinds: str = "iuf") -> Any:
        """A list of numbers, one for each token, or None. `kinds`: numpy's letters for those that will do."""
        value = self._metadata.get(KEY + name)
        if value is None:
            return None
        array = np.asarray(value) if hasattr(value, "__len__") and not isinstance(value, str) else None
        if array is None or array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
            raise self.fail(f"{KEY}{name} is no list of {'numbers' if 'f' in kinds else 'whole numbers'}")
        if len(array) < len(self.tokens):
            raise self.fail(f"{KEY}{name} has {len(array)} entries for {len(self.tokens)} tokens")
        return array[: len(self.tokens)]

    def _tokens(self) -> list[str]:
        tokens = list(self.strings("tokens"))
        if not tokens:
            raise self.fail(f"{KEY}tokens is empty")
        return [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)] if "" in tokens else tokens

    def _kinds(self) -> Any:
        kinds = self.numbers("token_type", "iu")
        if kinds is None:
            return np.full(len(self.tokens), Kind.NORMAL, np.int64)
        kinds = kinds.astype(np.int64)
        kinds[(kinds < 0) | (kinds > Kind.BYTE)] = Kind.UNDEFINED
        return kinds

    def id_of(self, name: str, default: int | None = None) -> int | None:
        """A special token's id; None when neither the metadata nor the default names one in the vocabulary."""
        given = self._metadata.get(KEY + name)
        for value in (given, default):
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self.tokens):
                if value is not given and given is not None:
                    log.warning("%s: %s%s is %r, no token's id; %d is taken", self.source, KEY, name, given, value)
                return value
        return None

    def _ids_by_text(self) -> dict[str, int]:
        found = dict[str, int]()
        for keys, texts in _BY_TEXT.items():
            given = [i for i in (self.id_of(key) for key in keys) if i is not None]
            if given:
                found[keys[0]] = given[-1]
                continue
            known = sorted(self.ids[text] for text in texts if text in self.ids)
            if known:
                found[keys[0]] = known[0]
                self._make_control(known[:1])
        return found

    def _make_control(self, ids: Iterable[int]) -> None:
        for i in ids:
            self.kinds[i] = Kind.CONTROL

    def _ends(self) -> frozenset[int]:
        """Every id that ends an answer."""
        ends = {self.ids[text] for text in _END_TEXTS if text in self.ids}
        self._make_control(ends)
        for text in _SHOWN & self.ids.keys():
            self.kinds[self.ids[text]] = Kind.USER_DEFINED
        ends |= {self._by_text[key] for key in _ENDING_KEYS if key in self._by_text}
        if self.eos_id is not None:
            ends.add(self.eos_id)
        texts = {self.tokens[i] for i in ends}
        called = {"<|call|>", "<|calls|>"} & texts
        if "<|end|>" in texts and called and {"<|return|>", "<|flush|>"} & texts:
            # harmony: <|end|> closes a message, not the answer
            ends.discard(self.ids["<|end|>"])
            self.kinds[self.ids["<|end|>"]] = Kind.USER_DEFINED
        if "<|tool_response>" in texts and "</s>" in texts:
            ends.discard(self.ids["</s>"])
            self.kinds[self.ids["</s>"]] = Kind.NORMAL
        return frozenset(ends)

    @cached_property
    def specials(self) -> tuple[Special, ...]:
        """Tokens that are matched literally, the longest (in bytes) first."""
        name = str(self._metadata.get("general.name", "")).lower()
        phi3 = "phi-3" in name or "phi3" in name
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        chosen = np.isin(self.kinds, (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN))
        found = [
            Special(i, text, Kind(int(self.kinds[i])), phi3 and text not in kept)
            for i in np.flatnonzero(chosen).tolist()
            for text in (self.tokens[i],)
        ]
        return tuple(sorted(found, key=lambda s: -len(s.text.encode())))
