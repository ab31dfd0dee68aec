"""Who is present: only enrolled workers, under the backbone's names, and what is told of them once."""

from __future__ import annotations

import pytest

from backbone.attendance import Attendance
from backbone.invite_book import InviteBook
from backbone.presence import enrolled
from protocol.capabilities import ClassInfo
from protocol.errors import ProtocolError
from protocol.presence import WILL, Capabilities, Health, capabilities_topic, health_topic, to_payload

SWARM, PHONE, BOX = "5" * 16, "a" * 16, "b" * 16
IS = to_payload(Capabilities(1, ClassInfo("c", "f32", "f32"), 7, "claimed", "1", "numpy", "cpu", ("f32",)))


def does(state: str, experts: int = 0) -> bytes:
    return to_payload(Health(calls=0, state=state, since=1, experts=experts, last_error=""))


class Told:
    """An attendance with two enrolled workers."""

    def __init__(self) -> None:
        self.names = {PHONE: "phone", BOX: "box"}
        self.attendance = Attendance(SWARM, self.names.get)
        self.now = 0.0

    def hear(self, payload: bytes, worker: str = PHONE) -> str:
        return self.attendance.heard(health_topic(SWARM, worker), payload, self.now)

    @property
    def states(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in self.attendance.rows(self.now)}


@pytest.fixture
def told() -> Told:
    return Told()


def test_rows_hold_what_was_said_last_under_the_backbones_name(told: Told) -> None:
    assert told.attendance.rows(0.0) == []
    told.attendance.heard(capabilities_topic(SWARM, PHONE), IS, 1.0)
    (row,) = told.attendance.rows(3.5)
    assert (row["name"], row["id"], row["state"], row["age_s"], row["health"]) == ("phone", PHONE, "unknown", 2.5, None)
    assert row["capabilities"]["name"] == "claimed"
    assert row["capabilities"]["numeric_class"] == {"name": "c", "accumulation": "f32", "activations": "f32"}
    told.now = 4.0
    told.hear(does("serving", 9))
    told.hear(does("online"), BOX)
    assert told.states == {"box": "online", "phone": "serving"}
    assert list(told.states) == ["box", "phone"]
    row = told.attendance.rows(4.0)[1]
    assert (row["health"]["experts"], row["age_s"]) == (9, 0.0)


def test_a_death_a_leave_and_a_return_are_told_once(told: Told) -> None:
    assert told.hear(does("online")) == told.hear(does("serving")) == ""
    assert told.hear(WILL) == "worker phone is gone: it left no word, and the broker has its last will"
    assert told.hear(WILL) == ""
    assert told.hear(does("serving")) == "worker phone is back"
    assert told.hear(does("serving", 2)) == ""
    assert told.hear(does("offline")) == "worker phone has left"
    assert told.hear(WILL) == ""
    assert told.states == {"phone": "offline"}


def test_what_happened_before_this_process_is_no_news(told: Told) -> None:
    assert told.hear(WILL) == told.hear(does("offline"), BOX) == ""
    assert told.hear(does("online")) == ""


def test_after_the_broker_was_away_nothing_is_known_until_it_is_said(told: Told) -> None:
    told.hear(does("serving"))
    told.hear(does("serving"), BOX)
    told.hear(WILL, BOX)
    told.attendance.connected()
    assert told.states == {"phone": "unknown", "box": "unknown"}
    assert told.hear(does("serving")) == told.hear(WILL, BOX) == ""
    assert told.states == {"phone": "serving", "box": "offline"}


@pytest.mark.parametrize(
    ("topic", "payload"),
    [
        (health_topic(SWARM, "c" * 16), WILL),
        (capabilities_topic(SWARM, "c" * 16), IS),
        (health_topic("6" * 16, PHONE), WILL),
        (health_topic(SWARM, PHONE), b"{}"),
        (capabilities_topic(SWARM, PHONE), WILL),
        (f"expertswarm/{SWARM}/workers/{PHONE}/other", WILL),
    ],
)
def test_what_is_nobodys_or_nothing_is_refused_and_counted(told: Told, topic: str, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        told.attendance.heard(topic, payload, 0.0)
    assert told.attendance.ignored == 1
    assert told.states.keys() <= {"phone"}
    assert all(state == "unknown" for state in told.states.values())


def test_a_revoked_worker_is_not_shown(told: Told) -> None:
    told.hear(does("serving"))
    del told.names[PHONE]
    assert told.states == {}


def test_a_name_is_that_of_an_enrolled_worker_of_the_book() -> None:
    book = InviteBook()
    with book.changing() as invites:
        invites.create(bytes(32), uses=2, now=0, ttl_s=9)
        for number in (1, 2):
            invites.enrol(bytes(32), bytes([number] * 32), "phone", 0)
    name_of = enrolled(book)
    assert [name_of(f"0{number}" * 8) for number in (1, 2, 3)] == ["phone", "phone-2", None]
    with book.changing() as invites:
        invites.revoke(invites.workers[bytes([1] * 32)])
    assert [name_of(f"0{number}" * 8) for number in (1, 2, 3)] == [None, "phone-2", None]
