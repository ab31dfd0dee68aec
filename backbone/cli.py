"""The `backbone` command: parses, runs a subcommand, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archdefs import ArchdefError
from kernels.errors import KernelError

from .commands import COMMANDS
from .errors import BackboneError, UsageError
from .provenance import engine_version


class Parser(argparse.ArgumentParser):
    """Takes no flag by its beginning: --mqtt-password would be --mqtt-password-file, and a secret a path."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def _parser() -> Parser:
    parser = Parser(
        prog="backbone",
        description="Mixture-of-Experts language models (GGUF) run across whatever hardware turned up.",
    )
    parser.add_argument("--version", action="version", version=f"expertswarm {engine_version()}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more on standard error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. 0: done, 1: failed on the way, 2: wrong use or bad input."""
    _speak_utf8()
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="backbone: %(message)s", stream=sys.stderr
    )
    try:
        code: int = args.func(args)
        sys.stdout.flush()
    except (UsageError, ArchdefError, KernelError) as error:
        return _failed(error, 2)
    except BackboneError as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        print("backbone: stopped", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a stream that cannot be written
        return _failed(error, 1)
    return code


def _speak_utf8() -> None:
    """Prompts and answers are UTF-8 whatever the locale says; what is none shows as U+FFFD rather than ends the run.

    A stream that was closed before we began reads as empty, or takes everything.
    """
    sys.stdin = sys.stdin or Path(os.devnull).open()  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _failed(error: Exception, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"backbone: error: {error}", file=sys.stderr)
    return code
