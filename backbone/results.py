"""What came of an answer, for scripts and for people: one object, whoever computed it, and the lines that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .calls import Cause
from .engine import Answer
from .roster import WorkerReport
from .session import Session
from .tally import Tally
from .terminal import table

Result = dict[str, Any]

#: Why an answer stopped, in words.
STOPS = {
    "eos": "the model's end token",
    "limit": "-n tokens",
    "length": "the context is full",
    "stop": "a stop string",
    "cancelled": "Ctrl-C",
}


@dataclass(frozen=True, slots=True)
class Before:
    """What the workers had done before an answer began; the default: nothing."""

    calls: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    audits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    computed_locally: int = 0
    local_causes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls, session: Session) -> Before:
        """What they have done so far."""
        workers = session.workers()
        return cls(
            {w.name: w.calls for w in workers},
            {w.name: w.rows for w in workers},
            {w.name: w.seconds for w in workers},
            {w.name: w.failed for w in workers},
            {w.name: (w.audits, w.audits_failed) for w in workers},
            {w.name: replace(w.tally) for w in workers},
            computed_locally(session) or 0,
            session.swarm.local_causes() if session.swarm is not None else {},
        )


def as_json(session: Session, answer: Answer, before: Before | None = None) -> Result:
    """The result that scripts rely on: all of it but `provenance`, which may have to be waited for.

    The workers' calls are those since `before`: all that ran while this answer did, which other answers share.
    """
    before = before or Before()
    done = computed_locally(session)
    workers = [_worker(w, before) for w in session.workers()]
    result: Result = {
        "prompt_ids": answer.prompt_ids,
        "ids": answer.ids,
        "text": answer.text,
        "stop": answer.stop,
        "timings": {
            "prompt": {"tokens": answer.prompt.tokens, "seconds": round(answer.prompt.seconds, 6)},
            "decode": {"tokens": answer.decode.tokens, "seconds": round(answer.decode.seconds, 6)},
        },
        "workers": workers,
        "computed_locally": None if done is None else done - before.computed_locally,
        "failures": _failures(session, workers, before),
        "in_doubt": answer.is_in_doubt,
        "class_changed_at": [{"token": c.token, "from": c.before, "to": c.after} for c in answer.class_changes] or None,
    }
    if answer.logits_sha256:
        result["logits_sha256"] = answer.logits_sha256
    return result


def computed_locally(session: Session) -> int | None:
    """Expert calls that the backbone computed because no worker did; None without workers."""
    return session.swarm.local_calls if session.swarm is not None else None


def workers_as_json(session: Session) -> list[Result]:
    """What each worker is and did."""
    return [_worker(w, Before()) for w in session.workers()]


def failures_as_json(session: Session) -> Result | None:
    """Which workers failed so far, and what that cost; None when nothing happened."""
    earlier = session.swarm.earlier.tally if session.swarm is not None else Tally()
    return _failures(session, workers_as_json(session), Before(), earlier)


def _failures(
    session: Session,
    workers: Sequence[Result],
    before: Before,
    earlier: Tally = Tally(),  # noqa: B008 - only read
) -> Result | None:
    """`earlier`: what those cost that are not among the workers any more."""
    causes = session.swarm.local_causes() if session.swarm is not None else {}
    locally = {cause: count - before.local_causes.get(cause, 0) for cause, count in causes.items()}
    found: Result = {
        "workers": [w["name"] for w in workers if w["failures"]],
        **{name: round(cost + sum(w[name] for w in workers), 6) for name, cost in _cost_as_json(earlier).items()},
        # What no worker holds may just not fit.
        "computed_locally": {c: n for c, n in sorted(locally.items()) if n and c != Cause.UNHELD.value},
    }
    return found if any(found.values()) else None


def _worker(w: WorkerReport, before: Before) -> Result:
    failed = w.failed - before.failures.get(w.name, 0)
    audits, audits_failed = before.audits.get(w.name, (0, 0))
    return {
        "name": w.name,
        "backend": w.backend,
        "class": w.numeric_class,
        "rank": w.rank or None,
        "error": w.error if w.rank else None,
        "device": w.device,
        "state": w.state,
        "experts": w.experts,
        "calls": w.calls - before.calls.get(w.name, 0),
        "rows": w.rows - before.rows.get(w.name, 0),
        "seconds": round(w.seconds - before.seconds.get(w.name, 0.0), 6),
        "audits": w.audits - audits,
        "audits_failed": w.audits_failed - audits_failed,
        "calls_in_doubt": w.in_doubt,
        "failed": failed,
        "failures": w.failures[-failed:] if failed else [],
        **_cost_as_json(w.tally, before.tallies.get(w.name, Tally())),
    }


def _cost_as_json(tally: Tally, was: Tally = Tally()) -> Result:  # noqa: B008 - only read
    return {
        "retried": tally.retried - was.retried,
        "hedged_won": tally.hedged_won - was.hedged_won,
        "hedged_lost": tally.hedged_lost - was.hedged_lost,
        "waited_seconds": round(tally.waited_s - was.waited_s, 6),
    }


def summary(result: Result) -> str:
    """The lines under an answer: workers, speed, what it came of."""
    prompt, decode = result["timings"]["prompt"], result["timings"]["decode"]
    speed = (
        f"prompt: {prompt['tokens']} tokens, {_rate(prompt)}; answer: {decode['tokens']} tokens, "
        f"{_rate(decode)}; stopped: {STOPS[result['stop']]}"
    )
    lines = worker_lines(result["workers"], result["computed_locally"], result["failures"])
    return "\n".join([*lines, speed, *change_lines(result), provenance_line(result["provenance"])])


def change_lines(result: Result) -> list[str]:
    """Whether an answer is in doubt, and from which token on it is of another class map."""
    doubt = ["a worker was found to be wrong that may have had a part in this answer"] if result.get("in_doubt") else []
    return doubt + [
        f"numeric class changed at token {change['token']}: class map {change['to'][:12]}, before {change['from'][:12]}"
        for change in result["class_changed_at"] or []
    ]


def _rate(timing: Result) -> str:
    return f"{timing['tokens'] / timing['seconds'] if timing['seconds'] else 0.0:.1f}/s"


def worker_lines(workers: Sequence[Result], locally: int | None, failures: Result | None) -> list[str]:
    """A table of the workers, what went wrong with them, and what the backbone had to do itself."""
    if not workers:
        return []
    rows: list[tuple[str, ...]] = [("worker", "backend", "rank", "experts", "calls", "rows", "seconds", "state")]
    for w in workers:
        counts = (str(w[name]) for name in ("experts", "calls", "rows"))
        rows.append((w["name"], w["backend"], w["rank"] or "", *counts, f"{w['seconds']:.3f}", w["state"]))
    lines = [table(rows)]
    for w in workers:
        if unsaid := w["failed"] - len(w["failures"]):
            lines.append(f"{w['name']}: failed {unsaid} times before that")
        lines += [f"{w['name']}: {reason}" for reason in w["failures"]]
    if locally:
        lines.append(f"{locally} expert calls were computed by the backbone")
    if failures is not None and (told := _cost(failures)):
        lines.append(told)
    return lines


def _cost(failures: Result) -> str:
    """What failures and stragglers cost, in a line; nothing where no call was given to anybody else."""
    hedged = failures["hedged_won"] + failures["hedged_lost"]
    parts = [
        f"{failures['retried']} calls retried" if failures["retried"] else "",
        f"{hedged} calls hedged, {failures['hedged_lost']} of them done by the other" if hedged else "",
        f"{failures['waited_seconds']:.2f} s waited for calls that were given up" if failures["waited_seconds"] else "",
    ]
    return "; ".join(filter(None, parts))


def provenance_line(p: Result) -> str:
    """Of which weights, definition, engine and classes it came."""
    return (
        f"weights {p['weights'][:12] or 'unreadable'}, archdef {p['archdef']['name']} {p['archdef']['sha256'][:12]} "
        f"({p['archdef']['origin']}), engine {p['engine']['version']} {p['engine']['sha256'][:12]}, "
        f"class map {p['class_map'][:12]}"
    )
