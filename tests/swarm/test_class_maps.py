"""Workers of several numeric classes at once: the map fixes every bit, and each change of it is told.

Real processes of `numpy` and `native` workers. Two backends' rows differ in their last bits, so that a row of the wrong
class shows.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import bits, greedy
from goldens import Golden, load
from shared_data import GOLDEN
from swarm_kit import NEVER_S, NoLocal, TinyExperts, ask, faulty, kill_when, pids_of, some_rows, swarm_of

from backbone import results
from backbone.answerers import InProcess
from backbone.class_map import ClassMap
from backbone.commands.chat import Chat
from backbone.engine import Answer, Engine, GenerateOptions
from backbone.local_workers import WorkerSpec
from backbone.model import Model
from backbone.placement import Candidate, Plan
from backbone.results import Result
from backbone.roster import Peer, WorkerReport
from backbone.session import Session, open_session
from backbone.settings import resolve
from backbone.swarm import Swarm

Find = Callable[[str], Path]
PROMPT = json.loads((GOLDEN / "verse-moe-golden.json").read_text())["prompts"][0]
FAMILIES = ["qwen3moe", "qwen2moe", "olmoe", "granitemoe", "mixtral", "qwen3moe-k256-Q4_K_M"]


def swarm(model: Model, workers: Sequence[str], **options: Any) -> Swarm:
    options = {"local": model.local_experts, "hedge_s": NEVER_S} | options
    specs = [WorkerSpec(backend=name, threads=1 + i % 2) for i, name in enumerate(workers)]
    return Swarm(model, specs, **options)


def kill(pid: int) -> None:
    """End a process, and return when it is no more."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# ---- both at once


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_two_classes_give_the_tokens_of_one_process(name: str, backend: str, arch_model: Find) -> None:
    prompt = Golden(name).data()["tokens"].tolist()[:12]
    model = load(arch_model(name), backend=backend)
    with swarm(model, ["numpy", "native"], local=NoLocal()) as workers:
        assert greedy(model, workers, prompt, 12) == greedy(model, model.local_experts, prompt, 12)
        classes = [report.numeric_class for report in workers.report()]
        assert len(set(classes)) == 2
        assert {kind for kinds in workers.class_map.experts.values() for kind in kinds} == set(classes)
        assert all(report.calls > 0 and report.state == "serving" for report in workers.report())
        assert workers.class_changes == []


@pytest.fixture
def model(arch_model: Find) -> Model:
    return load(arch_model("qwen3moe"), backend="native")


TOKENS = Golden("qwen3moe").data()["tokens"].tolist()[:20]


def by_parity(seed: int, sizes: Mapping[int, Sequence[int]], candidates: Sequence[Candidate], **_: Any) -> Plan:
    """Experts of odd number to the second class, the others to the first, at random within it and some twice."""
    draw = np.random.default_rng(seed)
    kinds = list(dict.fromkeys(c.numeric_class for c in candidates))
    holds: dict[str, dict[int, tuple[int, ...]]] = {c.name: {} for c in candidates}
    for layer, experts in sizes.items():
        for expert in range(len(experts)):
            able = [c.name for c in candidates if c.numeric_class == kinds[expert % 2]]
            for name in draw.permutation(able)[: draw.integers(1, 3)]:
                holds[name][layer] = (*holds[name].get(layer, ()), expert)
    return Plan(holds, {})


def test_one_map_gives_one_result_whoever_holds_what_and_is_how_slow(model: Model) -> None:
    alone = bits(model, model.local_experts, TOKENS)
    results, digests = set[bytes](), set[str]()
    slow = faulty("delay:0-0.004")
    for seed, workers, options in (
        (1, ["numpy", "native"], {}),
        (2, ["numpy", "native"], {"command": slow}),
        (3, ["numpy", "native", "native", "numpy"], {"command": slow, "share_path": False}),
        (4, ["numpy", "native", "numpy"], {"command": slow}),
    ):
        with swarm(model, workers, local=NoLocal(), placement=partial(by_parity, seed), **options) as running:
            results |= {bits(model, running, TOKENS, chunk) for chunk in (1, 7, 64)}
            digests.add(running.class_map.digest)
    assert (len(results), len(digests)) == (1, 1)
    assert results != {alone}


def test_a_plan_that_gives_an_expert_to_two_classes_is_held_to_the_first(model: Model) -> None:
    def twice(sizes: Mapping[int, Sequence[int]], candidates: Sequence[Candidate], **_: Any) -> Plan:
        return Plan({c.name: {la: tuple(range(len(e))) for la, e in sizes.items()} for c in candidates}, {})

    with swarm(model, ["numpy", "native"], local=NoLocal(), placement=twice) as workers:
        both = bits(model, workers, TOKENS)
        assert [report.experts > 0 for report in workers.report()] == [True, False]
    with swarm(model, ["numpy"], local=NoLocal()) as workers:
        assert bits(model, workers, TOKENS) == both


# ---- losses within a class


@pytest.mark.parametrize("kind", ["native", "numpy"])
def test_the_other_holder_takes_over_a_call(model: Model, kind: str, tmp_path: Path) -> None:
    """Neither the bits nor the map change, and the backbone computes nothing, whether or not it is of the class."""
    with swarm(model, [kind], local=NoLocal()) as workers:
        expected, planned = bits(model, workers, TOKENS), workers.class_map
    mark = tmp_path / "in-a-call"
    with swarm(model, [kind] * 2, local=NoLocal(), command=faulty("delay:0.01", f"mark:{mark}")) as workers:
        killer = threading.Thread(target=kill_when, args=(mark, workers.pids()[1]))
        killer.start()
        assert bits(model, workers, TOKENS, chunk=7) == expected
        killer.join()
        assert [report.state for report in workers.report()] == ["serving", "lost"]
        assert workers.local_calls == 0
        assert workers.class_changes == []
        assert workers.class_map == planned


@pytest.fixture
def tiny(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf")


def half_done(fault: str, tmp_path: Path) -> list[str]:
    """A worker with a fault, of which only the first that is started has it."""
    return faulty(fault, f"first:{tmp_path / 'started'}")


@pytest.mark.parametrize("fault", ["die", "nan", "shape", "garbage", "hang", "flip-epoch", "flip-seq"])
def test_whatever_a_worker_does_its_calls_go_to_the_other_holder(tiny: TinyExperts, fault: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"share_path": True, "command": half_done(fault, tmp_path), "deadline_s": 5.0}
    with swarm_of(tiny, 2, local=NoLocal(), **options) as workers:
        for layer in range(tiny.layers):
            x, ids = some_rows(tiny, chosen=4, seed=layer)
            assert ask(workers, layer, x, ids).tobytes() == tiny.local().send(layer, x, ids).tobytes()
        assert sorted(report.state for report in workers.report()) == ["lost", "serving"]
        assert workers.class_changes == []


# ---- losses of a class


def test_the_last_of_its_class_is_lost(tiny: TinyExperts, caplog: pytest.LogCaptureFixture) -> None:
    ours = str(tiny.numeric_class)
    with swarm_of(tiny, 1, command=faulty("class")) as workers:
        planned = workers.class_map
        assert {kind for kinds in planned.experts.values() for kind in kinds} == {"another/f32/f32"}
        x, ids = some_rows(tiny, chosen=4)
        assert ask(workers, 0, x, ids).tobytes() == tiny.local().send(0, x, ids).tobytes()
        kill(pids_of(workers)[0])
        assert ask(workers, 1, x, ids).tobytes() == tiny.local().send(1, x, ids).tobytes()
        (change,) = workers.class_changes
        now = workers.class_map
        assert (change.before, change.after) == (planned.digest, now.digest)
        assert now == ClassMap.of_backbone(ours, dict.fromkeys(range(tiny.layers), tiny.experts))
        assert ask(workers, 2, x, ids).tobytes() == tiny.local().send(2, x, ids).tobytes()
        assert workers.class_changes == [change]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert warnings[1] == (
        f"the numeric class changed: 12 experts are computed here from now on, as {ours}; "
        f"class map {now.digest[:12]}, before {planned.digest[:12]}"
    )


def test_what_went_over_stays_when_its_worker_comes_back(tiny: TinyExperts) -> None:
    """After its connection broke a worker serves again: but not what is of the backbone's class by then."""
    with swarm_of(tiny, 1, command=faulty("class", "reconnect")) as workers:
        x, ids = some_rows(tiny, chosen=4)
        report, layer = workers.report()[0], 0
        while not (report.failures and report.state == "serving"):
            layer = (layer + 1) % tiny.layers
            assert ask(workers, layer, x, ids).tobytes() == tiny.local().send(layer, x, ids).tobytes()
        assert report.experts == 0
        calls = report.calls
        assert ask(workers, 0, x, ids).tobytes() == tiny.local().send(0, x, ids).tobytes()
        assert report.calls == calls
        assert len(workers.class_changes) == 1


# ---- from end to end


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    args = argparse.Namespace(workers="numpy:1,native:1", threads="2")
    with open_session(resolve(args, {}, Path("absent"))) as opened:
        yield opened


def answer(session: Session, kill_at: int = -1, count: int = 16) -> Answer:
    """The demo prompt's answer; the numpy worker is killed once so many tokens were chosen."""
    assert session.swarm is not None
    pid, chosen = session.swarm.pids()[0], [0]
    choose = session.engine.choose

    def counted(*args: Any) -> int:
        if chosen[0] == kill_at:
            kill(pid)
        chosen[0] += 1
        return choose(*args)

    session.engine.choose = counted  # type: ignore[method-assign]
    try:
        options = GenerateOptions(max_tokens=count, digest=True)
        return session.engine.generate(PROMPT["prompt_ids"], session.tokenizer(), options)
    finally:
        session.engine.choose = choose  # type: ignore[method-assign]


def as_json(session: Session, answer: Answer) -> Result:
    """The whole object, as `generate` has it."""
    return results.as_json(session, answer) | {"provenance": session.provenance()}


@pytest.mark.parametrize("kill_at", [0, 5])
def test_an_answer_tells_from_which_token_on_another_class_computed(session: Session, kill_at: int) -> None:
    assert session.swarm is not None
    whole = answer(session)
    assert as_json(session, whole)["class_changed_at"] is None
    planned = session.provenance()["class_map"]
    assert planned == session.swarm.class_map.digest

    broken = answer(session, kill_at)
    result = as_json(session, broken)
    assert broken.ids == whole.ids == PROMPT["ids"][:16]
    # The token that was chosen after the kill came of logits from before it.
    now = result["provenance"]["class_map"]
    assert result["class_changed_at"] == [{"token": kill_at + 1, "from": planned, "to": now}]
    assert planned != now
    same = [a == b for a, b in zip(whole.logits_sha256, broken.logits_sha256, strict=True)]
    assert same[: kill_at + 1] == [True] * (kill_at + 1)
    assert not any(same[kill_at + 1 :])
    told = f"numeric class changed at token {kill_at + 1}: class map {now[:12]}, before {planned[:12]}"
    assert told in results.summary(result).splitlines()

    # The next request of the session begins with the new map, which is that of the backbone alone, to the bit.
    after = answer(session)
    assert as_json(session, after)["class_changed_at"] is None
    assert session.provenance()["class_map"] == now
    alone = Engine(session.model, session.model.local_experts, context=64)
    options = GenerateOptions(max_tokens=16, digest=True)
    expected = alone.generate(PROMPT["prompt_ids"], session.tokenizer(), options)
    assert after.logits_sha256 == expected.logits_sha256
    assert now == Session(session.settings, session.model, alone, None, session.digest).provenance()["class_map"]


def test_an_answer_tells_what_failures_cost_and_the_next_one_not(session: Session) -> None:
    """The native worker is of the backbone's class: nobody else holds its experts."""
    assert session.swarm is not None
    whole = as_json(session, answer(session))
    assert whole["failures"] is None
    assert not [line for line in results.summary(whole).splitlines() if "retried" in line]
    before = results.Before.now(session)
    kill(session.swarm.pids()[1])
    broken = results.as_json(session, answer(session), before) | {"provenance": session.provenance()}
    failures = broken["failures"]
    assert failures["workers"] == ["local-2"]
    assert len(broken["workers"][1]["failures"]) == 1
    assert set(failures["computed_locally"]) <= {"lost"}  # the rest is what nobody holds from then on
    assert broken["computed_locally"] > sum(failures["computed_locally"].values())
    assert failures["retried"] == broken["workers"][1]["retried"]
    before = results.Before.now(session)
    after = results.as_json(session, answer(session), before)
    assert (after["failures"], after["workers"][1]["failures"]) == (None, [])
    assert results.failures_as_json(session)["workers"] == ["local-2"]  # type: ignore[index]


def test_what_the_forgotten_cost_is_among_what_all_did(session: Session) -> None:
    assert session.swarm is not None
    gone = Peer(b"a key", WorkerReport("gone"))
    gone.report.tally.retried, gone.report.tally.waited_s = 5, 0.25
    session.swarm._roster.add(gone)
    session.swarm._roster.forget(gone)
    found = results.failures_as_json(session)
    assert found is not None
    assert (found["workers"], found["retried"], found["waited_seconds"]) == ([], 5, 0.25)


def test_what_is_not_kept_of_failures_is_counted() -> None:
    worker = {**WORKER, "failed": 11, "failures": ["it hung", "it left"]}
    assert results.worker_lines([worker], 0, None)[-3:] == ["w: failed 9 times before that", "w: it hung", "w: it left"]


def test_the_line_of_what_failures_cost() -> None:
    failures = {"retried": 2, "hedged_won": 1, "hedged_lost": 3, "waited_seconds": 0.314}
    lines = results.worker_lines([WORKER], 0, failures)
    assert (
        lines[-1]
        == "2 calls retried; 4 calls hedged, 3 of them done by the other; 0.31 s waited for calls that were given up"
    )
    assert len(results.worker_lines([WORKER], 0, None)) == len(lines) - 1


WORKER = {
    "name": "w",
    "backend": "numpy",
    "rank": "f32",
    "experts": 1,
    "calls": 1,
    "rows": 1,
    "seconds": 0.1,
    "state": "serving",
    "failed": 0,
    "failures": [],
}


def test_a_change_in_the_prompt_is_one_of_the_first_token(session: Session) -> None:
    assert session.swarm is not None
    kill(session.swarm.pids()[0])
    assert [change["token"] for change in as_json(session, answer(session))["class_changed_at"]] == [0]


def test_an_answer_that_is_broken_off_tells_it_too(session: Session) -> None:
    assert session.swarm is not None
    kill(session.swarm.pids()[0])

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    options = GenerateOptions(max_tokens=4)
    broken = session.engine.generate(PROMPT["prompt_ids"], session.tokenizer(), options, on_prompt=stop)
    assert (broken.stop, [change.token for change in broken.class_changes]) == ("cancelled", [0])


def test_chat_tells_it(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert session.swarm is not None
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    args = argparse.Namespace(system=None, template="t.jinja", stop=[], ignore_eos=False, digest=False)
    lines = iter(["In the", "beginning"])

    def ask_one() -> str:
        for line in lines:
            if line == "beginning":
                kill(session.swarm.pids()[0])  # type: ignore[union-attr]
            return line
        raise EOFError

    Chat(InProcess(session), session.settings, args).loop(ask_one)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("(numeric class changed")]
    assert told.startswith("(numeric class changed at token 0: class map ")
