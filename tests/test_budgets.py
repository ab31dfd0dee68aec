"""Size limits of the five packages: what outgrows them is two things."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from shared_data import ROOT

MAX_MODULE_LINES = 520
MAX_FUNCTION_LINES = 70
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
PACKAGES = ("protocol", "archdefs", "kernels", "worker", "backbone")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def long_functions(source: str) -> list[str]:
    """Functions above the limit with their lines, decorators left out."""
    return [
        f"{node.name}: {lines} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_module_is_small_in_small_functions_and_says_what_it_is(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_MODULE_LINES
    assert long_functions(source) == []
    assert not NAMELESS & set(path.relative_to(ROOT).with_suffix("").parts), "name it after what it does"
    assert ast.get_docstring(ast.parse(source)) or not source.strip(), "a module's docstring says what it owns"


def test_the_limits_are_found_when_broken() -> None:
    line = "    pass\n"
    assert long_functions("def fits():\n" + line * (MAX_FUNCTION_LINES - 1)) == []
    method = "class A:\n    async def long(self):\n" + ("    " + line) * MAX_FUNCTION_LINES
    assert long_functions(method) == ["long: 71 lines"]
    assert len(MODULES) > 60
