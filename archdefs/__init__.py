"""The archdef language: syntax, op table, checker, binding; and the definitions. Knows no arrays."""

from .bind import bind
from .errors import ArchdefError, Problem
from .library import Definition, Library, load_definition, load_library
from .ops import ACTIVATIONS, OPS, Op
from .program import Program, Step

__all__ = [
    "ACTIVATIONS",
    "OPS",
    "ArchdefError",
    "Definition",
    "Library",
    "Op",
    "Problem",
    "Program",
    "Step",
    "bind",
    "load_definition",
    "load_library",
]
