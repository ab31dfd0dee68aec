"""What an answer came of: sha256 of the weights, of the engine's sources; hashed beside the work, kept between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .discovery import content_sha256, home_folder

PACKAGES = ("archdefs", "backbone", "kernels", "protocol", "worker")
SOURCES = (".py", ".archdef", ".c", ".h", ".cl", ".cu")
BLOCK_BYTES = 1 << 20
MAX_ENTRIES = 4096
MAX_CACHE_BYTES = 1 << 22
SHA256 = re.compile(r"[0-9a-f]{64}")


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
    return Path(environ.get("XDG_CACHE_HOME") or home_folder(environ) / ".cache") / "expertswarm"


def combined(digests: Sequence[str]) -> str:
    """A model's digest from those of its parts: that of the only file, else the sha256 of theirs, one a line."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def known_sha256(paths: Sequence[Path], cache: DigestCache) -> str | None:
    """A model's digest where it is known without reading its files."""
    found = [digest for path in paths if (digest := content_sha256(path) or cache.get(path)) is not None]
    return combined(found) if found and len(found) == len(paths) else None


class WeightsDigest:
    """sha256 of a model's files, hashed in a thread beside the work. Provenance waits for it, tokens do not."""

    def __init__(self, paths: Sequence[Path], folder: Path | None = None) -> None:
        self._paths = tuple(paths)
        self._cache = DigestCache(folder or cache_folder())
        #: The digest, once it is known; empty when a file could not be read.
        self.future = Future[str]()
        self.future.set_running_or_notify_cancel()  # nobody who waits for it can cancel it for the others
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-digest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        found = list[str]()
        try:
            found = [digest for path in self._paths if (digest := self._one(path)) is not None]
        finally:
            self.future.set_result(combined(found) if found and len(found) == len(self._paths) else "")

    def _one(self, path: Path) -> str | None:
        if (known := known_sha256([path], self._cache)) is not None:
            return known
        whole = hashlib.sha256()
        try:
            with path.open("rb") as file:
                before = os.fstat(file.fileno())
                while (block := file.read(BLOCK_BYTES)) and not self._stop.is_set():
                    whole.update(block)
                unchanged = _identity(before) == _identity(os.fstat(file.fileno()))
        except OSError:
            return None
        if self._stop.is_set():
            return None
        if unchanged:  # what was written to meanwhile has no digest worth keeping
            self._cache.put(before, whole.hexdigest())
        return whole.hexdigest()

    def result(self) -> str:
        """The digest, once it is known; empty when a file could not be read."""
        return self.future.result()

    def stop(self) -> None:
        """Give up hashing: nobody will ask."""
        self._stop.set()
        self._thread.join()


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"


class DigestCache:
    """Digests by device, inode, size and time of change, in one file that may be lost or damaged at any time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "digests.json"

    def get(self, path: Path) -> str | None:
        """The digest of a file that has not changed since it was hashed."""
        try:
            value = self._read().get(_identity(path.stat()))
        except OSError:
            return None
        return value if isinstance(value, str) and SHA256.fullmatch(value) else None

    def put(self, stat: os.stat_result, digest: str) -> None:
        """Keep the digest of a file that was like this. Where that fails, the next run hashes again."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = self._read() | {_identity(stat): digest}
            newest = dict(list(content.items())[-MAX_ENTRIES:])
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as file:
                json.dump(newest, file)
            Path(file.name).replace(self._file)  # readers see the old file or the new one, never half of one

    def _read(self) -> dict[str, object]:
        try:
            with self._file.open("rb") as file:
                content = json.loads(file.read(MAX_CACHE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}
