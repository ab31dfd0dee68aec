"""Backends by name. The heavy import happens in the factory; an absent backend says why and what to install."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from .errors import BackendUnavailable
from .interface import DenseBackend


def _numpy() -> DenseBackend:
    from .backends.numpy_cpu import NumpyBackend  # imported here: it reads the machine's CPU and BLAS

    return NumpyBackend()


BACKENDS: Mapping[str, Callable[[], DenseBackend]] = {"numpy": _numpy}


def make_backend(name: str) -> DenseBackend:
    """The backend of this name. BackendUnavailable when there is none or it cannot run here."""
    if name not in BACKENDS:
        near = get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BACKENDS)}"
        raise BackendUnavailable(f"no backend {name!r}; {hint}")
    return BACKENDS[name]()


def probe() -> dict[str, str | None]:
    """Each backend's name with None where it runs here, else the reason why not."""
    found = dict[str, str | None]()
    for name in BACKENDS:
        try:
            make_backend(name)
            found[name] = None
        except BackendUnavailable as error:
            found[name] = str(error)
    return found
