"""The book of invites: who is let in and when, whatever happens; and its files, which several processes share."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from zmq.utils import z85

from backbone.enrolling import answer
from backbone.errors import BackboneError
from backbone.invite_book import BOOK, KEYS, InviteBook
from backbone.invites import MAX_INVITES, InviteEntry, Invites, Refusal, WorkerEntry
from protocol.messages import MAX_NAME, Attach, Enrol, Enrolled, Fetch, Goodbye, Ready, Refused


def key(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.fixture
def invites() -> Invites:
    book = Invites()
    book.create(key(1), uses=2, now=100, ttl_s=50)
    return book


def test_an_invite_lets_in_as_many_as_it_says_until_it_expires(invites: Invites) -> None:
    assert invites.admitted_keys(100) == {key(1)}
    one = invites.enrol(key(1), key(10), "phone", 110)
    assert one == WorkerEntry(key=key(10), name="phone", invite=key(1), enrolled=110)
    assert invites.admitted_keys(149) == {key(1), key(10)}
    assert invites.admitted_keys(150) == {key(10)}
    assert invites.enrol(key(1), key(11), "phone", 150) is Refusal.EXPIRED
    assert invites.enrol(key(1), key(11), "phone", 149).name == "phone-2"  # type: ignore[union-attr]
    assert invites.admitted_keys(149) == {key(10), key(11)}
    assert invites.enrol(key(1), key(12), "phone", 149) is Refusal.USED_UP
    assert invites.enrol(key(2), key(12), "phone", 149) is Refusal.UNKNOWN


def test_the_same_worker_is_welcome_again(invites: Invites) -> None:
    one = invites.enrol(key(1), key(10), "a", 110)
    invites.enrol(key(1), key(11), "b", 110)
    assert invites.enrol(key(1), key(10), "another", 10_000) == one
    invites.create(key(2), uses=1, now=200, ttl_s=50)
    assert invites.enrol(key(2), key(10), "a", 210) == one
    assert invites.used(key(2)) == 0


def test_who_is_revoked_stays_out(invites: Invites) -> None:
    one = invites.enrol(key(1), key(10), "a", 110)
    assert isinstance(one, WorkerEntry)
    invites.revoke(one)
    assert invites.admitted_keys(111) == {key(1)}
    assert invites.worker(key(10)) is None
    assert invites.enrol(key(1), key(10), "a", 111) is Refusal.WORKER_REVOKED
    two = invites.enrol(key(1), key(11), "b", 111)
    assert isinstance(two, WorkerEntry)
    assert invites.used(key(1)) == 2  # what a revoked worker used is not given back
    invites.revoke(invites.invites[key(1)])
    assert invites.admitted_keys(111) == {key(11)}
    assert invites.enrol(key(1), key(11), "b", 112) is Refusal.REVOKED


def test_a_key_is_one_thing(invites: Invites) -> None:
    invites.create(key(2), uses=1, now=100, ttl_s=50)
    assert invites.enrol(key(1), key(2), "a", 110) is Refusal.KEY_TAKEN
    assert invites.enrol(key(1), key(1), "a", 110) is Refusal.KEY_TAKEN


def test_names_stay_apart_and_short(invites: Invites) -> None:
    long = "n" * MAX_NAME
    names = [invites.enrol(key(1), key(n), long, 110) for n in (10, 11)]
    assert [w.name for w in names if isinstance(w, WorkerEntry)] == [long, "n" * (MAX_NAME - 2) + "-2"]


def test_they_are_found_by_name_or_by_the_beginning_of_a_key(invites: Invites) -> None:
    invites.enrol(key(1), key(0x1A), "0101", 110)
    invites.enrol(key(1), key(0x1B), "b", 110)
    (named,) = invites.find("0101")
    assert isinstance(named, WorkerEntry)
    (found,) = invites.find("010101")
    assert isinstance(found, InviteEntry)
    assert [entry.key for entry in invites.find("1B1B")] == [key(0x1B)]
    assert invites.find("b") == [invites.workers[key(0x1B)]]
    assert invites.find("1b") == []  # too short to mean anybody
    assert invites.find("nobody") == []


def test_closed_invites_are_forgotten_unless_a_worker_came_by_them(invites: Invites) -> None:
    invites.create(key(2), uses=1, now=100, ttl_s=50)
    invites.enrol(key(2), key(10), "a", 110)
    invites.create(key(3), uses=1, now=1000, ttl_s=50)
    assert set(invites.invites) == {key(2), key(3)}
    full = Invites(
        {bytes([n % 256, n >> 8]) * 16: InviteEntry(key=b"", uses=1, created=0, expires=9) for n in range(MAX_INVITES)}
    )
    with pytest.raises(ValueError, match="revoke some"):
        full.create(key(1), uses=1, now=1, ttl_s=9)


class AnyBook(RuleBasedStateMachine):
    """Invites come, workers enrol, both are revoked, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.count = 0, 0
        self.book = Invites()
        self.uses: dict[bytes, int] = {}
        self.expires: dict[bytes, int] = {}
        self.came: dict[bytes, set[bytes]] = {}
        self.revoked: set[bytes] = set()

    @rule(uses=st.integers(1, 3), ttl=st.integers(1, 20))
    def create(self, uses: int, ttl: int) -> None:
        self.count += 1
        new = key(self.count % 100)
        if new not in self.uses:
            self.book.create(new, uses=uses, now=self.now, ttl_s=ttl)
            self.uses[new], self.expires[new], self.came[new] = uses, self.now + ttl, set()

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), worker=st.integers(100, 110))
    def enrol(self, data: st.DataObject, worker: int) -> None:
        invite = data.draw(st.sampled_from(sorted(self.uses)))
        is_known = any(key(worker) in came for came in self.came.values())
        found = self.book.enrol(invite, key(worker), "w", self.now)
        if isinstance(found, WorkerEntry):
            assert invite not in self.revoked
            assert key(worker) not in self.revoked
            if not is_known:
                assert self.now < self.expires[invite]
                self.came[invite].add(key(worker))

    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        entries = [*self.book.invites.values(), *self.book.workers.values()]
        if entries:
            entry = data.draw(st.sampled_from(entries))
            self.book.revoke(entry)
            self.revoked.add(entry.key)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def nobody_comes_in_who_may_not(self) -> None:
        admitted = self.book.admitted_keys(self.now)
        assert not admitted & self.revoked
        for invite, came in self.came.items():
            assert len(came) <= self.uses[invite]
            is_open = invite not in self.revoked and self.now < self.expires[invite] and len(came) < self.uses[invite]
            assert (invite in admitted) == is_open
        everybody = set().union(*self.came.values())
        assert admitted - self.uses.keys() == everybody - self.revoked
        names = [worker.name for worker in self.book.workers.values()]
        assert len(names) == len(set(names))


AnyBook.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnyBook = AnyBook.TestCase


def test_an_invites_key_may_only_enrol(invites: Invites) -> None:
    told = answer(invites, key(1), Enrol(1, key(10), "phone"), server_key=key(99), now=110)
    assert told == Enrolled(key(99), "phone")
    before = dict(invites.workers)
    for message in (Attach(1), Fetch(bytes(32), 0, 1), Ready(1, 0), Goodbye("x")):
        told = answer(invites, key(1), message, server_key=key(99), now=110)
        assert told == Refused(f"an invite's key may only enrol; it sent {type(message).__name__}")
    told = answer(invites, key(1), Enrol(1, key(99), ""), server_key=key(99), now=110)
    assert told == Refused("not enrolled: this key is the backbone's own")
    told = answer(invites, key(1), Enrol(1, key(11), ""), server_key=key(99), now=150)
    assert told == Refused("not enrolled: the invite has expired; 'backbone invite' makes a new one")
    assert invites.workers == before


# ---- files


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def test_what_one_process_writes_the_other_reads(environ: dict[str, str]) -> None:
    serving, invite = InviteBook(environ), InviteBook(environ)
    assert not serving.folder.exists()  # reading makes nothing
    with invite.changing() as invites:
        invites.create(key(1), uses=1, now=1, ttl_s=9)
    assert not invite.reload_if_changed()
    assert serving.reload_if_changed()
    assert not serving.reload_if_changed()
    with serving.changing() as invites:
        invites.enrol(key(1), key(2), "phone", 2)
    with invite.changing() as invites:
        invites.revoke(invites.workers[key(2)])
        invites.revoke(invites.invites[key(1)])
    again = InviteBook(environ)
    assert again.invites == invite.invites
    assert again.invites.workers[key(2)].is_revoked
    assert (again.folder / BOOK).stat().st_mode & 0o777 == 0o600
    assert again.folder.stat().st_mode & 0o777 == 0o700


def test_a_change_that_fails_is_not_written(environ: dict[str, str]) -> None:
    book = InviteBook(environ)
    with contextlib.suppress(KeyError), book.changing() as invites:
        invites.create(key(1), uses=1, now=1, ttl_s=9)
        raise KeyError
    assert book.invites == InviteBook(environ).invites == Invites()


def _create(state: str, first: int) -> None:
    book = InviteBook({"XDG_STATE_HOME": state})
    for number in range(first, first + 10):
        with book.changing() as invites:
            invites.create(key(number), uses=1, now=1, ttl_s=9)


def test_no_change_is_lost_between_processes(environ: dict[str, str]) -> None:
    spawn = multiprocessing.get_context("spawn")
    makers = [spawn.Process(target=_create, args=(environ["XDG_STATE_HOME"], first)) for first in (10, 20, 30)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(InviteBook(environ).invites.invites) == 30


def test_the_server_keeps_its_keys(environ: dict[str, str]) -> None:
    keys = InviteBook(environ).server_keys()
    assert InviteBook(environ).server_keys() == keys
    assert z85.decode(zmq.curve_public(z85.encode(keys[1]))) == keys[0]
    assert (InviteBook(environ).folder / KEYS).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "it holds no JSON object"),
        ({}, "it has no list 'invites'"),
        ({"invites": [], "workers": {}}, "it has no list 'workers'"),
        ({"invites": [{}], "workers": []}, "an entry holds exactly key, uses"),
        (
            {"invites": [], "workers": [{"key": "00", "name": "a", "invite": "", "enrolled": 1, "is_revoked": False}]},
            "a key is not of its length",
        ),
        (
            {
                "invites": [{"key": "00" * 32, "uses": True, "created": 1, "expires": 1, "is_revoked": False}],
                "workers": [],
            },
            "uses is no int",
        ),
    ],
)
def test_a_damaged_book_is_named_with_the_fix(environ: dict[str, str], content: Any, told: str) -> None:
    book = InviteBook(environ)
    with book.changing():
        pass
    path = book.folder / BOOK
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(BackboneError) as caught:
        InviteBook(environ)
    assert str(caught.value).startswith(f"{path}: is damaged: ")
    assert told in str(caught.value)
    assert "invite the workers anew" in str(caught.value)


def test_damaged_keys_are_not_replaced_in_silence(environ: dict[str, str]) -> None:
    book = InviteBook(environ)
    book.server_keys()
    (book.folder / KEYS).write_text('{"public_key": "00"}')
    with pytest.raises(BackboneError, match=r"server-key\.json: is damaged: .* every worker has to enrol anew"):
        book.server_keys()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackboneError, match="set XDG_STATE_HOME"):
        InviteBook({"XDG_STATE_HOME": str(tmp_path / "file")}).server_keys()


def test_entries_are_replaced_whole(invites: Invites) -> None:
    entry = invites.invites[key(1)]
    invites.revoke(entry)
    assert not entry.is_revoked
    assert invites.invites[key(1)] == replace(entry, is_revoked=True)
