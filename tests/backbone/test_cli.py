"""The command as its users run it: a process, its output, its exit code."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import F32_BAR, Golden, load
from shared_data import GOLDEN, ROOT
from tinygguf import F32, STRING, U32, Tiny

from archdefs import load_library
from backbone.errors import UsageError

Find = Callable[[str], Path]
PROMPT = json.loads((GOLDEN / "verse-moe-golden.json").read_text())["prompts"][0]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "backbone", *args]


def backbone(*args: str, code: int = 0, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an empty folder; the exit code is asserted, and that no traceback was shown."""
    done = subprocess.run(
        command(*args),
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr
    return done


def error(*args: str, **env: str) -> str:
    """The error of a command that is used wrongly: exit code 2 and nothing on standard output."""
    done = backbone(*args, code=2, **env)
    assert done.stdout == ""
    line = done.stderr.splitlines()[0]
    assert line.startswith("backbone: error: ")
    return done.stderr.removeprefix("backbone: error: ")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_demo_model_through_two_workers() -> None:
    done = backbone("generate", PROMPT["prompt"], "-n", "64")
    assert done.stdout == PROMPT["text"] + "\n"
    table = done.stderr.splitlines()
    assert table[0].split() == ["worker", "backend", "rank", "experts", "calls", "rows", "seconds", "state"]
    for number, line in ((1, table[1]), (2, table[2])):
        name, backend, rank, experts, calls, rows, _, state = line.split()
        assert (name, backend, rank, experts, state) == (f"local-{number}", "native", "exact", "64", "serving")
        assert 0 < int(calls) <= int(rows)
    assert "answer: 64 tokens" in done.stderr
    assert "weights 85dbef22393e, archdef qwen3moe" in done.stderr


def test_json_holds_what_scripts_rely_on() -> None:
    done = backbone("generate", PROMPT["prompt"], "-n", "8", "--json", "--digest")
    result = json.loads(done.stdout)
    assert done.stderr == ""
    assert (result["prompt_ids"], result["ids"], result["stop"]) == (PROMPT["prompt_ids"], PROMPT["ids"][:8], "limit")
    assert PROMPT["text"].startswith(result["text"])
    assert result["timings"]["prompt"]["tokens"] == len(PROMPT["prompt_ids"])
    assert result["timings"]["decode"]["tokens"] == 8
    assert [set(w) >= {"name", "backend", "class", "calls", "seconds", "failures"} for w in result["workers"]] == [
        True
    ] * 2
    assert result["computed_locally"] == 0
    assert len(result["logits_sha256"]) == 8
    provenance = result["provenance"]
    assert provenance["weights"] == "85dbef22393ee60b0dd59161ff035a503be65c29e3594766b322a3e83b12ed2e"
    assert provenance["archdef"]["sha256"] == load_library().get("qwen3moe").sha256
    assert all(len(provenance[name]) == 64 for name in ("weights", "class_map"))
    assert len(provenance["engine"]["sha256"]) == 64


def test_rows_go_as_the_operator_wants_them() -> None:
    plain, *half = (
        json.loads(backbone("generate", PROMPT["prompt"], "-n", "8", "--json", "--digest", *args).stdout)
        for args in ((), ("--wire", "f16"), ("--wire", "f16", "--workers", "3"))
    )
    assert half[0]["logits_sha256"] == half[1]["logits_sha256"] != plain["logits_sha256"]
    maps = [result["provenance"]["class_map"] for result in (plain, *half)]
    assert maps[0] != maps[1] == maps[2]
    assert [r["provenance"]["backbone_class"].endswith(" wire-f16") for r in (plain, *half)] == [False, True, True]
    assert "--wire: 'f8' is not one of f32, f16" in backbone("generate", "x", "--wire", "f8", code=2).stderr


def test_how_many_answers_are_audited_is_the_operators_choice() -> None:
    every, none = (
        json.loads(backbone("generate", PROMPT["prompt"], "-n", "8", "--json", "--digest", "--audit", n).stdout)
        for n in ("1", "0")
    )
    assert every["logits_sha256"] == none["logits_sha256"]
    assert [w["audits"] > 0 for w in every["workers"]] == [True, True]
    for result in (every, none):
        assert [(w["rank"], w["audits_failed"], w["failures"]) for w in result["workers"]] == [("exact", 0, [])] * 2
        assert all(0 < w["error"] < 1e-6 for w in result["workers"])
        assert not result["in_doubt"]
    assert [w["audits"] for w in none["workers"]] == [0, 0]


def test_bits_and_class_map_do_not_depend_on_the_workers() -> None:
    results = [
        json.loads(backbone("generate", PROMPT["prompt"], "-n", "6", "--json", "--digest", "--workers", n).stdout)
        for n in ("0", "1", "native:3")
    ]
    assert len({json.dumps(r["logits_sha256"]) for r in results}) == 1
    assert len({r["provenance"]["class_map"] for r in results}) == 1
    assert [len(r["workers"]) for r in results] == [0, 1, 3]


def test_bits_of_another_class_do_not_depend_on_the_workers_either() -> None:
    asked = ("--activations", "i16", "--kv-cache", "f16")
    plain, alone, shared = (
        json.loads(backbone("generate", PROMPT["prompt"], "-n", "6", "--json", "--digest", *how).stdout)
        for how in (("--workers", "0"), ("--workers", "0", *asked), ("--workers", "2", *asked))
    )
    assert alone["logits_sha256"] == shared["logits_sha256"]
    assert alone["logits_sha256"] != plain["logits_sha256"]
    assert alone["provenance"] == shared["provenance"]
    assert alone["provenance"]["class_map"] != plain["provenance"]["class_map"]
    assert plain["provenance"]["backbone_class"] == "canonical-1/f32/f32"
    assert alone["provenance"]["backbone_class"] == "canonical-1/i16/f32 kv-f16"
    assert {w["class"] for w in shared["workers"]} == {"canonical-1/i16/f32"}


def test_workers_of_two_classes_answer_together() -> None:
    mixed, again, plain = (
        json.loads(backbone("generate", PROMPT["prompt"], "-n", "12", "--json", "--digest", "--workers", n).stdout)
        for n in ("numpy:1,native:1", "numpy:1,native:1", "0")
    )
    assert mixed["ids"] == plain["ids"] == PROMPT["ids"][:12]
    assert mixed["logits_sha256"] == again["logits_sha256"] != plain["logits_sha256"]
    assert mixed["provenance"] == again["provenance"]
    assert mixed["provenance"]["class_map"] != plain["provenance"]["class_map"]
    assert [(w["backend"], w["experts"], w["state"]) for w in mixed["workers"]] == [
        ("numpy", 32, "serving"),
        ("native", 32, "serving"),
    ]
    numpy, native = (w["class"] for w in mixed["workers"])
    assert numpy.startswith("numpy-")
    assert native == "canonical-1/f32/f32"
    assert mixed["computed_locally"] == 0
    assert [r["class_changed_at"] for r in (mixed, plain)] == [None, None]


def test_ids_file_stdin_stop_and_context(tmp_path: Path) -> None:
    ids = ",".join(map(str, PROMPT["prompt_ids"]))
    assert json.loads(backbone("generate", "--ids", ids, "-n", "4", "--json").stdout)["ids"] == PROMPT["ids"][:4]
    (tmp_path / "prompt.txt").write_text(PROMPT["prompt"])
    assert json.loads(backbone("generate", "-f", "prompt.txt", "-n", "4", "--json").stdout)["ids"] == PROMPT["ids"][:4]
    piped = backbone("generate", "-f", "-", "-n", "4", "--json", stdin=PROMPT["prompt"])
    assert json.loads(piped.stdout)["ids"] == PROMPT["ids"][:4]
    stopped = json.loads(backbone("generate", PROMPT["prompt"], "--stop", "day of the", "--json").stdout)
    assert (stopped["stop"], stopped["text"]) == ("stop", PROMPT["text"].split("day of the")[0])
    full = json.loads(backbone("generate", PROMPT["prompt"], "-c", "9", "--json").stdout)
    assert (full["stop"], len(full["prompt_ids"]) + len(full["ids"])) == ("length", 9)
    none = json.loads(backbone("generate", PROMPT["prompt"], "-n", "0", "--json").stdout)
    assert (none["stop"], none["ids"], none["text"]) == ("limit", [], "")


def test_text_is_utf8_whatever_the_locale_says() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ids = backbone("tokenize", "--jsonl", stdin='"é🙂"\n', **ascii_only).stdout
    assert json.loads(backbone("detokenize", "--jsonl", stdin=ids, **ascii_only).stdout) == "é🙂"


def test_streams_that_are_closed_or_full(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = " ".join(command("generate", "'In the'", "-n", "3", "--workers", "0"))
    for redirect, code in ((">&-", 0), ("2>&-", 0), ("<&-", 0), (">/dev/full", 1), ("2>/dev/full", 1)):
        done = subprocess.run(f"{line} {redirect}", shell=True, capture_output=True, text=True, env=env, check=False)  # noqa: S602
        assert "Traceback" not in done.stderr, redirect
        assert done.returncode == code, redirect
    assert error("logits", "--ids", "1", "--out", str(tmp_path)).endswith("is a folder; name a file\n")
    backbone("logits", "--ids", "1", "--out", "/dev/full", code=1)


def test_an_embedding_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"token_embd.weight has 8 tokens and the head 9; the file is damaged"):
        load(sparse_model(tmp_path, 9))


def test_seeds() -> None:
    def drawn(seed: str) -> list[int]:
        args = ("--temp", "1.5", "--top-k", "40", "--seed", seed, "-n", "8", "--json", "--workers", "0")
        return list(json.loads(backbone("generate", PROMPT["prompt"], *args).stdout)["ids"])

    assert drawn("1") == drawn("1")
    assert drawn("1") != drawn("2")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate",), "give one prompt: as an argument, with -f FILE, or as --ids 1,2,3"),
        (("generate", "a", "--ids", "1"), "give one prompt: as an argument, with -f FILE, or as --ids 1,2,3"),
        (("generate", "--ids", "1,x"), "--ids: '1,x' is no list of token ids such as 1,2,3"),
        (("generate", "--ids", "1,4096"), "token id 4096 is not in the vocabulary (0 to 4095)"),
        (("generate", "--ids", "-1"), "token id -1 is not in the vocabulary (0 to 4095)"),
        (("generate", ""), "there is no token to run: give a prompt"),
        (("generate", "-f", "absent.txt"), "absent.txt: cannot be read: No such file or directory"),
        (("generate", "a", "--temp", "hot"), "--temperature: 'hot' is not a number"),
        (("generate", "a", "--top-p", "2"), "--top-p: 2 is out of range; from 0 to 1 is allowed"),
        (("generate", "a", "-n", "-1"), "--predict: -1 is out of range; from 0 to "),
        (
            ("generate", "a", "--workers", "many"),
            "--workers many: 'many' is neither a number nor BACKEND:NUMBER",
        ),
        (("generate", "a", "--backend", "nunpy"), "no backend 'nunpy'; did you mean 'numpy'?"),
        (("generate", "a", "--workers", "metal:1"), "no backend 'metal'; there are native, numpy, opencl, cuda"),
        (
            ("generate", "a", "--backend", "numpy", "--activations", "i16"),
            "numpy computes with f32 activations only; i16 needs --backend native",
        ),
        (
            ("logits", "--ids", "1", "--out", "x.npy", "--backend", "numpy", "--kv-cache", "f16"),
            "numpy keeps keys and values in f32; f16 needs --backend native",
        ),
        (("chat", "--kv-cache", "i16"), "--kv-cache: 'i16' is not one of f32, f16"),
        (("logits", "--ids", "1", "--out", "x.npy", "--threads", "-1"), "--threads: -1 is out of range; from 0 to"),
        (("chat", "--activations", "f16"), "--activations: 'f16' is not one of f32, i16"),
        (("generate", "a", "--system", "b"), "--system and --template belong to --chat"),
        (
            ("generate", "a", "--workers", "numpy:1,native:1", "--activations", "i16"),
            "numpy computes with f32 activations only; i16 needs --backend native",
        ),
        (
            ("generate", "a", "--workers", "0", "--accumulation", "f16"),
            "native sums products in f32 only; f16 needs an opencl or cuda device that has F16",
        ),
        (("generate", "a", "--accumulation", "f16"), "native sums products in f32 only; f16 needs"),
        (
            ("generate", "a", "--backend", "native", "--workers", "numpy:1", "--accumulation", "f16"),
            "numpy sums products in f32 only; f16 needs",
        ),
        (
            ("generate", "a", "--backend", "numpy", "--workers", "1", "--accumulation", "f16"),
            "numpy sums products in f32 only; f16 needs",
        ),
        (("generate", "a", "--chat"), "{demo}: the model has no chat template; give one with --template FILE"),
        (("generate", "a b c d e", "-c", "3"), "6 tokens do not fit the context of 3; raise it with -c"),
        (("generate", "a", "-m", "absent.gguf"), "no model 'absent.gguf'; looked at {cwd}/absent.gguf, "),
        (
            ("generate", "a", "--archdefs", "absent"),
            "absent:1:1: no folder of definitions (--archdefs, EXPERTSWARM_ARCHDEFS)",
        ),
        (("logits", "--ids", "1", "--out", "no/where.npy"), "--out no/where.npy: there is no folder no"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    demo = ROOT / "backbone" / "demo" / "verse-moe-q4_k_m.gguf"
    # An empty argument is a prompt without tokens only for models that add no BOS; the demo model adds one.
    if args == ("generate", ""):
        args = ("generate", "--ids", "")
        message = "--ids: '' is no list of token ids such as 1,2,3"
    assert error(*args).startswith(message.format(demo=demo, cwd=tmp_path))


def test_settings_from_the_environment_are_named(tmp_path: Path) -> None:
    assert error("generate", "a", EXPERTSWARM_TOP_K="x").startswith(
        "environment: EXPERTSWARM_TOP_K: 'x' is not a whole"
    )
    assert "did you mean EXPERTSWARM_TOP_K?" in error("generate", "a", EXPERTSWARM_TOPK="3")
    (tmp_path / ".env").write_text("# ours\nEXPERTSWARM_PREDICT=2\n")
    assert len(json.loads(backbone("generate", "a", "--json").stdout)["ids"]) == 2
    (tmp_path / ".env").write_text("EXPERTSWARM_PREDICT=two\n")
    assert error("generate", "a").startswith(".env:1: EXPERTSWARM_PREDICT: 'two' is not a whole number")


def test_a_broken_definition_makes_its_architecture_unavailable(arch_model: Find, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    text = load_library().get("qwen3").text
    (folder / "qwen3.archdef").write_text(text.replace("  silu(g)", "  siluu(g)"))
    line = text.splitlines().index("  silu(g)") + 1
    message = error("generate", "--ids", "1,2", "-m", str(arch_model("qwen3")), "--archdefs", str(folder))
    assert f"{folder}/qwen3.archdef:{line}:3: no operation 'siluu'; did you mean 'silu'?" in message
    other = backbone(
        "generate", "--ids", "1,2", "-m", str(arch_model("llama")), "--archdefs", str(folder), "-n", "2", "--json"
    )
    assert len(json.loads(other.stdout)["ids"]) == 2


def sparse_model(folder: Path, vocabulary: int) -> Path:
    """A llama of one layer whose head has so many rows, in a file of holes."""
    shapes = {f"blk.0.attn_{n}.weight": (32, 32) for n in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{n}.weight": (32, 32) for n in ("gate", "up", "down")}
    shapes |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (32,))
    shapes |= {"token_embd.weight": (32, 8), "output.weight": (32, vocabulary)}
    tiny = Tiny().key("general.architecture", STRING, "llama")
    for key, count in (("block_count", 1), ("embedding_length", 32), ("attention.head_count", 4)):
        tiny.key(f"llama.{key}", U32, count)
    tiny.key("llama.attention.layer_norm_rms_epsilon", F32, 1e-5)
    offset = 0
    for name, dims in shapes.items():
        tiny.tensors.append((name, dims, 0, offset))
        offset += 4 * math.prod(dims)
    path = tiny.write(folder / "sparse.gguf")
    os.truncate(path, path.stat().st_size + offset)
    return path


def test_a_matrix_of_too_many_rows_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    path = sparse_model(tmp_path, (1 << 20) + 1)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="gives 1048577 values a row; at most 1048576 are allowed"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "gives 1048577 values a row" in error("logits", "--ids", "1", "--out", "x.npy", "-m", str(path))


def test_logits(arch_model: Find) -> None:
    data = Golden("olmoe").data()
    ids = ",".join(map(str, data["tokens"].tolist()))
    whole, single = (
        (backbone("logits", "-m", str(arch_model("olmoe")), "--ids", ids, "--out", out, *batch), np.load(out))[1]
        for out, batch in (("a.npy", ()), ("b.npy", ("--batch", "1")))
    )
    assert (whole.dtype, whole.shape) == (np.float32, (48, 512))
    assert np.abs(whole - data["logits"]).max() <= F32_BAR
    assert whole.tobytes() == single.tobytes()


def test_named_model_runs_here_and_says_how_to_add_workers(arch_model: Find) -> None:
    moe = backbone("generate", "--ids", "1", "-n", "1", "-m", str(arch_model("mixtral")))
    assert "all experts run in this process; share them out with --workers 2" in moe.stderr
    dense = backbone("generate", "--ids", "1", "-n", "1", "-m", str(arch_model("llama")), "--workers", "2")
    assert "is a dense model: workers have nothing to do" in dense.stderr


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_chat_keeps_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHAT)
    lines = "In the beginning\nAnd the earth\n/reset\nIn the beginning\n/nonsense\n/quit\nnever read\n"
    done = backbone("chat", "--template", "t.jinja", "-n", "6", "--workers", "0", stdin=lines)
    first, second, again, *rest = done.stdout.split("\n")
    assert first == again
    assert second != first
    assert rest == [""]
    assert "the conversation begins anew" in done.stderr
    assert "/reset forgets" in done.stderr


def test_chat_of_a_prompt_matches_the_template_written_out(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHAT)
    args = ("--json", "-n", "6", "--workers", "0")
    by_template = backbone("generate", "Hello", "--chat", "--system", "Be kind", "--template", "t.jinja", *args)
    written = backbone("generate", "system: Be kind\nuser: Hello\nassistant:", *args)
    assert json.loads(by_template.stdout)["prompt_ids"] == json.loads(written.stdout)["prompt_ids"]
    assert json.loads(by_template.stdout)["ids"] == json.loads(written.stdout)["ids"]


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}, **options,
    )  # fmt: skip


def test_ctrl_c_ends_an_answer_and_its_workers() -> None:
    process = start(
        "generate", PROMPT["prompt"], "-n", "100000", "-c", "100000", "--ignore-eos", start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == PROMPT["text"][:4]
    workers = _children(process.pid)
    assert len(workers) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "stopped: Ctrl-C" in stderr
    assert "Traceback" not in stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_no_worker_outlives_a_killed_backbone() -> None:
    process = start("generate", PROMPT["prompt"], "-n", "100000", "-c", "100000", "--ignore-eos")
    assert process.stdout is not None
    process.stdout.read(4)
    workers = _children(process.pid)
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 20
    while any(_is_alive(pid) for pid in workers):
        assert time.monotonic() < until, "workers outlived their backbone"
        os.sched_yield()


def test_a_reader_that_leaves_is_no_error() -> None:
    process = start("generate", PROMPT["prompt"], "-n", "100000", "-c", "100000", "--ignore-eos", "--workers", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert "Traceback" not in stderr
    assert "Error" not in stderr


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def can_unshare() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return subprocess.run([unshare, "-r", "-n", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="this machine makes no network namespaces (unshare -r -n)")
def test_without_workers_no_network_is_needed() -> None:
    done = subprocess.run(
        ["unshare", "-r", "-n", *command("generate", PROMPT["prompt"], "-n", "8", "--json", "--workers", "0")],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ids"] == PROMPT["ids"][:8]
