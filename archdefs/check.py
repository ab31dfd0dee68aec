"""What can be said of a definition without a model: names, arity, register life, limits. All problems at once."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import Problem, Span, did_you_mean
from .ops import ACTIVATIONS, OPS, REFUSED_WORDS, Arg, Kind, Op
from .syntax import (
    CONDITION_WORDS,
    SECTION_WORDS,
    Atom,
    Call,
    Choice,
    Document,
    Layers,
    Literal,
    Name,
    Section,
    Statement,
    With,
    is_register,
)

MAX_STEPS = 512  #: a layer
_RESERVED = frozenset((*OPS, *SECTION_WORDS, *CONDITION_WORDS, "none"))


class _Checker:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.written: set[str] = set()  #: registers that a step may read here

    def problem(self, span: Span, message: str) -> None:
        self.problems.append(self.document.problem(span, message))

    def run(self) -> list[Problem]:
        # A block may read what any earlier block wrote: which of them a layer runs is known only with a model.
        of_blocks = {"x"}
        for section in self.document.sections:
            self.written = {"prologue": set(), "block": of_blocks, "epilogue": {"x"}}[section.kind]
            self._section(section)
            if section.kind == "prologue" and "x" not in self.written:
                self.problem(section.span, "the prologue must set x, the residual register")
            if section.kind == "epilogue" and "logits" not in self.written:
                self.problem(section.span, "the epilogue must set logits, the result")
        return self.problems

    def _section(self, section: Section) -> None:
        for condition in section.conditions:
            if isinstance(condition, Layers):
                self._layers(condition)
            elif isinstance(condition, With):
                self._tensor(condition.tensor, section)
        if len(section.statements) > MAX_STEPS:
            extra = section.statements[MAX_STEPS]
            self.problem(
                extra.span,
                f"{len(section.statements)} steps in one section; at most {MAX_STEPS} a layer are allowed",
            )
            return
        for statement in section.statements:
            self._statement(section, statement)

    def _layers(self, condition: Layers) -> None:
        period = self._param_whole(condition.period)
        for residue in condition.residues:
            value = self._param_whole(residue)
            if period is not None and value is not None and not 0 <= value < period:
                self.problem(residue.span, f"a layer's remainder is from 0 to {period - 1}, not {value}")

    def _param_whole(self, atom: Literal | Name) -> int | None:
        if isinstance(atom, Name):
            if atom.text not in self.document.params:
                near = did_you_mean(atom.text, self.document.params)
                self.problem(atom.span, f"{atom.text!r} is no param of this file; a whole number is needed{near}")
                return None
            value = self.document.params[atom.text].value
        else:
            value = atom.value
        if not isinstance(value, int):
            self.problem(atom.span, f"{value:g} is not a whole number")
            return None
        return value

    def _statement(self, section: Section, statement: Statement) -> None:
        op = OPS.get(statement.op.text)
        if op is None:
            self.problem(statement.op.span, _unknown(statement.op.text))
        else:
            if section.kind not in op.sections:
                self.problem(statement.op.span, f"{op.name!r} belongs in a {' or '.join(op.sections)} section")
            self._targets(op, statement)
            self._arguments(op, section, statement)
        for target in statement.targets:
            if not is_register(target.text) or target.text in _RESERVED:
                self.problem(
                    target.span,
                    f"{target.text!r} cannot name a register: lower-case, and no word of the language",
                )
            self.written.add(target.text)

    def _targets(self, op: Op, statement: Statement) -> None:
        count, names = len(statement.targets), [t.text for t in statement.targets]
        if op.results == 0 and count:
            self.problem(statement.targets[0].span, f"{op.name!r} changes a register in place: write {op.form}")
        elif op.results == 1 and count != 1:
            self.problem(statement.span, f"{op.name!r} gives one result: write {op.form}")
        elif op.results is None:
            widths = len(statement.positional) - len(op.positional) + 1
            if count != widths:
                self.problem(statement.span, f"{widths} widths for {count} results: write {op.form}")
        if len(set(names)) != len(names):
            self.problem(statement.span, "one register takes two results")

    def _arguments(self, op: Op, section: Section, statement: Statement) -> None:
        given, wanted = len(statement.positional), len(op.positional)
        if given < wanted or (given > wanted and not op.variadic):
            self.problem(
                statement.op.span,
                f"{op.name!r} takes {wanted} argument{'s' * (wanted != 1)}, not {given}: {op.form}",
            )
        for i, choice in enumerate(statement.positional[: None if op.variadic else wanted]):
            self._argument(op.positional[min(i, wanted - 1)], section, choice, is_named=False)
        known, seen = {a.name: a for a in op.named}, set[str]()
        for key, choice in statement.named:
            if key.text not in known:
                near = did_you_mean(key.text, known)
                listed = f"; it takes {', '.join(known)}" if known else "; it takes none"
                self.problem(key.span, f"{op.name!r} has no argument {key.text!r}{near or listed}")
                continue
            if key.text in seen:
                self.problem(key.span, f"{key.text!r} is given twice")
            seen.add(key.text)
            self._argument(known[key.text], section, choice, is_named=True)

    def _argument(self, arg: Arg, section: Section, choice: Choice, *, is_named: bool) -> None:
        for i, atom in enumerate(choice.atoms):
            is_last = i == len(choice.atoms) - 1
            if isinstance(atom, Name) and atom.text == "none" and arg.kind is not Kind.WORD:
                if not (is_named and is_last) or arg.kind.is_register:
                    self.problem(atom.span, "'none' can only be the last choice of a named number or tensor")
            elif isinstance(atom, Literal) and not is_last:
                self.problem(atom.span, "a number is always present: what stands after it is never reached")
            else:
                self._atom(arg, section, atom)
        if len(choice.atoms) > 1 and (arg.kind.is_register or arg.kind in (Kind.WORD, Kind.WIDTH)):
            self.problem(choice.span, f"{arg.name!r} has one form and no alternatives")

    def _atom(self, arg: Arg, section: Section, atom: Atom) -> None:
        if arg.kind.is_register:
            self._register(arg, atom)
        elif arg.kind.is_tensor:
            if isinstance(atom, Name):
                self._tensor(atom, section)
            else:
                self.problem(atom.span, f"{arg.name!r} is a tensor's name as the GGUF has it")
        elif arg.kind is Kind.WORD:
            if not isinstance(atom, Name) or atom.text not in ACTIVATIONS:
                text = atom.text if isinstance(atom, (Name, Literal)) else atom.function
                near = did_you_mean(text, ACTIVATIONS) or f"; there are {', '.join(ACTIVATIONS)}"
                self.problem(atom.span, f"no activation {text!r}{near}")
        elif not (arg.kind is Kind.WIDTH and isinstance(atom, Name) and atom.text in ("rest", "half")):
            self._number(arg, atom)

    def _register(self, arg: Arg, atom: Atom) -> None:
        if not isinstance(atom, Name) or not is_register(atom.text) or atom.text in _RESERVED:
            self.problem(atom.span, f"{arg.name!r} is a register here")
        elif atom.text not in self.written:
            near = did_you_mean(atom.text, self.written)
            self.problem(atom.span, f"register {atom.text!r} is read before it is written{near}")

    def _tensor(self, name: Name, section: Section) -> None:
        if "{i}" in name.text and section.kind != "block":
            self.problem(name.span, f"{name.text!r}: {{i}} is a layer's index, and the {section.kind} belongs to none")

    def _number(self, arg: Arg, atom: Atom) -> None:
        if isinstance(atom, Literal):
            if arg.kind is not Kind.NUMBER and (not isinstance(atom.value, int) or atom.value < 1):
                self.problem(atom.span, f"{arg.name!r} is a whole number from 1 up, not {atom.text}")
            if abs(atom.value) > 3.4e38:
                self.problem(atom.span, f"{atom.text} does not fit float32")
            return
        key = atom.key if isinstance(atom, Call) else atom
        if "{i}" in key.text:
            self.problem(key.span, f"{key.text!r} is a tensor's name where a number is needed")


def _unknown(word: str) -> str:
    if word in REFUSED_WORDS:
        return f"no operation {word!r}: a definition has no control flow and opens nothing; write the steps one by one"
    return f"no operation {word!r}{did_you_mean(word, OPS) or '; there are ' + ', '.join(OPS)}"


def check(document: Document) -> Iterable[Problem]:
    """Every problem of a definition that needs no model to be seen."""
    return _Checker(document).run()
