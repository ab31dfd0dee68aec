"""The `worker` command."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kernels.errors import KernelError
from kernels.interface import Backend, Options
from kernels.memory import keep_heap_steady
from kernels.registry import ACCUMULATION_DTYPES, ACTIVATION_DTYPES, best_backend, make_backend
from protocol.broker import Broker
from protocol.errors import ProtocolError
from protocol.invite import MAX_TEXT, Invite, parse_invite
from protocol.sizes import parse_size

from . import backends, status
from .cache import SliceCache, cache_folder, default_bytes, listing, prune
from .doing import Doing
from .errors import UsageError, WorkerError
from .identity import Identities, checked_name
from .join import Joined, chosen_identity
from .presence import Presence, broker_of
from .runtime import Runtime
from .session import Session, end_with, read_session
from .stopping import Stop

MAX_THREADS = 1024


BEST = "best"  #: a GPU where there is one, else the CPU


class Parser(argparse.ArgumentParser):
    """Takes no flag by its beginning: --mqtt-password would be --mqtt-password-file, and a secret a path."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def build_name() -> str:
    """The installed version, which HELLO carries."""
    try:
        return version("expertswarm")
    except PackageNotFoundError:
        return "source tree"


def serve(session: Session, backend: Backend, cache: SliceCache | None = None) -> None:
    """Connect and serve until the backbone lets go."""
    keep_heap_steady()
    runtime = Runtime(session, backend, build=build_name(), cache=cache)
    try:
        runtime.run()
    finally:
        runtime.close()


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a size such as 800M or 2GiB") from None


def _backend(session: Session) -> Backend:
    options = Options(threads=session.threads, activations=session.activations, accumulation=session.accumulation)
    return best_backend(options) if session.backend == BEST else make_backend(session.backend, options)


# ---- local


def _local(args: argparse.Namespace) -> int:
    memory_bytes = None if args.memory is None else _size("--memory", args.memory)
    cache = None if args.cache is None else _cache(args.cache)
    session = read_session(sys.stdin)
    if memory_bytes is not None:
        session = replace(session, memory_bytes=memory_bytes)
    end_with(sys.stdin)
    serve(session, _backend(session), cache)
    return 0


# ---- join


def _join(args: argparse.Namespace) -> int:
    invite = _invite(args)
    name = "" if args.name is None else checked_name(args.name)
    template = Session(
        endpoint="",
        server_key="",
        public_key="",
        secret_key="",
        backend=args.backend,
        memory_bytes=0 if args.memory is None else _size("--memory", args.memory),
        threads=_threads(args.threads),
        activations=args.activations,
        accumulation=args.accumulation,
        model="" if args.model is None else args.model,
        quiet=False,
    )
    cache = _cache(args.cache)
    broker = _broker(args, os.environ)
    identities = Identities()
    identity, is_known = chosen_identity(identities, invite, name)
    keep_heap_steady()
    with identities.lock(identity), contextlib.closing(Doing(identities.doing_path(identity))) as doing:
        stop = Stop()
        runtime = Runtime(
            template, _backend(template), build=build_name(), cache=cache, is_joined=True, stop=stop, say=_say
        )
        presence = _presence(broker, runtime, stop)
        try:
            Joined(
                identities,
                identity,
                invite,
                is_known=is_known,
                template=template,
                runtime=runtime,
                stop=stop,
                say=_say,
                presence=presence,
                doing=doing,
            ).run()
        finally:
            if presence is not None:
                presence.close()
            runtime.close()
    _say("stopped")
    return 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a worker outlives whoever reads along
        print(f"worker: {line}", file=sys.stderr, flush=True)


def _invite(args: argparse.Namespace) -> Invite | None:
    text, place = args.string, ""
    if args.source is not None:
        if text is not None:
            raise UsageError("give either a string or --from FILE, not both")
        try:
            with Path(args.source).open(encoding="utf-8", errors="replace") as file:
                text, place = file.read(MAX_TEXT + 1), f"{args.source}: "
        except OSError as error:
            raise UsageError(f"--from: {args.source}: cannot be read: {error.strerror}") from None
    if text is None:
        return None
    try:
        return parse_invite(text)
    except ProtocolError as error:
        raise UsageError(f"{place}{error}") from None


def _broker(args: argparse.Namespace, environ: Mapping[str, str]) -> Broker | None:
    """The broker for presence, where one is named: by a flag, else by the environment."""
    given = {"mqtt": args.mqtt, "mqtt_ca": args.mqtt_ca, "mqtt_password_file": args.mqtt_password_file}
    names = (*given, "mqtt_password")
    url, ca_file, password_file, password = (
        environ.get(f"EXPERTSWARM_{name.upper()}", "") if given.get(name) is None else given[name] for name in names
    )
    if not url:
        return None
    return broker_of(url, password=password, password_file=password_file, ca_file=ca_file)


def _presence(broker: Broker | None, runtime: Runtime, stop: Stop) -> Presence | None:
    return None if broker is None else Presence(broker, runtime.hello(), runtime.activity, stop, _say)


def _threads(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:9]) <= MAX_THREADS):
        raise UsageError(f"--threads: {text[:60]!r} is not a number from 0 to {MAX_THREADS}")
    return int(text)


def _cache(text: str | None) -> SliceCache | None:
    folder = cache_folder()
    try:
        most = default_bytes(folder) if text is None else _size("--cache", text)
    except OSError as error:
        raise WorkerError(f"{folder}: {error.strerror}; set XDG_CACHE_HOME, or --cache 0 to go without") from None
    return SliceCache(folder, most) if most else None


# ---- cache


def _cache_list(args: argparse.Namespace) -> int:
    folder = cache_folder()
    entries = listing(folder)
    nbytes = sum(entry.nbytes for entry in entries)
    if args.json:
        slices = [
            {"sha256": e.sha256.hex(), "bytes": e.nbytes, "whole": not e.is_part, "used": int(e.used_s)}
            for e in entries
        ]
        print(json.dumps({"folder": str(folder), "bytes": nbytes, "slices": slices}))
        return 0
    for entry in entries:
        print(f"{entry.sha256.hex()}  {entry.nbytes / 1e6:10.3f} MB{'  (in part)' if entry.is_part else ''}")
    print(f"{len(entries)} slices, {nbytes / 1e6:.1f} MB in {folder}", file=sys.stderr)
    return 0


def _cache_prune(args: argparse.Namespace) -> int:
    folder, most = cache_folder(), _size("--to", args.to)
    removed = prune(folder, most)
    freed, left = sum(entry.nbytes for entry in removed), sum(entry.nbytes for entry in listing(folder))
    if args.json:
        print(json.dumps({"folder": str(folder), "removed": len(removed), "freed_bytes": freed, "bytes": left}))
    else:
        print(f"removed {len(removed)} slices, {freed / 1e6:.1f} MB; {left / 1e6:.1f} MB are left")
    return 0


# ---- parsing


def _add_join(commands: Any) -> None:
    join = commands.add_parser(
        "join",
        help="serve a backbone on another machine, until SIGTERM or Ctrl-C",
        description="Serve a backbone, by the string that 'backbone invite' printed there. Later none is needed: "
        "without a string, the backbone that was joined last.",
    )
    join.add_argument("string", nargs="?", metavar="STRING", help="what 'backbone invite' printed")
    join.add_argument("--from", dest="source", metavar="FILE", help="read the string from a file")
    join.add_argument("--name", metavar="NAME", help="this worker's name (default: the machine's); one for each worker")
    join.add_argument(
        "--backend", default=BEST, metavar="NAME", help="what to compute with (default: best: a GPU, else the CPU)"
    )
    join.add_argument("--memory", metavar="SIZE", help="what it may hold of experts, such as 800M (default: no bound)")
    join.add_argument("--threads", default="0", metavar="N", help="that compute (0: one for each physical core)")
    join.add_argument(
        "--activations",
        default="f32",
        choices=ACTIVATION_DTYPES,
        help="dtype in which activations are multiplied (default f32)",
    )
    join.add_argument(
        "--accumulation",
        default="f32",
        choices=ACCUMULATION_DTYPES,
        help="dtype in which products are summed (default f32; f16 needs a device that has it)",
    )
    join.add_argument("--model", metavar="PATH", help="a copy of the model here: what is in it is not fetched")
    join.add_argument("--cache", metavar="SIZE", help="bytes of experts to keep on disk (default 20GiB; 0: none)")
    join.add_argument(
        "--mqtt",
        metavar="URL",
        help="MQTT broker for presence, such as mqtts://worker@broker.lan (or EXPERTSWARM_MQTT); its password comes by "
        "EXPERTSWARM_MQTT_PASSWORD or a file",
    )
    join.add_argument("--mqtt-ca", metavar="FILE", help="certificate of the CA of an mqtts:// broker")
    join.add_argument("--mqtt-password-file", metavar="FILE", help="file whose first line is the broker's password")
    join.set_defaults(func=_join)


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser("cache", help="show or empty the experts that are kept on disk")
    actions = cache.add_subparsers(metavar="list | prune", required=True)
    shown = actions.add_parser("list", help="show what is kept, the one used last first")
    shown.set_defaults(func=_cache_list)
    pruned = actions.add_parser("prune", help="remove what was not used for longest")
    pruned.add_argument("--to", default="0", metavar="SIZE", help="what may stay (default 0: nothing)")
    pruned.set_defaults(func=_cache_prune)
    for parser in (shown, pruned):
        parser.add_argument("--json", action="store_true", help="print one JSON object")


def _parser() -> Parser:
    parser = Parser(prog="worker", description="Computes experts for an expertswarm backbone.")
    parser.add_argument("--version", action="version", version=f"expertswarm {build_name()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    _add_join(commands)
    _add_cache(commands)
    local = commands.add_parser("local", help="serve the backbone that started this process (it writes to our input)")
    local.add_argument(
        "--memory", metavar="SIZE", help="what it may hold of experts, such as 800M; over what the backbone says"
    )
    local.add_argument("--cache", metavar="SIZE", help="bytes of experts to keep on disk (default: none)")
    local.set_defaults(func=_local)
    backends.add_parser(commands)
    status.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="worker: %(levelname)s: %(message)s")
    try:
        code: int = args.func(args)
        sys.stdout.flush()
    except (WorkerError, KernelError) as error:
        print(f"worker: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("worker: stopped", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
