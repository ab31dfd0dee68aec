"""`backbone tokenize` and `backbone detokenize`: text to ids and back, a line at a time for scripts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from kernels.gguf import open_gguf

from ..discovery import resolve_model
from ..errors import UsageError
from ..settings import add_flags, resolve
from ..tokenizer import Tokenizer, load_tokenizer


def add_parser(commands: Any) -> None:
    """Add both commands."""
    tokenize = commands.add_parser("tokenize", help="text to token ids", description="Turn text into token ids.")
    tokenize.add_argument("text", nargs="?", metavar="TEXT", help="the text (without --jsonl)")
    tokenize.add_argument("--jsonl", action="store_true", help="standard input: a JSON string a line; output: JSON ids")
    tokenize.add_argument("--no-bos", action="store_true", help="add no BOS or EOS")
    tokenize.add_argument("--no-parse-special", action="store_true", help="control tokens in the text are plain text")
    add_flags(tokenize, "model")
    tokenize.set_defaults(func=run_tokenize)
    detokenize = commands.add_parser("detokenize", help="token ids to text", description="Turn token ids into text.")
    detokenize.add_argument("ids", nargs="?", metavar="1,2,3", help="the ids (without --jsonl)")
    detokenize.add_argument(
        "--jsonl", action="store_true", help="standard input: JSON ids a line; output: a JSON string"
    )
    add_flags(detokenize, "model")
    detokenize.set_defaults(func=run_detokenize)


def run_tokenize(args: argparse.Namespace) -> int:
    """Text to ids."""
    tokenizer = _tokenizer(args)

    def encode(text: Any) -> list[int]:
        if not isinstance(text, str):
            raise UsageError("a JSON string is needed")
        return tokenizer.encode(text, add_special=not args.no_bos, parse_special=not args.no_parse_special)

    if args.jsonl:
        return _lines(encode)
    if args.text is None:
        raise UsageError("give a TEXT, or --jsonl for lines of standard input")
    print(json.dumps(encode(args.text)))
    return 0


def run_detokenize(args: argparse.Namespace) -> int:
    """Ids to text."""
    tokenizer = _tokenizer(args)

    def decode(ids: Any) -> str:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise UsageError("a JSON list of token ids is needed")
        return tokenizer.decode(ids)

    if args.jsonl:
        return _lines(decode)
    if args.ids is None:
        raise UsageError("give ids such as 1,2,3, or --jsonl for lines of standard input")
    try:
        ids = [int(part) for part in args.ids.split(",")]
    except ValueError:
        raise UsageError(f"{args.ids[:60]!r} is no list of token ids such as 1,2,3") from None
    print(decode(ids))
    return 0


def _tokenizer(args: argparse.Namespace) -> Tokenizer:
    path = resolve_model(resolve(args, os.environ).model, os.environ)
    with open_gguf(path) as file:
        return load_tokenizer(file.metadata, str(path))


def _lines(convert: Callable[[Any], Any]) -> int:
    """Convert each line of standard input. UsageError names the line that cannot be."""
    # Ends of lines are the file's own: a text may hold what Python takes for a line's end.
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"standard input, line {number}: no JSON") from None
        try:
            converted = convert(value)
        except UsageError as error:
            raise UsageError(f"standard input, line {number}: {error}") from None
        sys.stdout.write(json.dumps(converted, ensure_ascii=False) + "\n")
    return 0
