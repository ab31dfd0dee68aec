"""A definition and a model together: conditions, tensors, numbers and shapes resolved into a flat program.

All problems are found in one go, before any array exists; a problem that comes back in each layer is told once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .check import MAX_STEPS
from .errors import ArchdefError, Mismatch, Problem, Span
from .facts import Absent, Facts
from .library import Definition
from .ops import MAX_WIDTH, OPS, Arg, Kind, Op
from .program import Constant, Program, Step
from .resolve import Resolver
from .shapes import Register, Shapes
from .slots import Slots
from .syntax import Choice, Name, Section, Statement


@dataclass(slots=True)
class _Resolved:
    """A statement's arguments, resolved."""

    registers: dict[str, tuple[str, Register]]
    tensors: dict[str, str]
    constants: dict[str, Constant]
    widths: tuple[int | str, ...] = ()


class _Binder:
    def __init__(self, definition: Definition, facts: Facts) -> None:
        self.definition = definition
        self.document = definition.document
        self.facts = facts
        self.resolver = Resolver(facts, self.document.params)
        self.problems: dict[Span, tuple[Problem, int]] = {}
        self.slots = Slots()
        self.used: set[str] = set()
        self.with_experts: set[int | None] = set()
        self.ran: set[int] = set()
        self.memories = 0
        self.registers: dict[str, Register | None] = {}  #: None: its step has a problem already

    def problem(self, span: Span, message: str, error: Exception | None = None) -> None:
        """Note a problem, or that it came back. What an error says is asked for the first time only."""
        known = self.problems.get(span)
        if known is None:
            told = message if error is None else f"{message}{error}"
            self.problems[span] = (self.document.problem(span, told), 0)
        else:
            self.problems[span] = (known[0], known[1] + 1)

    def run(self) -> Program:
        self._params()
        try:
            layer_count = self.facts.layer_count
        except (Absent, Mismatch) as error:
            self.problem(Span(1, 1), "", error)
            layer_count = 0
        prologue = self._part(self._sections("prologue"), None)
        layers = tuple(self._layer(i) for i in range(layer_count))
        epilogue = self._part(self._sections("epilogue"), None)
        self._last_rows()
        if self.problems:
            raise ArchdefError([self._told(*p) for _, p in sorted(self.problems.items(), key=_place)])
        return Program(
            prologue=prologue,
            layers=layers,
            epilogue=epilogue,
            slot_widths=self.slots.widths,
            logits=self.slots.of("logits"),
            memories=self.memories,
            warnings=tuple(self._warnings()),
        )

    def _last_rows(self) -> None:
        """The result is asked for some rows only: an epilogue that keeps all of them would give other rows' logits."""
        register = self.registers.get("logits")
        if register is not None and not register.last:
            span = self._sections("epilogue")[0].span
            self.problem(span, "logits holds all rows; keep those that are wanted before the head: x = last(x)")

    def _params(self) -> None:
        for name, literal in self.document.params.items():
            if (key := self.facts.full_key(name)) is not None:
                self.problem(literal.span, f"param {name} has the name of the model's key {key}; name it otherwise")

    def _told(self, problem: Problem, repeats: int) -> Problem:
        more = f" (and in {repeats} more layers)" if repeats else ""
        return Problem(problem.file, problem.span, problem.message + more, problem.excerpt)

    def _sections(self, kind: str) -> list[Section]:
        return [s for s in self.document.sections if s.kind == kind]

    def _layer(self, layer: int) -> tuple[Step, ...]:
        sections = list[Section]()
        for number, section in enumerate(self._sections("block")):
            try:
                if all(self.resolver.holds(condition, layer) for condition in section.conditions):
                    sections.append(section)
                    self.ran.add(number)
            except Mismatch as error:
                self.problem(section.span, f"layer {layer}: {error}")
        if not sections:
            self.problem(self._sections("block")[0].span, f"layer {layer} runs no block")
        return self._part(sections, layer)

    def _part(self, sections: list[Section], layer: int | None) -> tuple[Step, ...]:
        statements = [s for section in sections for s in section.statements]
        if len(statements) > MAX_STEPS:
            self.problem(
                statements[MAX_STEPS].span,
                f"layer {layer} has {len(statements)} steps; at most {MAX_STEPS} a layer are allowed",
            )
            return ()
        self.registers = {"x": self.registers.get("x")} if "x" in self.registers else {}
        steps, last_read = list[Step](), _last_mentions(statements)
        for at, statement in enumerate(statements):
            if (step := self._statement(statement, layer)) is not None:
                steps += self.slots.collect_before(statement_registers(statement), step.line, layer)
                steps.append(self._placed(step, statement))
                if step.op == "experts":
                    self.slots.in_flight(statement.targets[0].text)
            self.slots.free(name for name, last in last_read.items() if last == at and name not in ("x", "logits"))
        steps += self.slots.collect_before(None, statements[-1].span.line if statements else 0, layer)
        return tuple(steps)

    def _placed(self, step: Step, statement: Statement) -> Step:
        """The step with its registers' slots; results get theirs now."""
        op = OPS[step.op]
        named = {key.text: choice for key, choice in statement.named}
        inputs = list[int]()
        for arg, choice in zip(op.positional, statement.positional, strict=False):
            if arg.kind.is_register:
                inputs.append(self.slots.of(_register(choice)))
        for arg in op.named:
            if arg.kind.is_register:
                inputs.append(self.slots.of(_register(named[arg.name])) if arg.name in named else -1)
        if op.results == 0:
            outputs: tuple[int, ...] = (inputs[0],)
        else:
            outputs = tuple(self.slots.give(t.text, self._width(t.text)) for t in statement.targets)
        memory = None
        if op.has_memory:
            memory, self.memories = self.memories, self.memories + 1
        return Step(
            op=step.op,
            line=step.line,
            inputs=tuple(inputs),
            outputs=outputs,
            tensors=step.tensors,
            constants=step.constants,
            layer=step.layer,
            memory=memory,
            kept=step.kept,
            on_weights=step.on_weights,
        )

    def _width(self, name: str) -> int:
        register = self.registers.get(name)
        return register.width if register is not None else 0

    def _statement(self, statement: Statement, layer: int | None) -> Step | None:
        """The step without its slots; None when it has a problem or does nothing."""
        op = OPS[statement.op.text]
        where = "" if layer is None else f"layer {layer}: "
        resolved = self._arguments(op, statement, layer, where)
        results: tuple[Register, ...] | None = None
        if resolved is not None:
            try:
                results = self._shape(op, resolved, layer)
            except (Mismatch, Absent) as error:
                argument = getattr(error, "argument", "") if isinstance(error, Mismatch) else ""
                span, what = _point(op, statement, argument, resolved)
                self.problem(span, f"{where}{op.name}: {what}", error)
        for i, target in enumerate(statement.targets):
            self.registers[target.text] = results[i] if results is not None and i < len(results) else None
        if resolved is None or results is None:
            return None
        if op.name == "experts":
            if layer in self.with_experts:
                self.problem(statement.op.span, f"{where}a second experts(); a layer has one")
            self.with_experts.add(layer)
        if op.off is not None and resolved.constants.get(op.off[0]) == op.off[1]:
            return None
        changed = next(iter(resolved.registers.values()), None)
        return Step(
            op=op.name,
            line=statement.span.line,
            inputs=(),
            outputs=(),
            tensors=resolved.tensors,
            constants=resolved.constants,
            layer=layer,
            kept=sum(resolved.registers[name][1].width for name in op.keeps),
            on_weights=op.results == 0 and changed is not None and changed[1].choices_of > 0,
        )

    def _shape(self, op: Op, resolved: _Resolved, layer: int | None) -> tuple[Register, ...]:
        resolved.constants.update(self.resolver.facts_of(op, layer, resolved.constants))
        for name in ("heads", "kv_heads", "dimensions"):
            value = resolved.constants.get(name)
            if isinstance(value, (int, float)):
                if value != int(value) or value < 1:
                    raise Mismatch("", f"{name} is {value:g}; a whole number from 1 up is needed")
                resolved.constants[name] = int(value)
        registers = {name: register for name, (_, register) in resolved.registers.items()}
        _same_rows(op, registers)
        numbers = {k: v for k, v in resolved.constants.items() if isinstance(v, (int, float))}
        dims = {name: self.facts.dims[tensor] for name, tensor in resolved.tensors.items()}
        results = op.rule(Shapes(registers, dims, numbers, resolved.widths))
        for result in results:
            if not 1 <= result.width <= MAX_WIDTH:
                raise Mismatch("", f"gives {result.width} values a row; at most {MAX_WIDTH} are allowed")
        if resolved.widths:
            resolved.constants["widths"] = tuple(r.width for r in results)
        if op.name == "experts":
            resolved.constants["outputs"] = results[0].width
        return results

    def _arguments(self, op: Op, statement: Statement, layer: int | None, where: str) -> _Resolved | None:
        resolved, ok = _Resolved({}, {}, {}), True
        pairs = [(op.positional[min(i, len(op.positional) - 1)], c) for i, c in enumerate(statement.positional)]
        named = {a.name: a for a in op.named}
        pairs += [(named[key.text], choice) for key, choice in statement.named]
        for arg, choice in pairs:
            try:
                ok &= self._argument(arg, choice, layer, resolved)
            except (Absent, Mismatch) as error:
                self.problem(choice.span, where, error)
                ok = False
        return resolved if ok else None

    def _argument(self, arg: Arg, choice: Choice, layer: int | None, resolved: _Resolved) -> bool:
        if arg.kind.is_register:
            name = _register(choice)
            if name not in self.registers:
                raise Mismatch("", f"register {name!r} is read, and no step of this layer's own list has set it")
            register = self.registers[name]
            if register is None:
                return False
            resolved.registers[arg.name] = (name, register)
        elif arg.kind.is_tensor:
            tensor = self.resolver.tensor(choice, layer)
            if tensor is not None:
                resolved.tensors[arg.name] = tensor
                self.used.add(tensor)
        elif arg.kind is Kind.WORD:
            resolved.constants[arg.name] = _register(choice)
        elif arg.kind is Kind.WIDTH:
            resolved.widths += (self.resolver.width(choice, layer),)
        else:
            value = self.resolver.number(choice, layer, arg.kind)
            if value is not None:
                resolved.constants[arg.name] = value
        return True

    def _warnings(self) -> list[str]:
        found = list[str]()
        for number, section in enumerate(self._sections("block")):
            if number not in self.ran:
                found.append(str(self.document.problem(section.span, "this block runs for no layer of the model")))
        unused = [t for t in self.facts.dims if t not in self.used and not self._skipped_layer(t)]
        if unused:
            shown = ", ".join(sorted(unused)[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            found.append(f"{self.document.file}: tensors of the model that no step uses: {shown}")
        return found

    def _skipped_layer(self, tensor: str) -> bool:
        """Whether a tensor belongs to a block that plain decoding leaves out (`nextn_predict_layers`)."""
        head, _, rest = tensor.partition(".")
        index, count = rest.partition(".")[0], self.facts.layer_count
        return head == "blk" and index.isdecimal() and count <= int(index) < self.facts.whole("block_count", None)


def _register(choice: Choice) -> str:
    atom = choice.atoms[0]
    return atom.text if isinstance(atom, Name) else ""


def statement_registers(statement: Statement) -> set[str]:
    """Every register that a statement mentions."""
    op = OPS[statement.op.text]
    names = {t.text for t in statement.targets}
    for i, choice in enumerate(statement.positional):
        if op.positional[min(i, len(op.positional) - 1)].kind.is_register:
            names.add(_register(choice))
    kinds = {a.name: a.kind for a in op.named}
    names |= {_register(choice) for key, choice in statement.named if kinds[key.text].is_register}
    return names


def _last_mentions(statements: list[Statement]) -> dict[str, int]:
    return {name: at for at, s in enumerate(statements) for name in statement_registers(s)}


def _same_rows(op: Op, registers: Mapping[str, Register]) -> None:
    """Rows that `last` kept and all rows cannot meet; chosen experts go to `experts` and to ops on their weights."""
    if len({r.last for r in registers.values()}) > 1:
        raise Mismatch("", "one register holds all rows and the other only those that last() kept")
    kinds = {a.name: a.kind for a in (*op.positional, *op.named)}
    for name, register in registers.items():
        if op.needs_rows and register.last:
            raise Mismatch(name, "holds only the rows that last() kept")
        if kinds[name] is Kind.CHOSEN and not register.choices_of:
            raise Mismatch(name, "does not hold what top_k gives")
        if register.choices_of and kinds[name] is not Kind.CHOSEN and not op.on_weights:
            raise Mismatch(name, "holds chosen experts; only experts() and operations on their weights take it")


def _point(op: Op, statement: Statement, argument: str, resolved: _Resolved) -> tuple[Span, str]:
    """Where to point for an argument, and its name in the definition as the subject of the message."""
    pairs = dict(zip((a.name for a in op.positional), statement.positional, strict=False))
    pairs |= {key.text: choice for key, choice in statement.named}
    if argument not in pairs:
        return statement.op.span, ""
    if argument in resolved.registers:
        return pairs[argument].span, f"register {resolved.registers[argument][0]!r} "
    return pairs[argument].span, f"{resolved.tensors.get(argument, argument)} "


def _place(item: tuple[Span, Any]) -> tuple[int, int]:
    return (item[0].line, item[0].column)


def bind(
    definition: Definition, metadata: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]], source: str
) -> Program:
    """Bind a definition to a model's metadata and tensor dimensions (GGUF order). ArchdefError holds all problems."""
    return _Binder(definition, Facts(metadata, dims, source)).run()
