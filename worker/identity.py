"""Who a worker is to a backbone: its permanent key pair, and where it is enrolled. One file for each name there.

A process holds its identity's lock as long as it lives: two workers of one key would push each other out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import zmq
from zmq.utils import z85

from protocol.errors import ProtocolError
from protocol.invite import KEY_BYTES, MAX_HOSTS, Invite, is_host
from protocol.messages import MAX_NAME
from protocol.private_file import FileDamaged, make_private, read_private, state_folder, write_private

from .errors import UsageError, WorkerError

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")
_KEYS = ("server_key", "public_key", "secret_key", "invite_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A worker's keys, raw, and the backbone that they are for."""

    name: str
    hosts: tuple[str, ...]
    port: int
    server_key: bytes
    public_key: bytes
    secret_key: bytes = field(repr=False)
    invite_key: bytes  #: public half of the invite that it enrols or enrolled with
    is_enrolled: bool

    def moved_to(self, invite: Invite) -> Identity:
        """The same worker with the addresses of an invite."""
        return replace(self, hosts=invite.hosts, port=invite.port)


def public_half(secret_key: bytes) -> bytes:
    """The public key, raw, of a raw secret key."""
    return bytes(z85.decode(zmq.curve_public(z85.encode(secret_key))))


def new_identity(name: str, invite: Invite) -> Identity:
    """A worker with new keys that has yet to enrol."""
    public, secret = (bytes(z85.decode(key)) for key in zmq.curve_keypair())
    return Identity(
        name=name,
        hosts=invite.hosts,
        port=invite.port,
        server_key=invite.server_key,
        public_key=public,
        secret_key=secret,
        invite_key=public_half(invite.secret_key),
        is_enrolled=False,
    )


def checked_name(text: str) -> str:
    """A worker's name as somebody gave it. UsageError for one that cannot be."""
    if not _NAME.fullmatch(text):
        raise UsageError(f"--name: {text[:80]!r} is not 1 to {MAX_NAME} letters, digits, '.', '_' and '-'")
    return text


def default_name() -> str:
    """A name after this machine."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).lstrip("._-")[:MAX_NAME]
    return name or "worker"


class Identities:
    """The folder of a machine's identities."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.folder = state_folder(environ, "worker")

    def path(self, server_key: bytes, name: str) -> Path:
        """The file of a name at a backbone."""
        return self.folder / f"{server_key.hex()[:16]}.{name}.json"

    def doing_path(self, identity: Identity) -> Path:
        """The file in which the process of an identity says what it does."""
        return self.path(identity.server_key, identity.name).with_suffix(".doing")

    def find(
        self, *, server_key: bytes | None = None, invite_key: bytes | None = None, name: str = ""
    ) -> list[Identity]:
        """The identities that are of this backbone, invite and name, where given: the one written last comes first.

        WorkerError when a file that might be one of them is damaged.
        """
        start = "" if server_key is None else server_key.hex()[:16]
        try:
            paths = sorted(
                self.folder.glob(f"{start}*.{name or '*'}.json"), key=lambda p: p.stat().st_mtime_ns, reverse=True
            )
        except OSError as error:
            raise _unreadable(self.folder, error) from None
        found = [self._read(path) for path in paths]
        return [
            identity
            for identity in found
            if server_key in (None, identity.server_key)
            and invite_key in (None, identity.invite_key)
            and name in ("", identity.name)
        ]

    def save(self, identity: Identity) -> None:
        """Keep an identity. WorkerError when the folder cannot be written."""
        content: dict[str, Any] = asdict(identity) | {key: getattr(identity, key).hex() for key in _KEYS}
        path = self.path(identity.server_key, identity.name)
        try:
            write_private(path, content)
        except OSError as error:
            raise _unreadable(path, error) from None

    def lock(self, identity: Identity) -> IO[str]:
        """Hold an identity until the file is closed. WorkerError when another process does."""
        path = self.path(identity.server_key, identity.name).with_suffix(".lock")
        try:
            make_private(self.folder)
            file = path.open("a+", encoding="ascii")
        except OSError as error:
            raise _unreadable(path, error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            pid = re.sub(r"\D", "", file.read(20)) or "unknown"
            file.close()
            raise WorkerError(
                f"a worker named {identity.name} runs on this machine already (process {pid}); "
                "give this one another --name"
            ) from None
        with contextlib.suppress(OSError):  # the number is for people
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        return file

    def _read(self, path: Path) -> Identity:
        fix = "move the file away and join with a new invite ('backbone invite')"
        try:
            content = read_private(path)
            return _identity(content or {})
        except FileDamaged as error:
            raise WorkerError(f"{error}; {fix}") from None
        except (ValueError, ProtocolError) as error:
            raise WorkerError(f"{path}: is damaged: {error}; {fix}") from None
        except OSError as error:
            raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> WorkerError:
    return WorkerError(f"{path}: {error.strerror or error}; set XDG_STATE_HOME to a folder of yours")


def _identity(content: dict[str, Any]) -> Identity:
    """An identity from what a file holds. ValueError names the entry that is wrong."""
    kinds = {"name": str, "hosts": list, "port": int, "is_enrolled": bool, **dict.fromkeys(_KEYS, str)}
    for entry, kind in kinds.items():
        if type(content.get(entry)) is not kind:
            raise ValueError(f"it has no right {entry!r}")
    if content.keys() != kinds.keys():
        raise ValueError("it has an entry that is not known")
    keys = {entry: _key(entry, content[entry]) for entry in _KEYS}
    hosts: list[Any] = content["hosts"]
    if not (
        _NAME.fullmatch(content["name"])
        and 1 <= len(hosts) <= MAX_HOSTS
        and all(isinstance(host, str) and is_host(host) for host in hosts)
        and 1 <= content["port"] <= 65535
    ):
        raise ValueError("its name, hosts or port cannot be")
    if public_half(keys["secret_key"]) != keys["public_key"]:
        raise ValueError("its two keys do not belong together")
    return Identity(**(content | keys | {"hosts": tuple(hosts)}))


def _key(entry: str, text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"it has no right {entry!r}")
    return key
