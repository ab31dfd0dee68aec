"""Builds of the C kernels that must compute the same bits: which there are, and what this machine lacks for each.

Run as a program it prints what the driver computes, as it is kept in tests/golden/native/digests.txt.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels.cores import usable_cores
from kernels.native import build, structs

DRIVER = Path(__file__).parents[1] / "kernels" / "native" / "driver.c"
EXPECTED = Path(__file__).parents[1] / "golden" / "native"
#: What has to be there for tests to pass, of "gcc clang aarch64" and the words of device_checks: where it is missing
#: they fail rather than be skipped.
REQUIRE = "TESTS_REQUIRE"
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-function")
CROSS = "aarch64-linux-gnu-gcc"
TIMEOUT_S = 200

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
PLAIN = ("-DLANES_PLAIN",)
AVX2_CPU = ("avx2", "fma", "f16c")
AVX512_CPU = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Made:
    """What a compiler made."""

    program: Path
    library: Path  #: not there for a build that is foreign
    warnings: str

    def load(self) -> ctypes.CDLL:
        """The kernels as Python has them."""
        library = ctypes.CDLL(str(self.library))
        structs.declare(library)
        return library


@dataclass(frozen=True)
class Build:
    """One way to compile the kernels."""

    name: str
    variant: str  #: what `swarm_variant` says of it
    compiler: str
    flags: tuple[str, ...]
    machine: str = "x86_64"
    cpu: tuple[str, ...] = ()  #: features without which it does not run
    emulated: str = "max"  #: the CPU that qemu is told to be

    @property
    def is_foreign(self) -> bool:
        """Whether it is made by a cross compiler and runs under qemu."""
        return machine() != self.machine

    def lacks(self) -> str | None:
        """What this machine lacks for it, None if nothing."""
        if self.is_foreign and self.machine != "aarch64":
            return f"the CPU is no {self.machine}"
        if self.is_foreign:
            if shutil.which(CROSS) is None:
                return f"there is no {CROSS} (apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)"
            return None if qemu() else "there is no qemu-aarch64 (apt install qemu-user)"
        if shutil.which(self.compiler) is None:
            return f"there is no {self.compiler} (apt install {self.compiler})"
        missing = sorted(set(self.cpu) - cpu_features())
        return f"the CPU has no {', '.join(missing)}" if missing else None

    def is_required(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether a machine without it fails the tests; a CPU's features are never asked for."""
        wanted = environ.get(REQUIRE, "").split()
        if self.machine == "aarch64":
            return "aarch64" in wanted
        return self.compiler in wanted and machine() == self.machine and not set(self.cpu) - cpu_features()

    def command(self) -> list[str]:
        """The compiler's command."""
        return [CROSS if self.is_foreign else self.compiler]

    def make(self, folder: Path) -> Made:
        """The driver with the kernels in it, as a program and, where this machine runs it, as a library.

        RuntimeError when it does not compile.
        """
        out = folder / self.name.replace(" ", "-")
        code, program, library = (out.with_suffix(ending) for ending in (".o", ".bin", ".so"))
        flags = [flag for flag in build.FLAGS if flag != "-shared"]
        warnings = self._call(*flags, *self.flags, *WARNINGS, f"-I{build.SOURCES}", "-c", str(DRIVER), "-o", str(code))
        static = ("-static",) if self.is_foreign else ()
        self._call(*static, "-pthread", str(code), "-o", str(program), "-lm")
        if not self.is_foreign:
            self._call("-shared", "-pthread", str(code), "-o", str(library), "-lm")
        return Made(program, library, warnings)

    def _call(self, *args: str) -> str:
        """Run the compiler; what it said."""
        command = [*self.command(), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.name} does not compile:\n{done.stderr[:4000]}")
        return done.stderr

    def run(self, program: Path, threads: int = 1) -> subprocess.CompletedProcess[str]:
        """What the driver prints."""
        prefix = [qemu() or "", "-cpu", self.emulated] if self.is_foreign else []
        command = [*prefix, str(program), str(threads)]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def cpu_features() -> set[str]:
    """This CPU's features."""
    return set(build.cpu_features().split())


def machine() -> str:
    """This machine, by the name that compilers have for it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def qemu() -> str | None:
    """The emulator of aarch64 for one program."""
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


#: Each kind of registers by each compiler, optimised more or less: the flags that users' builds have where it matters most.
BUILDS = [
    Build("gcc avx512 vnni", "avx512", "gcc", (*AVX512, "-mavx512vnni"), cpu=(*AVX512_CPU, "avx512_vnni")),
    Build("gcc avx512 -O2", "avx512", "gcc", (*AVX512, "-O2"), cpu=AVX512_CPU),
    Build("gcc avx2", "avx2", "gcc", AVX2, cpu=AVX2_CPU),
    Build("gcc plain -O2", "plain", "gcc", (*PLAIN, "-O2")),
    Build("clang avx512", "avx512", "clang", AVX512, cpu=AVX512_CPU),
    Build("clang avx2 -O1", "avx2", "clang", (*AVX2, "-O1"), cpu=AVX2_CPU),
    Build("clang plain -O1", "plain", "clang", (*PLAIN, "-O1")),
    Build("aarch64 neon dotprod", "neon", "gcc", ("-march=armv8.2-a+dotprod",), "aarch64", cpu=("asimddp",)),
    Build("aarch64 neon -O1", "neon", "gcc", ("-march=armv8-a", "-O1"), "aarch64", emulated="cortex-a57"),
]
if machine() == "aarch64":  # emulated it would cost seconds, and show nothing that the others do not
    BUILDS.append(Build("aarch64 plain", "plain", "gcc", PLAIN, "aarch64"))


class Workshop:
    """Makes builds side by side, in a folder of its own, and then runs what tests ask for."""

    def __init__(self, folder: Path, wanted: Iterable[Build]) -> None:
        self.pool = ThreadPoolExecutor(max(2, usable_cores()))
        self._made = {b.name: self.pool.submit(b.make, folder) for b in wanted if b.lacks() is None}

    def __getitem__(self, build_: Build) -> Future[Made]:
        """What came of a build that is not lacking."""
        return self._made[build_.name]

    def close(self) -> None:
        """Make nothing more."""
        self.pool.shutdown(cancel_futures=True)


def digests(text: str) -> dict[str, str]:
    """Digest by name from lines of `digest  name`."""
    return {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}


def differences(found: Mapping[str, str], expected: Mapping[str, str], shown: int = 12) -> str:
    """Which lines differ, in words; empty when none does."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    told = "\n".join(
        f"  {name}: {found.get(name, 'no such line')}, not {expected.get(name, 'known')}" for name in names[:shown]
    )
    return f"{len(names)} of {len(expected)} lines differ:\n{told}" if names else ""


def main() -> None:
    """Print the digests of plain C, with the first compiler that is there."""
    plain = next(b for b in BUILDS if b.variant == "plain" and b.lacks() is None)
    with tempfile.TemporaryDirectory() as folder:
        done = plain.run(plain.make(Path(folder)).program)
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode == 0:
        print(done.stdout, end="")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
