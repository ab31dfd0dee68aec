"""`backbone init`: writes `.env.example`, every setting with its meaning and default, into the current folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import BackboneError, UsageError
from ..settings import example

FILE = ".env.example"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "init",
        help=f"write {FILE}, every setting with its default",
        description=f"Write {FILE} into the current folder: every setting with its meaning and default.",
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    try:
        with Path(FILE).open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(example())
    except FileExistsError:
        raise UsageError(f"{FILE} is there already; --force writes over it") from None
    except OSError as error:
        raise BackboneError(f"{FILE}: cannot be written: {error.strerror}") from None
    print(f"wrote {FILE}; copy it to .env and set what you want to change", file=sys.stderr)
    return 0
