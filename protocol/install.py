"""Who owns our five import names. `kernels`, `protocol` and `worker` are other projects' names on PyPI too, and pip
lets one distribution overwrite another without a word. Needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import packages_distributions
from pathlib import Path

DISTRIBUTION = "expertswarm"
PACKAGES = ("archdefs", "backbone", "kernels", "protocol", "worker")
_FIX = f"install {DISTRIBUTION} into a virtual environment of its own"


def conflicts() -> list[str]:
    """What is wrong with the five names, one line each with the fix; empty when all are ours."""
    return [*_foreign_owners(), *_scattered()]


def explain(error: ImportError) -> str:
    """One line for a command that could not start: a conflict of names, else the module that is missing."""
    found = conflicts()
    if found:
        return found[0]
    if error.name is not None and error.name.partition(".")[0] not in PACKAGES:
        return f"the package {error.name!r} cannot be imported ({error}); pip install {DISTRIBUTION} brings it"
    return f"the installation is damaged ({error}); {_FIX}"


def _foreign_owners() -> list[str]:
    owners = packages_distributions()
    found = list[str]()
    for package in PACKAGES:
        foreign = sorted({name for name in owners.get(package, ()) if _normal(name) != DISTRIBUTION})
        if foreign:
            found.append(
                f"the package {package!r} also belongs to {', '.join(foreign)}, and one overwrites the other; {_FIX}"
            )
    return found


def _scattered() -> list[str]:
    """Packages that do not lie beside this one: another copy, or another project's, comes first on the path."""
    ours, found = Path(__file__).resolve().parents[1], list[str]()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None:
            found.append(f"the package {package!r} is missing; {_FIX}")
        elif (place := _folder(spec.origin)) != ours:
            found.append(f"the package {package!r} is taken from {place or 'no file'}, not from {ours}; {_FIX}")
    return found


def _folder(origin: str | None) -> Path | None:
    return Path(origin).resolve().parents[1] if origin is not None else None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
