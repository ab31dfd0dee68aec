"""`backbone tolerance`: how far two ways to compute a model differ, whether a policy allows it, and a report."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..discovery import DEMO, DEMO_NAME, resolve_model
from ..errors import BackboneError, UsageError
from ..model import bind_model
from ..provenance import cache_folder, engine_sha256, engine_version
from ..results import workers_as_json
from ..session import Session, open_library
from ..settings import Settings, add_flags, resolve
from ..terminal import ProgressLine, table
from ..tolerance import plots, report
from ..tolerance.judge import judge
from ..tolerance.passage import Passage, passage_of, read_text
from ..tolerance.policy import coarser, load_policy
from ..tolerance.runner import LEVELS, Found, Journal, Work
from ..tolerance.runner import run as carry_out
from ..tolerance.saved import save
from ..tolerance.sides import Side
from ..tolerance.specs import FORM, dictates, open_side

REPORTS = "tolerance_reports"
POSITIONS, WINDOW = 10_240, 512  #: the bars of decisions are made for 10,000 positions
MOST = 1 << 24
PROMPT_TOKENS = 16  #: of a window, that level 5 goes on from
LEAST_NUMBERS = (("positions", 2), ("prompts", 1), ("tokens", 1))
SIDES = (
    f"{FORM}, such as native, native/activations=i16, native/workers=native:2,numpy:1, opencl/accumulation=f16, or "
    "float64, an oracle without rounding; worker:NAME of the running server; saved:FILE; kld:FILE of llama-perplexity; "
    "server:URL of a llama-server"
)


def add_parser(commands: Any) -> None:
    """Add the command with its own commands."""
    parser = commands.add_parser("tolerance", help="measure how far two ways to compute a model differ")
    own = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=type(parser))
    made = own.add_parser(
        "run",
        help="compare two sides at six levels, judge them, write a report",
        description="Compare A and B: operations, drift by layer, logits, decisions, generation, perplexity. "
        "Exit code 0: everything that was measured passes; 1: something does not.",
    )
    made.add_argument("--a", default="float64", metavar="SIDE", help=f"the first side: {SIDES} (default float64)")
    made.add_argument("--b", default="native", metavar="SIDE", help="the second side (default native)")
    made.add_argument("--text", type=Path, metavar="FILE", help="the text to run (default: one that comes with this)")
    _numbers(made)
    made.add_argument("--levels", default="1,2,3,4,5,6", metavar="1,3", help="which levels (default all six)")
    made.add_argument("--policy", type=Path, metavar="FILE", help="bars of your own (TOML), in place of the defaults")
    made.add_argument("--out", type=Path, default=Path(REPORTS), metavar="DIR", help=f"reports (default {REPORTS})")
    made.add_argument("--no-report", action="store_true", help="write no report")
    made.add_argument("--fresh", action="store_true", help="begin anew where the same run was stopped before")
    made.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_flags(made, "model", "threads", "archdefs")
    made.set_defaults(func=run)
    kept = own.add_parser(
        "save",
        help="keep a side's figures in a file, to compare others with later (saved:FILE)",
        description="Run a side over a text and keep tokens, logits, routing, residuals and greedy answers in a file.",
    )
    kept.add_argument("--a", default="float64", metavar="SIDE", help=f"what to run: {SIDES} (default float64)")
    kept.add_argument("--text", type=Path, metavar="FILE", help="the text to run (default: one that comes with this)")
    _numbers(kept)
    kept.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    add_flags(kept, "model", "threads", "archdefs")
    kept.set_defaults(func=keep)
    two = own.add_parser("compare", help="compare two reports, value by value")
    two.add_argument("first", type=Path, metavar="R1", help="a report's folder, or its report.json")
    two.add_argument("second", type=Path, metavar="R2")
    two.add_argument("--json", action="store_true", help="print one JSON object")
    two.set_defaults(func=compare)
    again = own.add_parser("render", help="make Markdown, plots and index of report.json again")
    again.add_argument("reports", type=Path, nargs="?", default=Path(REPORTS), metavar="DIR", help="folder of reports")
    again.set_defaults(func=render)


def _numbers(parser: argparse.ArgumentParser) -> None:
    for flag, default, what in (
        ("--positions", POSITIONS, "positions of the text"),
        ("--window", 0, f"tokens that are run as one sequence (default {WINDOW}, or the model's context)"),
        ("--prompts", 5, "prompts of level 5"),
        ("--tokens", 64, "greedy tokens for each of them"),
        ("--seed", 1, "of level 1's inputs"),
    ):
        shown = what if not default else f"{what} (default {default})"
        # Not `seed`, which is a setting's.
        parser.add_argument(flag, dest=f"given_{flag[2:]}", default=str(default), metavar="N", help=shown)


def _number(args: argparse.Namespace, name: str, least: int) -> int:
    text: str = getattr(args, f"given_{name}")
    if not (text.isascii() and text.isdecimal()) or not least <= int(text[:9]) <= MOST or len(text) > 9:
        raise UsageError(f"--{name} {text[:40]}: a whole number from {least} to {MOST} is needed")
    return int(text)


def _levels(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part in map(str, LEVELS) for part in parts):
        raise UsageError(f"--levels {text[:40]}: give some of {', '.join(map(str, LEVELS))}")
    return sorted({int(part) for part in parts})


# ---- run


def run(args: argparse.Namespace) -> int:
    """Measure, judge, report."""
    levels, policy, settings = _levels(args.levels), load_policy(args.policy), resolve(args, os.environ)
    positions, prompts, tokens = (_number(args, name, least) for name, least in LEAST_NUMBERS)
    seed = _number(args, "seed", 0)
    window = _window(settings, _number(args, "window", 0), tokens)
    text = read_text(args.text)
    started, progress = time.monotonic(), ProgressLine(sys.stderr)
    if not args.no_report:
        _need_folder(args.out)
    with ExitStack() as stack:
        a, b = _open(args, settings, stack, context=max(window, PROMPT_TOKENS + tokens))
        session = a.session or b.session
        if session is None:
            raise UsageError("--a, --b: one of the sides has to be run here")
        passage = _passage(a, b, session, text, positions=positions, window=window)
        work = Work(
            passage=passage, levels=levels, prompts=prompts, prompt_tokens=PROMPT_TOKENS, tokens=tokens, seed=seed
        )
        journal = _journal(a, b, session, work, is_fresh=args.fresh)
        try:
            findings = carry_out(a, b, work, journal, progress.show)
        except KeyboardInterrupt:
            progress.clear()
            print("backbone: stopped; the same command goes on from here", file=sys.stderr)
            return 1
        finally:
            progress.clear()
        found: Found = {
            "format": report.FORMAT,
            "command": _command(sys.argv),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            "seconds": round(time.monotonic() - started, 1),
            "seed": seed,
            "model": _model(session),
            "text": {
                "name": passage.name,
                "sha256": passage.sha256,
                "positions": passage.positions,
                "windows": len(passage.windows),
                "window": max(map(len, passage.windows)),
            },
            "a": _told(a),
            "b": _told(b),
            "machine": report.machine(),
            "versions": report.versions(),
            "policy": {"source": policy.source, "bars": {kind: dict(bars) for kind, bars in policy.bars.items()}},
        }
        found["levels"] = judge(
            findings,
            levels,
            policy,
            precisions=(a.precision, b.precision),
            coarser=coarser(a.precision, b.precision),
            is_one_class=a.numeric_class == b.numeric_class != "",
        )
    verdicts = [level["pass"] for level in found["levels"].values()]
    found["pass"] = False not in verdicts and True in verdicts
    if not args.no_report:
        folder = report.write(found, args.out, _draw)
        print(f"backbone: report in {report.shown(folder)}", file=sys.stderr)
    journal.remove()
    _show(found, as_json=args.json)
    return 0 if found["pass"] else 1


def keep(args: argparse.Namespace) -> int:
    """Run one side and keep what came of it."""
    settings, text = resolve(args, os.environ), read_text(args.text)
    positions, prompts, tokens = (_number(args, name, least) for name, least in LEAST_NUMBERS)
    window = _window(settings, _number(args, "window", 0), tokens)
    progress = ProgressLine(sys.stderr)
    if args.out.is_dir() or not args.out.absolute().parent.is_dir():
        raise UsageError(f"--out {args.out}: is a folder, or in none; name a file")
    with open_side(args.a, "--a", settings, context=max(window, PROMPT_TOKENS + tokens)) as side:
        if side.session is None:
            raise UsageError(f"--a {args.a}: only a side that is run here can be saved")
        passage = passage_of(*text, side.session.tokenizer(), positions=positions, window=window)
        try:
            save(side, passage, args.out, progress.show, prompts=prompts, prompt_tokens=PROMPT_TOKENS, tokens=tokens)
        except OSError as error:
            raise BackboneError(f"--out {args.out}: cannot be written: {error.strerror}") from None
        finally:
            progress.clear()
    print(f"backbone: {passage.positions:,} positions in {args.out}", file=sys.stderr)
    return 0


def _command(argv: Sequence[str]) -> str:
    """What was typed; of a program of somebody's own its name alone."""
    name = Path(argv[0]).name
    return shlex.join(["backbone" if name in ("backbone", "__main__.py") else name, *argv[1:]])


def _window(settings: Settings, asked: int, tokens: int) -> int:
    """Tokens of a window. UsageError for more than the model was made for, of it or of what follows a prompt."""
    trained = bind_model(resolve_model(settings.model, os.environ), open_library(settings)).trained_context
    if asked == 1 or (trained is not None and asked > trained):
        raise UsageError(f"--window {asked}: from 2 to the model's context of {trained} is allowed")
    if trained is not None and PROMPT_TOKENS + tokens > trained:
        most = trained - PROMPT_TOKENS
        raise UsageError(f"--tokens {tokens}: at most {most} fit the model's context of {trained} behind a prompt")
    return asked or min(WINDOW, trained or WINDOW)


def _open(args: argparse.Namespace, settings: Settings, stack: ExitStack, *, context: int) -> tuple[Side, Side]:
    """Both sides; first the one that says of which tokens it has figures, for the other has to have room for them."""
    found = dict[str, Side]()
    for flag in sorted(("a", "b"), key=lambda flag: not dictates(getattr(args, flag))):
        found[flag] = side = stack.enter_context(open_side(getattr(args, flag), f"--{flag}", settings, context=context))
        if side.passage is not None:
            context = max(context, *map(len, side.passage.windows))
    return found["a"], found["b"]


def _need_folder(folder: Path) -> None:
    """UsageError, before anything is run, where reports cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written to: {error.strerror}") from None


def _told(side: Side) -> Found:
    """What a side is; of a placement also what its workers did."""
    session = side.session
    if session is None or session.swarm is None:
        return dict(side.told)
    told = ("name", "backend", "class", "device", "state", "rank", "experts", "calls", "failures")
    return dict(side.told) | {"workers": [{name: w[name] for name in told} for w in workers_as_json(session)]}


def _passage(a: Side, b: Side, session: Session, text: tuple[str, bytes], *, positions: int, window: int) -> Passage:
    """The tokens that a side has figures of, as many of its windows as are needed, else those of the text."""
    dictated = [side.passage for side in (a, b) if side.passage is not None]
    if len(dictated) == 2 and dictated[0] != dictated[1]:
        raise UsageError("--a, --b: they have figures of different texts")
    if dictated:
        return dictated[0].begun(positions)
    return passage_of(*text, session.tokenizer(), positions=positions, window=window)


def _model(session: Session) -> dict[str, Any]:
    told = session.provenance()
    path = Path(told["model"])
    name = DEMO_NAME if path == DEMO else path.name
    return {"name": name, "weights": told["weights"], "archdef": told["archdef"], "engine": told["engine"]}


def _journal(a: Side, b: Side, session: Session, work: Work, *, is_fresh: bool) -> Journal:
    """Where what is done is kept. Anything that could change a figure makes another one."""
    what = {
        "model": _model(session),
        "sides": [dict(side.told) | {"numeric_class": side.numeric_class} for side in (a, b)],
        "windows": hashlib.sha256(repr((work.passage.windows, work.passage.first)).encode()).hexdigest(),
        "generation": [work.prompts, work.prompt_tokens, work.tokens],
        "seed": work.seed,
        "engine": [engine_version(), engine_sha256()],
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()
    path = cache_folder() / "tolerance" / f"{key[:32]}.jsonl"
    if is_fresh:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return Journal(path, key)


def _draw(found: report.Report, folder: Path) -> list[str]:
    try:
        return plots.draw(found, folder)
    except ImportError:
        print(f"backbone: {plots.MISSING}", file=sys.stderr)
    except Exception as error:  # of a library that draws: the report itself is there
        print(f"backbone: no plots: {' '.join(str(error).split())[:200]}", file=sys.stderr)
    return []


def _show(found: Found, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    print("\n".join(report.summary(found)))
    verdicts = [level["pass"] for level in found["levels"].values()]
    print("pass" if found["pass"] else "fail" if False in verdicts else "not passed: there is nothing to judge by")


# ---- of reports


def compare(args: argparse.Namespace) -> int:
    """Show two reports side by side. Exit code 0 whatever they say."""
    first, second = report.read(args.first), report.read(args.second)
    rows = report.compared(first, second)
    if args.json:
        print(json.dumps([dict(zip(("what", "first", "second", "ratio"), row, strict=True)) for row in rows]))
        return 0
    names = tuple(f"{r['model']['name']}: {r['a']['asked']} vs {r['b']['asked']}" for r in (first, second))
    print(table([("", *names, "ratio"), *(tuple(row) for row in rows)]))
    return 0


def render(args: argparse.Namespace) -> int:
    """Make what is made of the JSON again, of every report in a folder."""
    reports: Path = args.reports
    folders: Sequence[Path] = sorted(path.parent for path in reports.glob(f"*/{report.JSON}"))
    if not folders:
        raise UsageError(f"{reports}: there is no report in it")
    try:
        for folder in folders:
            report.render(folder, _draw)
        report.write_index(reports)
    except OSError as error:
        raise BackboneError(f"{reports}: cannot be written to: {error.strerror}") from None
    print(f"{len(folders)} reports in {reports}")
    return 0
