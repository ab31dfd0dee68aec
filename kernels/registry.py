"""Backends by name. The heavy import happens in the factory; an absent backend says why and what to install."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from .errors import BackendUnavailable
from .interface import Backend, DenseBackend, Options

#: What `Options.activations` may be; not every backend computes with each.
ACTIVATION_DTYPES = ("f32", "i16")
CACHE_DTYPES = ("f32", "f16")  #: likewise of `Options.kv_cache`
ACCUMULATION_DTYPES = ("f32", "f16")  #: likewise of `Options.accumulation`
_DEFAULT = Options()

log = logging.getLogger(__name__)


def _sums_in_f32(name: str, options: Options) -> None:
    if options.accumulation != "f32":
        raise BackendUnavailable(
            f"{name} sums products in f32 only; {options.accumulation} needs an opencl or cuda device that has F16"
        )


def _numpy(options: Options) -> DenseBackend:
    _sums_in_f32("numpy", options)
    if options.activations != "f32":
        raise BackendUnavailable(
            f"numpy computes with f32 activations only; {options.activations} needs --backend native"
        )
    if options.kv_cache != "f32":
        raise BackendUnavailable(f"numpy keeps keys and values in f32; {options.kv_cache} needs --backend native")
    from .backends.numpy_cpu import NumpyBackend  # imported here: it reads the machine's CPU and BLAS

    return NumpyBackend()


def _native(options: Options) -> DenseBackend:
    _sums_in_f32("native", options)
    from .backends.native_cpu import NativeBackend  # imported here: it compiles at first use

    return NativeBackend(options)


def _opencl(options: Options) -> DenseBackend:
    from .device.backend import DeviceBackend  # imported here: drivers are heavy, and may not be there
    from .device.opencl_devices import open_device

    return DeviceBackend("opencl", open_device(), options)


def _cuda(options: Options) -> DenseBackend:
    from .device.backend import DeviceBackend
    from .device.cuda import open_device

    return DeviceBackend("cuda", open_device(), options)


BACKENDS: Mapping[str, Callable[[Options], DenseBackend]] = {
    "native": _native,
    "numpy": _numpy,
    "opencl": _opencl,
    "cuda": _cuda,
}


AUTO = "auto"  #: native where it works, else numpy
ON_CPU = ("native", "numpy")


def _auto(options: Options) -> DenseBackend:
    try:
        return _native(options)
    except BackendUnavailable as error:
        if (options.activations, options.kv_cache, options.accumulation) != ("f32",) * 3:
            raise
        log.warning("computing with numpy, many times slower: %s", error)
        return _numpy(options)


def best_backend(options: Options = _DEFAULT) -> DenseBackend:
    """A GPU where there is one that computes as asked, else the CPU as `auto` has it."""
    from .device import opencl_devices

    try:
        return _cuda(options)
    except BackendUnavailable as error:
        log.info("%s", error)
    try:
        if any(device.is_gpu for device in opencl_devices.list_devices()):
            return _opencl(options)
    except BackendUnavailable as error:
        log.info("%s", error)
    return _auto(options)


def make_backend(name: str, options: Options = _DEFAULT) -> DenseBackend:
    """The backend of this name. BackendUnavailable when there is none, or it cannot run here or as asked."""
    for what, given, known in (
        ("activations", options.activations, ACTIVATION_DTYPES),
        ("KV cache", options.kv_cache, CACHE_DTYPES),
        ("accumulation", options.accumulation, ACCUMULATION_DTYPES),
    ):
        if given not in known:
            raise BackendUnavailable(f"no {what} {given!r}; there are {', '.join(known)}")
    if name == AUTO:
        return _auto(options)
    refuse_unknown(name)
    return BACKENDS[name](options)


def refuse_unknown(name: str) -> None:
    """BackendUnavailable when no backend has this name; whether it runs here is not tried."""
    if name not in BACKENDS:
        near = get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BACKENDS)}"
        raise BackendUnavailable(f"no backend {name!r}; {hint}")


def stand_in(backend: Backend) -> Backend | None:
    """A backend on the CPU with a device's bits, for what the device cannot do; None where there is none."""
    if backend.name in ON_CPU:
        return None
    try:
        cpu = make_backend("native")
    except BackendUnavailable:
        return None
    return cpu if cpu.numeric_class == backend.numeric_class else None
