"""The CUDA branch of a device source on this CPU: a Device for the tests, and what the fake `cupy` launches by.

The text is the one that NVRTC gets; `cuda_shim.h` gives the words of CUDA a meaning in C++.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from native_builds import cpu_features
from numpy.typing import NDArray

from kernels.device.driver import Driver, first_error, with_defines
from kernels.device.interface import DeviceInfo

HEADER = Path(__file__).with_name("cuda_shim.h")
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-w", "-x", "c++")
TIMEOUT_S = 200
#: Of the results of a launch in cuda_shim.h.
RESULTS = {1: "is made for another number of work items", 2: "has a barrier that not every work item comes to"}
KERNEL = re.compile(r"__global__\s+__launch_bounds__\(([^)]*)\)\s*void\s+(\w+)\s*\(")
#: Bytes on both sides of memory that a kernel has no business to write.
GUARD, PATTERN = 64, 0xA5


class CompileError(Exception):
    """The log of a compiler that refused a source."""


def compiler() -> str:
    """A C++ compiler."""
    found = os.environ.get("CXX") or shutil.which("clang++") or shutil.which("g++")
    assert found, "there is no C++ compiler (apt install clang)"
    return found


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda-shim-")


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be launched. `kinds`: a letter for each argument, of p(ointer), i(nteger) and f(loat)."""

    name: str
    kinds: str
    launcher: Any

    def launch(self, groups: tuple[int, int], items: int, values: Sequence[bytes]) -> str | None:
        """Run it on arguments as they lie in memory; what went wrong, None if nothing."""
        held = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        result = self.launcher(*groups, items, pointers)
        return RESULTS[result] if result else None


@functools.cache
def build(source: str) -> dict[str, Kernel]:
    """The kernels of a source by their names, compiled once in a process. CompileError has the compiler's log."""
    plain = _call("-E", "-P", "-x", "c++", "-", text=source)
    found = {name: made_for for made_for, name in KERNEL.findall(plain)}
    launchers = [f"SHIM_KERNEL({name}, ({made_for}))\n" for name, made_for in found.items()]
    text = f'#include "{HEADER}"\n{source}\n{"".join(launchers)}'
    path = Path(_folder().name) / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    features = [f"-m{name}" for name in ("fma", "f16c") if name in cpu_features()]
    _call(*FLAGS, *features, "-o", str(path), "-", "-lm", text=text)
    library = ctypes.CDLL(str(path))
    kernels = dict[str, Kernel]()
    for name in found:
        launcher, kinds = library[f"shim_launch_{name}"], library[f"shim_kinds_{name}"]
        launcher.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p]
        kinds.restype = ctypes.c_char_p
        kernels[name] = Kernel(name, kinds().decode(), launcher)
    return kernels


def _call(*args: str, text: str) -> str:
    command = [compiler(), *args]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stdout


class Bytes:
    """Memory of the shim: full of NaN at first, between bytes that must stay as they are."""

    def __init__(self, nbytes: int) -> None:
        self._whole = np.full(nbytes + 2 * GUARD + 16, PATTERN, np.uint8)
        start = GUARD + -(self._whole.ctypes.data + GUARD) % 16
        self.data = self._whole[start : start + nbytes]
        self.data[:] = 0xFF
        self._rims = (self._whole[:start], self._whole[start + nbytes :])

    @property
    def address(self) -> int:
        """Where it starts, a multiple of 16."""
        return self.data.ctypes.data

    @property
    def is_whole(self) -> bool:
        """Whether nothing was written beside it."""
        return all((rim == PATTERN).all() for rim in self._rims)


class ShimDevice(Driver):
    """A device that runs the CUDA text here, stricter than CUDA: kinds of arguments and writes beside memory are seen."""

    def __init__(self) -> None:
        super().__init__(
            DeviceInfo(
                name="CUDA on this CPU",
                driver="cuda_shim.h",
                memory_bytes=1 << 32,
                largest_buffer=1 << 30,
                work_group=1024,
                divides_exactly=True,
                keeps_subnormals=True,
            )
        )

    def _alloc(self, nbytes: int) -> Bytes:
        return Bytes(nbytes)

    def _free(self, handle: Bytes) -> None:
        pass

    def _write(self, handle: Bytes, data: NDArray[Any], offset: int) -> None:
        handle.data[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    def _read(self, handle: Bytes, out: NDArray[Any], offset: int) -> None:
        out.reshape(-1).view(np.uint8)[:] = handle.data[offset : offset + out.nbytes]

    def _build(self, source: str, defines: Mapping[str, str]) -> dict[str, Kernel]:
        try:
            return build(with_defines(source, defines))
        except CompileError as error:
            raise self._error(f"the source does not compile: {first_error(str(error))}") from None

    def _kernel(self, program: dict[str, Kernel], name: str) -> tuple[Kernel, int]:
        if name not in program:
            raise self._error(f"{name}: there is no such kernel")
        return program[name], len(program[name].kinds)

    def _launch(self, name: str, kernel: Kernel, groups: tuple[int, int], items: int, args: list[Any]) -> None:
        kinds = "".join({Bytes: "p", np.int32: "i", np.float32: "f"}[type(arg)] for arg in args)
        if kinds != kernel.kinds:
            raise self._error(f"{name}: arguments of the kinds {kinds}, it takes {kernel.kinds}")
        values = [arg.address.to_bytes(8, "little") if isinstance(arg, Bytes) else arg.tobytes() for arg in args]
        if problem := kernel.launch(groups, items, values):
            raise self._error(f"{name} {problem}")
        for i, arg in enumerate(args):
            if isinstance(arg, Bytes) and not arg.is_whole:
                raise self._error(f"{name} wrote beside the memory of argument {i}")

    def wait(self) -> None:
        """See Device: a launch returns when it is done."""
