"""A worker's keys outlive it, are its owner's alone, and one process at a time uses them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.invite import Invite
from worker.errors import UsageError, WorkerError
from worker.identity import Identities, Identity, checked_name, default_name, new_identity, public_half

INVITE = Invite(hosts=("::1", "box"), port=7, server_key=bytes(32), secret_key=b"\1" * 32, expires=9)


@pytest.fixture
def folder(tmp_path: Path) -> Identities:
    return Identities({"XDG_STATE_HOME": str(tmp_path / "state")})


def test_what_is_saved_is_found_and_is_its_owners_alone(folder: Identities) -> None:
    assert folder.find() == []
    one = new_identity("box", INVITE)
    folder.save(one)
    folder.save(done := replace(one, is_enrolled=True))
    assert folder.find() == [done]
    path = folder.path(one.server_key, "box")
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in folder.folder.iterdir()] == [path.name]
    assert public_half(one.secret_key) == one.public_key
    assert one.secret_key.hex() not in repr(one)
    assert new_identity("box", INVITE).public_key != one.public_key


def test_an_open_folder_is_closed(folder: Identities) -> None:
    folder.folder.mkdir(mode=0o755, parents=True)
    folder.save(new_identity("box", INVITE))
    assert folder.folder.stat().st_mode & 0o777 == 0o700


def test_each_backbone_and_each_name_has_its_own(folder: Identities) -> None:
    other = replace(INVITE, server_key=b"\2" * 32)
    made = [
        new_identity(name, invite) for name, invite in (("a", INVITE), ("b", INVITE), ("a", other), ("x.b", INVITE))
    ]
    for identity in made:
        folder.save(identity)
    assert folder.find(server_key=INVITE.server_key, name="b") == [made[1]]
    assert folder.find(server_key=other.server_key) == [made[2]]
    assert {i.public_key for i in folder.find(invite_key=public_half(INVITE.secret_key))} == {
        i.public_key for i in made
    }
    assert folder.find(invite_key=bytes(32)) == []
    folder.save(made[1])
    assert folder.find()[0] == made[1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("", "it holds no JSON object"),
        ("[1]", "it holds no JSON object"),
        ("[" * 100_000, "it holds no JSON object"),
        ({"port": "7"}, "it has no right 'port'"),
        ({"port": 0}, "its name, hosts or port cannot be"),
        ({"hosts": ["a b"]}, "its name, hosts or port cannot be"),
        ({"hosts": [7]}, "its name, hosts or port cannot be"),
        ({"name": "../x"}, "its name, hosts or port cannot be"),
        ({"server_key": "zz"}, "it has no right 'server_key'"),
        ({"secret_key": "00" * 32}, "its two keys do not belong together"),
        ({"more": 1}, "it has an entry that is not known"),
    ],
)
def test_a_damaged_file_is_named_with_the_fix(folder: Identities, change: Any, told: str) -> None:
    one = new_identity("box", INVITE)
    folder.save(one)
    path = folder.path(one.server_key, "box")
    whole = json.loads(path.read_text())
    path.write_text(change if isinstance(change, str) else json.dumps(whole | change))
    with pytest.raises(WorkerError) as caught:
        folder.find()
    assert str(caught.value).startswith(f"{path}: is damaged: ")
    assert told in str(caught.value)
    assert "move the file away and join with a new invite" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = Identities({"XDG_STATE_HOME": str(tmp_path / "file")})
    for act in (folder.save, folder.lock):
        with pytest.raises(WorkerError, match="set XDG_STATE_HOME to a folder of yours"):
            act(new_identity("box", INVITE))


HOLD = """
import sys
from pathlib import Path
from worker.identity import Identities
ids = Identities({"XDG_STATE_HOME": sys.argv[1]})
held = ids.lock(ids.find()[0])
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_at_a_time_is_a_worker(folder: Identities, tmp_path: Path) -> None:
    one = new_identity("box", INVITE)
    folder.save(one)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "state")]
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=root) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(
            WorkerError, match=rf"named box runs .* already \(process {holder.pid}\); .* another --name"
        ):
            folder.lock(one)
        other: Identity = replace(one, name="other")
        folder.lock(other).close()
        holder.kill()
        holder.wait()
        folder.lock(one).close()


def test_names() -> None:
    assert checked_name("gpu-0.box_1") == "gpu-0.box_1"
    for wrong in ("", "a b", "../a", ".a", "a" * 65, "ü"):
        with pytest.raises(UsageError, match="--name"):
            checked_name(wrong)
    assert checked_name(default_name())
