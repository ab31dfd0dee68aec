"""Text to statements with line and column. Knows the grammar, not what any operation means.

A line that cannot be read becomes a problem and reading goes on with the next, so that all problems of a file are
found in one go.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import ArchdefError, Problem, Span

MAX_FILE_BYTES = 64 * 1024
FUNCTIONS = ("sqrt", "inverse")
SECTION_WORDS = ("arch", "kind", "param", "prologue", "block", "epilogue")
CONDITION_WORDS = ("with", "without", "layers", "where")

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<comment>\#.*)
      |(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![A-Za-z_.{]))
      |(?P<name>[A-Za-z_](?:[A-Za-z0-9_.\-]|\{i\})*)
      |(?P<mark>[=(),;:|/])""",
    re.VERBOSE,
)
_REGISTER = re.compile(r"[a-z][a-z0-9_]*\Z")
_ARCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*\Z")
# A name may begin with a digit, which would read as a number: this line is taken as written.
_ARCH_LINE = re.compile(r"[ \t]*(?P<word>arch)[ \t]+(?P<name>[^#=(,\s][^#]*?)[ \t]*(?:\#.*)?\Z")


@dataclass(frozen=True, slots=True)
class Literal:
    """A number as written."""

    span: Span
    text: str

    @property
    def value(self) -> float:
        """The number; whole when written without a point or exponent."""
        return float(self.text) if re.search(r"[.eE]", self.text) else int(self.text)


@dataclass(frozen=True, slots=True)
class Name:
    """A register, a key, a param, a tensor or a word: its position tells which."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """`sqrt(KEY)` or `inverse(KEY)`."""

    span: Span
    function: str
    key: Name


Atom = Literal | Name | Call


@dataclass(frozen=True, slots=True)
class Choice:
    """`A | B`: the first that is present."""

    atoms: tuple[Atom, ...]

    @property
    def span(self) -> Span:
        """Where the first alternative stands."""
        return self.atoms[0].span


@dataclass(frozen=True, slots=True)
class Statement:
    """`targets = op(positional; named)`; `targets` is empty for an operation in place."""

    span: Span
    targets: tuple[Name, ...]
    op: Name
    positional: tuple[Choice, ...]
    named: tuple[tuple[Name, Choice], ...]


@dataclass(frozen=True, slots=True)
class With:
    """`with TENSOR` or `without TENSOR`."""

    span: Span
    tensor: Name
    present: bool


@dataclass(frozen=True, slots=True)
class Layers:
    """`layers R,R/P`: layer index mod P is one of the Rs."""

    span: Span
    residues: tuple[Literal | Name, ...]
    period: Literal | Name


@dataclass(frozen=True, slots=True)
class Where:
    """`where [not] KEY [= VALUE]`."""

    span: Span
    key: Name
    negated: bool
    value: Literal | Name | None


Condition = With | Layers | Where


@dataclass(frozen=True, slots=True)
class Section:
    """Prologue, one block, or epilogue, with its statements in order."""

    kind: str
    span: Span
    conditions: tuple[Condition, ...]
    statements: list[Statement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Document:
    """A file that could be read: what it says, not yet whether that makes sense."""

    file: str
    lines: tuple[str, ...]
    arch: Name
    params: dict[str, Literal]
    sections: tuple[Section, ...]

    def problem(self, span: Span, message: str) -> Problem:
        """A problem at a place of this file, with its line as excerpt."""
        return Problem(self.file, span, message, self.lines[span.line - 1])


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    span: Span


class _Unreadable(Exception):
    def __init__(self, span: Span, message: str) -> None:
        self.span = span
        super().__init__(message)


class _Line:
    """The tokens of one line, taken from left to right."""

    def __init__(self, number: int, text: str) -> None:
        self._tokens: list[_Token] = []
        self._at = 0
        self._end = Span(number, len(text.split("#", 1)[0].rstrip()) + 1)
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            span = Span(number, at + 1)
            if match is None:
                raise _Unreadable(span, f"{text[at]!r} has no meaning here")
            at = match.end()
            if match.lastgroup not in ("space", "comment"):
                self._tokens.append(_Token(match.lastgroup or "", match.group(), span))

    def __bool__(self) -> bool:
        return self._at < len(self._tokens)

    @property
    def span(self) -> Span:
        return self._tokens[self._at].span if self else self._end

    def peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def holds(self, mark: str) -> bool:
        return any(t.kind == "mark" and t.text == mark for t in self._tokens)

    def mark(self, text: str) -> bool:
        if self and self._tokens[self._at].kind == "mark" and self.peek() == text:
            self._at += 1
            return True
        return False

    def expect(self, text: str, after: str) -> None:
        if not self.mark(text):
            got = f"{self.peek()!r}" if self else "the end of the line"
            raise _Unreadable(self.span, f"expected {text!r} after {after}, found {got}")

    def name(self, what: str) -> Name:
        if not self or self._tokens[self._at].kind != "name":
            got = f"{self.peek()!r}" if self else "the end of the line"
            raise _Unreadable(self.span, f"expected {what}, found {got}")
        token = self._tokens[self._at]
        self._at += 1
        return Name(token.span, token.text)

    def literal(self) -> Literal | None:
        if self and self._tokens[self._at].kind == "number":
            token = self._tokens[self._at]
            self._at += 1
            return Literal(token.span, token.text)
        return None

    def end(self, after: str) -> None:
        if self:
            raise _Unreadable(self.span, f"nothing may follow {after}; found {self.peek()!r}")


def is_register(text: str) -> bool:
    """Whether a word has the form of a register's name."""
    return _REGISTER.match(text) is not None


def _atom(line: _Line) -> Atom:
    if (literal := line.literal()) is not None:
        return literal
    name = line.name("a register, a key, a tensor or a number")
    if line.peek() != "(":
        return name
    if name.text not in FUNCTIONS:
        raise _Unreadable(
            name.span, f"{name.text!r} cannot be called here; only {' and '.join(FUNCTIONS)} can be, on a key"
        )
    line.expect("(", name.text)
    key = line.name("a key")
    line.expect(")", f"{name.text}({key.text}")
    return Call(name.span, name.text, key)


def _choice(line: _Line) -> Choice:
    atoms = [_atom(line)]
    while line.mark("|"):
        atoms.append(_atom(line))
    return Choice(tuple(atoms))


def parse_choice(text: str) -> Choice:
    """A choice written outside of a file, as the op table writes what an op reads from the metadata."""
    return _choice(_Line(1, text))


def _statement(line: _Line) -> Statement:
    span, targets = line.span, list[Name]()
    if line.holds("="):
        targets.append(line.name("a register"))
        while line.mark(","):
            targets.append(line.name("a register"))
        line.expect("=", "the registers that take the result")
    op = line.name("an operation")
    line.expect("(", op.text)
    positional, named = list[Choice](), list[tuple[Name, Choice]]()
    while line and not line.mark(";") and line.peek() != ")":
        positional.append(_choice(line))
        if line.peek() not in (";", ")"):
            line.expect(",", "an argument")
    while line and line.peek() != ")":
        key = line.name("a named argument")
        line.expect(":", key.text)
        named.append((key, _choice(line)))
        if line.peek() != ")":
            line.expect(",", "an argument")
    line.expect(")", "the arguments")
    line.end("an operation")
    return Statement(span, tuple(targets), op, tuple(positional), tuple(named))


def _number_or_param(line: _Line, what: str) -> Literal | Name:
    literal = line.literal()
    return literal if literal is not None else line.name(what)


def _conditions(line: _Line) -> tuple[Condition, ...]:
    found = list[Condition]()
    while line:
        word = line.name("a condition")
        if word.text in ("with", "without"):
            found.append(With(word.span, line.name("a tensor"), word.text == "with"))
        elif word.text == "layers":
            residues = [_number_or_param(line, "a layer's remainder")]
            while line.mark(","):
                residues.append(_number_or_param(line, "a layer's remainder"))
            line.expect("/", "the remainders")
            found.append(Layers(word.span, tuple(residues), _number_or_param(line, "a period")))
        elif word.text == "where":
            negated = line.peek() == "not"
            if negated:
                line.name("not")
            key = line.name("a key")
            value = _number_or_param(line, "a number or a word") if line.mark("=") else None
            found.append(Where(word.span, key, negated, value))
        else:
            known = ", ".join(CONDITION_WORDS)
            raise _Unreadable(word.span, f"{word.text!r} is no condition of a block; there are {known}")
    return tuple(found)


class _Reader:
    """Reads a file line by line; holds what was read and every problem."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.lines = tuple(text.replace("\r\n", "\n").split("\n"))
        self.problems: list[Problem] = []
        self.arch: Name | None = None
        self.kind: Name | None = None
        self.params: dict[str, Literal] = {}
        self.sections: list[Section] = []

    def problem(self, span: Span, message: str) -> None:
        self.problems.append(Problem(self.file, span, message, self.lines[span.line - 1]))

    def read(self) -> None:
        for number, text in enumerate(self.lines, 1):
            try:
                if match := _ARCH_LINE.match(text):
                    self._arch(
                        Span(number, match.start("word") + 1),
                        Name(Span(number, match.start("name") + 1), match["name"]),
                    )
                elif line := _Line(number, text):
                    self._line(line)
            except _Unreadable as error:
                self.problem(error.span, str(error))
        self._whole()

    def _line(self, line: _Line) -> None:
        word, following, span = line.peek(), line.peek(1), line.span
        if word in SECTION_WORDS and following not in ("=", "(", ","):
            line.name("a word")
            if word == "arch":
                raise _Unreadable(line.span, "'arch' needs a name")
            if word in ("kind", "param"):
                self._heading(word, line, span)
            else:
                self._section(word, line, span)
        elif not self.sections:
            raise _Unreadable(span, f"{word!r} stands before 'prologue'; steps belong to a section")
        else:
            self.sections[-1].statements.append(_statement(line))

    def _arch(self, span: Span, name: Name) -> None:
        if self.sections:
            raise _Unreadable(span, "'arch' belongs before 'prologue'")
        if self.arch is not None:
            raise _Unreadable(span, "the architecture is named twice")
        self.arch = name
        if not _ARCH.match(name.text):
            raise _Unreadable(name.span, f"{name.text!r} is no architecture's name")

    def _heading(self, word: str, line: _Line, span: Span) -> None:
        if self.sections:
            raise _Unreadable(span, f"'{word}' belongs before 'prologue'")
        if self.arch is None:
            raise _Unreadable(span, f"'arch NAME' comes before '{word}'")
        if word == "kind":
            if self.kind is not None:
                raise _Unreadable(span, "the kind is named twice")
            self.kind = line.name("a kind")
            if self.kind.text != "decoder":
                raise _Unreadable(self.kind.span, f"kind {self.kind.text!r} is not known; there is 'decoder'")
        else:
            self._param(line)
        line.end(word)

    def _param(self, line: _Line) -> None:
        name = line.name("a param's name")
        value = line.literal()
        if value is None:
            raise _Unreadable(line.span, f"param {name.text} needs a number")
        if name.text in self.params:
            raise _Unreadable(name.span, f"param {name.text} is given twice")
        self.params[name.text] = value

    def _section(self, word: str, line: _Line, span: Span) -> None:
        order = ("prologue", "block", "epilogue")
        last = self.sections[-1].kind if self.sections else ""
        follows = {"": ("prologue",), "prologue": ("block",), "block": ("block", "epilogue"), "epilogue": ()}
        wrong = word not in follows[last]
        conditions: tuple[Condition, ...] = ()
        try:
            if word == "block":
                conditions = _conditions(line)
            line.end(word)
        finally:
            # Opened even when its line is wrong: its steps are then checked instead of blamed.
            self.sections.append(Section(word, span, conditions))
        if wrong:
            where = f"after {last!r}" if last else "first"
            raise _Unreadable(span, f"{word!r} cannot come {where}; the order is {', '.join(order)}")

    def _whole(self) -> None:
        first, last = Span(1, 1), Span(len(self.lines), 1)
        if self.arch is None:
            self.problem(first, "the file must begin with 'arch NAME'")
        elif self.kind is None:
            self.problem(self.arch.span, "'kind decoder' must follow the 'arch' line")
        kinds = {section.kind for section in self.sections}
        for word in ("prologue", "block", "epilogue"):
            if word not in kinds:
                self.problem(last, f"there is no {word!r} section")


def parse(file: str, text: str) -> tuple[Document, tuple[Problem, ...]]:
    """Read a definition. Returns what could be read and the problems; ArchdefError when too little could be."""
    reader = _Reader(file, text)
    reader.read()
    if reader.arch is None:
        raise ArchdefError(reader.problems)
    document = Document(file, reader.lines, reader.arch, reader.params, tuple(reader.sections))
    return document, tuple(reader.problems)
