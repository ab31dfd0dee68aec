"""Invites and the workers that enrolled with them: who may come in, and what became of a wish to enrol.

Pure: no files, no clock. Keys are raw CURVE keys; times are unix seconds. Reading is safe beside one thread that
changes: entries are replaced whole, never changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum

from protocol.messages import MAX_NAME

MAX_USES = 10_000
MAX_INVITES = 4096
MAX_WORKERS = 1 << 16
LOCAL_NAME = re.compile(r"local-[0-9]+")  #: as the workers are called that the backbone starts
LEAST_PREFIX = 4  #: characters of a key by which it may be named


class Refusal(Enum):
    """Why a worker was not enrolled."""

    UNKNOWN = "there is no such invite"
    EXPIRED = "the invite has expired"
    REVOKED = "the invite was revoked"
    USED_UP = "the invite was used up"
    WORKER_REVOKED = "this worker was revoked"
    KEY_TAKEN = "this key is another's"


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteEntry:
    """What the backbone keeps of an invite: its secret half is in the string alone."""

    key: bytes  #: public half
    uses: int  #: workers that may enrol with it
    created: int
    expires: int
    is_revoked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEntry:
    """A worker that enrolled."""

    key: bytes
    name: str
    invite: bytes
    enrolled: int
    is_revoked: bool = False


Entry = InviteEntry | WorkerEntry


@dataclass(slots=True)
class Invites:
    """All invites by key, and all workers by key."""

    invites: dict[bytes, InviteEntry] = field(default_factory=dict)
    workers: dict[bytes, WorkerEntry] = field(default_factory=dict)

    # ---- questions

    def used(self, invite: bytes) -> int:
        """How many workers enrolled with an invite, revoked ones among them."""
        return sum(worker.invite == invite for worker in tuple(self.workers.values()))

    def is_open(self, entry: InviteEntry, now: int) -> bool:
        """Whether somebody may yet enrol with an invite."""
        return not entry.is_revoked and now < entry.expires and self.used(entry.key) < entry.uses

    def is_invite(self, key: bytes) -> bool:
        """Whether a key is an invite's: it may enrol and nothing else."""
        return key in self.invites

    def worker(self, key: bytes) -> WorkerEntry | None:
        """The enrolled worker of a key, unless it was revoked."""
        entry = self.workers.get(key)
        return None if entry is None or entry.is_revoked else entry

    def admits(self, key: bytes, now: int) -> bool:
        """Whether a key may pass the handshake now."""
        return not self.refusal(key, now)

    def refusal(self, key: bytes, now: int) -> str:
        """Why a key may not pass the handshake now; empty if it may."""
        invite, worker = self.invites.get(key), self.workers.get(key)
        if invite is None:
            if worker is None:
                return "it is not known"
            return Refusal.WORKER_REVOKED.value if worker.is_revoked else ""
        if self.is_open(invite, now):
            return ""
        why = Refusal.REVOKED if invite.is_revoked else Refusal.EXPIRED if now >= invite.expires else Refusal.USED_UP
        return why.value

    def admitted_keys(self, now: int) -> frozenset[bytes]:
        """All keys that may."""
        return frozenset(key for key in (*self.invites, *self.workers) if self.admits(key, now))

    def find(self, text: str) -> list[Entry]:
        """Whom a name, or the beginning of a key in hexadecimal, could mean. A name that fits whole comes alone."""
        entries: list[Entry] = [*self.invites.values(), *self.workers.values()]
        named = [entry for entry in entries if isinstance(entry, WorkerEntry) and entry.name == text]
        if named or len(text) < LEAST_PREFIX:
            return list[Entry](named)
        return [entry for entry in entries if entry.key.hex().startswith(text.lower())]

    # ---- changes

    def create(self, key: bytes, *, uses: int, now: int, ttl_s: int) -> InviteEntry:
        """An invite for so many workers, open for so long. ValueError when there are too many invites."""
        self._tidy(now)
        if len(self.invites) >= MAX_INVITES:
            raise ValueError(f"there are {MAX_INVITES} open invites; revoke some")
        entry = self.invites[key] = InviteEntry(key=key, uses=uses, created=now, expires=now + ttl_s)
        return entry

    def enrol(self, invite: bytes, key: bytes, name: str, now: int) -> WorkerEntry | Refusal:
        """Let a worker's key in from now on. The same worker with the same invite is welcome again, used up or not."""
        entry, known = self.invites.get(invite), self.workers.get(key)
        if entry is None:
            return Refusal.UNKNOWN
        if known is not None and known.is_revoked:
            return Refusal.WORKER_REVOKED
        if entry.is_revoked:
            return Refusal.REVOKED
        if known is not None and known.invite == invite:
            return known
        if now >= entry.expires:
            return Refusal.EXPIRED
        if known is not None:
            return known
        if self.used(invite) >= entry.uses or len(self.workers) >= MAX_WORKERS:
            return Refusal.USED_UP
        if key in self.invites:
            return Refusal.KEY_TAKEN
        worker = WorkerEntry(key=key, name=self._free_name(name or "worker"), invite=invite, enrolled=now)
        self.workers[key] = worker
        return worker

    def revoke(self, entry: Entry) -> None:
        """Let a key in no more. An invite's workers stay: they are revoked by their own names."""
        if isinstance(entry, InviteEntry):
            self.invites[entry.key] = replace(entry, is_revoked=True)
        else:
            self.workers[entry.key] = replace(entry, is_revoked=True)

    def _free_name(self, wanted: str) -> str:
        """The name, or the name with the first number that makes it nobody else's; a revoked worker's stays its own.

        Names of the backbone's own workers are nobody's.
        """
        taken = {worker.name for worker in self.workers.values()}
        name, number = wanted, 1
        while name in taken or LOCAL_NAME.fullmatch(name):
            number += 1
            name = f"{wanted[: MAX_NAME - 1 - len(str(number))]}-{number}"
        return name

    def _tidy(self, now: int) -> None:
        """Forget closed invites that no worker came by. One that has workers explains where these came from."""
        origins = {worker.invite for worker in self.workers.values()}
        closed = [e.key for e in self.invites.values() if not self.is_open(e, now) and e.key not in origins]
        for key in closed:
            del self.invites[key]
