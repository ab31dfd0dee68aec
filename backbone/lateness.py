"""When a call is late, and when others are asked too: by what was measured of its worker. Pure."""

from __future__ import annotations

import math

from .calls import Member

HEDGE_S = 0.05  #: no call is hedged before
HEDGE_FACTOR = 4.0  #: nor before so many times what it takes at most
UNKNOWN_S = 2.0  #: a call is hedged of whose worker nothing is known yet: its kernels are compiled, it may be stopped
LATE_S = 10.0  #: no deadline of a call that was measured is shorter (but for a shorter one that is set)
LATE_FACTOR, LATE_SLACK_S = 10.0, 1.0  #: nor shorter than so many times what it takes at most, and this


def due(
    member: Member, experts: int, pairs: int, now_s: float, deadline_s: float, hedge_s: float, *, may_hedge: bool
) -> tuple[float, float]:
    """When a call of a member that is sent now is late, and when it is to be hedged; infinite: never.

    What the member was asked for before comes first. `deadline_s`: of a call of which nothing was measured, and the
    longest of any; `hedge_s`: as HEDGE_S.
    """
    late_s, hedged_s = now_s + deadline_s, math.inf
    most_s = member.pace.most_s(experts, pairs)
    start_s = now_s if now_s > member.free_s else member.free_s
    if most_s is not None:
        member.free_s = start_s + most_s
        late_s = min(late_s, start_s + max(LATE_S, LATE_FACTOR * most_s + LATE_SLACK_S))
    elif may_hedge:  # nothing is known of when it is late, but perhaps of when others would be done with it
        most_s = member.pace.bound_s(experts, pairs)
    if may_hedge:
        after_s = HEDGE_FACTOR * most_s if most_s is not None else UNKNOWN_S
        hedged_s = start_s + (after_s if after_s > hedge_s else hedge_s)
    return late_s, hedged_s
