"""The side `kld:FILE`: a file as llama-perplexity writes it of our own logits, damaged ones, and a real one."""

from __future__ import annotations

import io
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from outside_kit import findings, kld_bytes, of_kind, session_of, side

from backbone.discovery import DEMO
from backbone.errors import UsageError
from backbone.tolerance import measures
from backbone.tolerance.kld import KldFile
from backbone.tolerance.passage import shipped_text
from backbone.tolerance.sides import Side

CONTEXT, CHUNKS = 96, 2
#: A build of llama.cpp's perplexity, for the one test against the real thing.
LLAMA_PERPLEXITY = os.environ.get("TESTS_LLAMA_PERPLEXITY", "")


@pytest.fixture(scope="module")
def native() -> Iterator[Side]:
    with side("native", "--a") as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens(native: Side) -> NDArray[np.int32]:
    """[CHUNKS, CONTEXT] of the text, without what the model begins a text with."""
    ids = session_of(native).tokenizer().encode(shipped_text()[1].decode(), add_special=False)
    return np.asarray(ids[: CHUNKS * CONTEXT], np.int32).reshape(CHUNKS, CONTEXT)


@pytest.fixture(scope="module")
def content(native: Side, tokens: NDArray[np.int32]) -> bytes:
    """The demo model has BOS, which llama-perplexity puts in place of each chunk's first token."""
    session = session_of(native)
    (bos,) = session.tokenizer().encode("")
    logits = [
        session.engine.extend(session.engine.new_sequence(), [bos, *chunk[1:]], want_all=True)[CONTEXT // 2 : -1]
        for chunk in tokens.tolist()
    ]
    return kld_bytes(tokens, np.stack(logits))


@pytest.fixture
def file(content: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "base.kld"
    path.write_bytes(content)
    return path


def test_our_own_logits_come_back_but_for_their_16_bits(native: Side, file: Path, tokens: NDArray[np.int32]) -> None:
    with side(f"kld:{file}") as outside:
        over = outside.passage
        assert over is not None
        assert [len(window) for window in over.windows] == [CONTEXT - 1] * CHUNKS
        assert (over.first, over.positions) == (CONTEXT // 2, CHUNKS * (CONTEXT - 1 - CONTEXT // 2))
        found = findings(native, outside, over)
    for window in of_kind(found, "window"):
        assert window["counted"] == len(window["kl"]) == CONTEXT - 1 - CONTEXT // 2
        assert max(window["kl"]) < 1e-7
        assert max(window["l_inf"]) < 3e-4  # half a step is 16 / 65535 / 2, of two numbers
        assert [flip for flip in window["flips"] if flip["margin_a"] > 1e-3] == []
        assert window["nll_b"] == pytest.approx(window["nll_a"], abs=3e-4)
        assert len(window["nll_a"]) == window["counted"]  # that of the last position, too: its target is known


def test_what_it_has_not_is_empty(native: Side, file: Path) -> None:
    with side(f"kld:{file}") as outside:
        assert outside.passage is not None
        found = findings(native, outside, outside.passage)
        assert (outside.precision, outside.numeric_class, outside.told["routing"]) == ("outside", "", "its own")
    assert all(one["b"] is None and one["identical"] is False for one in of_kind(found, "operation"))
    assert all(one["drift"] == {} and one["decisions"] == one["identical"] == 0 for one in of_kind(found, "window"))
    assert of_kind(found, "generation") == [{}, {}]


def test_what_is_cut_off_below_is_not_measured(native: Side, file: Path) -> None:
    """Taken as written, all tokens beyond 16 nats would have e^-16 of the likeliest: that is no difference of models."""
    with side(f"kld:{file}") as outside:
        assert outside.passage is not None
        window, walk = outside.passage.windows[0], outside.begin(0)
        assert walk is not None
        piece = walk.run(window, None)
        mine = session_of(native).engine.extend(session_of(native).engine.new_sequence(), window, want_all=True)
    at = CONTEXT // 2
    assert piece.known is not None
    assert 0.05 < 1 - piece.known[at:].mean() < 0.5
    above = measures.log_softmax(mine)[at:] - piece.logits[at:].min(axis=1)[:, None]
    assert above[piece.known[at:]].min() > -3e-4
    assert above[~piece.known[at:]].max() < 3e-4
    as_written = measures.distances(mine[at:], piece.logits[at:]).kl.mean()
    assert as_written > 1e-5 > 1e-7 > measures.distances(mine[at:], piece.logits[at:], piece.known[at:]).kl.mean()


def test_it_can_be_a(native: Side, file: Path) -> None:
    with side(f"kld:{file}", "--a") as outside:
        assert outside.passage is not None
        found = findings(outside, native, outside.passage, (3, 4, 6))
        twice = findings(outside, outside, outside.passage, (3, 4, 6))
    assert max(of_kind(found, "window")[0]["kl"]) < 1e-7
    assert max(of_kind(twice, "window")[0]["l_inf"]) == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_rows_of_the_next_position_are_seen(
    native: Side, tokens: NDArray[np.int32], tmp_path: Path, shift: int
) -> None:
    session, at = session_of(native), CONTEXT // 2 + shift
    (bos,) = session.tokenizer().encode("")
    logits = session.engine.extend(session.engine.new_sequence(), [bos, *tokens[0, 1:].tolist()], want_all=True)
    (tmp_path / "base.kld").write_bytes(kld_bytes(tokens[:1], logits[None, at : at + CONTEXT - 1 - CONTEXT // 2]))
    with side(f"kld:{tmp_path / 'base.kld'}") as outside:
        assert outside.passage is not None
        (window,) = of_kind(findings(native, outside, outside.passage, (3,)), "window")
    assert np.mean(window["kl"]) > 1


def test_other_tokens_than_its_own_have_no_figures(file: Path) -> None:
    with side(f"kld:{file}") as outside:
        walk = outside.begin(0)
        assert walk is not None
        with pytest.raises(UsageError, match="has no figures of these tokens"):
            walk.run([1, 2, 3], None)


# ---- damaged ones


def head(context: int = 8, vocabulary: int = 5, chunks: int = 1, magic: bytes = b"_logits_") -> bytes:
    return struct.pack("<8s3i", magic, context, vocabulary, chunks)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is no file of llama-perplexity"),
        (b"_logits_", "is no file of llama-perplexity"),
        (head(magic=b"GGUF\3\0\0\0"), "is no file of llama-perplexity"),
        (head(context=2), "n_ctx is 2, which is not from 4"),
        (head(context=-8), "n_ctx is -8"),
        (head(vocabulary=2**31 - 1), "n_vocab is 2147483647"),
        (head(chunks=0), "n_chunk is 0"),
        (head(context=2**20, vocabulary=2**21, chunks=2**20), "has 20 bytes where"),
        (head() + bytes(8 * 4 + 3 * 20 - 1), "has 111 bytes where 112 are due; was llama-perplexity stopped?"),
        (head() + bytes(8 * 4 + 3 * 20 + 1), "has 113 bytes where 112 are due"),
        (
            head() + struct.pack("<8i", 0, 1, 2, 3, 4, 5, 0, 0) + bytes(60),
            "holds tokens that are not in its vocabulary",
        ),
        (
            head() + struct.pack("<8i", 0, 1, 2, 3, 4, -1, 0, 0) + bytes(60),
            "holds tokens that are not in its vocabulary",
        ),
    ],
)
def test_a_damaged_head_is_one_line(content: bytes, why: str) -> None:
    with pytest.raises(UsageError) as error:
        KldFile(io.BytesIO(content), "--b kld:x")
    assert str(error.value).startswith("--b kld:x: ")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("scale", "least"),
    [
        (float("nan"), -1.0),
        (1e-5, float("nan")),
        (float("inf"), -1.0),
        (-1e-5, -1.0),
        (1.0, -65535.0),
        (1e-5, 3.0),
        (1e-5, -float("inf")),
        (0.0, -30.0),  # probabilities of next to nothing
        (0.0, 0.0),  # each of them certain
    ],
)
def test_rows_that_are_no_log_probabilities(scale: float, least: float) -> None:
    rows = struct.pack("<2f6H", scale, least, *range(6)) * 3
    found = KldFile(io.BytesIO(head() + bytes(32) + rows), "--b kld:x")
    with pytest.raises(UsageError, match="--b kld:x: chunk 1 holds what are no log-probabilities"):
        found.log_probs(0, 0, 3)


def test_equal_logits_have_no_scale() -> None:
    rows = struct.pack("<2f6H", 0.0, np.log(0.2), *[0] * 6) * 3
    values, known = KldFile(io.BytesIO(head() + bytes(32) + rows), "x").log_probs(0, 1, 2)
    assert known.all()
    assert np.exp(values) == pytest.approx(np.full((2, 5), 0.2))


@given(st.data())
@example_settings(max_examples=300, deadline=None)
def test_any_damage_is_told_or_harmless(data: st.DataObject) -> None:
    logits = np.random.default_rng(1).normal(0, 5, (2, 3, 5)).astype(np.float32)
    content = bytearray(kld_bytes(np.arange(16, dtype=np.int32).reshape(2, 8) % 5, logits))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(content), len(content) // 2, len(content) - 1]))
    try:
        found = KldFile(io.BytesIO(content[:end]), "x")
        for chunk in range(found.chunks):
            values, _ = found.log_probs(chunk, 0, found.rows)
            assert np.isfinite(values).all()
    except UsageError as error:
        assert str(error).startswith("x: ")


def test_another_vocabulary_is_refused(native: Side, tmp_path: Path) -> None:
    path = tmp_path / "five.kld"
    path.write_bytes(kld_bytes(np.zeros((1, 8), np.int32), np.zeros((1, 3, 5), np.float32)))
    with side(f"kld:{path}") as outside:
        assert outside.passage is not None
        with pytest.raises(UsageError, match="has 5 tokens and the model 4096"):
            findings(native, outside, outside.passage, (3,))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"), side(f"kld:{tmp_path / 'none'}"):
        pass
    with pytest.raises(UsageError, match="cannot be read: Is a directory"), side(f"kld:{tmp_path}"):
        pass


# ---- the real one


@pytest.mark.skipif(not LLAMA_PERPLEXITY, reason="TESTS_LLAMA_PERPLEXITY names no llama-perplexity")
def test_a_real_file(native: Side, tmp_path: Path) -> None:
    """Its rounding of activations to 8 bits is all that differs, and the perplexity is the one that it prints."""
    (tmp_path / "text").write_bytes(shipped_text()[1])
    command = [LLAMA_PERPLEXITY, "-m", str(DEMO), "-f", "text", "-c", "128", "--chunks", "3", "-t", "2"]
    done = subprocess.run(
        [*command, "--kl-divergence-base", "base.kld"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (printed,) = [line for line in (done.stdout + done.stderr).splitlines() if "PPL = " in line]
    with side(f"kld:{tmp_path / 'base.kld'}") as outside:
        assert outside.passage is not None
        windows = of_kind(findings(native, outside, outside.passage, (3, 4, 6)), "window")
    kl = np.concatenate([one["kl"] for one in windows])
    assert len(kl) == 3 * 63
    assert 1e-6 < kl.mean() < 2e-2
    ppl = np.exp(np.concatenate([one["nll_b"] for one in windows]).mean())
    assert ppl == pytest.approx(float(printed.partition("PPL = ")[2].split()[0]), abs=2e-3)
