"""The generator of synthetic models: types, sizes, values, that ours loads what it writes, and what it refuses."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from scripts import load_benchmark

from archdefs import load_library
from backbone.engine import Engine
from backbone.model import load_model
from backbone.tokenizer import load_tokenizer
from kernels.formats import GGMLType
from kernels.gguf import open_gguf
from kernels.quants import dequantise
from kernels.registry import make_backend

make_moe = load_benchmark("make_moe")
SMALL = make_moe.Shape(layers=1, experts=8, vocab=1000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with 8 experts, 1,000 tokens."""
    path = tmp_path_factory.mktemp("moe") / "small.gguf"
    make_moe.make(path, SMALL, seed=1)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["make_moe.py", *map(str, args)])
    code: int = make_moe.main()
    return code


def test_the_whole_model_has_the_size_and_the_mixture_of_q4_k_m() -> None:
    wanted = list(make_moe.tensors(make_moe.Shape()))
    assert len(wanted) == 48 * 12 + 3
    assert sum(np.prod(t.dims) for t in wanted) == 30_532_122_624  # Qwen3-30B-A3B's parameters
    assert 18.5e9 < sum(t.nbytes for t in wanted) < 18.6e9
    kinds = {t.name: t.type for t in wanted}
    more = [i for i in range(48) if kinds[f"blk.{i}.attn_v.weight"] is GGMLType.Q6_K]
    assert more == [*range(6), *range(8, 42, 3), *range(42, 48)]
    assert more == [i for i in range(48) if kinds[f"blk.{i}.ffn_down_exps.weight"] is GGMLType.Q6_K]
    plain = {"attn_q", "attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps"}
    assert {kinds[f"blk.{i}.{name}.weight"] for i in range(48) for name in plain} == {GGMLType.Q4_K}
    assert {kinds[name] for name in kinds if "norm" in name or "gate_inp" in name} == {GGMLType.F32}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == (GGMLType.Q4_K, GGMLType.Q6_K)


def test_the_file_holds_what_was_planned_in_sane_sizes(small: Path) -> None:
    with open_gguf(small) as gguf:
        for tensor in make_moe.tensors(SMALL):
            info = gguf.tensors[tensor.name]
            assert (info.type, info.dims, info.nbytes) == (tensor.type, tensor.dims, tensor.nbytes), tensor.name
            values = dequantise(info.type, gguf.data(tensor.name)[None])
            if tensor.std:
                assert values.std() / tensor.std == pytest.approx(1, abs=0.05), tensor.name
                assert abs(values.mean()) < 0.1 * tensor.std, tensor.name
                assert abs(values).max() < 4 * tensor.std, tensor.name
            else:
                assert (values == 1).all()
        assert len(gguf.tensors) == 15


def test_ours_binds_it_and_its_logits_are_of_size_one(small: Path) -> None:
    model = load_model(small, load_library(), make_backend("numpy"))
    assert model.warnings == ()
    assert (model.vocabulary, model.expert_count(0), model.expert_width(0)) == (1000, 8, 2048)
    engine = Engine(model, model.local_experts, context=16)
    logits = engine.extend(engine.new_sequence(), [1, 2, 3], want_all=True)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2


def test_text_comes_back_through_its_vocabulary(small: Path) -> None:
    with open_gguf(small) as gguf:
        tokenizer = load_tokenizer(gguf.metadata, "small")
    ids = tokenizer.encode("then the ü 🙂")
    assert tokenizer.decode(ids) == "then the ü 🙂"
    assert len(ids) < len("then the ü 🙂".encode())
    assert tokenizer.size == 1000
    assert max(tokenizer.eos_ids) < make_moe.FEWEST_TOKENS


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(small: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    make_moe.make(again, SMALL, seed=1)
    make_moe.make(other, SMALL, seed=2)
    assert again.read_bytes() == small.read_bytes()
    assert again.stat().st_size == other.stat().st_size
    assert again.read_bytes() != other.read_bytes()
    # A digest for each type: these bytes hold for every version of numpy and every machine.
    assert {
        kind.name: hashlib.sha256(_bytes(make_moe.Tensor("t", kind, (256, 40), 0.5))).hexdigest()[:16]
        for kind in make_moe.SHAPERS
    } == {"Q4_K": "cad1b0a63f50c632", "Q6_K": "7ee86aa1dfe493f2", "F32": "fbcea690ee1aa612"}


def test_a_tensor_is_the_same_in_every_cut() -> None:
    def values(layers: int, vocab: int) -> bytes:
        wanted = make_moe.tensors(make_moe.Shape(layers=layers, experts=8, vocab=vocab))
        return _bytes(next(t for t in wanted if t.name == "blk.0.attn_q.weight"))

    assert values(1, 1000) == values(3, 400)


def test_a_file_that_exists_is_kept_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"dear")
    assert run(monkeypatch, path, "--layers", 1) == 2
    assert capsys.readouterr().err == f"make_moe: {path}: exists; --force overwrites it\n"
    assert path.read_bytes() == b"dear"
    assert run(monkeypatch, path, "--layers", 1, "--experts", 8, "--vocab", 300, "--force") == 0
    assert path.stat().st_size > 1_000_000
    assert [p.name for p in tmp_path.iterdir()] == ["mine.gguf"]


def test_a_full_disk_is_told_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(5_000_000_000))
    assert run(monkeypatch, tmp_path / "big.gguf") == 2
    error = capsys.readouterr().err
    assert "needs 18.55 GB" in error
    assert "5.00 free" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--layers", 0), "--layers 0: at least 1"),
        (("--experts", 7), "--experts 7: at least 8"),
        (("--vocab", 256), "--vocab 256: at least 267"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(
    args: tuple[object, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "never.gguf", *args)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def _bytes(tensor: Any) -> bytes:
    return b"".join(chunk.tobytes() for chunk in make_moe.contents(tensor, 1))
