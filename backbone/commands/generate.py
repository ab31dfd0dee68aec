"""`backbone generate`: a prompt in, text out; at the end who computed what, how fast, and of which weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..chat_template import chat_prompt
from ..engine import Answer, ClassChange, GenerateOptions
from ..errors import UsageError
from ..sampling import SamplingOptions
from ..session import Session, open_session
from ..settings import Settings, add_flags, resolve
from ..terminal import ProgressLine, dim, table

MAX_PROMPT_BYTES = 1 << 24
#: Why an answer stopped, in words.
STOPS = {
    "eos": "the model's end token",
    "limit": "-n tokens",
    "length": "the context is full",
    "stop": "a stop string",
    "cancelled": "Ctrl-C",
}
SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
MODEL_FLAGS = (
    "model",
    "workers",
    "worker_memory",
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
    with open_session(settings) as session:
        tokenizer = session.tokenizer()
        if ids is None and args.chat:
            messages = [{"role": "system", "content": args.system}] if args.system is not None else []
            ids = chat_prompt(session, tokenizer, [*messages, {"role": "user", "content": text}], args.template)
        elif ids is None:
            ids = tokenizer.encode(text)
        progress = ProgressLine(sys.stderr)
        answer = session.engine.generate(
            ids,
            tokenizer,
            generate_options(settings, args),
            on_text=(lambda piece: None) if args.json else shower(progress),
            on_prompt=lambda done, total: progress.show("prompt", done, total),
        )
        progress.clear()
        if args.json:
            print(json.dumps(as_json(session, answer), ensure_ascii=False))
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            print(dim(summary(session, answer), sys.stderr), file=sys.stderr)
    return 1 if answer.stop == "cancelled" else 0


def shower(progress: ProgressLine) -> Any:
    """A callback that writes text to standard output, over a line of progress."""

    def show(piece: str) -> None:
        progress.clear()
        sys.stdout.write(piece)
        sys.stdout.flush()

    return show


def as_json(session: Session, answer: Answer) -> dict[str, Any]:
    """The result that scripts rely on."""
    result: dict[str, Any] = {
        "prompt_ids": answer.prompt_ids,
        "ids": answer.ids,
        "text": answer.text,
        "stop": answer.stop,
        "timings": {
            "prompt": {"tokens": answer.prompt.tokens, "seconds": round(answer.prompt.seconds, 6)},
            "decode": {"tokens": answer.decode.tokens, "seconds": round(answer.decode.seconds, 6)},
        },
        "workers": workers_as_json(session),
        "computed_locally": session.swarm.local_calls if session.swarm is not None else None,
        "class_changed_at": [{"token": c.token, "from": c.before, "to": c.after} for c in answer.class_changes] or None,
        "provenance": session.provenance(),
    }
    if answer.logits_sha256:
        result["logits_sha256"] = answer.logits_sha256
    return result


def workers_as_json(session: Session) -> list[dict[str, Any]]:
    """What each worker is and did."""
    return [
        {
            "name": w.name,
            "backend": w.backend,
            "class": w.numeric_class,
            "device": w.device,
            "state": w.state,
            "experts": w.experts,
            "calls": w.calls,
            "rows": w.rows,
            "seconds": round(w.seconds, 6),
            "failures": w.failures,
        }
        for w in session.workers()
    ]


def summary(session: Session, answer: Answer) -> str:
    """The lines under an answer: workers, speed, what it came of."""
    speed = (
        f"prompt: {answer.prompt.tokens} tokens, {answer.prompt.rate:.1f}/s; answer: {answer.decode.tokens} tokens, "
        f"{answer.decode.rate:.1f}/s; stopped: {STOPS[answer.stop]}"
    )
    changes = [change_line(change) for change in answer.class_changes]
    return "\n".join([*worker_lines(session), speed, *changes, provenance_line(session)])


def change_line(change: ClassChange) -> str:
    """From which token on an answer is of another class map."""
    return f"numeric class changed at token {change.token}: class map {change.after[:12]}, before {change.before[:12]}"


def worker_lines(session: Session) -> list[str]:
    """A table of the workers, what went wrong with them, and what the backbone had to do itself."""
    if session.swarm is None:
        return []
    rows: list[tuple[str, ...]] = [("worker", "backend", "experts", "calls", "rows", "seconds", "state")]
    for w in session.workers():
        cells = (w.name, w.backend, str(w.experts), str(w.calls), str(w.rows), f"{w.seconds:.3f}", w.state)
        rows.append(cells)
    lines = [table(rows), *(f"{w.name}: {reason}" for w in session.workers() for reason in w.failures)]
    if session.swarm.local_calls:
        lines.append(f"{session.swarm.local_calls} expert calls were computed by the backbone")
    return lines


def provenance_line(session: Session) -> str:
    """Of which weights, definition, engine and classes it came. Waits for the weights' sha256."""
    p = session.provenance()
    return (
        f"weights {p['weights'][:12] or 'unreadable'}, archdef {p['archdef']['name']} {p['archdef']['sha256'][:12]} "
        f"({p['archdef']['origin']}), engine {p['engine']['version']} {p['engine']['sha256'][:12]}, "
        f"class map {p['class_map'][:12]}"
    )
