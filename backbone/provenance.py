"""What an answer came of: sha256 of the weights, of the engine's sources; hashed beside the work, kept between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .discovery import content_sha256

PACKAGES = ("archdefs", "backbone", "kernels", "protocol", "worker")
SOURCES = (".py", ".archdef", ".c", ".h", ".cl", ".cu")
BLOCK_BYTES = 1 << 20


def engine_version() -> str:
    """The installed version."""
    try:
        return version("expertswarm")
    except PackageNotFoundError:
        return "source tree"


@cache
def engine_sha256() -> str:
    """sha256 over the relative path and the sha256 of every source file of the five packages, sorted by path."""
    root, whole = Path(__file__).parents[1], hashlib.sha256()
    files = [p for package in PACKAGES for p in (root / package).rglob("*") if p.suffix in SOURCES and p.is_file()]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        whole.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def class_map_digest(backbone: str, experts: Mapping[int, Sequence[str]]) -> str:
    """Digest of which numeric class computes what: the backbone's, then that of each layer's experts in order."""
    lines = [f"backbone {backbone}"]
    lines += [f"{layer} {expert} {kind}" for layer in sorted(experts) for expert, kind in enumerate(experts[layer])]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where digests are kept between runs."""
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(base) / "expertswarm"


class WeightsDigest:
    """sha256 of a model's files, hashed in a thread beside the work. Provenance waits for it, tokens do not.

    Of a model in several parts it is the sha256 of the parts' sha256, in hexadecimal, one a line.
    """

    def __init__(self, paths: Sequence[Path], folder: Path | None = None) -> None:
        self._paths = tuple(paths)
        self._cache = DigestCache(folder or cache_folder())
        self._found: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-digest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        found = [self._one(path) for path in self._paths]
        if all(found):
            self._found = (
                found[0] if len(found) == 1 else hashlib.sha256("\n".join(map(str, found)).encode()).hexdigest()
            )

    def _one(self, path: Path) -> str | None:
        if (known := content_sha256(path) or self._cache.get(path)) is not None:
            return known
        whole = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while (block := file.read(BLOCK_BYTES)) and not self._stop.is_set():
                    whole.update(block)
        except OSError:
            return None
        if self._stop.is_set():
            return None
        self._cache.put(path, whole.hexdigest())
        return whole.hexdigest()

    def result(self) -> str:
        """The digest, once it is known; empty when a file could not be read."""
        self._thread.join()
        return self._found or ""

    def stop(self) -> None:
        """Give up hashing: nobody will ask."""
        self._stop.set()
        self._thread.join()


class DigestCache:
    """Digests by device, inode, size and time of change, in one file that may be lost or damaged at any time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "digests.json"

    def get(self, path: Path) -> str | None:
        """The digest of a file that has not changed since it was hashed."""
        value = self._read().get(self._key(path))
        return value if isinstance(value, str) and len(value) == 64 else None

    def put(self, path: Path, digest: str) -> None:
        """Keep a digest. A folder that cannot be written costs only the next run's time."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = self._read() | {self._key(path): digest}
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as file:
                json.dump(content, file)
            Path(file.name).replace(self._file)  # readers see the old file or the new one, never half of one

    @staticmethod
    def _key(path: Path) -> str:
        stat = path.stat()
        return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
