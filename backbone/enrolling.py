"""What the backbone answers to somebody who came in with an invite's key: only Enrol is heard. Opens no socket."""

from __future__ import annotations

from protocol.messages import Enrol, Enrolled, Refused, ToBackbone

from .invites import Invites, WorkerEntry


def answer(invites: Invites, invite: bytes, message: ToBackbone, *, server_key: bytes, now: int) -> Enrolled | Refused:
    """The answer to a message of a connection of the key `invite`, raw. What is Refused has to be counted."""
    if not isinstance(message, Enrol):
        return Refused(f"an invite's key may only enrol; it sent {type(message).__name__}")
    if message.public_key == server_key:
        return Refused("not enrolled: this key is the backbone's own")
    found = invites.enrol(invite, message.public_key, message.name, now)
    if isinstance(found, WorkerEntry):
        return Enrolled(server_key, found.name)
    return Refused(f"not enrolled: {found.value}; 'backbone invite' makes a new one")
