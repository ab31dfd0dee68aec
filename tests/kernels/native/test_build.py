"""Compiling at first use: once, for all processes, into a folder of one's own; and what is said where it cannot be."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from shared_data import ROOT

from kernels import inventory
from kernels.errors import BackendUnavailable
from kernels.interface import Options
from kernels.native import build
from kernels.registry import make_backend

INSTALL = "install a C compiler (apt install gcc, pkg install clang) or 'pip install expertswarm[compiler]'"
DEMO_TEXT = "In the beginning"


@pytest.fixture(autouse=True)
def _no_ziglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ziglang", None)


@pytest.fixture
def library(compiled_kernels: Path) -> Path:
    """A library that a compiler made."""
    return next(compiled_kernels.glob("*.so"))


def script(path: Path, text: str) -> str:
    """An executable file."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def compiler(tmp_path: Path, library: Path) -> str:
    """A compiler that counts its calls and gives what another one made."""
    return script(
        tmp_path / "compiler",
        f'echo "$*" >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\ncp {library} "$2"',
    )


def calls(tmp_path: Path) -> int:
    file = tmp_path / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    """No compiler on the path, an empty cache."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    return {"PATH": f"{tmp_path}/bin", "XDG_CACHE_HOME": f"{tmp_path}/cache", "HOME": str(tmp_path)} | more


def test_the_first_load_compiles_and_the_second_does_not(
    tmp_path: Path, compiler: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = environ(tmp_path, CC=compiler, PATH=os.environ["PATH"])
    assert build.load(env).swarm_variant() in (b"avx512", b"avx2", b"neon", b"plain")
    assert calls(tmp_path) == 1
    assert capsys.readouterr().err == "compiling the native kernels for this CPU (once)\n"
    folder = tmp_path / "cache" / "expertswarm" / "native"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(p.suffix for p in folder.iterdir()) == ["", ".so"]  # the lock, and nothing half done
    build.load(env)
    assert calls(tmp_path) == 1
    assert capsys.readouterr().err == ""


def test_another_compiler_source_or_cpu_is_another_library(
    tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environ(tmp_path, CC=compiler, PATH=os.environ["PATH"])
    build.load(env)
    build.load(env | {"CC": f"{compiler} -DSOMETHING"})
    assert calls(tmp_path) == 2
    os.utime(compiler, ns=(1, 1))  # the same name, another build
    build.load(env)
    assert calls(tmp_path) == 3
    monkeypatch.setattr(build, "cpu_features", lambda: "another one, with the same home")
    build.load(env)
    assert calls(tmp_path) == 4
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    (sources / "lanes.h").write_text((sources / "lanes.h").read_text() + "// changed\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    build.load(env)
    assert calls(tmp_path) == 5
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 5


def test_the_compiler_gets_flags_that_keep_the_order_of_operations(tmp_path: Path, compiler: str) -> None:
    build.load(environ(tmp_path, CC=f"{compiler} -g", PATH=os.environ["PATH"]))
    words = (tmp_path / "calls").read_text().split()
    assert words[0] == "-g"
    assert "-ffp-contract=off" in words
    assert not [w for w in words if "fast-math" in w or w in ("-Ofast", "-funsafe-math-optimizations")]


AT_THE_DOOR = """
import fcntl
flock = fcntl.flock
def told(file, how):
    print("at the door", flush=True)
    flock(file, how)
fcntl.flock = told
from kernels.native import build
build.load()
print("loaded")
"""


def test_processes_that_start_at_once_compile_once(tmp_path: Path, compiler: str) -> None:
    env = environ(tmp_path, CC=compiler, PATH=os.environ["PATH"], PYTHONPATH=str(ROOT))
    folder = tmp_path / "cache" / "expertswarm" / "native"
    folder.mkdir(parents=True, mode=0o700)
    command = [sys.executable, "-c", AT_THE_DOOR]
    with ExitStack() as stack:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            processes = [
                stack.enter_context(
                    subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                )
                for _ in range(2)
            ]
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "at the door\n"  # none has found a library
            assert calls(tmp_path) == 0
        told = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in told] == ["loaded\n"] * 2
    assert sorted(err for _, err in told) == ["", "compiling the native kernels for this CPU (once)\n"]
    assert calls(tmp_path) == 1


def refusal(env: dict[str, str]) -> str:
    """Why it cannot be: one line."""
    with pytest.raises(BackendUnavailable) as caught:
        build.load(env)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("native: ")
    return message


def test_no_compiler(tmp_path: Path) -> None:
    assert refusal(environ(tmp_path)) == f"native: there is no C compiler; {INSTALL}"
    assert not (tmp_path / "cache").exists()
    message = refusal(environ(tmp_path, CC="/absent/cc -m32"))
    assert message == f"native: there is no /absent/cc; {INSTALL}"


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    failing = script(
        tmp_path / "failing",
        "echo 'In file included from x.c:1:' >&2; echo 'lanes.h:3:1: error: no such register' >&2; exit 1",
    )
    env = environ(tmp_path, CC=failing, PATH=f"{tmp_path}/bin:/bin")
    env["PATH"] = str(tmp_path / "bin")
    message = refusal(env)
    assert message == f"native: {failing} failed: lanes.h:3:1: error: no such register; {INSTALL}"
    folder = tmp_path / "cache" / "expertswarm" / "native"
    assert [p.name for p in folder.iterdir()] == ["lock"]
    silent = script(tmp_path / "silent", "exit 3")
    assert "no message" in refusal(env | {"CC": silent})


def test_a_compiler_whose_library_does_not_load(tmp_path: Path) -> None:
    wrong = script(tmp_path / "wrong", 'while [ "$1" != -o ]; do shift; done\necho "no library" > "$2"')
    assert INSTALL in refusal(environ(tmp_path, CC=wrong, PATH=str(tmp_path / "bin")))


def test_a_compiler_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    endless = script(tmp_path / "endless", "exec tail -f /dev/null")
    message = refusal(environ(tmp_path, CC=endless) | {"PATH": str(tmp_path / "bin")})
    assert "not done within 0.2 s" in message


def test_the_next_compiler_has_its_turn(tmp_path: Path, compiler: str, caplog: pytest.LogCaptureFixture) -> None:
    env = environ(tmp_path, CC=script(tmp_path / "failing", "exit 1"))
    (tmp_path / "bin" / "clang").symlink_to(compiler)
    for tool in ("cp", "sh"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or "")
    build.load(env)
    assert calls(tmp_path) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"native: {env['CC']} failed: no message; {tmp_path}/bin/clang was taken"
    ]


def test_a_library_outlives_its_compiler(tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load(environ(tmp_path, CC=compiler, PATH=os.environ["PATH"]))
    Path(compiler).unlink()
    env = environ(tmp_path)
    assert build.load(env).swarm_variant()
    monkeypatch.setattr(build, "cpu_features", lambda: "another CPU's")
    assert refusal(env) == f"native: there is no C compiler; {INSTALL}"


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path, compiler: str) -> None:
    """Root may write anywhere, so a file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    message = refusal(environ(tmp_path, CC=compiler, XDG_CACHE_HOME=f"{tmp_path}/file", PATH=os.environ["PATH"]))
    folder = tmp_path / "file" / "expertswarm" / "native"
    assert message == f"native: {folder}: Not a directory; set XDG_CACHE_HOME to a folder of yours"
    assert calls(tmp_path) == 0


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path, compiler: str, mode: int) -> None:
    """What lies there is loaded into this process."""
    env = environ(tmp_path, CC=compiler, PATH=os.environ["PATH"])
    build.load(env)
    folder = tmp_path / "cache" / "expertswarm" / "native"
    folder.chmod(mode)
    assert (
        refusal(env)
        == f"native: {folder}: others may write to it; make it yours alone (chmod 700), or set XDG_CACHE_HOME"
    )


# ---- what users see


def test_auto_falls_back_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CC", raising=False)
    assert make_backend("auto").name == "numpy"
    (record,) = caplog.records
    assert record.getMessage() == f"computing with numpy, many times slower: native: there is no C compiler; {INSTALL}"
    with pytest.raises(BackendUnavailable, match="there is no C compiler"):
        make_backend("auto", Options(activations="i16"))  # numpy has no such class: nothing is substituted
    with pytest.raises(BackendUnavailable, match="there is no C compiler"):
        make_backend("native")
    found = inventory.availability()
    assert found["numpy"] is None
    assert found["native"] == f"native: there is no C compiler; {INSTALL}"


def backbone(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """The command, with no ziglang to be found."""
    program = "import sys; sys.modules['ziglang'] = None; from backbone.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *args],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_without_a_compiler_answers_and_says_once_what_is_lost(tmp_path: Path) -> None:
    done = backbone(environ(tmp_path), "generate", DEMO_TEXT, "-n", "4", "--json")
    assert done.returncode == 0, done.stderr
    found: Any = json.loads(done.stdout)
    assert [w["backend"] for w in found["workers"]] == ["numpy"] * 2
    (line,) = done.stderr.splitlines()
    assert "computing with numpy, many times slower" in line
    assert line.endswith(INSTALL)


def test_the_command_that_asks_for_native_without_a_compiler_ends_with_one_line(tmp_path: Path) -> None:
    for args in (("--backend", "native"), ("--workers", "native:1"), ("--activations", "i16")):
        done = backbone(environ(tmp_path), "generate", DEMO_TEXT, *args)
        assert (done.returncode, done.stdout) == (2, "")
        *_, line = done.stderr.splitlines()
        assert line == f"backbone: error: native: there is no C compiler; {INSTALL}"


def test_the_command_with_a_cache_that_cannot_be_written_answers(tmp_path: Path, compiler: str) -> None:
    (tmp_path / "file").write_text("")
    env = environ(tmp_path, CC=compiler, XDG_CACHE_HOME=f"{tmp_path}/file", PATH=os.environ["PATH"])
    done = backbone(env, "generate", DEMO_TEXT, "-n", "2", "--json", "--workers", "0")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "native" in line]
    assert "Not a directory; set XDG_CACHE_HOME to a folder of yours" in line


def test_status_tells_why_native_is_absent(tmp_path: Path) -> None:
    done = backbone(environ(tmp_path), "status", "--json")
    assert done.returncode == 0, done.stderr
    native, numpy, *devices = json.loads(done.stdout)["backends"]
    assert native == {"name": "native", "available": False, "reason": f"native: there is no C compiler; {INSTALL}"}
    assert numpy == {"name": "numpy", "available": True, "reason": None}
    assert [device["name"] for device in devices] == ["opencl", "cuda"]
