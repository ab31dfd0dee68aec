"""Every build of the C kernels computes the same bits: compilers, instruction sets, aarch64 under qemu, threads.

The driver's digests are compared with committed ones; the driver itself holds results to a plain specification.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from native_builds import BUILDS, EXPECTED, Build, differences, digests

from kernels.cores import usable_cores


@dataclass(frozen=True)
class Answer:
    """What a build said."""

    warnings: str
    code: int
    lines: dict[str, str]
    errors: str
    by_threads: dict[str, str]  #: digests from three threads, where they were asked for


def answer(build: Build, folder: Path) -> Answer:
    program, warnings = build.make(folder)
    done = build.run(program)
    threads = done if build.variant == "plain" or build.is_foreign else build.run(program, threads=3)
    return Answer(warnings, done.returncode, digests(done.stdout), done.stderr, digests(threads.stdout))


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Answer]]]:
    """Every build that a selected test asks for, made and run side by side."""
    folder = tmp_path_factory.mktemp("driver")
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == Path(__file__)]
    wanted = {i.callspec.id for i in items if "build" in i.fixturenames}
    made = [b for b in BUILDS if b.name in wanted and b.lacks() is None]
    made.sort(key=lambda b: not b.is_foreign)  # the emulated ones take longest: first
    with ThreadPoolExecutor(max(2, usable_cores())) as pool:
        yield {b.name: pool.submit(answer, b, folder) for b in made}


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
    assert by_name["aarch64 neon"].is_required({"TESTS_REQUIRE": "gcc aarch64"})
    assert not by_name["aarch64 neon"].is_required({"TESTS_REQUIRE": "gcc clang"})
    assert not by_name["clang plain"].is_required({})
