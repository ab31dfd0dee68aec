"""The guard of our five import names: another distribution's copy, another place on the path, a missing package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import install

ROOT = Path(install.__file__).parents[1]


def test_nothing_is_wrong_here() -> None:
    assert install.conflicts() == []


def test_another_distribution_that_owns_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"kernels": ["kernels", "expertswarm"], "worker": ["ExpertSwarm"], "numpy": ["numpy"]}
    monkeypatch.setattr(install, "packages_distributions", lambda: owners)
    assert install.conflicts() == [
        "the package 'kernels' also belongs to kernels, and one overwrites the other; "
        "install expertswarm into a virtual environment of its own"
    ]


def conflicts_with(path: str) -> str:
    """What the guard prints in a process of its own with this path before ours."""
    code = "from protocol.install import conflicts; print(*conflicts(), sep='\\n')"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    ended = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_a_real_distribution_beside_ours(tmp_path: Path) -> None:
    info = tmp_path / "kernels-0.17.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\nkernels-0.17.dist-info/METADATA,,\n")
    assert conflicts_with(str(tmp_path)).startswith("the package 'kernels' also belongs to kernels, ")


def test_a_package_that_comes_first_on_the_path(tmp_path: Path) -> None:
    for name in ("kernels", "worker"):
        (tmp_path / name).mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    # A folder without __init__.py does not win over a package behind it: worker is still ours.
    assert conflicts_with(str(tmp_path)) == (
        f"the package 'kernels' is taken from {tmp_path.resolve()}, not from {ROOT}; "
        "install expertswarm into a virtual environment of its own"
    )


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "PACKAGES", ("protocol", "no_such_package"))
    assert install.conflicts()[0].startswith("the package 'no_such_package' is missing; ")


def test_an_import_error_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def explained(module: str) -> str:
        with pytest.raises(ImportError) as caught:
            __import__(module, fromlist=["x"])
        return install.explain(caught.value)

    assert explained("no_such_dependency") == (
        "the package 'no_such_dependency' cannot be imported (No module named 'no_such_dependency'); "
        "pip install expertswarm brings it"
    )
    assert explained("kernels.no_such_module").startswith("the installation is damaged (No module named 'kernels.")
    monkeypatch.setattr(install, "packages_distributions", lambda: {"kernels": ["kernels"]})
    assert explained("kernels.no_such_module").startswith("the package 'kernels' also belongs to kernels, ")
