"""`backbone init`: the example file, never over what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from backbone.cli import main
from backbone.settings import example


def test_init_writes_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == [".env.example"]
    assert (tmp_path / ".env.example").read_text(encoding="utf-8") == example()


def test_init_refuses_to_write_over_a_file_or_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env.example").write_text("mine")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == ("backbone: error: .env.example is there already; --force writes over it\n")
    assert (tmp_path / ".env.example").read_text() == "mine"
    assert main(["init", "--force"]) == 0
    assert (tmp_path / ".env.example").read_text(encoding="utf-8") == example()
    (tmp_path / ".env.example").unlink()
    (tmp_path / ".env.example").symlink_to(tmp_path / "elsewhere")
    assert main(["init"]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_init_says_why_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env.example").mkdir()
    assert main(["init", "--force"]) == 1
    assert capsys.readouterr().err == "backbone: error: .env.example: cannot be written: Is a directory\n"
