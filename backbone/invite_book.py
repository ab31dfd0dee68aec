"""The book of invites and workers on disk, with the backbone's own key pair, which workers know it by after a restart.

Several processes share it: `backbone invite` writes while a backbone serves. Who changes it holds a lock, reads what is
there, and writes it by rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zmq.utils import z85

from protocol.invite import KEY_BYTES
from protocol.private_file import FileDamaged, make_private, read_private, state_folder, write_private

from .errors import BackboneError
from .gate import new_key_pair
from .invites import InviteEntry, Invites, WorkerEntry

BOOK, KEYS, LOCK = "invites.json", "server-key.json", "lock"
_INVITE = {"key": bytes, "uses": int, "created": int, "expires": int, "is_revoked": bool}
_WORKER = {"key": bytes, "name": str, "invite": bytes, "enrolled": int, "is_revoked": bool}


class InviteBook:
    """`book.invites` is what was last read. BackboneError when a file is damaged or the folder cannot be used."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.folder = state_folder(environ, "backbone")
        self.invites = Invites()
        self._seen: tuple[int, int, int] | None = None
        self.reload_if_changed()

    def server_keys(self) -> tuple[bytes, bytes]:
        """The backbone's public and secret key, raw: made once, the same ever after."""
        path = self.folder / KEYS
        with self._locked():
            content = self._read(path, "every worker has to enrol anew if you move it away")
            if content is None:
                pair = new_key_pair()
                public, secret = (bytes(z85.decode(key)) for key in pair)
                write_private(path, {"public_key": public.hex(), "secret_key": secret.hex()})
                return public, secret
        try:
            return _checked_bytes(content["public_key"]), _checked_bytes(content["secret_key"])
        except (KeyError, ValueError):
            raise BackboneError(
                f"{path}: is damaged: it holds no two keys; every worker has to enrol anew if you move it away"
            ) from None

    def reload_if_changed(self) -> bool:
        """Read the book if it is not the one that was read last; whether it was."""
        path = self.folder / BOOK
        try:
            found = path.stat()
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        except FileNotFoundError:
            seen = None
        except OSError as error:
            raise _unusable(path, error) from None
        if seen == self._seen:
            return False
        fix = "move it away and invite the workers anew"
        content = self._read(path, fix)
        try:
            self.invites = _invites(content) if content is not None else Invites()
        except ValueError as error:
            raise BackboneError(f"{path}: is damaged: {error}; {fix}") from None
        self._seen = seen
        return True

    @contextlib.contextmanager
    def changing(self) -> Iterator[Invites]:
        """The book as it is now, for a change that is written at the end; nothing is when the block raises."""
        with self._locked():
            self.reload_if_changed()
            before = self._content()
            try:
                yield self.invites
            except BaseException:
                self._seen = (0, 0, 0)  # no file is like this: what the block did to the entries here is read away
                self.reload_if_changed()
                raise
            if (content := self._content()) == before:
                return  # whoever was refused costs no writing
            write_private(self.folder / BOOK, content)
            found = (self.folder / BOOK).stat()
            self._seen = (found.st_ino, found.st_size, found.st_mtime_ns)

    def _content(self) -> dict[str, Any]:
        return {
            "invites": [_plain(entry) for entry in self.invites.invites.values()],
            "workers": [_plain(entry) for entry in self.invites.workers.values()],
        }

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_private(self.folder)
            with (self.folder / LOCK).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise _unusable(self.folder, error) from None

    def _read(self, path: Path, fix: str) -> dict[str, Any] | None:
        try:
            return read_private(path)
        except FileDamaged as error:
            raise BackboneError(f"{error}; {fix}") from None
        except OSError as error:
            raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> BackboneError:
    return BackboneError(f"{path}: {error.strerror or error}; set XDG_STATE_HOME to a folder of yours")


def _plain(entry: InviteEntry | WorkerEntry) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(entry).items()}


def _invites(content: dict[str, Any]) -> Invites:
    """The book of what a file holds. ValueError says what is wrong with it."""
    invites = [InviteEntry(**_entry(data, _INVITE)) for data in _list(content, "invites")]
    workers = [WorkerEntry(**_entry(data, _WORKER)) for data in _list(content, "workers")]
    return Invites({entry.key: entry for entry in invites}, {entry.key: entry for entry in workers})


def _list(content: dict[str, Any], name: str) -> list[Any]:
    found = content.get(name)
    if not isinstance(found, list):
        raise ValueError(f"it has no list {name!r}")
    return found


def _entry(data: Any, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    if not isinstance(data, dict) or data.keys() != kinds.keys():
        raise ValueError(f"an entry holds exactly {', '.join(kinds)}")
    found = dict[str, Any]()
    for name, kind in kinds.items():
        found[name] = _checked_bytes(data[name]) if kind is bytes else data[name]
        if type(found[name]) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
    return found


def _checked_bytes(text: Any) -> bytes:
    key = bytes.fromhex(text) if isinstance(text, str) else b""
    if len(key) != KEY_BYTES:
        raise ValueError("a key is not of its length")
    return key
