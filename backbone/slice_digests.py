"""sha256 of every expert's slices, hashed beside the work, layer by layer, and kept between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from protocol.private_file import write_private


class Slices(Protocol):
    """Whoever has all experts' bytes."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The model's files."""

    @property
    def expert_tensors(self) -> Mapping[int, Mapping[str, str]]:
        """For each layer with experts: part to the tensor's name."""

    def expert_count(self, layer: int) -> int:
        """Experts of a layer."""

    def slice_data(self, tensor: str, expert: int) -> memoryview:
        """One expert's bytes of a tensor."""

    def release(self, layer: int) -> None:
        """Take a layer's experts out of this process's memory, until they are read again."""


class SliceDigests:
    """Digests by tensor and expert. What is not known yet is hashed when it is asked for."""

    def __init__(self, slices: Slices, folder: Path | None = None) -> None:
        """`folder` keeps them between runs; a file there that is damaged, or of another file's slices, is not used."""
        self._slices, self._known = slices, dict[str, list[bytes]]()
        self._file = None if folder is None else folder / f"{_identity(slices.paths)}.json"
        self._read()
        self._told = len(self._known)
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Hash what is not known yet in a thread, so that nobody has to wait for it."""
        if not all(self.is_known(layer) for layer in self._slices.expert_tensors):
            self._thread = threading.Thread(target=self._run, name="slice-digests", daemon=True)
            self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether the thread hashes."""
        return self._thread is not None and self._thread.is_alive()

    def take_news(self) -> bool:
        """Whether something was hashed since the last call."""
        told, self._told = self._told, len(self._known)
        return told != self._told

    def close(self) -> None:
        """Hash no more."""
        self._is_ending.set()
        if self._thread is not None:
            self._thread.join()

    def is_known(self, layer: int) -> bool:
        """Whether all slices of a layer are hashed."""
        return all(tensor in self._known for tensor in self._slices.expert_tensors[layer].values())

    def of(self, tensor: str, expert: int) -> bytes:
        """The sha256 of a slice."""
        known = self._known.get(tensor)
        return hashlib.sha256(self._slices.slice_data(tensor, expert)).digest() if known is None else known[expert]

    def _run(self) -> None:
        for layer, tensors in self._slices.expert_tensors.items():
            for tensor in tensors.values():
                if tensor in self._known:
                    continue
                digests = list[bytes]()
                for expert in range(self._slices.expert_count(layer)):
                    if self._is_ending.is_set():
                        return
                    digests.append(hashlib.sha256(self._slices.slice_data(tensor, expert)).digest())
                self._known[tensor] = digests
            self._slices.release(layer)
        self._write()

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            content = json.loads(self._file.read_bytes())
            found = {str(tensor): [bytes.fromhex(text) for text in texts] for tensor, texts in content.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return
        for layer, tensors in self._slices.expert_tensors.items():
            for tensor in tensors.values():
                digests = found.get(tensor, [])
                if len(digests) == self._slices.expert_count(layer) and all(len(d) == 32 for d in digests):
                    self._known[tensor] = digests

    def _write(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the next run hashes again
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(self._file, {tensor: [d.hex() for d in ds] for tensor, ds in self._known.items()})


def _identity(paths: Sequence[Path]) -> str:
    """Of files, by device, inode, size and time of change of each."""
    stats = [path.stat() for path in paths]
    told = " ".join(f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns}" for s in stats)
    return hashlib.sha256(told.encode()).hexdigest()[:32]
