"""A swarm over LAN, Wi-Fi and WAN: time per token and to the first token of a prompt, beside what the network explains.

    python benchmarks/networks.py [-m MODEL ...] [--profiles none,lan,wifi,wan] [--workers 2] [-p 512] [-n 32]
                                  [--wire f32|f16] [--runs 3] [--json]

`backbone serve` and each `worker join` are in network namespaces of their own, enrolled by an invite, over CURVE;
benchmarks/wan.py carries their frames. Needs root and /dev/net/tun. Workers have the model's file (`--model`), so that
only calls and rows cross. What the relay itself does, a round trip and a bulk transfer, is measured beside it.

Predicted, without any overlap: compute + layers x round trip + bytes / rate. Compute is what the same run measures at
no delay (profile `none`, the least of its runs, which other work on the machine disturbed least); the round trip is
the measured one beyond `none`'s; the rate is the profile's, or the bulk transfer's where that is less. Bytes are those
of our frames: what is on the wire beside them (TCP, Ethernet, CURVE, acknowledgements) shows in the column `wire`.

What overlap recovers is what measured lies below predicted. Today: a shared expert is computed while rows are under
way, and a prompt of more than CHUNK_ROWS (512) tokens has two chunks in flight (`-p 1024` shows it). `--wire f16` shows
what half the bytes give.
"""

from __future__ import annotations

import kernels  # noqa: F401 - before numpy: it sets one BLAS thread, as in every real run

# isort: split
import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from backbone.discovery import DEMO
from backbone.engine import CHUNK_ROWS
from backbone.planning import ROW_BYTES
from backbone.prediction import CALL_BYTES, PAIR_BYTES
from backbone.terminal import table
from kernels.gguf import open_gguf

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PORT, BULK_PORT = 7610, 7611
READY_S, ANSWER_S, END_S = 180.0, 600.0, 10.0
BULK_S = 1.5
CLONE_NEWNET = 0x40000000
WARM_UP = 8  #: tokens
STEADY = 2  #: looks at the workers between which nothing changed: what they hold is settled
T = TypeVar("T")


class CannotMeasure(Exception):
    """One line for the user."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A network. One way each: a round trip has the delay twice, and on average the jitter once."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    mbit: float = 0.0  #: of each way of each machine; 0: what the relay can do


PROFILES = {
    "none": Profile(),
    "lan": Profile(delay_ms=0.075, mbit=1000),  # the relay itself adds 0.15 ms to a round trip
    "wifi": Profile(delay_ms=1.2, jitter_ms=0.5, loss=0.001, mbit=100),
    "wan": Profile(delay_ms=10, mbit=50),
}


# ---- what the network explains


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one token, or one prompt, sends: frames' bytes, and how often it waits for the network."""

    layers: int  #: round trips, one after another
    bytes_out: float  #: of all calls, from the backbone
    bytes_back: float


def work_of(*, layers: int, row_bytes: int, calls: float, rows_sent: float, rows_back: float, trips: int = 1) -> Work:
    """Of calls and rows in total. `trips`: batches that go through the layers one after another."""
    return Work(
        layers=layers * trips,
        bytes_out=calls * CALL_BYTES / 2 + rows_sent * row_bytes + rows_back * PAIR_BYTES,
        bytes_back=calls * CALL_BYTES / 2 + rows_back * row_bytes,
    )


def predicted_s(work: Work, *, compute_s: float, round_trip_s: float, bytes_per_s: float) -> float:
    """Seconds with nothing done at the same time: compute, then out, then back, layer by layer."""
    return compute_s + work.layers * round_trip_s + (work.bytes_out + work.bytes_back) / bytes_per_s


# ---- namespaces


def run(*command: str, timeout_s: float = 30.0) -> str:
    """Standard output of a command that has to succeed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMeasure(f"{' '.join(command)[:120]}: {error}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise CannotMeasure(f"{' '.join(command)[:120]}: exit code {done.returncode}: {said}")
    return done.stdout


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[None]:
    """Network namespaces with loopback up, which go with the block."""
    with ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "delete", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            # IPv6 would announce itself between the bytes that are counted.
            inside(name, lambda: Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1"))
        yield


def inside(namespace: str, work: Callable[[], T]) -> T:
    """What a function gives in a namespace: a thread goes there, and ends with it."""
    found: list[T] = []
    failed: list[BaseException] = []

    def go() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path("/run/netns", namespace).open("rb") as file:
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    if failed:
        raise CannotMeasure(f"in {namespace}: {failed[0]}")
    return found[0]


@contextmanager
def process(command: Sequence[str], environ: dict[str, str], log: Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, by force where it does not by itself."""
    with log.open("a") as file:
        started = subprocess.Popen(command, env=environ, stderr=file, text=True, **more)
    try:
        yield started
    finally:
        if started.stdin is not None:
            started.stdin.close()
        else:
            started.terminate()
        try:
            started.wait(END_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        if started.stdout is not None:
            started.stdout.close()


# ---- the network


class Network:
    """Stations at wan.py, the backbone's first."""

    def __init__(self, names: Sequence[str], relay: subprocess.Popen[str]) -> None:
        self.names, self._relay = names, relay

    def address(self, number: int) -> str:
        """Of a station."""
        return f"10.77.0.{number + 1}"

    def counts(self) -> dict[str, Any]:
        """What crossed so far, by station."""
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write("\n")
        self._relay.stdin.flush()
        line = self._relay.stdout.readline()
        if not line:
            raise CannotMeasure("wan.py ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def backbone_bytes(self) -> tuple[int, int]:
        """Bytes of frames from the backbone, and to it."""
        own = self.counts()["stations"][0]
        return own["bytes_up"], own["bytes_down"]

    def round_trip_s(self) -> float:
        """Median of what it takes to connect to the swarm's socket, which is one round trip."""

        def connect() -> float:
            started = time.perf_counter()
            socket.create_connection((self.address(0), PORT), timeout=10).close()
            return time.perf_counter() - started

        return inside(self.names[1], lambda: statistics.median(connect() for _ in range(40)))

    def bulk_bytes_per_s(self) -> float:
        """Of one TCP connection from the first worker's place to the backbone's."""
        listener = inside(self.names[0], lambda: socket.create_server((self.address(0), BULK_PORT)))
        sender = inside(self.names[1], lambda: socket.create_connection((self.address(0), BULK_PORT), timeout=30))
        taker, _ = listener.accept()
        taker.settimeout(30)
        over = threading.Event()

        def send() -> None:
            block = bytes(1 << 16)
            with contextlib.suppress(OSError):
                while not over.is_set():
                    sender.sendall(block)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        with contextlib.closing(listener), taker, sender:
            for phase_s in (BULK_S, BULK_S):  # the first fills the way and opens the window
                total, started = 0, time.perf_counter()
                while time.perf_counter() - started < phase_s:
                    total += len(taker.recv(1 << 20))
                seconds = time.perf_counter() - started
            over.set()
            for end in (taker, sender):
                with contextlib.suppress(OSError):  # what was under way may have ended it
                    end.shutdown(socket.SHUT_RDWR)
            thread.join(END_S)
        return total / seconds


@contextmanager
def network(names: Sequence[str], profile: Profile, log: Path) -> Iterator[Network]:
    """The namespaces joined by a relay."""
    stations = [f"{name}=10.77.0.{number + 1}/24" for number, name in enumerate(names)]
    command = [sys.executable, "-P", str(HERE / "wan.py"), *stations, "--loss", str(profile.loss)]
    command += ["--delay-ms", str(profile.delay_ms), "--jitter-ms", str(profile.jitter_ms), "--mbit", str(profile.mbit)]
    with process(command, dict(os.environ), log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise CannotMeasure(_last_line(log))
        yield Network(names, relay)


def _last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["no word"])[-1]


# ---- the swarm


class Swarm:
    """A served model with workers that joined."""

    def __init__(self, net: Network, model: Path, folder: Path, prompt: int, decode: int, wire: str) -> None:
        self._net, self._model, self._folder, self._wire = net, model, folder, wire
        self._context = max(prompt + decode, 2 * WARM_UP) + 64
        self._draw = random.Random(1)  # noqa: S311 - token ids

    def _environ(self, who: str) -> dict[str, str]:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # compiled kernels are there
        place = {"XDG_STATE_HOME": str(self._folder / who), "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
        return {k: v for k, v in os.environ.items() if not k.startswith("EXPERTSWARM_")} | place

    def _command(self, number: int, program: str, *args: str) -> list[str]:
        where = ["ip", "netns", "exec", self._net.names[number]]
        return [*where, sys.executable, "-P", "-m", program, *args]

    def backbone(self, *args: str) -> str:
        """Standard output of a command beside the server."""
        try:
            done = subprocess.run(
                self._command(0, "backbone", *args),
                env=self._environ("backbone"),
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CannotMeasure(f"backbone {args[0]} took more than {ANSWER_S:g} s") from None
        if done.returncode not in (0, 1) or not done.stdout:
            raise CannotMeasure(f"backbone {args[0]}: {done.stderr.strip()[-200:]}")
        return done.stdout

    @contextmanager
    def up(self, workers: int, threads: int) -> Iterator[None]:
        """Serve, invite, join; the block begins when every worker holds experts."""
        (self._folder / "backbone").mkdir(exist_ok=True)
        log = self._folder / "serve.log"
        serve = self._command(
            0, "backbone", "serve", "-m", str(self._model), "--workers", "0", "-c", str(self._context),
            "--threads", str(threads), "--listen", f"{self._net.address(0)}:{PORT}", "--http", "127.0.0.1:0",
            "--wire", self._wire,
        )  # fmt: skip
        # Made before the server is there: it looks into its book of invites only now and then, and refuses till then.
        invite = self._folder / "invite"
        self.backbone_quiet(
            "invite", "--uses", str(workers), "--out", str(invite), "--listen", f"{self._net.address(0)}:{PORT}"
        )
        with ExitStack() as stack:
            started = stack.enter_context(process(serve, self._environ("backbone"), log, stdout=subprocess.PIPE))
            assert started.stdout is not None
            if " is served on " not in started.stdout.readline():
                raise CannotMeasure(f"backbone serve: {_last_line(log)}")
            joined = list[subprocess.Popen[str]]()
            for number in range(1, workers + 1):
                name = f"worker-{number}"
                join = self._command(
                    number, "worker", "join", "--from", str(invite), "--name", name, "--backend", "native",
                    "--threads", str(threads), "--model", str(self._model),
                )  # fmt: skip
                joined.append(stack.enter_context(process(join, self._environ(name), self._folder / f"{name}.log")))
            self._until_held(joined)
            yield

    def backbone_quiet(self, *args: str) -> None:
        """A command that prints nothing."""
        done = subprocess.run(
            self._command(0, "backbone", *args),
            env=self._environ("backbone"), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CannotMeasure(f"backbone {args[0]}: {done.stderr.strip()[-200:]}")

    def _until_held(self, joined: Sequence[subprocess.Popen[str]]) -> None:
        give_up, before, same = time.monotonic() + READY_S, list[int](), 0
        while same < STEADY:
            held = [w["experts"] for w in self._workers() if w["state"] == "serving" and w["experts"]]
            same = same + 1 if len(held) == len(joined) and held == before else 0
            before = held
            for number, each in enumerate(joined, 1):
                if each.poll() is not None:
                    raise CannotMeasure(f"worker-{number} ended: {_last_line(self._folder / f'worker-{number}.log')}")
            if time.monotonic() > give_up:
                raise CannotMeasure(f"after {READY_S:g} s {len(held)} of {len(joined)} workers serve")

    def _workers(self) -> list[dict[str, Any]]:
        server = json.loads(self.backbone("status", "--json"))["server"]
        if server is None:
            raise CannotMeasure(f"backbone serve: {_last_line(self._folder / 'serve.log')}")
        found: list[dict[str, Any]] = server["workers"]
        return found

    def answer(self, prompt: int, tokens: int) -> dict[str, Any]:
        """The object of an answer to a prompt of new ids, with the bytes that crossed meanwhile."""
        ids = ",".join(str(self._draw.randrange(3, 250)) for _ in range(prompt))
        before = self._net.backbone_bytes()
        found: dict[str, Any] = json.loads(
            self.backbone("generate", "-m", str(self._model), "--ids", ids, "-n", str(tokens), "--ignore-eos", "--json")
        )
        after = self._net.backbone_bytes()
        found["wire_bytes"] = sum(after) - sum(before)
        return found


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One profile's, medians over the runs. Seconds and bytes; for a token of decode, and for a prompt."""

    profile: str
    round_trip_s: float
    bulk_bytes_per_s: float
    token_s: float
    token_least_s: float
    token_predicted_s: float
    token_frame_bytes: float
    token_wire_bytes: float
    first_s: float
    first_least_s: float
    first_predicted_s: float
    first_frame_bytes: float
    first_wire_bytes: float
    failures: list[str]
    computed_locally: int


@dataclass(frozen=True, kw_only=True)
class Raw:
    """What was measured in one profile, before anything is made of it."""

    round_trip_s: float
    bulk_bytes_per_s: float
    token_s: float
    token_least_s: float
    token_wire: float
    token: Work
    first_s: float
    first_least_s: float
    first_wire: float
    first: Work
    failures: list[str]
    computed_locally: int


def measure(swarm: Swarm, net: Network, layers: int, row_bytes: int, prompt: int, decode: int, runs: int) -> Raw:
    """One profile's figures."""
    swarm.answer(WARM_UP, WARM_UP)
    first, token = list[dict[str, Any]](), list[dict[str, Any]]()
    for _ in range(runs):
        first.append(swarm.answer(prompt, 1))  # with -n 1 the first token is chosen, and no step of decode is run
        token.append(swarm.answer(1, decode + 1))

    def total(answer: dict[str, Any], what: str) -> int:
        return sum(int(w[what]) for w in answer["workers"])

    # The first token comes of the prompt: there is a step less than there are tokens.
    of_tokens = [a["timings"]["decode"]["seconds"] / decode for a in token]
    of_first = [a["timings"]["prompt"]["seconds"] for a in first]
    steps = decode + 1  # and the prompt's one token: all of them are steps of one row
    calls, rows = (statistics.median(total(a, what) for a in token) for what in ("calls", "rows"))
    token_work = work_of(
        layers=layers, row_bytes=row_bytes, calls=calls / steps, rows_sent=calls / steps, rows_back=rows / steps
    )
    calls, rows = (statistics.median(total(a, what) for a in first) for what in ("calls", "rows"))
    askers = len(first[0]["workers"])
    first_work = work_of(
        layers=layers,
        row_bytes=row_bytes,
        calls=calls,
        rows_sent=prompt * layers * askers,
        rows_back=rows,
        trips=math.ceil(prompt / CHUNK_ROWS),
    )
    return Raw(
        round_trip_s=net.round_trip_s(),
        bulk_bytes_per_s=net.bulk_bytes_per_s(),
        token_s=statistics.median(of_tokens),
        token_least_s=min(of_tokens),
        token_wire=statistics.median(a["wire_bytes"] for a in token) / steps,
        token=token_work,
        first_s=statistics.median(of_first),
        first_least_s=min(of_first),
        first_wire=statistics.median(a["wire_bytes"] for a in first),
        first=first_work,
        failures=[f"{w['name']}: {reason}" for a in (*first, *token) for w in a["workers"] for reason in w["failures"]],
        computed_locally=sum(a["computed_locally"] or 0 for a in (*first, *token)),
    )


def beside_prediction(name: str, profile: Profile, raw: Raw, base: Raw) -> Figures:
    """A profile's figures with what the network explains of them. `base`: the same at no delay."""
    asked = profile.mbit * 1e6 / 8
    rate = min(asked, raw.bulk_bytes_per_s) if asked else raw.bulk_bytes_per_s
    trip = max(0.0, raw.round_trip_s - base.round_trip_s)

    def predicted(work: Work, compute_s: float) -> float:
        # What `none` took to move the bytes is in its time already.
        moved = (work.bytes_out + work.bytes_back) / base.bulk_bytes_per_s
        return predicted_s(work, compute_s=max(0.0, compute_s - moved), round_trip_s=trip, bytes_per_s=rate)

    return Figures(
        profile=name,
        round_trip_s=raw.round_trip_s,
        bulk_bytes_per_s=raw.bulk_bytes_per_s,
        token_s=raw.token_s,
        token_least_s=raw.token_least_s,
        token_predicted_s=predicted(raw.token, base.token_least_s),
        token_frame_bytes=raw.token.bytes_out + raw.token.bytes_back,
        token_wire_bytes=raw.token_wire,
        first_s=raw.first_s,
        first_least_s=raw.first_least_s,
        first_predicted_s=predicted(raw.first, base.first_least_s),
        first_frame_bytes=raw.first.bytes_out + raw.first.bytes_back,
        first_wire_bytes=raw.first_wire,
        failures=raw.failures,
        computed_locally=raw.computed_locally,
    )


def shape_of(model: Path) -> tuple[int, int]:
    """Layers with experts, and the width of a row."""
    with open_gguf(model) as gguf:
        layers = sum(1 for name in gguf.tensors if re.fullmatch(r"blk\.\d+\.ffn_gate_exps\.weight", name))
        width = gguf.tensors["token_embd.weight"].dims[0]
    if not layers:
        raise CannotMeasure(f"{model}: has no experts")
    return layers, width


def as_text(name: str, found: Sequence[Figures], args: argparse.Namespace) -> str:
    """A table of one model."""
    rows: list[tuple[str, ...]] = [
        (
            "network", "round trip ms", "Mbit/s",
            "token ms", "least", "predicted", "KB frames", "KB wire",
            f"{args.prompt} tokens s", "least", "predicted", "MB frames", "MB wire",
        )
    ]  # fmt: skip
    for f in found:
        rows.append(
            (
                f.profile, f"{f.round_trip_s * 1e3:.2f}", f"{f.bulk_bytes_per_s * 8 / 1e6:.0f}",
                f"{f.token_s * 1e3:.1f}", f"{f.token_least_s * 1e3:.1f}", f"{f.token_predicted_s * 1e3:.1f}",
                f"{f.token_frame_bytes / 1e3:.1f}", f"{f.token_wire_bytes / 1e3:.1f}",
                f"{f.first_s:.2f}", f"{f.first_least_s:.2f}", f"{f.first_predicted_s:.2f}",
                f"{f.first_frame_bytes / 1e6:.1f}", f"{f.first_wire_bytes / 1e6:.1f}",
            )
        )  # fmt: skip
    lines = [
        f"{name}, {args.workers} workers, rows in {args.wire.upper()}, medians and least of {args.runs} runs",
        table(rows),
    ]
    for f in found:
        if f.computed_locally:
            lines.append(f"{f.profile}: {f.computed_locally} expert calls were computed by the backbone")
        lines += [f"{f.profile}: {reason}" for reason in f.failures]
    return "\n".join(lines)


def one_model(model: Path, args: argparse.Namespace, folder: Path) -> list[Figures]:
    """Every profile of a model."""
    layers, width = shape_of(model)
    names = [f"es{os.getpid()}-{number}" for number in range(args.workers + 1)]
    raw: dict[str, Raw] = {}
    for profile in args.profiles:
        place = Path(tempfile.mkdtemp(dir=folder))
        with namespaces(names), network(names, PROFILES[profile], place / "wan.log") as net:
            swarm = Swarm(net, model, place, args.prompt, args.decode, args.wire)
            with swarm.up(args.workers, args.threads):
                row_bytes = ROW_BYTES[args.wire] * width
                raw[profile] = found = measure(swarm, net, layers, row_bytes, args.prompt, args.decode, args.runs)
        print(
            f"{model.name}: {profile}: {found.token_s * 1e3:.1f} ms a token, {found.first_s:.2f} s to the first of "
            f"{args.prompt}",
            file=sys.stderr,
            flush=True,
        )
    return [beside_prediction(name, PROFILES[name], found, raw["none"]) for name, found in raw.items()]


def refusal() -> str | None:
    """Why this machine cannot do it; None when it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun, which is not here"
    return None


def _profiles(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in PROFILES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(PROFILES)}")
    return ["none", *(name for name in wanted if name != "none")]  # without it nothing can be predicted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, action="append", help="GGUF file (default: the demo model)")
    parser.add_argument("--profiles", type=_profiles, default=",".join(PROFILES), help="of none,lan,wifi,wan")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("-n", "--decode", type=int, default=32, help="tokens to decode")
    parser.add_argument("--wire", choices=tuple(ROW_BYTES), default="f32", help="dtype of rows on the wire")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if problem := refusal():
        print(f"networks.py: error: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and everything is cleaned up on the way
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = {model: one_model(model, args, Path(folder)) for model in args.model or [DEMO]}
    except CannotMeasure as error:
        print(f"networks.py: error: {error}", file=sys.stderr)
        return 1
    if args.json:
        profiles = {name: asdict(PROFILES[name]) for name in args.profiles}
        results = {model.name: [asdict(f) for f in figures] for model, figures in found.items()}
        print(
            json.dumps(
                {
                    "profiles": profiles,
                    "workers": args.workers,
                    "prompt": args.prompt,
                    "wire": args.wire,
                    "results": results,
                }
            )
        )
    else:
        print("\n\n".join(as_text(model.name, figures, args) for model, figures in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
