"""A network between namespaces of this machine: delay, jitter, loss and rate, where the kernel has no netem.

    python benchmarks/wan.py --delay-ms 10 --mbit 50 NAMESPACE=10.77.0.1/24 NAMESPACE=10.77.0.2/24 ...

Needs root and /dev/net/tun. Each namespace gets an interface wan0, and is a station at one switch: a frame passes its
sender's way up and its receiver's way down, each of that rate, then it is late. Figures are for one way. Queues have no
bound, order is kept. A line on standard input is answered with what crossed so far, as one JSON object; the end of the
input is the end. Python moves some 10^4 frames a second: where no rate is given, that is the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

TUNSETIFF, IFF_TAP_NO_PI = 0x400454CA, 0x1002
MOST_AT_ONCE = 64  #: frames that are taken from a station before the others have their turn


@dataclass
class Switch:
    """When a frame arrives. Pure: time, in seconds, and chance, from 0 to 1, come in."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0  #: of each way of each station; 0: no limit
    _free: dict[tuple[str, int], float] = field(default_factory=dict)
    _last: dict[tuple[int, int], float] = field(default_factory=dict)

    def due(self, now_s: float, source: int, target: int, nbytes: int, chances: tuple[float, float]) -> float | None:
        """When a frame that comes now is at its target; None: it is lost."""
        if chances[0] < self.loss:
            return None
        at = self._through(("up", source), now_s, nbytes)
        # Bits of a frame go down while others of it still come up.
        at = max(at, self._through(("down", target), at - self._time(nbytes), nbytes))
        at += self.delay_s + chances[1] * self.jitter_s
        at = max(at, self._last.get((source, target), 0.0))
        self._last[source, target] = at
        return at

    def _time(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def _through(self, way: tuple[str, int], now_s: float, nbytes: int) -> float:
        free = max(now_s, self._free.get(way, 0.0)) + self._time(nbytes)
        self._free[way] = free
        return free


def tap(name: str) -> int:
    """A new interface as a file."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_PI))
    return fd


def station(namespace: str, address: str, number: int) -> int:
    """The file of a namespace's wan0."""
    name = f"wan{os.getpid()}-{number}"[-15:]
    fd = tap(name)
    inside = ("ip", "-n", namespace)
    for command in (
        ("ip", "link", "set", name, "netns", namespace),
        (*inside, "link", "set", name, "name", "wan0"),
        (*inside, "addr", "add", address, "dev", "wan0"),
        (*inside, "link", "set", "wan0", "up", "txqueuelen", "10000"),
    ):
        subprocess.run(command, check=True, timeout=30)
    return fd


def relay(stations: list[int], switch: Switch) -> None:
    """Carry frames until the standard input ends."""
    waiting: list[tuple[float, int, int, bytes]] = []
    counts = [{"frames_up": 0, "bytes_up": 0, "frames_down": 0, "bytes_down": 0} for _ in stations]
    lost, sequence, at_address = 0, 0, dict[bytes, int]()
    poller = select.poll()
    for fd in (0, *stations):
        poller.register(fd, select.POLLIN)
    number_of = {fd: number for number, fd in enumerate(stations)}
    while True:
        left_ms = max(0.0, (waiting[0][0] - time.monotonic()) * 1e3) if waiting else None
        for fd, _ in poller.poll(left_ms):
            if fd == 0:
                if not os.read(0, 4096):
                    return
                print(json.dumps({"stations": counts, "lost": lost}), flush=True)
                continue
            source = number_of[fd]
            for _ in range(MOST_AT_ONCE):
                try:
                    frame = os.read(fd, 65536)
                except BlockingIOError:
                    break
                now = time.monotonic()
                at_address[frame[6:12]] = source
                counts[source]["frames_up"] += 1
                counts[source]["bytes_up"] += len(frame)
                known = at_address.get(frame[:6])
                for target in range(len(stations)) if known is None else (known,):
                    if target == source:
                        continue
                    draws = random.random(), random.random()  # noqa: S311
                    due = switch.due(now, source, target, len(frame), draws)
                    if due is None:
                        lost += 1
                        continue
                    sequence += 1
                    heapq.heappush(waiting, (due, sequence, target, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            try:
                os.write(stations[target], frame)
            except OSError:  # its queue is full, or the namespace is on its way out: lost, as on any wire
                lost += 1
                continue
            counts[target]["frames_down"] += 1
            counts[target]["bytes_down"] += len(frame)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stations", nargs="+", metavar="NAMESPACE=ADDRESS/BITS")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="up to so much more, evenly drawn")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames, from 0 to 1")
    parser.add_argument("--mbit", type=float, default=0.0, help="Mbit/s of each way (0: no limit)")
    args = parser.parse_args()
    switch = Switch(args.delay_ms / 1e3, args.jitter_ms / 1e3, args.loss, args.mbit * 1e6 / 8)
    try:
        parts = [each.partition("=") for each in args.stations]
        found = [station(namespace, address, i) for i, (namespace, _, address) in enumerate(parts)]
    except (OSError, subprocess.SubprocessError) as error:
        print(f"wan.py: error: {error}; it needs root, /dev/net/tun, and namespaces that are there", file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # a wire does not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    relay(found, switch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
