"""How many bytes of weights are asked for at once: so few that they never stand in front of a token for long, and on a
line that carries much so many that what a message costs does not count. Pure: times come in, none is read here.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import MAX_CHUNK_BYTES

LEAST_BYTES = 256 * 1024
LEAST_IN_FLIGHT_BYTES = 1 << 20
LEAST_CHUNKS = 2  #: in flight: one is on its way while another is read
FAST_BYTES_S = 200e6  #: of a line on which the most that is ever in flight is here within about 10 ms
WINDOW_BYTES = 2 << 20  #: that come between two looks at how fast they do


@dataclass(slots=True)
class ChunkSize:
    """Of one connection for weights."""

    nbytes: int = LEAST_BYTES
    _came: int = 0
    _since_s: float | None = None

    @property
    def chunks(self) -> int:
        """How many may be in flight."""
        return max(LEAST_CHUNKS, LEAST_IN_FLIGHT_BYTES // self.nbytes)

    def came(self, nbytes: int, now_s: float) -> None:
        """A chunk came. A pause in which nothing was asked for only makes the line look slower than it is."""
        if self._since_s is None:
            self._since_s = now_s
            return
        self._came += nbytes
        if self._came < WINDOW_BYTES:
            return
        fast_s = self._came / FAST_BYTES_S
        if now_s - self._since_s < fast_s:
            self.nbytes = min(2 * self.nbytes, MAX_CHUNK_BYTES)
        elif now_s - self._since_s > 2 * fast_s:
            self.nbytes = max(self.nbytes // 2, LEAST_BYTES)
        self._came, self._since_s = 0, now_s
