"""What a joined worker does after each try: a no ends it, silence does not end one that has enrolled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.backoff import MOST_S, delay_s
from worker.errors import Break
from worker.membership import ENROL_HANG_UPS, ENROL_TRIES, HANG_UPS, Come, Leave, Membership, Wait


def known(has_invite: bool = False) -> Membership:
    member = Membership(is_known=True, has_invite=has_invite)
    assert member.begin() is Come.AS_ITSELF
    return member


def new() -> Membership:
    member = Membership(is_known=False, has_invite=True)
    assert member.begin() is Come.TO_ENROL
    return member


def left(step: object) -> str:
    assert isinstance(step, Leave)
    assert "\n" not in step.reason
    return step.reason


def test_it_enrols_then_comes_as_itself() -> None:
    member = new()
    assert member.enrolled() is Come.AS_ITSELF
    member.welcomed()
    assert member.broke(Break.LOST, 0.0, "x") == Wait(delay_s(1, 0.0))
    assert member.waited() is Come.AS_ITSELF


def test_a_refused_invite_ends_it() -> None:
    told = left(new().broke(Break.KEY_REFUSED, 0.0, "x"))
    assert told == (
        "the backbone refuses this invite: it was used up, has expired or was revoked; "
        "ask for a new one ('backbone invite')"
    )


def test_a_revoked_worker_ends_or_uses_a_new_invite() -> None:
    assert "it was revoked" in left(known().broke(Break.KEY_REFUSED, 0.0, "x"))
    member = known(has_invite=True)
    assert member.broke(Break.KEY_REFUSED, 0.0, "x") is Come.TO_ENROL
    assert member.enrolled() is Come.AS_ITSELF
    member.welcomed()
    assert "it was revoked" in left(member.broke(Break.KEY_REFUSED, 0.0, "x"))


def test_an_invite_is_not_kept_for_later() -> None:
    member = known(has_invite=True)
    member.welcomed()
    assert "it was revoked" in left(member.broke(Break.KEY_REFUSED, 0.0, "x"))


@given(st.lists(st.sampled_from([Break.NOBODY, Break.LOST, Break.SILENT]), min_size=1, max_size=60))
def test_an_enrolled_worker_outlasts_its_backbone(breaks: list[Break]) -> None:
    member = known()
    for count, how in enumerate(breaks, 1):
        assert member.broke(how, 1.0, "x") == Wait(delay_s(count, 1.0))
    member.welcomed()
    assert member.broke(Break.LOST, 1.0, "x") == Wait(delay_s(1, 1.0))


def test_a_worker_that_has_yet_to_enrol_gives_up_when_nobody_answers() -> None:
    member = new()
    for _ in range(ENROL_TRIES - 1):
        assert isinstance(member.broke(Break.NOBODY, 0.0, "box:1"), Wait)
        assert member.waited() is Come.TO_ENROL
    assert left(member.broke(Break.NOBODY, 0.0, "box:1")).startswith("box:1: nobody answers; is the backbone running")


@pytest.mark.parametrize(("member", "limit"), [(new, ENROL_HANG_UPS), (known, HANG_UPS)])
def test_hang_ups_in_a_row_mean_another_key(member: type[Membership], limit: int) -> None:
    one = member()  # type: ignore[call-arg]
    for _ in range(limit - 1):
        assert isinstance(one.broke(Break.HUNG_UP, 0.0, "box:1"), Wait)
    assert "box:1: no CURVE handshake: what answers there" in left(one.broke(Break.HUNG_UP, 0.0, "box:1"))


def test_nobody_where_a_hint_leads_makes_it_leave() -> None:
    member = known()
    for count in range(1, 3 * HANG_UPS):
        how = Break.KEY_REFUSED if count % 2 else Break.HUNG_UP
        assert member.broke(how, 1.0, "x", is_hint=True) == Wait(delay_s(count, 1.0))
        assert member.waited() is Come.AS_ITSELF
    assert "it was revoked" in left(member.broke(Break.KEY_REFUSED, 1.0, "x"))


def test_a_hang_up_now_and_then_does_not() -> None:
    member = known()
    for _ in range(3 * HANG_UPS):
        assert isinstance(member.broke(Break.HUNG_UP, 0.0, "x"), Wait)
        member.welcomed()


def test_who_was_let_go_does_not_come_back_at_once() -> None:
    member = known()
    member.welcomed()
    step = member.let_go(0.0)
    assert isinstance(step, Wait)
    assert step.seconds >= MOST_S / 2
