"""An argument as written and a model together: the number, the tensor or the word that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .errors import Mismatch
from .facts import Absent, Facts, round_f32
from .ops import Kind, Op
from .syntax import Atom, Call, Choice, Layers, Literal, Name, Where, With, parse_choice

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resolver:
    """Looks arguments and conditions of one definition up in one model."""

    facts: Facts
    params: Mapping[str, Literal]

    def number(self, choice: Choice, layer: int | None, kind: Kind = Kind.NUMBER) -> float | None:
        """The number that a choice stands for; None for `none`. Absent when nothing is present."""
        value = _first(choice, lambda atom: self._number(atom, layer))
        if value is not None and kind is not Kind.NUMBER and (value != int(value) or value < 1):
            raise Mismatch("", f"a whole number from 1 up is needed here, not {value:g}")
        return int(value) if value is not None and kind is not Kind.NUMBER else value

    def tensor(self, choice: Choice, layer: int | None) -> str | None:
        """The name of the first tensor that is present; None for `none`. Absent when there is none."""
        return _first(choice, lambda atom: self._tensor(atom, layer))

    def width(self, choice: Choice, layer: int | None) -> int | str:
        """A width of `split`: a count, `rest` or `half`."""
        atom = choice.atoms[0]
        if isinstance(atom, Name) and atom.text in ("rest", "half"):
            return atom.text
        value = self.number(choice, layer, Kind.WIDTH)
        return int(value) if value is not None else 0

    def facts_of(self, op: Op, layer: int | None, given: Mapping[str, object]) -> dict[str, float | str]:
        """What an operation reads from the metadata by itself, less what its line gives."""
        found = dict[str, float | str]()
        for name, text in op.facts.items():
            if name not in given:
                value = self.number(parse_choice(text), layer)
                found[name] = value if value is not None else 0
        for name, (text, known) in op.words.items():
            key, _, default = text.partition(" | ")
            try:
                word = self.facts.value(key, layer)
            except Absent:
                word = default
            if word not in known:
                raise Mismatch("", f"{key} is {word!r}; known are {', '.join(known)}")
            found[name] = word
        return found

    def holds(self, condition: With | Layers | Where, layer: int) -> bool:
        """Whether a block's condition holds for a layer."""
        if isinstance(condition, With):
            return (_named(condition.tensor, layer) in self.facts.dims) == condition.present
        if isinstance(condition, Layers):
            period = self._whole(condition.period)
            return layer % period in {self._whole(residue) for residue in condition.residues}
        if condition.value is None:
            return self.facts.has(condition.key.text, layer) != condition.negated
        return self._equals(condition, layer) != condition.negated

    def _equals(self, condition: Where, layer: int) -> bool:
        wanted = condition.value
        if isinstance(wanted, Name):
            wanted_value = self.params[wanted.text].value if wanted.text in self.params else wanted.text
        else:
            wanted_value = wanted.value if wanted is not None else 0
        try:
            return bool(self.facts.value(condition.key.text, layer) == wanted_value)
        except Absent:
            return False

    def _whole(self, atom: Literal | Name) -> int:
        literal = self.params[atom.text] if isinstance(atom, Name) else atom
        return int(literal.value)  # checked to be whole when the file was read

    def _number(self, atom: Atom, layer: int | None) -> float:
        if isinstance(atom, Literal):
            return atom.value
        if isinstance(atom, Name):
            return self.params[atom.text].value if atom.text in self.params else self.facts.number(atom.text, layer)
        return _called(atom, self.facts.number(atom.key.text, layer))

    def _tensor(self, atom: Atom, layer: int | None) -> str:
        name = _named(atom, layer)
        if name not in self.facts.dims:
            raise Absent(f"the model has no tensor {name}", name, self.facts.dims)
        return name


def _called(call: Call, value: float) -> float:
    if call.function == "sqrt":
        if value < 0:
            raise Mismatch("", f"sqrt({call.key.text}): {value:g} is below 0")
        return round_f32(math.sqrt(value))
    value = round_f32(value)
    if value == 0:
        raise Mismatch("", f"inverse({call.key.text}): the value is 0")
    return round_f32(1 / value)


def _named(atom: Atom, layer: int | None) -> str:
    if not isinstance(atom, Name):
        raise Mismatch("", "a tensor's name is needed here")
    return atom.text if layer is None else atom.text.replace("{i}", str(layer))


def _first(choice: Choice, look: Callable[[Atom], T]) -> T | None:
    absent: Absent | None = None
    for atom in choice.atoms:
        if isinstance(atom, Name) and atom.text == "none":
            return None
        try:
            return look(atom)
        except Absent as error:
            absent = absent or error
    raise absent or Absent("nothing is written here")
