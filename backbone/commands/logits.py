"""`backbone logits`: the logits after each token, as a numpy file, for scripts."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kernels.interface import F32

from ..engine import Engine
from ..errors import BackboneError, UsageError
from ..session import open_session
from ..settings import add_flags, resolve
from .generate import MODEL_FLAGS, parse_ids


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "logits",
        help="write the logits after each token to a .npy file",
        description="Write logits, float32 [tokens, vocabulary], after each of the given tokens.",
    )
    parser.add_argument("--ids", required=True, metavar="1,2,3", help="token ids, taken as they are")
    parser.add_argument("--out", required=True, metavar="F.npy", help="the file to write")
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="rows at a time (1: token by token)")
    add_flags(parser, *MODEL_FLAGS)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Compute and write the logits."""
    ids, out = parse_ids(args.ids), Path(args.out)
    if args.batch < 0:
        raise UsageError(f"--batch {args.batch}: a number of rows is needed (0: the default)")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; name a file")
    with open_session(resolve(args, os.environ)) as session:
        engine = session.engine
        if args.batch:
            engine = Engine(session.model, engine.experts, context=engine.context, chunk_rows=args.batch)
        logits = engine.extend(engine.new_sequence(), ids, want_all=True)
    _write(out, logits)
    print(f"{out}: float32 {logits.shape[0]} x {logits.shape[1]}", file=sys.stderr)
    return 0


def _write(out: Path, logits: F32) -> None:
    """Write a file whole or not at all; what is no regular file, such as a pipe, is written as it is."""
    is_special = out.exists() and not out.is_file()
    half = out if is_special else out.with_name(f"{out.name}.part")
    try:
        with half.open("wb") as file:
            file.write(_npy(logits))
        if not is_special:
            half.replace(out)
    except OSError as error:
        if not is_special:
            half.unlink(missing_ok=True)
        raise BackboneError(f"--out {out}: cannot be written: {error.strerror}") from None


def _npy(logits: F32) -> bytes:
    data = io.BytesIO()
    np.save(data, logits)
    return data.getvalue()
