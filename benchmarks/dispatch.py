"""Time per MoE layer beyond compute: from `send` to the last row, minus what the busiest worker says it computed.

    python benchmarks/dispatch.py [--workers 1,2,3] [--calls 1000] [--json]

Real worker processes on loopback, CURVE on, experts that compute nothing; D = 2048, 8 of 64 experts, one row. In the
same run: what bare ZeroMQ takes to carry the same bytes between two processes, which no dispatcher can go below.
"""

from __future__ import annotations

import kernels  # noqa: F401 - before numpy: it sets one BLAS thread, as in every real run

# isort: split
import argparse
import json
import logging
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from null_model import WIDTH, NullBackend, OneLayer

from backbone.gate import new_key_pair
from backbone.local_workers import WorkerSpec
from backbone.swarm import Swarm
from backbone.trust import Checks
from worker.cli import serve
from worker.session import end_with, read_session

INNER, EXPERTS, CHOSEN, WARM_UP = 4, 64, 8, 50
NO_CHECKS = Checks(every=0, is_probing=False)  #: rows of experts that compute nothing are all wrong


def measure(workers: int, calls: int) -> dict[str, Any]:
    """Microseconds beyond compute of `calls` layers."""
    layer = OneLayer(EXPERTS, INNER)
    command = [sys.executable, str(Path(__file__).resolve()), "--as-worker"]
    draw = np.random.default_rng(2)
    ids = [draw.permutation(EXPERTS)[None, :CHOSEN].astype(np.int32) for _ in range(64)]
    x = draw.standard_normal((1, WIDTH), np.float32)
    beyond, whole = list[float](), list[float]()
    specs = [WorkerSpec(backend="null")] * workers
    with Swarm(layer, specs, local=layer, share_path=False, command=command, hedge_s=60.0, checks=NO_CHECKS) as swarm:
        reports = swarm.report()
        for i in range(calls + WARM_UP):
            before = [r.seconds for r in reports]
            started = time.perf_counter()
            swarm.wait(swarm.send(0, x, ids[i % len(ids)]))
            seconds = time.perf_counter() - started
            busiest = max(r.seconds - b for r, b in zip(reports, before, strict=True))
            if i >= WARM_UP:
                whole.append(seconds * 1e6)
                beyond.append((seconds - busiest) * 1e6)
    ninety = statistics.quantiles(beyond, n=10)[-1]
    return {
        "workers": workers,
        "calls": calls,
        "median_us": round(statistics.median(beyond), 1),
        "p90_us": round(ninety, 1),
        "with_compute_median_us": round(statistics.median(whole), 1),
    }


def bare(calls: int) -> float:
    """Median microseconds for the bytes of a call and its answer over CURVE, with no code of ours in between."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = new_key_pair(), new_key_pair()
    router = context.socket(zmq.ROUTER)
    router.linger, router.curve_server = 0, True
    router.curve_publickey, router.curve_secretkey = server
    port = router.bind_to_random_port("tcp://127.0.0.1")
    echo = multiprocessing.get_context("spawn").Process(target=_echo, args=(port, server[0], client))
    echo.start()
    route = router.recv_multipart()[0]
    taken, x = list[float](), bytes(4 * WIDTH)
    for _ in range(calls + WARM_UP):
        started = time.perf_counter()
        router.send_multipart([route, bytes(100), x, bytes(8 * CHOSEN)])
        router.recv_multipart(copy=False)
        taken.append((time.perf_counter() - started) * 1e6)
    router.send_multipart([route, b""])
    echo.join()
    context.destroy()
    return statistics.median(taken[WARM_UP:])


def _echo(port: int, server: bytes, keys: tuple[bytes, bytes]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer, rows = context.socket(zmq.DEALER), bytes(4 * WIDTH * CHOSEN)
    dealer.linger, dealer.curve_serverkey = 0, server
    dealer.curve_publickey, dealer.curve_secretkey = keys
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"here")
    while len(dealer.recv_multipart(copy=False)) > 1:
        dealer.send_multipart([bytes(100), rows])
    context.destroy()


def work() -> None:
    """This file as the worker."""
    session = read_session(sys.stdin)
    end_with(sys.stdin)
    serve(session, NullBackend())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,3", help="numbers of workers to measure with")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.basicConfig()
    found = [measure(int(n), args.calls) for n in args.workers.split(",")]
    floor = round(bare(args.calls), 1)
    if args.json:
        print(json.dumps({"width": WIDTH, "chosen": CHOSEN, "rows": 1, "bare_zeromq_us": floor, "results": found}))
        return
    print(f"{'workers':>7} {'calls':>6} {'median us':>10} {'p90 us':>8} {'median with compute':>20}")
    for row in found:
        print("{workers:>7} {calls:>6} {median_us:>10} {p90_us:>8} {with_compute_median_us:>20}".format(**row))
    print(f"bare ZeroMQ with CURVE, the same bytes to one process and back: {floor} us (median)")


if __name__ == "__main__":
    if "--as-worker" in sys.argv:
        work()
    else:
        main()
