"""`backbone invite`: one string, with a QR code on a terminal, by which workers enrol; and who did."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import segno
import zmq
from zmq.utils import z85

from protocol.invite import Invite

from .. import run_file
from ..durations import parse_duration, show_duration
from ..errors import BackboneError, UsageError
from ..invite_book import InviteBook
from ..invites import MAX_USES, Entry, InviteEntry, Invites, WorkerEntry
from ..listening import Address, is_loopback, parse_address, reachable_hosts
from ..settings import add_flags, resolve
from ..terminal import table

KEY_CHARACTERS = 12  #: of a key in hexadecimal, for people


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "invite",
        help="let workers on other machines join: prints one string for 'worker join'",
        description="Print one string, and on a terminal its QR code, with which 'worker join' enrols a worker.",
    )
    parser.add_argument("--uses", default="1", metavar="N", help="workers that may enrol with it (default 1)")
    parser.add_argument("--expires", default="1h", metavar="TIME", help="such as 30m, 1h or 7d (default 1h)")
    parser.add_argument("--out", metavar="FILE", help="write the string into a file, for 'worker join --from FILE'")
    parser.add_argument(
        "--if-missing", action="store_true", help="with --out: where FILE is there, leave it as it is and make none"
    )
    add_flags(parser, "listen", "advertise")
    parser.set_defaults(func=create)
    actions = parser.add_subparsers(metavar="list | revoke")
    shown = actions.add_parser("list", help="show the invites and the workers that enrolled")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.set_defaults(func=show)
    revoked = actions.add_parser("revoke", help="let an invite, or a worker that enrolled, in no more")
    revoked.add_argument("who", metavar="KEY|NAME", help="a worker's name, or the beginning of a key")
    revoked.set_defaults(func=revoke)


# ---- creating


def create(args: argparse.Namespace) -> int:
    """Make an invite and print it."""
    settings = resolve(args, os.environ)
    uses, ttl_s = _uses(args.uses), _ttl(args.expires)
    if args.if_missing:
        if args.out is None:
            raise UsageError("--if-missing goes with --out FILE")
        if os.path.lexists(args.out):
            print(f"{args.out} is there: no invite was made", file=sys.stderr)
            return 0
    running = run_file.read() if settings["listen"].source == "default" else None
    if running is not None and running.swarm:
        listen = parse_address(running.swarm, "the running server's address")
    else:
        listen = parse_address(settings.listen, f"listen ({settings['listen'].source})")
    hosts = reachable_hosts(listen, settings.advertise)
    invite = new_invite(InviteBook(), hosts, listen.port, uses=uses, ttl_s=ttl_s, now=int(time.time()))
    if args.out is not None:
        _write(Path(args.out), str(invite))
    else:
        print(invite)
        show_code(str(invite), sys.stdout)
    sys.stdout.flush()
    for line in _advice(invite, listen, uses, ttl_s, args.out):
        print(line, file=sys.stderr)
    return 0


def new_invite(book: InviteBook, hosts: tuple[str, ...], port: int, *, uses: int, ttl_s: int, now: int) -> Invite:
    """An invite that the book knows from now on; its secret half is nowhere else. BackboneError when there are many."""
    server_key = book.server_keys()[0]
    public, secret = (bytes(z85.decode(key)) for key in zmq.curve_keypair())
    with book.changing() as invites:
        try:
            entry = invites.create(public, uses=uses, now=now, ttl_s=ttl_s)
        except ValueError as error:
            raise BackboneError(str(error)) from None
    return Invite(hosts=hosts, port=port, server_key=server_key, secret_key=secret, expires=entry.expires)


def show_code(text: str, stream: TextIO) -> None:
    """The QR code of a text, where somebody can see it."""
    if stream.isatty():
        segno.make(text, error="l", micro=False).terminal(stream, compact=True)


def _uses(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_USES):
        raise UsageError(f"--uses: {text[:60]!r} is not a number from 1 to {MAX_USES}")
    return int(text)


def _ttl(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError:
        raise UsageError(f"--expires: {text[:60]!r} is not a time such as 90s, 30m, 1h or 7d, at most a year") from None


def _write(path: Path, text: str) -> None:
    """A new file that only its owner reads: what is in it lets a worker in."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(text + "\n")
    except FileExistsError:
        raise UsageError(f"--out: {path} is there already; remove it or name another file") from None
    except OSError as error:
        raise BackboneError(f"--out: {path}: cannot be written: {error.strerror}") from None


def _advice(invite: Invite, listen: Address, uses: int, ttl_s: int, out: str | None) -> list[str]:
    """What to do with an invite, for whoever reads along."""
    whom = "one worker" if uses == 1 else f"{uses} workers"
    how = f"--from {out}" if out is not None else "STRING"
    lines = [f"for {whom}, within {show_duration(ttl_s)}: worker join {how}"]
    if listen.is_loopback or all(map(is_loopback, invite.hosts)):
        lines.append(f"only this machine can join: the address {listen} is loopback; --listen HOST:PORT names another")
    return lines


# ---- listing and revoking


def show(args: argparse.Namespace) -> int:
    """List invites and workers."""
    invites, now = InviteBook().invites, int(time.time())
    print(json.dumps(as_json(invites, now)) if args.json else as_text(invites, now))
    return 0


def state_of(invites: Invites, entry: InviteEntry, now: int) -> str:
    """Whether an invite is open, or why not."""
    if entry.is_revoked:
        return "revoked"
    if invites.used(entry.key) >= entry.uses:
        return "used up"
    return "expired" if now >= entry.expires else "open"


def as_json(invites: Invites, now: int) -> dict[str, Any]:
    """The result that scripts rely on."""
    return {
        "invites": [
            {
                "key": entry.key.hex(),
                "state": state_of(invites, entry, now),
                "uses": entry.uses,
                "used": invites.used(entry.key),
                "created": entry.created,
                "expires": entry.expires,
            }
            for entry in invites.invites.values()
        ],
        "workers": [
            {
                "key": worker.key.hex(),
                "name": worker.name,
                "invite": worker.invite.hex(),
                "enrolled": worker.enrolled,
                "state": "revoked" if worker.is_revoked else "enrolled",
            }
            for worker in invites.workers.values()
        ],
    }


def as_text(invites: Invites, now: int) -> str:
    """The same for people."""
    if not invites.invites and not invites.workers:
        return "no invites and no workers; 'backbone invite' makes an invite"
    blocks = list[str]()
    if invites.invites:
        rows: list[tuple[str, ...]] = [("invite", "used", "state", "expires in")]
        for entry in invites.invites.values():
            state, left = state_of(invites, entry, now), entry.expires - now
            used = f"{invites.used(entry.key)} of {entry.uses}"
            rows.append((_short(entry.key), used, state, show_duration(left) if state == "open" else "-"))
        blocks.append(table(rows))
    if invites.workers:
        rows = [("worker", "key", "invite", "state")]
        for worker in invites.workers.values():
            state = "revoked" if worker.is_revoked else "enrolled"
            rows.append((worker.name, _short(worker.key), _short(worker.invite), state))
        blocks.append(table(rows))
    return "\n\n".join(blocks)


def revoke(args: argparse.Namespace) -> int:
    """Let an invite or a worker in no more."""
    with InviteBook().changing() as invites:
        found = invites.find(args.who)
        if len(found) != 1:
            raise UsageError(_not_one(args.who, found))
        entry = found[0]
        invites.revoke(entry)
        stay = [w.name for w in invites.workers.values() if w.invite == entry.key and not w.is_revoked]
    print(f"revoked {_shown(entry)}", file=sys.stderr)
    if isinstance(entry, InviteEntry) and stay:
        print(f"workers that enrolled with it stay: {', '.join(stay)}; revoke them by name", file=sys.stderr)
    return 0


def _not_one(who: str, found: list[Entry]) -> str:
    if not found:
        return f"no invite and no worker is {who[:80]!r}; 'backbone invite list' shows them"
    return f"{who[:80]!r} could be {', '.join(map(_shown, found[:5]))}; give more of the key"


def _shown(entry: Entry) -> str:
    if isinstance(entry, WorkerEntry):
        return f"worker {entry.name} ({_short(entry.key)})"
    return f"invite {_short(entry.key)}"


def _short(key: bytes) -> str:
    return key.hex()[:KEY_CHARACTERS]
