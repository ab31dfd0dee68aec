"""How long to wait before the next try: twice as long after each failure, never the same for two workers."""

from __future__ import annotations

FIRST_S = 0.5
MOST_S = 4.0  #: a backbone that comes back has its workers within 5 s


def delay_s(failures: int, draw: float) -> float:
    """Seconds to wait after so many failures in a row (1 or more); `draw` is from 0 up to 1.

    Between half the bound and the bound, so that workers that lost the same backbone do not all come back at once.
    """
    bound = min(MOST_S, FIRST_S * 2.0 ** min(failures - 1, 16))
    return bound * (0.5 + draw / 2)
