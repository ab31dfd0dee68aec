"""How fast experts reach a worker over the wire, beside what ZeroMQ with CURVE carries at most on this machine.

    python benchmarks/weights.py [--megabytes 360] [--repetitions 3] [--in-flight N] [--json]

In turn, in one run: a bare stream of the same chunks to another process, which drops them; the real slice server and a
real worker process that asks for chunks, hashes every slice and keeps it in memory; the same with its cache on disk.
In the same run also what one thread hashes.
"""

from __future__ import annotations

import kernels  # noqa: F401 - before numpy: it sets one BLAS thread, as in every real run

# isort: split
import argparse
import hashlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
from null_model import PARTS, WIDTH, NullBackend, OneLayer

from backbone.gate import Gate, Sent, new_key_pair
from backbone.local_workers import WorkerSpec, start_worker
from backbone.slice_digests import SliceDigests
from backbone.weights import SliceServer
from protocol.frames import DType, Tensor, decode_to_backbone, encode
from protocol.messages import Assign, Chunk, Fetch, Hello, Ready, Welcome
from worker import state
from worker.cache import SliceCache
from worker.cli import serve
from worker.session import end_with, read_session

CHUNK_BYTES = 1 << 20
CHUNKS_IN_FLIGHT = 4
INNER = 115  #: a slice of 0.94 MB, as a matrix of an expert of Qwen3-30B-A3B in Q4_K


def fetched(layer: OneLayer, cache: str, in_flight: int) -> float:
    """Seconds from the assignment to ready."""
    gate, slices = Gate("tcp://127.0.0.1:*"), SliceServer(layer, share_path=False, digests=SliceDigests(layer))
    assign = Assign(1, 0, "silu", slices.grant("w", 0, range(layer.expert_count(0)), by_path=False))
    command = [sys.executable, str(Path(__file__).resolve()), "--as-worker", cache, str(in_flight)]
    spec = WorkerSpec(backend="null")
    worker = start_worker("w", spec, endpoint=gate.endpoint, server_key=gate.public_key, model=None, command=command)
    gate.admit(worker.public_key)
    started = 0.0
    try:
        while gate.socket.poll(60_000):
            received = gate.receive()
            if received is None:
                continue
            _, route, frames = received
            message, _ = decode_to_backbone(frames)
            if isinstance(message, Fetch):
                data = slices.read("w", message)
                if data is None:
                    raise SystemExit("the worker asked for what it was not assigned")
                chunk = encode(Chunk(message.sha256, message.offset), [Tensor(DType.U8, (len(data),), data)])
                if gate.send(route, chunk, copy=False) is not Sent.OK:
                    raise SystemExit("the worker takes no chunks")
            elif isinstance(message, Hello):
                started = time.perf_counter()
                gate.send(route, encode(Welcome("w")))
                gate.send(route, encode(assign))
            elif isinstance(message, Ready):
                return time.perf_counter() - started
        raise SystemExit(f"the worker fell silent: {worker.obituary()}")
    finally:
        worker.stop()
        gate.close()


def streamed(layer: OneLayer) -> float:
    """Seconds for the same chunks in a bare stream, from the first to the word that all have come."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = new_key_pair(), new_key_pair()
    router = context.socket(zmq.ROUTER)
    router.linger, router.curve_server, router.router_mandatory = 0, True, True
    router.curve_publickey, router.curve_secretkey = server
    port = router.bind_to_random_port("tcp://127.0.0.1")
    drop = multiprocessing.get_context("spawn").Process(target=_dropped, args=(port, server[0], client))
    drop.start()
    route, header = router.recv_multipart()[0], bytes(100)
    started = time.perf_counter()
    for expert in range(layer.expert_count(0)):
        for part in PARTS:
            data = layer.slice_data(part, expert)
            for offset in range(0, len(data), CHUNK_BYTES):
                router.send_multipart([route, header, data[offset : offset + CHUNK_BYTES]], copy=False)
    router.send_multipart([route, b""])
    router.recv_multipart()
    seconds = time.perf_counter() - started
    drop.join()
    context.destroy()
    return seconds


def _dropped(port: int, server: bytes, keys: tuple[bytes, bytes]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger, dealer.curve_serverkey = 1000, server
    dealer.curve_publickey, dealer.curve_secretkey = keys
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"here")
    while len(dealer.recv_multipart(copy=False)) > 1:
        pass
    dealer.send(b"all")
    context.destroy()


def hashed(layer: OneLayer) -> float:
    """Seconds to hash all slices in one thread."""
    started = time.perf_counter()
    for expert in range(layer.expert_count(0)):
        for part in PARTS:
            hashlib.sha256(layer.slice_data(part, expert)).digest()
    return time.perf_counter() - started


def measure(megabytes: int, repetitions: int, in_flight: int) -> dict[str, Any]:
    """Megabytes a second of each way, medians, with what they were made of."""
    layer = OneLayer(max(1, round(megabytes * 1e6 / (len(PARTS) * 4 * INNER * WIDTH))), INNER)
    nbytes = layer.nbytes
    seconds: dict[str, list[float]] = {"bare": [], "memory": [], "disk": []}
    for _ in range(repetitions):
        seconds["bare"].append(streamed(layer))
        seconds["memory"].append(fetched(layer, "", in_flight))
        with tempfile.TemporaryDirectory() as folder:
            seconds["disk"].append(fetched(layer, folder, in_flight))
    rates = {name: round(nbytes / 1e6 / statistics.median(each)) for name, each in seconds.items()}
    return {
        "bytes": nbytes,
        "repetitions": repetitions,
        "in_flight": in_flight,
        "mb_per_s": rates | {"hashing": round(nbytes / 1e6 / hashed(layer))},
        "ratio": {name: round(rates[name] / rates["bare"], 2) for name in ("memory", "disk")},
        "seconds": {name: [round(s, 3) for s in each] for name, each in seconds.items()},
    }


def work(folder: str, in_flight: int) -> None:
    """This file as the worker."""
    state.X = in_flight  # type: ignore[attr-defined]
    session = read_session(sys.stdin)
    end_with(sys.stdin)
    serve(session, NullBackend(), SliceCache(Path(folder) / "slices", 1 << 40) if folder else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=360)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=CHUNKS_IN_FLIGHT, help="chunks asked for at once")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.megabytes, args.repetitions, args.in_flight)
    if args.json:
        print(json.dumps(found))
        return
    rates, ratio = found["mb_per_s"], found["ratio"]
    size, chunk, in_flight = found["bytes"] / 1e6, CHUNK_BYTES >> 10, found["in_flight"]
    print(f"{size:.0f} MB in chunks of {chunk} KiB, {in_flight} in flight, MB/s (medians):")
    print(f"bare ZeroMQ with CURVE  {rates['bare']:>6}")
    print(f"to a worker's memory    {rates['memory']:>6}  {ratio['memory']:.2f} of that")
    print(f"to a worker's disk      {rates['disk']:>6}  {ratio['disk']:.2f}")
    print(f"sha256, one thread      {rates['hashing']:>6}")


if __name__ == "__main__":
    if "--as-worker" in sys.argv:
        work(sys.argv[-2], int(sys.argv[-1]))
    else:
        main()
