"""SIGTERM and SIGINT as a wish: the loop that polls sees it wherever it waits. A second one ends the process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """`fd` is readable from the first signal on."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe()
        os.set_blocking(self._end, False)
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._end, b"\0")
        signal.signal(number, signal.SIG_DFL)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until somebody wants an end; whether somebody does."""
        return bool(select.select([self.fd], [], [], seconds)[0])
