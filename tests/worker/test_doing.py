"""What a joined worker does, asked from beside it: the word of a process that lives, and of no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.invite import Invite
from worker.cli import main
from worker.doing import CONNECTING, NOT_RUNNING, SERVING, Doing, doing
from worker.errors import WorkerError
from worker.identity import Identities, Identity, new_identity

INVITE = Invite(hosts=("::1", "box"), port=7, server_key=bytes(32), secret_key=b"\1" * 32, expires=9)
HOLD = """
import sys
from pathlib import Path
from worker.doing import Doing
doing = Doing(Path(sys.argv[1]))
for word in sys.stdin:
    doing.say(word.strip())
    print("said", flush=True)
"""


@pytest.fixture
def identity() -> Identity:
    Identities().save(one := new_identity("box", INVITE))
    return one


def test_a_word_holds_as_long_as_its_process(identity: Identity, capsys: pytest.CaptureFixture[str]) -> None:
    path = Identities().doing_path(identity)
    assert doing(path) == NOT_RUNNING
    command = [sys.executable, "-P", "-c", HOLD, str(path)]
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=root, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        for word, code in ((SERVING, 0), (CONNECTING, 1), (SERVING, 0)):
            print(word, file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "said\n"
            assert doing(path) == word
            assert main(["status"]) == code
            assert capsys.readouterr().out == f"box: {word} (::1, box, port 7)\n"
        holder.kill()
        holder.wait()
    assert doing(path) == NOT_RUNNING
    assert main(["status", "--name", "box"]) == 1
    assert f"box: {NOT_RUNNING}" in capsys.readouterr().out
    # Who comes next is not taken for its predecessor.
    Doing(path).close()
    held = Doing(path)
    assert doing(path) == CONNECTING
    held.close()


def test_looking_keeps_nobody_from_starting(identity: Identity) -> None:
    path = Identities().doing_path(identity)
    Doing(path).close()
    look = "import fcntl, sys\nf = open(sys.argv[1])\nfcntl.flock(f, fcntl.LOCK_SH)\nprint('looks', flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", look, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as looker:
        assert looker.stdin
        assert looker.stdout
        assert looker.stdout.readline() == b"looks\n"
        looker.stdin.close()
        held = Doing(path)  # waits for the other's end
        held.say(SERVING)
        assert doing(path) == SERVING
        held.close()


def test_every_worker_has_to_serve_and_there_has_to_be_one(
    identity: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    identities = Identities()
    identities.save(other := new_identity("other", INVITE))
    held = Doing(identities.doing_path(identity))
    held.say(SERVING)
    assert main(["status", "--json"]) == 1
    found = {w["name"]: w for w in json.loads(capsys.readouterr().out)["workers"]}
    assert {name: w["state"] for name, w in found.items()} == {"box": SERVING, "other": NOT_RUNNING}
    assert found["box"] == {"name": "box", "hosts": ["::1", "box"], "port": 7, "enrolled": False, "state": SERVING}
    assert main(["status", "--name", "box"]) == 0
    second = Doing(identities.doing_path(other))
    second.say(SERVING)
    assert main(["status"]) == 0
    capsys.readouterr()
    assert main(["status", "--name", "nobody"]) == 1
    assert capsys.readouterr().out == "no worker named nobody has joined from here\n"
    assert main(["status", "--name", "../box"]) == 2
    held.close()
    second.close()


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerError, match="set XDG_STATE_HOME to a folder of yours"):
        Doing(tmp_path / "file" / "x.doing")
