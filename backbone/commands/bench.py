"""`backbone bench`: tokens a second of prefill and decode as llama-bench has them, and where a token's time goes."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.interface import NumericClass

from ..clock import Clock
from ..discovery import DEMO_NAME
from ..engine import Engine
from ..errors import UsageError
from ..results import computed_locally, failures_as_json, provenance_line, worker_lines, workers_as_json
from ..sampling import Sampler, SamplingOptions
from ..session import Session, open_session
from ..settings import add_flags, resolve
from ..terminal import ProgressLine, dim, table

FLAGS = (
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
)
SEED = 1  #: of the token ids: the same in every run
MOST_TOKENS = 1 << 20
MOST_REPETITIONS = 1000
WARM_UP_TOKENS = 8  #: decoded before decode is measured; prefill runs once whole
COLUMNS = ("model", "size", "params", "backend", "class", "threads", "workers", "test", "t/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure; 0 tokens: not at all."""

    prompt: int
    decode: int
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One test: how long each repetition of so many tokens took."""

    test: str
    tokens: int
    seconds: tuple[float, ...]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.tokens / seconds for seconds in self.seconds]

    @property
    def mean(self) -> float:
        """Mean of the rates."""
        return statistics.fmean(self.rates)

    @property
    def sd(self) -> float:
        """Standard deviation of the rates; 0 for one alone."""
        return statistics.stdev(self.rates) if len(self.seconds) > 1 else 0.0

    def as_json(self) -> dict[str, Any]:
        """The result that scripts rely on."""
        return {
            "test": self.test,
            "tokens": self.tokens,
            "seconds": list(self.seconds),
            "tokens_per_s": self.rates,
            "median": statistics.median(self.rates),
            "mean": self.mean,
            "sd": self.sd,
        }


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="measure tokens a second of prefill and decode",
        description="Measure prefill and decode on random tokens, after a warm-up, and where a token's time goes.",
    )
    parser.add_argument("-p", default="512", metavar="N", help="tokens of a prompt (default 512; 0: no prefill test)")
    parser.add_argument("-n", default="128", metavar="N", help="tokens to decode (default 128; 0: no decode test)")
    parser.add_argument("-r", default="5", metavar="N", help="repetitions of each test (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser, *FLAGS)
    parser.set_defaults(func=run)


def _number(flag: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{flag}: {text[:60]!r} is not a whole number") from None
    if not least <= value <= most:
        raise UsageError(f"{flag}: {value} is out of range; from {least} to {most} is allowed")
    return value


def _plan(args: argparse.Namespace) -> Plan:
    plan = Plan(
        prompt=_number("-p", args.p, 0, MOST_TOKENS),
        decode=_number("-n", args.n, 0, MOST_TOKENS),
        repetitions=_number("-r", args.r, 1, MOST_REPETITIONS),
    )
    if not plan.prompt and not plan.decode:
        raise UsageError("-p 0 and -n 0 leave nothing to measure; give one of them a number of tokens")
    return plan


def run(args: argparse.Namespace) -> int:
    """Measure and show."""
    plan, settings = _plan(args), resolve(args, os.environ)
    with open_session(settings) as session:
        session.digest.result()  # hashing the weights takes a core: not beside what is measured
        clock, progress = Clock(), ProgressLine(sys.stderr)
        try:
            results = measure(session, plan, clock, progress)
        finally:
            progress.clear()
        split = dict[str, float]()
        if plan.decode:
            decode = results[-1]
            split = clock.split(decode.tokens * len(decode.seconds), math.fsum(decode.seconds))
        if args.json:
            print(json.dumps(as_json(session, results, split)))
        else:
            print(as_text(session, results, split))
            sys.stdout.flush()
            workers = worker_lines(workers_as_json(session), computed_locally(session), failures_as_json(session))
            below = [*workers, f"class {session.model.numeric_class}", provenance_line(session.provenance())]
            print(dim("\n".join(below), sys.stderr), file=sys.stderr)
    return 0


def measure(session: Session, plan: Plan, clock: Clock, progress: ProgressLine) -> list[Result]:
    """The results of a plan, prefill first. The clock holds what the repetitions of decode took, and nothing else."""
    draw = np.random.default_rng(SEED)
    ids: list[int] = draw.integers(0, session.model.vocabulary, max(plan.prompt, 1)).tolist()
    experts, context = session.engine.experts, max(plan.prompt, plan.decode) + 1
    results = list[Result]()
    if plan.prompt:
        engine = Engine(session.model, experts, context=context)
        name = f"pp{plan.prompt}"
        progress.show(f"{name}: warm-up", 0, plan.repetitions)
        _prefill(engine, ids)
        once = _repeated(name, plan, lambda: _prefill(engine, ids), progress)
        results.append(Result(test=name, tokens=plan.prompt, seconds=once))
    if plan.decode:
        timed = Engine(session.model, experts, context=context, clock=clock)
        name = f"tg{plan.decode}"
        progress.show(f"{name}: warm-up", 0, plan.repetitions)
        _decode(timed, ids[0], min(plan.decode, WARM_UP_TOKENS))
        clock.clear()
        once = _repeated(name, plan, lambda: _decode(timed, ids[0], plan.decode), progress)
        results.append(Result(test=name, tokens=plan.decode, seconds=once))
    return results


def _repeated(name: str, plan: Plan, once: Callable[[], float], progress: ProgressLine) -> tuple[float, ...]:
    seconds = list[float]()
    for repetition in range(plan.repetitions):
        progress.show(name, repetition, plan.repetitions)
        seconds.append(once())
    return tuple(seconds)


def _prefill(engine: Engine, ids: Sequence[int]) -> float:
    """Seconds to run a prompt, up to the logits after its last token."""
    sequence = engine.new_sequence()
    started = time.perf_counter()
    engine.extend(sequence, ids)
    return time.perf_counter() - started


def _decode(engine: Engine, first: int, count: int) -> float:
    """Seconds to run and choose so many tokens, one after another, from one token on."""
    sequence, sampler, token = engine.new_sequence(), Sampler(SamplingOptions()), first
    started = time.perf_counter()
    for _ in range(count):
        token = engine.choose(sampler, engine.step(sequence, token), sequence)
    return time.perf_counter() - started


def _identity(session: Session) -> tuple[str, int, int, int]:
    """Name, bytes of tensors, parameters, threads."""
    tensors = session.model.gguf.tensors.values()
    name = Path(session.settings.model or DEMO_NAME).name
    threads: int = getattr(session.model.backend, "threads", 1)
    return name, sum(t.nbytes for t in tensors), sum(math.prod(t.dims) for t in tensors), threads


def as_json(session: Session, results: Sequence[Result], split: dict[str, float]) -> dict[str, Any]:
    """The result that scripts rely on. `split`: microseconds a token of the decode test."""
    name, size, params, threads = _identity(session)
    return {
        "model": name,
        "size_bytes": size,
        "params": params,
        "backend": session.model.backend.name,
        "class": str(session.model.numeric_class),
        "threads": threads,
        "workers": workers_as_json(session),
        "computed_locally": computed_locally(session),
        "failures": failures_as_json(session),
        "results": [result.as_json() for result in results],
        "split": split,
        "provenance": session.provenance(),
    }


def as_text(session: Session, results: Sequence[Result], split: dict[str, float]) -> str:
    """The table, and a line of where a token's time goes."""
    name, size, params, threads = _identity(session)
    what = (name, _size(size), _count(params), session.model.backend.name, _short(session.model.numeric_class))
    rows: list[tuple[str, ...]] = [COLUMNS]
    for result in results:
        rate = f"{result.mean:.2f} ± {result.sd:.2f}"
        rows.append((*what, str(threads), str(len(session.workers())), result.test, rate))
    lines = [table(rows)]
    if split:
        parts = ", ".join(f"{part} {us:.0f}" for part, us in split.items() if us or part == "other")
        lines.append(f"a token of {results[-1].test} takes {sum(split.values()):.0f} us: {parts}")
    return "\n".join(lines)


def _short(numeric: NumericClass) -> str:
    """A class without the build and CPU that it may name: a column is narrow, and it stands in full below."""
    return f"{numeric.name.split()[0]}/{numeric.activations}/{numeric.accumulation}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.2f} MiB"


def _count(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**9 else f"{count / 1e6:.2f} M"
