"""The `worker` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from kernels.errors import KernelError
from kernels.interface import Backend, Options
from kernels.registry import make_backend
from protocol.sizes import parse_size

from .errors import UsageError, WorkerError
from .runtime import Runtime
from .session import Session, end_with, read_session


def build_name() -> str:
    """The installed version, which HELLO carries."""
    try:
        return version("expertswarm")
    except PackageNotFoundError:
        return "source tree"


def serve(session: Session, backend: Backend) -> None:
    """Connect and serve until the backbone lets go."""
    runtime = Runtime(session, backend, build=build_name())
    try:
        runtime.run()
    finally:
        runtime.close()


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a size such as 800M or 2GiB") from None


def _local(args: argparse.Namespace) -> int:
    memory_bytes = None if args.memory is None else _size("--memory", args.memory)
    session = read_session(sys.stdin)
    if memory_bytes is not None:
        session = replace(session, memory_bytes=memory_bytes)
    end_with(sys.stdin)
    options = Options(threads=session.threads, activations=session.activations, accumulation=session.accumulation)
    serve(session, make_backend(session.backend, options))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="worker", description="Computes experts for an expertswarm backbone.")
    parser.add_argument("--version", action="version", version=f"expertswarm {build_name()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    local = commands.add_parser("local", help="serve the backbone that started this process (it writes to our input)")
    local.add_argument(
        "--memory", metavar="SIZE", help="what it may hold of experts, such as 800M; over what the backbone says"
    )
    local.set_defaults(func=_local)
    args = parser.parse_args(argv)
    logging.basicConfig(format="worker: %(levelname)s: %(message)s")
    try:
        code: int = args.func(args)
    except (WorkerError, KernelError) as error:
        print(f"worker: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return code
