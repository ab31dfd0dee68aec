"""The connections of a listening socket, watched from beside ZeroMQ: how much each has sent that nobody has taken yet.

ZeroMQ bounds a frame and counts messages, but a message of frames without end is none yet, and what comes before the
handshake is done is as large as any frame: either would fill the memory. A line that has sent more than anybody here
could have asked for is hung up, and a message that was quicker than the watcher is not heard.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.repeats import Repeats

log = logging.getLogger(__name__)

FIRST_BYTES = 2 << 20  #: of handshake and greeting; a greeting is at most half of it
FRAME_BYTES = 48  #: around each frame, at most: its header on the wire, nonce, authenticator
IDLE_BYTES_S = 128  #: of heartbeats, which are never taken
TICK_MS = 100  #: between two looks at lines of which a message was taken: their keys are known here
FIRST_TICK_MS = 10  #: while there is one that may be anybody's
MOST_LINES = 1024
_TCP_INFO_BYTES, _BYTES_RECEIVED = 192, 128  #: of Linux's tcp_info; where in it tcpi_bytes_received stands
_TOO_MANY = "more bytes came than any message that was asked for"
_NEWS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


@dataclass(slots=True)
class _Line:
    """One connection. The socket is a duplicate: its number is never somebody else's while it is watched."""

    socket: socket.socket
    since: float
    taken: int = 0  #: bytes of messages that were received here
    is_heard: bool = False  #: a whole message of it was received


class Lines:
    """`took` is called by the thread that receives; a thread of its own watches. Linux alone can be watched."""

    def __init__(self, listener: zmq.Socket[bytes], port: int) -> None:
        self.most_unread = FIRST_BYTES  #: bytes that a line may have sent, of those that had a message taken
        self.hung_up = 0
        self._lines: dict[int, _Line] = {}  #: by the descriptor that ZeroMQ has
        self._port, self._most, self._repeats = port, most_lines(), Repeats()
        self._listener = listener
        self._monitor: Any = listener.get_monitor_socket(_NEWS) if sys.platform == "linux" else None
        self._thread = threading.Thread(target=self._watch, name="lines", daemon=True)
        if self._monitor is not None:
            self._thread.start()

    def __len__(self) -> int:
        return len(self._lines)

    def took(self, fd: int, nbytes: int, frames: int) -> bool:
        """A message was received over the connection of this descriptor; False when nobody could have asked for it."""
        line = self._lines.get(fd)
        most = self._most_of(line)
        if nbytes > most:
            self.hang_up(fd, _TOO_MANY, f"{nbytes}; at most {most} are allowed")
            return False
        if line is not None:
            line.taken += nbytes + frames * FRAME_BYTES
            line.is_heard = True
        return True

    def _most_of(self, line: _Line | None) -> int:
        return self.most_unread if line is None or line.is_heard else FIRST_BYTES

    def hang_up(self, fd: int, reason: str, figures: str = "") -> None:
        """Hang up on a connection that sent what nobody hears."""
        line = self._lines.get(fd)
        if line is None:
            self.hung_up += 1  # it cannot be reached; what it sends is not heard
        else:
            self._hang_up(line, reason, figures)

    def close(self) -> None:
        """Watch no more; before the listener is closed."""
        if self._monitor is not None:
            self._listener.disable_monitor()
            self._thread.join()
            self._monitor.close()
            self._monitor = None

    # ---- the thread

    def _watch(self) -> None:
        while True:
            is_anybodys = any(not line.is_heard for line in self._lines.values())
            has_news = self._monitor.poll((FIRST_TICK_MS if is_anybodys else TICK_MS) if self._lines else None)
            while has_news and self._monitor.poll(0):
                news = recv_monitor_message(self._monitor)
                if news["event"] == zmq.EVENT_MONITOR_STOPPED:
                    for fd in list(self._lines):
                        self._forget(fd)
                    return
                self._on_news(news["event"], news["value"])
            now_s = time.monotonic()
            for line in list(self._lines.values()):
                self._look(line, now_s)

    def _on_news(self, event: int, fd: int) -> None:
        self._forget(fd)
        if event != zmq.EVENT_ACCEPTED:
            return
        try:
            held = socket.socket(fileno=os.dup(fd))
        except OSError:
            return  # it has gone already
        try:
            is_ours = held.getsockname()[1] == self._port
        except (OSError, IndexError, TypeError):
            is_ours = False
        if not is_ours:  # it has gone, and the number is another's
            held.close()
            return
        if len(self._lines) >= self._most:
            self._make_room()
        self._lines[fd] = _Line(held, time.monotonic())

    def _make_room(self) -> None:
        """Too many: the oldest that nothing was heard of goes, else the oldest."""
        fd = min(self._lines, key=lambda fd: (self._lines[fd].is_heard, self._lines[fd].since))
        self._hang_up(self._lines[fd], "there are too many", f"more than {self._most}")
        self._forget(fd)

    def _look(self, line: _Line, now_s: float) -> None:
        try:
            info = line.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
        except (OSError, struct.error):
            return
        line.taken = min(received, line.taken)  # what frames do not need does not add up
        unread = received - line.taken - int((now_s - line.since) * IDLE_BYTES_S)
        if unread > (most := self._most_of(line)):
            self._hang_up(line, _TOO_MANY, f"{unread}; at most {most} are allowed")

    def _hang_up(self, line: _Line, reason: str, figures: str) -> None:
        self.hung_up += 1
        try:
            host = line.socket.getpeername()[0]
            line.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has gone already, or was hung up before
        if (tail := self._repeats.tail(reason, time.monotonic())) is not None:
            told = f"{reason}: {figures}" if figures else reason
            log.warning("a connection from %s was hung up: %s%s", host, told, tail)

    def _forget(self, fd: int) -> None:
        line = self._lines.pop(fd, None)
        if line is not None:
            line.socket.close()


def most_lines() -> int:
    """Connections that this process may have open: each takes two descriptors, and others need some too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_LINES if soft == resource.RLIM_INFINITY else max(16, min(MOST_LINES, (soft - 256) // 2))
