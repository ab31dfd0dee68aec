"""`backbone tokenize` and `detokenize` with a file that holds a vocabulary only."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from shared_data import GOLDEN
from vocabularies import bpe, write_vocabulary

from backbone.cli import main

SPM = str(GOLDEN / "tokenizers" / "ggml-vocab-llama-spm.gguf")
CASES = json.loads((GOLDEN / "tokenizers" / "llama-spm.json").read_text())["cases"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    metadata = bpe(["<ctl>"], token_type=[1] * 256 + [3], bos_token_id=256, add_bos_token=True)
    return str(write_vocabulary(metadata, tmp_path / "vocabulary.gguf"))


def given_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_a_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", "--model", model, "a<ctl>"]) == 0
    assert main(["tokenize", "--model", model, "--no-bos", "a<ctl>"]) == 0
    assert main(["tokenize", "--model", model, "--no-bos", "--no-parse-special", "a<"]) == 0
    assert capsys.readouterr().out == "[256, 97, 256]\n[97, 256]\n[97, 60]\n"


def test_ids(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detokenize", "--model", model, "256, 97,256,195,169"]) == 0
    assert capsys.readouterr().out == "a<ctl>é\n"


@pytest.mark.parametrize(
    ("flags", "column"),
    [([], "ids"), (["--no-bos"], "ids_no_bos"), (["--no-bos", "--no-parse-special"], "ids_no_parse_special")],
)
def test_lines_of_texts(
    flags: list[str], column: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_input(monkeypatch, "".join(json.dumps(case["text"]) + "\n" for case in CASES).encode())
    assert main(["tokenize", "--jsonl", "--model", SPM, *flags]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]] == [c[column] for c in CASES]


def test_lines_of_ids(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given_input(monkeypatch, "".join(json.dumps(case["ids"]) + "\n" for case in CASES).encode())
    assert main(["detokenize", "--jsonl", "--model", SPM]) == 0
    texts = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert texts == [case["text"].replace("\u2581", " ") for case in CASES]


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        ("tokenize", b'"open', "no JSON"),
        ("tokenize", b"", "no JSON"),
        ("tokenize", b'"\xff"', "no JSON"),
        ("tokenize", b"[" * 100_000, "no JSON"),
        ("tokenize", b"[1]", "a JSON string is needed"),
        ("tokenize", b'"a\\ud800"', "character 1 of the text is a lone surrogate, not Unicode"),
        ("detokenize", b'"a"', "a JSON list of token ids is needed"),
        ("detokenize", b"[true]", "a JSON list of token ids is needed"),
        ("detokenize", b"[1.0]", "a JSON list of token ids is needed"),
        ("detokenize", b"[257]", "token id 257 is not in the vocabulary (0 to 256)"),
        ("detokenize", b"[-1]", "token id -1 is not in the vocabulary (0 to 256)"),
        ("detokenize", b"[1" + b"0" * 5000 + b"]", "no JSON"),
    ],
)
def test_a_bad_line(
    command: str,
    line: bytes,
    message: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = {"tokenize": b'"a"\n', "detokenize": b"[97]\n"}[command]
    given_input(monkeypatch, good + line + b"\n" + good)
    assert main([command, "--jsonl", "--model", model]) == 2
    streams = capsys.readouterr()
    assert streams.err == f"backbone: error: standard input, line 2: {message}\n"
    assert streams.out == {"tokenize": "[256, 97]\n", "detokenize": '"a"\n'}[command]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tokenize"], "give a TEXT, or --jsonl for lines of standard input"),
        (["tokenize", "a\ud800"], "character 1 of the text is a lone surrogate, not Unicode"),
        (["detokenize"], "give ids such as 1,2,3, or --jsonl for lines of standard input"),
        (["detokenize", "1,x"], "'1,x' is no list of token ids such as 1,2,3"),
        (["detokenize", "1,,2"], "'1,,2' is no list of token ids such as 1,2,3"),
        (["detokenize", "999"], "token id 999 is not in the vocabulary (0 to 256)"),
    ],
)
def test_wrong_use(args: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*args, "--model", model]) == 2
    assert capsys.readouterr().err == f"backbone: error: {message}\n"


def test_a_model_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_vocabulary({}, tmp_path / "none.gguf")
    assert main(["tokenize", "--model", str(path), "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"backbone: error: {path}: the metadata has no tokenizer.ggml.model")


def test_ids_that_are_no_whole_character(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detokenize", "--model", model, "195"]) == 0
    assert capsys.readouterr().out == "\ufffd\n"
