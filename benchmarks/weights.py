"""How fast experts reach a worker over the wire, beside what ZeroMQ with CURVE carries at most on this machine.

    python benchmarks/weights.py [--megabytes 360] [--repetitions 3] [--json]

In turn, in one run: a plain stream of messages of each of some sizes from one process to another, which drops them; the
real slice server and a real worker process that asks for chunks, hashes every slice and keeps it in memory; the same
with its cache on disk. In the same run also what one thread hashes.
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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import zmq
from null_model import PARTS, WIDTH, NullBackend, OneLayer

from backbone.gate import Gate, Sent, new_key_pair
from backbone.local_workers import WorkerSpec, start_worker
from backbone.slice_digests import SliceDigests
from backbone.weights import SliceServer
from kernels.memory import keep_heap_steady
from protocol.frames import DType, Tensor, decode_to_backbone, encode
from protocol.messages import Assign, Chunk, Fetch, Hello, Ready, Welcome
from worker.cache import SliceCache
from worker.cli import serve
from worker.session import end_with, read_session

PLAIN_BYTES = (256 << 10, 512 << 10, 1 << 20)  #: of the messages of a plain stream: the sizes that weights come in
INNER = 115  #: a slice of 0.94 MB, as a matrix of an expert of Qwen3-30B-A3B in Q4_K


def fetched(layer: OneLayer, cache: str) -> float:
    """Seconds from the assignment to ready."""
    gate, slices = Gate("tcp://127.0.0.1:*"), SliceServer(layer, share_path=False, digests=SliceDigests(layer))
    assign = Assign(1, 0, "silu", slices.grant("w", 0, range(layer.expert_count(0)), by_path=False))
    command = [sys.executable, str(Path(__file__).resolve()), "--as-worker", cache]
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


def streamed(megabytes: int, message_bytes: int) -> float:
    """Seconds for as many bytes in a plain stream, from the first to the word that all have come.

    In processes of its own: a server's has its heap set up for messages.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_streamed, megabytes, message_bytes).result()


def _streamed(megabytes: int, message_bytes: int) -> float:
    layer = layer_of(megabytes)
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
            for offset in range(0, len(data), message_bytes):
                router.send_multipart([route, header, data[offset : offset + message_bytes]], copy=False)
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


def layer_of(megabytes: int) -> OneLayer:
    """About so many bytes of experts."""
    return OneLayer(max(1, round(megabytes * 1e6 / (len(PARTS) * 4 * INNER * WIDTH))), INNER)


def measure(megabytes: int, repetitions: int) -> dict[str, Any]:
    """Megabytes a second of each way, medians, with what they were made of. Ratios are to the fastest plain stream."""
    keep_heap_steady()  # as a server does
    layer = layer_of(megabytes)
    nbytes = layer.nbytes
    plain: dict[int, list[float]] = {size: [] for size in PLAIN_BYTES}
    seconds: dict[str, list[float]] = {"memory": [], "disk": []}
    for _ in range(repetitions):
        for size, each in plain.items():
            each.append(streamed(megabytes, size))
        seconds["memory"].append(fetched(layer, ""))
        with tempfile.TemporaryDirectory() as folder:
            seconds["disk"].append(fetched(layer, folder))
    named = {f"plain, {size >> 10} KiB": each for size, each in plain.items()} | seconds
    rates = {name: round(nbytes / 1e6 / statistics.median(each)) for name, each in named.items()}
    return {
        "bytes": nbytes,
        "repetitions": repetitions,
        "mb_per_s": rates | {"hashing": round(nbytes / 1e6 / hashed(layer))},
        "ratio": {
            name: {other: round(rates[name] / rates[other], 2) for other in rates if other.startswith("plain")}
            for name in seconds
        },
        "seconds": {name: [round(s, 3) for s in each] for name, each in named.items()},
    }


def work(folder: str) -> None:
    """This file as the worker."""
    session = read_session(sys.stdin)
    end_with(sys.stdin)
    serve(session, NullBackend(), SliceCache(Path(folder) / "slices", 1 << 40) if folder else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=360)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.megabytes, args.repetitions)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{found['bytes'] / 1e6:.0f} MB, MB/s (medians of {found['repetitions']}):")
    for name, rate in found["mb_per_s"].items():
        told = ", ".join(f"{ratio:.2f} of {other}" for other, ratio in found["ratio"].get(name, {}).items())
        print(f"{name:<18}{rate:>6}  {told}".rstrip())


if __name__ == "__main__":
    if "--as-worker" in sys.argv:
        work(sys.argv[-1])
    else:
        main()
