"""`backbone generate`: a prompt in, text out; at the end who computed what, how fast, and of which weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..answerers import open_answerer
from ..chat_template import read_template
from ..engine import GenerateOptions
from ..errors import UsageError
from ..prompts import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from ..results import summary
from ..sampling import SamplingOptions
from ..settings import Settings, add_flags, resolve
from ..terminal import ProgressLine, dim

MAX_PROMPT_BYTES = 1 << 24
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
MODEL_FLAGS = (
    "model",
    "workers",
    "worker_memory",
    "audit",
    "wire",
    "backend",
    "threads",
    "activations",
    "accumulation",
    "kv_cache",
    "archdefs",
    "context",
)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt, token by token.")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file ('-': standard input)")
    parser.add_argument("--ids", metavar="1,2,3", help="token ids in place of a prompt, taken as they are")
    add_flags(parser, *MODEL_FLAGS, "predict", *SAMPLING_FLAGS)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer at this text")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end token")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    parser.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    parser.add_argument("--template", metavar="FILE", help="chat template (with --chat), for a model that has none")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and no text before")
    parser.add_argument("--digest", action="store_true", help="add the sha256 of each token's logits to the JSON")
    parser.set_defaults(func=run)


def generate_options(settings: Settings, args: argparse.Namespace) -> GenerateOptions:
    """How to generate, from settings and flags."""
    return GenerateOptions(
        max_tokens=settings.predict,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        digest=args.digest,
        sampling=SamplingOptions(**{name: getattr(settings, name) for name in SAMPLING_FLAGS}),
    )


def parse_ids(text: str) -> list[int]:
    """Token ids of `1,2,3`. UsageError when it is no such list."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--ids: {text[:60]!r} is no list of token ids such as 1,2,3") from None
    return ids


def _prompt_text(args: argparse.Namespace) -> str:
    if sum(source is not None for source in (args.prompt, args.file, args.ids)) != 1:
        raise UsageError("give one prompt: as an argument, with -f FILE, or as --ids 1,2,3")
    if args.file is None:
        return args.prompt or ""
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES) if args.file == "-" else Path(args.file).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{args.file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{args.file}: byte {error.start} is not UTF-8") from None


def run(args: argparse.Namespace) -> int:
    """Generate; the exit code is 0 unless the answer was broken off."""
    text, ids = _prompt_text(args), parse_ids(args.ids) if args.ids is not None else None
    if not args.chat and (args.system is not None or args.template is not None):
        raise UsageError("--system and --template belong to --chat")
    settings = resolve(args, os.environ)
    prompt: Prompt = TextPrompt(text) if ids is None else IdsPrompt(tuple(ids))
    if ids is None and args.chat:
        messages = [{"role": "system", "content": args.system}] if args.system is not None else []
        template = read_template(args.template) if args.template is not None else None
        prompt = ChatPrompt([*messages, {"role": "user", "content": text}], template)
    with open_answerer(settings) as answerer:
        progress = ProgressLine(sys.stderr)
        result = answerer.answer(
            prompt,
            generate_options(settings, args),
            on_text=(lambda piece: None) if args.json else shower(progress),
            on_prompt=lambda done, total: progress.show("prompt", done, total),
        )
        progress.clear()
        if args.json:
            print(json.dumps(result, ensure_ascii=False))
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            who = "" if answerer.is_here else f"answered by {answerer.name}\n"
            print(dim(who + summary(result), sys.stderr), file=sys.stderr)
    return 1 if result["stop"] == "cancelled" else 0


def shower(progress: ProgressLine) -> Any:
    """A callback that writes text to standard output, over a line of progress."""

    def show(piece: str) -> None:
        progress.clear()
        sys.stdout.write(piece)
        sys.stdout.flush()

    return show
