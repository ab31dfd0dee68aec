"""The compiled kernels: built once for this machine's CPU, kept in a cache folder, loaded.

A library's name holds the sha256 of the sources with the CPU's features, so that a home folder shared by several
machines has one for each, and that of the compiler with its flags. One process builds, the others wait at a lock. Where
no compiler is left, a library that one made before goes on serving.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import BackendUnavailable
from . import structs

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
MAIN = "program.c"
FLAGS = (
    *("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)
PLAIN = ("-DLANES_PLAIN",)  #: the same bits without the CPU's vectors: what others are compared with
TIMEOUT_S = 300
INSTALL = "install a C compiler (apt install gcc, pkg install clang) or 'pip install expertswarm[compiler]'"


def compilers(environ: Mapping[str, str]) -> list[list[str]]:
    """Commands to try, in order: $CC, cc, gcc, clang, the `ziglang` wheel."""
    found = [shlex.split(environ["CC"])] if environ.get("CC") else []
    found += [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name, path=environ.get("PATH")))]
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc"])
    return found


def cpu_flags() -> tuple[str, ...]:
    """Flags that make the compiler use what this CPU has."""
    machine = platform.machine().lower()
    return ("-mcpu=native",) if machine in ("aarch64", "arm64") else ("-march=native",)


def cpu_features() -> str:
    """What distinguishes this CPU from another that runs the same programs."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.partition(":")[0].strip() in ("flags", "Features"):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


def sources_sha256() -> str:
    """sha256 over the names and texts of the C sources."""
    whole = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        whole.update(f"{path.name}\n".encode() + path.read_bytes())
    return whole.hexdigest()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where libraries are kept."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or tempfile.gettempdir()) / ".cache")
    return Path(home) / "expertswarm" / "native"


class CacheUnavailable(BackendUnavailable):
    """The cache folder is at fault: no other compiler helps."""


def load(environ: Mapping[str, str] = os.environ, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """The library for this machine, compiled if need be. BackendUnavailable says what is missing and how to get it.

    `flags` are given to the compiler beside those of every build, which are kept apart.
    """
    problems, folder = list[str](), cache_folder(environ) / ("others" if flags else "")
    for command in compilers(environ):
        try:
            library = ctypes.CDLL(str(built(command, (*FLAGS, *flags, *cpu_flags()), folder)))
        except CacheUnavailable as error:
            raise BackendUnavailable(f"native: {error}") from None
        except (BackendUnavailable, OSError) as error:
            problems.append(str(error))
            continue
        structs.declare(library)
        for problem in problems:
            log.warning("native: %s; %s was taken", problem, shlex.join(command))
        return library
    if not flags and (made_before := _made_before(folder)) is not None:
        return made_before
    why = "; ".join(problems) if problems else "there is no C compiler"
    raise BackendUnavailable(f"native: {why}; {INSTALL}")


def _made_before(folder: Path) -> ctypes.CDLL | None:
    """A library of these sources for this CPU that a compiler made which is gone, where there is one."""
    _refuse_open_door(folder)
    for path in sorted(folder.glob(f"{_source_key()}-*.so")):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(path))
            structs.declare(library)
            return library
    return None


def _source_key() -> str:
    return _digest("\n".join((sources_sha256(), cpu_features(), platform.machine())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def built(command: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    """The library that a compiler makes, from the cache where it is there. BackendUnavailable when it fails."""
    made_by = _digest("\n".join((*command, _identity(command), *flags)))
    path = folder / f"{_source_key()}-{made_by}.so"
    _refuse_open_door(folder)
    if path.is_file():
        return path
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not path.is_file():
                _compile(command, flags, path)
    except OSError as error:
        raise CacheUnavailable(f"{folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours") from None
    return path


def _refuse_open_door(folder: Path) -> None:
    """What lies in the folder is loaded into this process: nobody else may have put it there."""
    try:
        state = folder.stat()
    except OSError:
        return  # not there yet: what is wrong beyond that shows when it is made
    if state.st_uid not in (0, os.getuid()):
        raise CacheUnavailable(f"{folder}: belongs to somebody else; set XDG_CACHE_HOME to a folder of yours")
    if state.st_mode & 0o022:
        raise CacheUnavailable(
            f"{folder}: others may write to it; make it yours alone (chmod 700), or set XDG_CACHE_HOME"
        )


def _identity(command: Sequence[str]) -> str:
    """What tells one build of a compiler from another; asking it for its version would cost each start a process."""
    path = shutil.which(command[0])
    if path is None:
        raise BackendUnavailable(f"there is no {command[0]}")
    found = Path(path).resolve()
    state = found.stat()
    return f"{found} {state.st_size} {state.st_mtime_ns}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: Sequence[str], flags: Sequence[str], path: Path) -> None:
    print("compiling the native kernels for this CPU (once)", file=sys.stderr, flush=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
    try:
        done = subprocess.run(
            [*command, *flags, str(SOURCES / MAIN), "-o", str(part), "-lm"],
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
            raise BackendUnavailable(f"{shlex.join(command)} failed: {first[:300]}")
        part.replace(path)
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"{shlex.join(command)}: not done within {TIMEOUT_S} s") from None
    finally:
        part.unlink(missing_ok=True)
