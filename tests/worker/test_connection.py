"""A connection that breaks in the middle of a message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zmq

from protocol.frames import PIECE_BYTES, DType, Tensor
from protocol.messages import Rows
from worker.connection import Connection


class Broken:
    """A socket that takes so many frames of a message, and of what follows none, as ZeroMQ's does then."""

    def __init__(self, takes: int) -> None:
        self.takes, self.offered = takes, list[bool]()

    def send(self, data: Any, flags: int, *, copy: bool = True) -> None:
        self.offered.append(bool(flags & zmq.SNDMORE))
        if len(self.offered) == self.takes + 1:
            raise zmq.Again


@pytest.mark.parametrize("takes", [0, 1, 2, 3, 4])
def test_what_breaks_off_is_told_and_ends_where_it_should(takes: int) -> None:
    connection, rows = object.__new__(Connection), np.zeros((3, PIECE_BYTES // 4), np.float32)
    connection.socket = socket = Broken(takes)  # type: ignore[assignment]
    sent = connection.send(Rows(1, 1, 1), [Tensor(DType.F32, rows.shape, rows)])
    assert sent is (takes == 4)
    # Unless it was the first, the others are offered all the same: the last is what ends the message for ZeroMQ.
    assert socket.offered == ([True] if takes == 0 else [True, True, True, False])
