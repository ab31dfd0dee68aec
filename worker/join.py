"""A joined worker's life: the shell around `membership`, which decides. It ends by a signal, or when it is told no."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from zmq.utils import z85

from protocol.invite import Invite, endpoint_of

from .doing import CONNECTING, SERVING, Doing
from .enrolment import Stopped, enrol
from .errors import Break, LinkBroken, UsageError, WorkerError
from .identity import Identities, Identity, default_name, new_identity, public_half
from .membership import Come, Leave, Membership, Step, Wait
from .presence import Presence
from .runtime import Runtime
from .session import Session
from .stopping import Stop

Say = Callable[[str], None]


def chosen_identity(identities: Identities, invite: Invite | None, name: str) -> tuple[Identity, bool]:
    """Who this worker is, and whether its key may be enrolled already. UsageError when nothing says where to go.

    The identity with this invite, else the one of this name at its backbone, else a new one; without an invite the one
    that was used last.
    """
    if invite is None:
        found = [identity for identity in identities.find(name=name) if identity.is_enrolled]
        if not found:
            who = f"no worker named {name}" if name else "no worker"
            raise UsageError(f"{who} has joined from here; give the string that 'backbone invite' prints")
        return found[0], True
    server_key = invite.server_key
    found = identities.find(server_key=server_key, invite_key=public_half(invite.secret_key), name=name)
    found = found or identities.find(server_key=server_key, name=name or default_name())
    if found:
        return found[0].moved_to(invite), True
    return new_identity(name or default_name(), invite), False


def addresses(hosts: tuple[str, ...], port: int) -> list[str]:
    """ZeroMQ's addresses of hosts, names looked up now; those that cannot be found are left out."""
    found = list[str]()
    for host in hosts:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        found += [endpoint_of(_numeric(info[4]), port) for info in infos]
    return list(dict.fromkeys(found))


def _numeric(address: tuple[object, ...]) -> str:
    """The address of a socket, with the zone that a link-local one needs."""
    host, scope = str(address[0]), address[3] if len(address) == 4 else 0
    return f"{host}%{socket.if_indextoname(int(str(scope)))}" if scope and "%" not in host else host


class Joined:
    """`template` says what to compute with; where to connect, and as whom, is filled in for each try.

    `presence` is begun once the worker is enrolled; what it says of the backbone's address is tried behind the ones
    that came with the invite. `doing` is told what becomes of it.
    """

    def __init__(
        self,
        identities: Identities,
        identity: Identity,
        invite: Invite | None,
        *,
        is_known: bool,
        template: Session,
        runtime: Runtime,
        stop: Stop,
        say: Say,
        presence: Presence | None = None,
        doing: Doing | None = None,
    ) -> None:
        self._identities, self._identity, self._invite = identities, identity, invite
        self._template, self._runtime, self._stop, self._say = template, runtime, stop, say
        is_same = invite is not None and public_half(invite.secret_key) == identity.invite_key
        has_invite = invite is not None and not (is_same and identity.is_enrolled)
        self._membership = Membership(is_known=is_known, has_invite=has_invite)
        self._presence, self._doing = presence, doing
        self._turn = 0

    def run(self) -> None:
        """Serve until a signal. WorkerError when the backbone says no, or there is none."""
        if self._identity.is_enrolled:
            self._be_present(self._identity.name)
        step: Step = self._membership.begin()
        while True:
            if isinstance(step, Leave):
                raise WorkerError(step.reason)
            if isinstance(step, Wait):
                self._say(f"trying again in {step.seconds:.1f} s")
                if self._stop.wait(step.seconds):
                    return
                step = self._membership.waited()
            else:
                after = self._tried(step)
                if after is None:
                    return
                step = after

    def _tried(self, come: Come) -> Step | None:
        """What to do after a try to connect, which may have lasted for days; None: the worker was stopped."""
        place, is_hint = f"{', '.join(self._identity.hosts)}, port {self._identity.port}", False
        try:
            endpoint, is_hint = self._endpoint(come)
            place = endpoint.removeprefix("tcp://")
            if come is Come.TO_ENROL:
                self._enrol(endpoint, place)
                return self._membership.enrolled()
            self._serve(endpoint, place)
        except Stopped:
            return None
        except LinkBroken as error:
            draw = random.random()  # noqa: S311 - no secret
            step = self._membership.broke(error.how, draw, place, is_hint=is_hint)
            if isinstance(step, Wait):
                self._say(f"{place}: {error}")
            if is_hint or error.how in (Break.NOBODY, Break.HUNG_UP):
                self._turn += 1
            return step
        if self._stop.wait(0):
            return None
        self._say(f"{place}: the backbone let this worker go")
        return self._membership.let_go(random.random())  # noqa: S311

    def _endpoint(self, come: Come) -> tuple[str, bool]:
        """Where to try now, and whether that is only what presence says."""
        own = addresses(self._identity.hosts, self._identity.port)
        said = () if self._presence is None or come is Come.TO_ENROL else self._presence.endpoints()
        hints = [address for host, port in said for address in addresses((host,), port)]
        found = list(dict.fromkeys([*own, *hints]))
        if not found:
            raise LinkBroken(Break.NOBODY)
        endpoint = found[self._turn % len(found)]
        return endpoint, endpoint not in own

    def _be_present(self, name: str) -> None:
        if self._presence is not None:
            self._presence.begin(self._identity, name)

    def _session(self, endpoint: str, public_key: bytes, secret_key: bytes) -> Session:
        keys = (self._identity.server_key, public_key, secret_key)
        server, public, secret = (z85.encode(key).decode() for key in keys)
        return replace(self._template, endpoint=endpoint, server_key=server, public_key=public, secret_key=secret)

    def _enrol(self, endpoint: str, place: str) -> None:
        invite, identity = self._invite, self._identity
        if invite is None:  # membership asks only whoever has one
            raise WorkerError("there is no invite to enrol with")
        invite_key = public_half(invite.secret_key)
        if identity.is_enrolled:  # its old key is not let in any more
            identity = new_identity(identity.name, invite)
        # Kept before it is sent: a worker that is killed in between comes again with the key that the backbone knows.
        identity = self._identity = replace(identity, invite_key=invite_key, is_enrolled=False)
        self._identities.save(identity)
        late = time.time() - invite.expires
        try:
            session = self._session(endpoint, invite_key, invite.secret_key)
            answer = enrol(session, identity.public_key, identity.name, self._stop)
        except LinkBroken as error:
            if error.how is Break.KEY_REFUSED and late > 0:
                raise WorkerError(
                    f"the backbone refuses this invite: it expired {late:.0f} s ago by this machine's clock; "
                    "ask for a new one ('backbone invite')"
                ) from None
            raise
        self._identity = replace(identity, is_enrolled=True)
        self._identities.save(self._identity)
        self._say(f"enrolled at {place} as {answer.name}")

    def _serve(self, endpoint: str, place: str) -> None:
        identity = self._identity

        def on_welcome() -> None:
            self._membership.welcomed()
            self._say(f"connected to {place} as {self._runtime.name}")
            self._does(SERVING)
            self._identity = replace(identity, is_enrolled=True)
            self._identities.save(self._identity)  # also the one that was used last
            self._be_present(self._runtime.name)

        try:
            self._runtime.serve(self._session(endpoint, identity.public_key, identity.secret_key), on_welcome)
        finally:
            self._does(CONNECTING)

    def _does(self, word: str) -> None:
        if self._doing is not None:
            self._doing.say(word)
