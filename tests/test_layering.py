"""Who may import whom: read from the syntax of every module, also of imports inside functions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_data import ROOT

ALLOWED = {
    "protocol": set[str](),
    "archdefs": set[str](),
    "kernels": set[str](),
    "worker": {"protocol", "kernels"},
    "backbone": {"protocol", "kernels", "archdefs"},
}
#: What `pip install` brings, and which of it each package may use at all.
THIRD_PARTY = {
    "protocol": {"msgpack"},
    "archdefs": set[str](),
    "kernels": {"numpy"},
    "worker": {"numpy", "zmq", "msgpack"},
    "backbone": {"numpy", "zmq", "msgpack", "tokenizers", "jinja2", "segno"},
    "backbone.server": {"starlette", "uvicorn", "h11", "prometheus_client"},
}
#: What only an extra brings: each is imported by the one module of a package that binds it, in a function.
EXTRAS = {
    "kernels/device/opencl.py": "pyopencl",
    "kernels/device/cuda.py": "cupy",
    "protocol/presence_link.py": "aiomqtt",
    "backbone/tolerance/plots.py": "matplotlib",
}
MODULES = sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))
DYNAMIC = {"__import__", "import_module", "exec", "eval"}


def imported(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Each imported module's full name. `package` is that of the module, for relative imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            if node.level and not above:
                yield "beyond the top"
                continue
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (".".join([*above, name]) for name in names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in DYNAMIC:
                yield f"{called}()"


def faults(source: str, package: tuple[str, ...]) -> list[str]:
    """The imports of a module that it may not have."""
    home = package[0]
    fine = {home} | ALLOWED[home] | THIRD_PARTY[home] | sys.stdlib_module_names
    fine |= THIRD_PARTY.get(".".join(package[:2]), set())
    return [name for name in imported(source, package) if name.split(".")[0] not in fine]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_module_imports_only_what_its_package_may(path: Path) -> None:
    found = faults(path.read_text(encoding="utf-8"), path.relative_to(ROOT).parent.parts)
    found = [name for name in found if name != EXTRAS.get(path.relative_to(ROOT).as_posix())]
    assert found == [], f"{path.relative_to(ROOT)} imports {', '.join(found)}"


@pytest.mark.parametrize("module", EXTRAS)
def test_what_an_extra_brings_is_imported_when_it_is_needed(module: str) -> None:
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    at_import = ast.Module([node for node in tree.body if node not in functions], [])
    package = Path(module).parent.parts
    assert EXTRAS[module] not in imported(ast.unparse(at_import), package)
    assert EXTRAS[module] in imported(ast.unparse(ast.Module(list(functions), [])), package)


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("import backbone.engine", ("worker",), ["backbone.engine"]),
        ("from worker import state", ("backbone",), ["worker"]),
        ("def f():\n    from archdefs import bind", ("kernels",), ["archdefs"]),
        ("from .. import kernels", ("protocol",), ["beyond the top"]),
        ("from ...worker import x", ("backbone", "commands"), ["beyond the top"]),
        ("import tests.support", ("backbone",), ["tests.support"]),
        ("import zmq, os", ("kernels",), ["zmq"]),
        ("import uvicorn", ("backbone", "commands"), ["uvicorn"]),
        ("import uvicorn, zmq", ("backbone", "server"), []),
        ("import importlib\nimportlib.import_module(name)", ("worker",), ["import_module()"]),
        ("__import__('backbone')", ("worker",), ["__import__()"]),
        ("from ..kernels import x\nfrom . import y\nimport numpy", ("backbone", "commands"), []),
        ("from kernels.gguf import open_gguf\nfrom .state import State", ("worker",), []),
    ],
)
def test_the_rule_finds_what_it_is_for(source: str, package: tuple[str, ...], found: list[str]) -> None:
    assert faults(source, package) == found


def test_every_package_is_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(ALLOWED)
    tops = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert tops == set(ALLOWED), "a new package needs its row here"


BLOCKER = """
import sys
# ziglang is a compiler that `native` looks for; nothing of it is imported.
allowed = set(sys.stdlib_module_names) | {"worker", "protocol", "kernels", "numpy", "zmq", "msgpack", "ziglang"}

class Blocker:
    refused = []
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        # numpy and zmq look for others and go on without them; ours would not.
        if top not in allowed:
            self.refused.append(name)
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def blocked(code: str) -> subprocess.CompletedProcess[str]:
    """Run code where every module but a worker's own three dependencies is missing."""
    command = [sys.executable, "-c", BLOCKER + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_worker_runs_with_its_three_dependencies_alone() -> None:
    code = """
import worker.cli, worker.runtime
from kernels.registry import make_backend
make_backend("numpy")
ours = {n.partition(".")[0] for n in sys.modules} & {"backbone", "archdefs", "tokenizers", "jinja2", "gguf"}
print(sorted(ours))
"""
    done = blocked(code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_backends_are_listed_with_the_three_alone() -> None:
    code = """
import sys
from worker.cli import main
sys.exit(main(["backends", "--json", "--probe-seconds", "0"]))
"""
    done = blocked(code)
    assert (done.returncode, done.stderr) == (0, "")
    found = {one["backend"]: one for one in json.loads(done.stdout)["backends"]}
    assert [name for name, one in found.items() if one["available"]][:2] == ["native", "numpy"]
    assert all(one["memory_bytes"] > 0 for backend in found.values() for one in backend["devices"])
    assert "pip install 'expertswarm[cuda]'" in found["cuda"]["reason"]
    assert found["opencl"]["available"] or "pip install 'expertswarm[opencl]'" in found["opencl"]["reason"]


def test_presence_is_an_extra_of_the_worker() -> None:
    """Without aiomqtt the command says what to install."""
    done = blocked("""
import worker.cli
sys.exit(worker.cli.main(["join", "--cache", "0", "--mqtt", "mqtt://box"]))
""")
    told = "worker: error: --mqtt: needs aiomqtt: pip install expertswarm[mqtt]\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_the_block_holds() -> None:
    for module in ("backbone.cli", "archdefs", "tokenizers", "jinja2", "gguf", "aiomqtt"):
        done = blocked(f"import {module}")
        assert done.returncode == 1
        assert f"ModuleNotFoundError: blocked: {module.partition('.')[0]}" in done.stderr
