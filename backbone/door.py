"""Where workers from elsewhere come in: an address, the backbone's own keys, and the book that says who may."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85

from protocol.errors import ProtocolError
from protocol.frames import decode_to_backbone
from protocol.messages import Enrolled, Refused
from protocol.repeats import Repeats
from protocol.schema import one_line

from .enrolling import answer
from .errors import BackboneError, UsageError
from .gate import Gate
from .invite_book import InviteBook
from .invites import WorkerEntry
from .listening import Address

log = logging.getLogger(__name__)


class Door:
    """The book of invites at an address. Keys are Z85, as the gate has them."""

    def __init__(self, address: Address, book: InviteBook) -> None:
        self.address, self._book = address, book
        self._server_key, self._secret_key = book.server_keys()
        self._repeats = Repeats()
        self.refused = 0  #: enrolments that came to nothing

    def open(self) -> Gate:
        """Listen. UsageError when the address cannot be had."""
        keys = z85.encode(self._server_key), z85.encode(self._secret_key)
        try:
            return Gate(self.address.endpoint, refusal=self._refusal, keys=keys)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            raise UsageError(
                f"the swarm cannot listen at {self.address}: {reason}; choose another by --listen"
            ) from None

    def _refusal(self, key: bytes) -> str:
        raw, now = z85.decode(key), int(time.time())
        reason = self._book.invites.refusal(raw, now)
        if reason and self.has_changed():  # an invite that was made a moment ago
            reason = self._book.invites.refusal(raw, now)
        return reason

    def has_changed(self) -> bool:
        """Read the book if somebody wrote to it; whether that was so. A damaged book changes nothing."""
        try:
            return self._book.reload_if_changed()
        except BackboneError:
            return False

    def worker(self, key: bytes) -> WorkerEntry | None:
        """The enrolled worker of a key."""
        return self._book.invites.worker(z85.decode(key))

    def answer(self, key: bytes, frames: Sequence[Any]) -> Enrolled | Refused | None:
        """What to say to somebody who came in with an invite's key; None to anybody else."""
        raw = z85.decode(key)
        if not self._book.invites.is_invite(raw):
            return None
        try:
            message, _ = decode_to_backbone(frames)
            with self._book.changing() as invites:
                told = answer(invites, raw, message, server_key=self._server_key, now=int(time.time()))
        except ProtocolError as error:
            told = Refused(one_line(f"a message that cannot be read: {error}", 200))
        except BackboneError as error:  # the answer that is in the making has nothing to do with it
            log.error("nobody can enrol: %s", error)
            told = Refused("not enrolled: the backbone cannot write down who enrols; its log says why")
        if isinstance(told, Refused):
            self.refused += 1
            if (tail := self._repeats.tail(raw, time.monotonic())) is not None:
                log.warning("the invite %s... was refused: %s%s", raw.hex()[:12], told.reason, tail)
        return told
