"""Every build of the C kernels computes the same bits: compilers, instruction sets, aarch64 under qemu, threads.

The driver's digests are compared with committed ones; the driver itself holds results to a plain specification.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_builds import BUILDS, EXPECTED, Build, Made, Workshop, differences, digests


@dataclass(frozen=True)
class Answer:
    """What a build said."""

    warnings: str
    code: int
    lines: dict[str, str]
    errors: str
    by_threads: dict[str, str]  #: digests from three threads, where they were asked for


def answer(build: Build, made: Future[Made]) -> Answer:
    program = made.result().program
    done = build.run(program)
    threads = done if build.variant == "plain" or build.is_foreign else build.run(program, threads=3)
    return Answer(made.result().warnings, done.returncode, digests(done.stdout), done.stderr, digests(threads.stdout))


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, workshop: Workshop) -> dict[str, Future[Answer]]:
    """Those of every build that a selected test asks for; they run side by side."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == Path(__file__)]
    wanted = {i.callspec.id for i in items if "build" in i.fixturenames}
    made = [b for b in BUILDS if b.name in wanted and b.lacks() is None]
    made.sort(key=lambda b: not b.is_foreign)  # the emulated ones take longest: first
    return {b.name: workshop.pool.submit(answer, b, workshop[b]) for b in made}


@pytest.mark.parametrize("build", BUILDS, ids=lambda b: b.name)
def test_a_build_computes_the_committed_bits(build: Build, answers: dict[str, Future[Answer]]) -> None:
    if reason := build.lacks():
        assert not build.is_required(), f"required here: {reason}"
        pytest.skip(reason)
    said = answers[build.name].result()
    assert said.warnings == ""
    expected = digests((EXPECTED / "digests.txt").read_text())
    told = differences(said.lines, expected)
    last = (list(said.lines) or ["nothing"])[-1]
    assert said.code == 0, f"{build.name}: exit {said.code} after {last}:\n{said.errors[:2000]}\n{told}"
    assert f"variant {build.variant}," in said.errors, "the flags did not give the variant that was meant"
    assert not told, f"{build.name}: {told}"
    assert not (told := differences(said.by_threads, said.lines)), f"{build.name}, three threads: {told}"


def test_a_difference_is_told() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == ""
    told = differences({"a": "1", "c": "3"}, {"a": "0", "b": "2"})
    assert told == "3 of 2 lines differ:\n  a: 1, not 0\n  b: no such line, not 2\n  c: 3, not known"


def test_what_is_required_is_not_skipped() -> None:
    by_name = {b.name: b for b in BUILDS}
    assert by_name["aarch64 neon dotprod"].is_required({"TESTS_REQUIRE": "gcc aarch64"})
    assert not by_name["aarch64 neon dotprod"].is_required({"TESTS_REQUIRE": "gcc clang"})
    assert not by_name["clang plain -O1"].is_required({})
