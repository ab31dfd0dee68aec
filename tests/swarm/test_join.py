"""`worker join` as real processes against a real gate and book: in once, in again, out when somebody says no."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from join_kit import PATIENCE_S, Door, Joiner

from protocol.invite import Invite
from protocol.messages import Drain, Goodbye, Hello, Refused, Welcome

Start = Callable[..., Joiner]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path / "backbone")
    yield door
    door.close()


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait without answering anybody."""
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up
        os.sched_yield()


def test_a_worker_enrols_once_and_is_known_ever_after(door: Door, start: Start, tmp_path: Path) -> None:
    invite = door.invite()
    worker = start(tmp_path / "a", str(invite), "--name", "phone")
    key, hello = door.hear(Hello)
    assert hello.backend == "numpy"
    (entry,) = door.book.invites.workers.values()
    assert (entry.key, entry.name) == (key, "phone")
    door.say(key, Welcome("phone"))
    door.pump(lambda: "connected to" in worker.told())
    code, line = worker.stop()
    assert (code, line) == (0, "worker: stopped")
    assert door.hear(Goodbye) == (key, Goodbye("stopped"))
    assert worker.told().splitlines() == [
        f"worker: enrolled at 127.0.0.1:{door.port} as phone",
        f"worker: connected to 127.0.0.1:{door.port} as phone",
        "worker: stopped",
    ]
    # A service's command line survives a reboot: with the same string, used up, and with none.
    for args in ([str(invite)], [], ["--name", "phone"]):
        worker = start(tmp_path / "a", *args)
        assert door.hear(Hello)[0] == key
        assert worker.stop(signal.SIGINT) == (0, "worker: stopped")
    assert len(door.book.invites.workers) == 1
    assert door.gate.refused == 0


def test_a_used_an_expired_and_a_revoked_invite_are_refused_in_the_handshake(
    door: Door, start: Start, tmp_path: Path
) -> None:
    refusal = (
        1,
        "worker: error: the backbone refuses this invite: it was used up, has expired or was revoked; ask for a new one "
        "('backbone invite')",
    )
    used, expired, revoked = door.invite(), door.invite(ttl_s=9), door.invite()
    start(tmp_path / "a", str(used))
    door.hear(Hello)
    with door.book.changing() as invites:
        invites.revoke(list(invites.invites.values())[2])
    door.now += 10
    for count, invite in enumerate((used, expired, revoked), 1):
        worker = start(tmp_path / f"refused-{count}", str(invite))
        door.pump(worker.has_ended)
        assert worker.end() == refusal
        assert door.gate.refused == count
    assert len(door.book.invites.workers) == 1


def test_an_invite_that_has_expired_by_the_workers_clock_says_so(door: Door, start: Start, tmp_path: Path) -> None:
    door.now -= 1000
    invite = door.invite(ttl_s=100)
    door.now += 1000
    worker = start(tmp_path / "a", str(invite))
    door.pump(worker.has_ended)
    code, line = worker.end()
    assert code == 1
    assert "the backbone refuses this invite: it expired 9" in line


def test_a_revoked_worker_is_turned_away_until_it_has_a_new_invite(door: Door, start: Start, tmp_path: Path) -> None:
    worker = start(tmp_path / "a", str(old := door.invite()), "--name", "phone")
    key, _ = door.hear(Hello)
    worker.stop()
    with door.book.changing() as invites:
        invites.revoke(invites.workers[key])
    for args in ([], [str(old)]):
        worker = start(tmp_path / "a", *args)
        door.pump(worker.has_ended)
        assert worker.end() == (
            1,
            "worker: error: the backbone does not let this worker in any more: it was revoked; ask for a new one "
            "('backbone invite')",
        )
    worker = start(tmp_path / "a", str(door.invite()), "--name", "phone")
    new_key, _ = door.hear(Hello)
    assert new_key != key
    assert [w.name for w in door.book.invites.workers.values()] == ["phone", "phone-2"]


def test_a_wrong_server_key_is_no_hang(door: Door, start: Start, tmp_path: Path) -> None:
    invite = door.invite()
    other = Invite(
        hosts=invite.hosts,
        port=invite.port,
        server_key=bytes(range(32)),
        secret_key=invite.secret_key,
        expires=invite.expires,
    )
    worker = start(tmp_path / "a", str(other))
    door.pump(worker.has_ended)
    code, line = worker.end()
    assert code == 1
    assert line == (
        f"worker: error: 127.0.0.1:{door.port}: no CURVE handshake: what answers there is another program, or not that "
        "backbone: its key is another"
    )


def test_a_new_worker_gives_up_when_nobody_is_there(door: Door, start: Start, tmp_path: Path) -> None:
    invite = door.invite()
    door.close()
    worker = start(tmp_path / "a", str(invite))
    code, line = worker.end()
    assert code == 1
    assert line.endswith(
        f"127.0.0.1:{invite.port}: nobody answers; is the backbone running, and does it listen on that address?"
    )


def test_a_worker_outlasts_its_backbone(door: Door, start: Start, tmp_path: Path) -> None:
    worker = start(tmp_path / "a", str(door.invite()), "--name", "phone")
    key, _ = door.hear(Hello)
    door.say(key, Welcome("phone"))
    door.pump(lambda: "connected to" in worker.told())
    door.close()
    wait_for(lambda: worker.told().count("trying again in") > 1)
    again = Door(tmp_path / "backbone", f"tcp://127.0.0.1:{door.port}")
    try:
        assert again.server_key == door.server_key
        assert again.hear(Hello)[0] == key
        again.say(key, Welcome("phone"))
        again.pump(lambda: worker.told().count("connected to") == 2)
        # A backbone that lets it go may want it back later.
        again.say(key, Drain("enough"))
        assert again.hear(Goodbye) == (key, Goodbye("drained"))
        again.pump(lambda: "the backbone let this worker go" in worker.told())
        assert again.hear(Hello)[0] == key
        assert "nobody answers" in worker.told()
        # While it waits, a signal is heard at once.
        assert worker.stop() == (0, "worker: stopped")
    finally:
        again.close()


def test_a_worker_is_revoked_while_the_backbone_is_down(door: Door, start: Start, tmp_path: Path) -> None:
    worker = start(tmp_path / "a", str(door.invite()))
    key, _ = door.hear(Hello)
    door.close()
    with door.book.changing() as invites:
        invites.revoke(invites.workers[key])
    again = Door(tmp_path / "backbone", f"tcp://127.0.0.1:{door.port}")
    try:
        again.pump(worker.has_ended)
        assert worker.end()[0] == 1
        assert "it was revoked" in worker.end()[1]
        assert again.gate.refused
    finally:
        again.close()


def test_a_refusal_as_itself_ends_it_with_the_reason(door: Door, start: Start, tmp_path: Path) -> None:
    worker = start(tmp_path / "a", str(door.invite()))
    key, _ = door.hear(Hello)
    door.say(key, Refused("of another version"))
    door.pump(worker.has_ended)
    assert worker.end() == (1, "worker: error: refused by the backbone: of another version")


def test_a_worker_killed_between_its_key_and_the_answer_comes_in_with_that_key(
    door: Door, start: Start, tmp_path: Path
) -> None:
    invite = door.invite()
    worker = start(tmp_path / "a", str(invite))
    door.pump(lambda: door.book.invites.workers)  # the answer is on its way
    worker.process.kill()
    worker.process.wait()
    (key,) = door.book.invites.workers
    start(tmp_path / "a", str(invite))
    assert door.hear(Hello)[0] == key


def test_two_workers_of_a_machine_have_two_names(door: Door, start: Start, tmp_path: Path) -> None:
    (file := tmp_path / "fleet").write_text(f"{door.invite(uses=2)}\n")
    first = start(tmp_path / "a", "--from", str(file), "--name", "one")
    one, _ = door.hear(Hello)
    same = start(tmp_path / "a", "--from", str(file))
    assert same.end() == (
        1,
        f"worker: error: a worker named one runs on this machine already (process {first.process.pid}); "
        "give this one another --name",
    )
    start(tmp_path / "a", "--from", str(file), "--name", "two")
    two, _ = door.hear(Hello)
    assert one != two
    assert sorted(w.name for w in door.book.invites.workers.values()) == ["one", "two"]


def test_the_first_host_that_answers_is_taken(door: Door, start: Start, tmp_path: Path) -> None:
    invite = door.invite(hosts=("no-such-host.invalid", "::1", "127.0.0.1"))
    start(tmp_path / "a", str(invite))
    door.hear(Hello)


def test_ipv6(start: Start, tmp_path: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    door = Door(tmp_path / "backbone", "tcp://[::1]:*")
    try:
        start(tmp_path / "a", str(door.invite(hosts=("::1",))))
        door.hear(Hello)
    finally:
        door.close()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "no worker has joined from here; give the string that 'backbone invite' prints"),
        (["--name", "x"], "no worker named x has joined from here"),
        (["swarm1:AAAA"], "this invite is damaged: its checksum does not match; copy it again, whole"),
        (["--from", "/nonexistent"], "--from: /nonexistent: cannot be read: No such file"),
        (["a", "--from", "b"], "give either a string or --from FILE, not both"),
        (["a", "--name", "a b"], "--name"),
        (["--threads", "x"], "--threads: 'x' is not a number from 0 to 1024"),
        (["--memory", "much"], "--memory: 'much' is not a size"),
        (["--cache", "much"], "--cache: 'much' is not a size"),
    ],
)
def test_wrong_use_ends_in_one_line(start: Start, tmp_path: Path, args: list[str], told: str) -> None:
    if args[:1] == ["a"] and "--name" in args:
        args = [str(Invite(hosts=("h",), port=1, server_key=bytes(32), secret_key=b"\1" * 32, expires=1)), *args[1:]]
    worker = start(tmp_path / "a", *args)
    code, line = worker.end()
    assert code == 2
    assert told in line
    assert len(worker.told().splitlines()) == 1


def test_the_secret_never_shows(door: Door, start: Start, tmp_path: Path) -> None:
    invite = door.invite()
    worker = start(tmp_path / "a", str(invite))
    door.hear(Hello)
    worker.stop()
    kept = "".join(path.read_text() for path in (tmp_path / "a" / "state").rglob("*") if path.is_file())
    assert invite.secret_key.hex() not in kept + worker.told()
