"""What a model's metadata says, looked up the way a definition writes it: keys, derived numbers, tensors' dimensions.

Values come from a foreign file: every number is checked for type, finiteness and the layer's range before use.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .errors import Mismatch, did_you_mean

MAX_LAYERS = 4096


def round_f32(value: float) -> float:
    """The nearest float32 as a Python float. Mismatch when it does not fit."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise Mismatch("", f"{value:g} does not fit float32") from None


class Absent(Exception):
    """A key or tensor is not in the model. The message names what was looked for, and what is near when it is read."""

    def __init__(self, message: str, word: str = "", known: Iterable[str] = ()) -> None:
        self._word, self._known = word, known
        super().__init__(message)

    def __str__(self) -> str:
        # Looking for what is near takes long, and most that is absent is never told of: a default stands in for it.
        return f"{self.args[0]}{did_you_mean(self._word, self._known) if self._word else ''}"


@dataclass(frozen=True, slots=True)
class Facts:
    """A model as a definition sees it.

    `metadata`: the GGUF's key-values. `dims`: each tensor's dimensions in GGUF order (inputs first).
    """

    metadata: Mapping[str, Any]
    dims: Mapping[str, tuple[int, ...]]
    source: str  #: the model file, for messages

    @property
    def architecture(self) -> str:
        """`general.architecture`. Mismatch when the file does not say."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise Mismatch("", f"{self.source}: the metadata has no 'general.architecture'")
        return name

    @property
    def layer_count(self) -> int:
        """Layers that plain decoding runs: `block_count` less `nextn_predict_layers`."""
        count = self.whole("block_count", None)
        with suppress(Absent):
            count -= self.whole("nextn_predict_layers", None)
        if not 1 <= count <= MAX_LAYERS:
            raise Mismatch("", f"{self.source}: {count} layers; from 1 to {MAX_LAYERS} can be run")
        return count

    def full_key(self, key: str) -> str | None:
        """The metadata's name for a key as a definition writes it, or None."""
        prefix = self.architecture
        for candidate in (f"{prefix}.{key}", f"{prefix}.attention.{key}"):
            if candidate in self.metadata:
                return candidate
        return None

    def value(self, key: str, layer: int | None) -> Any:
        """The value of a key, for an array the layer's entry. Absent when the key is not there."""
        full = self.full_key(key)
        if full is None:
            prefix = f"{self.architecture}."
            known = [k.removeprefix(prefix) for k in self.metadata if k.startswith(prefix)]
            known += [k.removeprefix("attention.") for k in known] + list(DERIVED)
            raise Absent(f"the model has no key {prefix}{key} (nor {prefix}attention.{key})", key, known)
        value = self.metadata[full]
        if isinstance(value, (str, bool, int, float)):
            return value
        if not isinstance(value, Sequence) and not hasattr(value, "__getitem__"):
            raise Mismatch("", f"{full} is neither a number nor a word")
        if layer is None:
            raise Mismatch("", f"{full} has an entry for each layer, and this place belongs to none")
        if layer >= len(value):
            raise Mismatch("", f"{full} has {len(value)} entries and none for layer {layer}")
        entry = value[layer]
        return entry.item() if hasattr(entry, "item") else entry

    def number(self, key: str, layer: int | None) -> float:
        """A key's value, or a derived number, as a finite number. Absent or Mismatch otherwise."""
        if self.full_key(key) is None and key in DERIVED:
            return DERIVED[key](self, layer)
        value = self.value(key, layer)
        if isinstance(value, str):
            raise Mismatch("", f"{key} is the word {value!r} where a number is needed")
        if not math.isfinite(value):
            raise Mismatch("", f"{key} is {value}, not a finite number")
        return int(value) if isinstance(value, bool) else value

    def whole(self, key: str, layer: int | None) -> int:
        """A key's value as a whole number from 0 up."""
        return whole(self.number(key, layer), key)

    def has(self, key: str, layer: int | None) -> bool:
        """`where KEY`: present and non-zero."""
        try:
            value = self.value(key, layer)
        except Absent:
            return False
        return bool(value) and value != 0


def whole(value: float, what: str) -> int:
    """A number that must be whole and not negative. Mismatch otherwise."""
    if value != int(value) or value < 0:
        raise Mismatch("", f"{what} is {value:g}; a whole number from 0 up is needed")
    return int(value)


def _head_dim(facts: Facts, layer: int | None) -> float:
    try:
        return facts.number("attention.key_length", layer)
    except Absent:
        return _embedding_per_head(facts, layer)


def _embedding_per_head(facts: Facts, layer: int | None) -> float:
    width, heads = facts.whole("embedding_length", layer), facts.whole("attention.head_count", layer)
    if heads == 0 or width % heads:
        raise Mismatch("", f"embedding_length {width} is no multiple of attention.head_count {heads}")
    return width // heads


def _yarn_score_scale(facts: Facts, layer: int | None) -> float:
    try:
        multiplier = facts.number("rope.scaling.yarn_log_multiplier", layer)
        factor = facts.number("rope.scaling.factor", layer)
    except Absent:
        return 1
    if factor <= 0:
        raise Mismatch("", f"rope.scaling.factor is {factor:g}; it must be above 0")
    return (1 + multiplier * math.log(factor)) ** 2


#: Numbers that no key holds, each with its formula.
DERIVED: Mapping[str, Callable[[Facts, int | None], float]] = {
    # attention.key_length where present, else embedding_length / attention.head_count
    "head_dim": _head_dim,
    # embedding_length / attention.head_count
    "embedding_per_head": _embedding_per_head,
    # m * m with m = 1 + yarn_log_multiplier * ln(factor); 1 without a multiplier (DeepSeek's attention scores)
    "yarn_score_scale": _yarn_score_scale,
}
