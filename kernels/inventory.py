"""Every backend with every device that it could compute on here, and for what is absent the reason and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import registry
from .errors import BackendUnavailable
from .interface import DenseBackend, Options
from .registry import make_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A device of a backend."""

    id: str  #: what the backend's setting chooses it by; empty where there is no choice
    name: str  #: as its driver calls it; empty before it is opened where there is no choice
    is_default: bool  #: whether a worker takes it when nothing is said
    open: Callable[[], DenseBackend] = field(repr=False)  #: BackendUnavailable or another KernelError when it fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A backend and its devices."""

    backend: str
    setting: str  #: the variable that chooses among several devices; empty where there is no choice
    candidates: tuple[Candidate, ...]
    reason: str  #: why there is none, and what to install; empty when there is one


def _opencl(environ: Mapping[str, str]) -> tuple[str, list[Candidate]]:
    from .device import opencl_devices
    from .device.backend import DeviceBackend

    found = opencl_devices.list_devices(environ)
    default = opencl_devices.choose(found, None, environ)

    def opener(wanted: str) -> Callable[[], DenseBackend]:
        return lambda: DeviceBackend("opencl", opencl_devices.open_device(wanted, environ), Options())

    return opencl_devices.DEVICE, [
        Candidate(id=one.id, name=one.name, is_default=one.id == default.id, open=opener(one.id)) for one in found
    ]


def _cuda(environ: Mapping[str, str]) -> tuple[str, list[Candidate]]:
    from .device import cuda
    from .device.backend import DeviceBackend

    names = cuda.list_devices()
    default = cuda.choose(names, None, environ)

    def opener(wanted: str) -> Callable[[], DenseBackend]:
        return lambda: DeviceBackend("cuda", cuda.open_device(wanted, environ), Options())

    return cuda.DEVICE, [
        Candidate(id=str(i), name=name, is_default=i == default, open=opener(str(i))) for i, name in enumerate(names)
    ]


#: Backends that choose among devices: the setting's name, and the devices.
_SEVERAL: Mapping[str, Callable[[Mapping[str, str]], tuple[str, list[Candidate]]]] = {"opencl": _opencl, "cuda": _cuda}


def look(environ: Mapping[str, str] = os.environ) -> list[Found]:
    """What this machine has, each backend of the registry in turn. Opens nothing."""
    return [_look(name, environ) for name in registry.BACKENDS]


def availability(environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Each backend's name with None where it runs here, else the reason why not. No device is opened for it."""
    found = dict[str, str | None]()
    for each in look(environ):
        found[each.backend] = each.reason or None
        if not each.reason and not each.setting:  # one that chooses among no devices is its own test
            try:
                each.candidates[0].open()
            except BackendUnavailable as error:
                found[each.backend] = str(error)
    return found


def _look(name: str, environ: Mapping[str, str]) -> Found:
    if name not in _SEVERAL:
        only = Candidate(id="", name="", is_default=True, open=lambda: make_backend(name))
        return Found(backend=name, setting="", candidates=(only,), reason="")
    try:
        setting, candidates = _SEVERAL[name](environ)
    except BackendUnavailable as error:
        return Found(backend=name, setting="", candidates=(), reason=str(error).removeprefix(f"{name}: "))
    return Found(backend=name, setting=setting, candidates=tuple(candidates), reason="")
