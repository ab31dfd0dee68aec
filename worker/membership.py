"""What a joined worker does next: come as itself, enrol, wait, or leave. Pure: what became of a try comes in.

    not enrolled -> enrol with the invite -> come as itself -> served ... -> wait -> come as itself -> ...

An enrolled worker outlasts its backbone: it goes on trying. One that has yet to enrol gives up after a while. A worker
that is told no leaves at once: it never looks like a hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.backoff import delay_s

from .errors import Break

ENROL_TRIES = 7  #: in a row with nobody answering: about a quarter of a minute
ENROL_HANG_UPS = 2  #: in a row, in the middle of the handshake: a wrong server key looks like this
HANG_UPS = 5  #: the same of an enrolled worker: a proxy in front of a backbone that is down does it too
LET_GO_FAILURES = 5  #: a backbone that let a worker go is not asked again at once
NEW_INVITE = "ask for a new one ('backbone invite')"


class Come(Enum):
    """Connect."""

    AS_ITSELF = "as itself"
    TO_ENROL = "to enrol"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait, then connect as itself or to enrol, whichever it was."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Give up, and say so."""

    reason: str


Step = Come | Wait | Leave


@dataclass(slots=True)
class Membership:
    """`is_known`: this key may be enrolled already. `has_invite`: there is one that it did not enrol with."""

    is_known: bool
    has_invite: bool
    _come: Come = Come.TO_ENROL
    _failures: int = 0
    _hang_ups: int = 0

    def begin(self) -> Come:
        """The first try. A key that may be enrolled is tried before an invite is used up."""
        return self._go(Come.AS_ITSELF if self.is_known else Come.TO_ENROL)

    def waited(self) -> Come:
        """The time is over."""
        return self._come

    def enrolled(self) -> Come:
        """The backbone took the key."""
        self.has_invite = False
        return self._go(Come.AS_ITSELF)

    def welcomed(self) -> None:
        """The backbone accepted the worker as itself."""
        self.has_invite = False
        self._failures = self._hang_ups = 0

    def let_go(self, draw: float) -> Step:
        """The backbone said that it does not need this worker now."""
        self._failures = max(self._failures, LET_GO_FAILURES - 1)
        return self._again(draw)

    def broke(self, how: Break, draw: float, place: str, *, is_hint: bool = False) -> Step:
        """A try or a session ended; `place` is where, for people.

        Of a place that `is_hint` somebody, who may be anybody, said that the backbone is there: whoever answers there
        cannot make the worker leave.
        """
        if is_hint:
            return self._again(draw)
        if how is Break.KEY_REFUSED:
            return self._refused()
        if how is Break.HUNG_UP:
            self._hang_ups += 1
            if self._hang_ups >= (HANG_UPS if self._come is Come.AS_ITSELF else ENROL_HANG_UPS):
                return Leave(f"{place}: {how.value}: its key is another")
        elif how is not Break.NOBODY:
            self._hang_ups = 0
        if self._come is Come.TO_ENROL and self._failures + 1 >= ENROL_TRIES:
            return Leave(f"{place}: {how.value}; is the backbone running, and does it listen on that address?")
        return self._again(draw)

    def _refused(self) -> Step:
        if self._come is Come.TO_ENROL:
            return Leave(f"the backbone refuses this invite: it was used up, has expired or was revoked; {NEW_INVITE}")
        if self.has_invite:
            return self._go(Come.TO_ENROL)
        return Leave(f"the backbone does not let this worker in any more: it was revoked; {NEW_INVITE}")

    def _again(self, draw: float) -> Wait:
        self._failures += 1
        return Wait(delay_s(self._failures, draw))

    def _go(self, come: Come) -> Come:
        self._come, self._failures, self._hang_ups = come, 0, 0
        return come
