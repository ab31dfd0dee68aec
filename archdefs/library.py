"""The definitions there are: built in, and the operator's, which win. A broken file never falls back to another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .check import check
from .errors import ArchdefError, Problem, Span, did_you_mean
from .syntax import MAX_FILE_BYTES, Document, parse

BUILT_IN = Path(__file__).parent
SUFFIX = ".archdef"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A definition that was read and checked."""

    name: str
    origin: str  #: "built in", or the operator's path
    text: str
    sha256: str  #: of the file's bytes
    document: Document

    @property
    def steps_per_layer(self) -> int:
        """Statements in all blocks together: no layer runs more."""
        return sum(len(s.statements) for s in self.document.sections if s.kind == "block")


@dataclass(frozen=True, slots=True)
class Library:
    """Architectures by name; `broken` holds each file that did not load with its rendered errors."""

    definitions: Mapping[str, Definition]
    broken: Mapping[str, list[str]]

    def get(self, name: str) -> Definition:
        """The definition of an architecture. ArchdefError names the known ones, and those that did not load."""
        if name in self.definitions:
            return self.definitions[name]
        for file, errors in self.broken.items():
            if Path(file).stem == name:
                raise ArchdefError(
                    (),
                    "\n".join([f"architecture {name!r} is unavailable: its definition is broken", *errors]),
                )
        lines = [
            f"no definition for architecture {name!r}{did_you_mean(name, self.definitions)}; known: "
            f"{', '.join(sorted(self.definitions)) or 'none'}"
        ]
        for errors in self.broken.values():
            lines += ["did not load:", *errors]
        raise ArchdefError((), "\n".join(lines))


def _refuse(shown: str, message: str) -> ArchdefError:
    return ArchdefError([Problem(shown, Span(1, 1), message, "")])


def load_definition(path: Path, *, built_in: bool = False) -> Definition:
    """Read and check one file. ArchdefError holds every problem of it."""
    shown = f"archdefs/{path.name}" if built_in else str(path)
    if not path.is_file():
        raise _refuse(shown, "not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise _refuse(shown, f"the file is larger than {MAX_FILE_BYTES} bytes, the limit for a definition")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse(shown, f"byte {error.start} is not UTF-8") from None
    document, problems = parse(shown, text)
    problems = (*problems, *check(document))
    if document.arch.text != path.name.removesuffix(SUFFIX):
        expected = f"{document.arch.text}{SUFFIX}"
        message = f"the file's name and its architecture differ; rename the file to {expected} or the architecture"
        problems = (*problems, document.problem(document.arch.span, message))
    if problems:
        raise ArchdefError(sorted(problems, key=lambda p: (p.span.line, p.span.column)))
    return Definition(
        name=document.arch.text,
        origin="built in" if built_in else str(path),
        text=text,
        sha256=hashlib.sha256(data).hexdigest(),
        document=document,
    )


def load_library(directory: Path | None = None) -> Library:
    """All definitions: the built-in ones and those of the operator's directory, which win by name.

    A broken file makes its architecture unavailable. ArchdefError when the directory itself cannot be read.
    """
    definitions, broken = dict[str, Definition](), dict[str, list[str]]()
    _load_into(definitions, broken, BUILT_IN, built_in=True)
    if directory is not None:
        if not directory.is_dir():
            raise _refuse(str(directory), "no folder of definitions (--archdefs, EXPERTSWARM_ARCHDEFS)")
        _load_into(definitions, broken, directory, built_in=False)
    return Library(definitions, broken)


def _load_into(
    definitions: dict[str, Definition], broken: dict[str, list[str]], directory: Path, *, built_in: bool
) -> None:
    try:
        paths = sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except OSError as error:  # a glob would find nothing there, and the built-in ones would be taken
        raise _refuse(str(directory), f"cannot be read: {error.strerror}") from None
    for path in paths:
        name = path.name.removesuffix(SUFFIX)
        definitions.pop(name, None)  # no fallback: a broken file of the operator's hides the built-in one
        try:
            definitions[name] = load_definition(path, built_in=built_in)
        except OSError as error:
            broken[str(path)] = [f"{path}:1:1: cannot be read: {error.strerror}"]
        except ArchdefError as error:
            broken[str(path)] = [str(problem) for problem in error.problems]
