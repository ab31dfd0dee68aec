"""Digests of slices: right, kept between runs, and never those of another file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from swarm_kit import TinyExperts

from backbone.slice_digests import SliceDigests


@pytest.fixture
def model(tmp_path: Path) -> TinyExperts:
    return TinyExperts(tmp_path / "tiny.gguf")


def hashed(model: TinyExperts, folder: Path) -> SliceDigests:
    digests = SliceDigests(model, folder)
    digests.start()
    while digests.is_busy:
        assert digests._thread is not None
        digests._thread.join()
    return digests


def expected(model: TinyExperts) -> dict[str, list[bytes]]:
    return {
        tensor: [hashlib.sha256(model.slice_data(tensor, e)).digest() for e in range(model.experts)]
        for tensors in model.expert_tensors.values()
        for tensor in tensors.values()
    }


def found(model: TinyExperts, digests: SliceDigests) -> dict[str, list[bytes]]:
    return {tensor: [digests.of(tensor, e) for e in range(model.experts)] for tensor in expected(model)}


def test_they_are_right_whether_hashed_before_or_when_asked_for(model: TinyExperts, tmp_path: Path) -> None:
    assert found(model, SliceDigests(model)) == expected(model)
    digests = hashed(model, tmp_path / "kept")
    assert all(digests.is_known(layer) for layer in model.expert_tensors)
    assert digests.take_news()
    assert not digests.take_news()
    assert found(model, digests) == expected(model)


def test_they_are_kept_for_the_next_run(model: TinyExperts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed(model, tmp_path / "kept").close()
    again = SliceDigests(model, tmp_path / "kept")
    monkeypatch.setattr(TinyExperts, "slice_data", lambda *_: pytest.fail("hashed again"))
    assert all(again.is_known(layer) for layer in model.expert_tensors)
    again.start()
    assert not again.is_busy


def test_those_of_a_file_that_changed_are_not_used(model: TinyExperts, tmp_path: Path) -> None:
    hashed(model, tmp_path / "kept").close()
    data = bytearray(model.path.read_bytes())
    data[-1] ^= 1
    model.path.write_bytes(data)
    assert not SliceDigests(model, tmp_path / "kept").is_known(0)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', '{"blk.0.ffn_gate_exps.weight": ["00"]}'])
def test_a_damaged_file_is_as_none(model: TinyExperts, tmp_path: Path, content: str) -> None:
    hashed(model, tmp_path / "kept").close()
    (file,) = (tmp_path / "kept").iterdir()
    assert set(json.loads(file.read_text())) == set(expected(model))
    file.write_text(content)
    digests = SliceDigests(model, tmp_path / "kept")
    assert not digests.is_known(0)
    assert found(model, digests) == expected(model)
