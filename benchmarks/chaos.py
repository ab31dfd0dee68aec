"""A swarm under fire: workers are killed, stopped, cut off and made to answer garbage while the demo model writes.

    PYTHONPATH=. .venv/bin/python benchmarks/chaos.py [--generations 500] [--backends native:4] [--json]

The workers join through relays of their own, each with memory for about half of the experts. Every answer is held to an
undisturbed run by the sha256 of each token's logits: one that does not come is *lost*, one whose digests differ with no
`class_changed_at` before is *changed*. Exits with 1 when there is any of either. With `--backends native:2,i16:2` half
of the workers are of the class i16.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from archdefs import load_library
from backbone.class_map import ClassMap
from backbone.commands.invite import new_invite
from backbone.discovery import DEMO
from backbone.door import Door
from backbone.engine import Answer, Engine, GenerateOptions
from backbone.experts import LocalExperts
from backbone.invite_book import InviteBook
from backbone.listening import Address
from backbone.model import Model, load_model
from backbone.swarm import Swarm
from backbone.tokenizer import load_tokenizer
from backbone.weights import expert_bytes
from kernels.interface import F32, I32, Options
from kernels.memory import keep_heap_steady
from kernels.registry import make_backend

ROOT = Path(__file__).parents[1]
FAULTY = ROOT / "tests" / "support" / "faulty_worker.py"
PROMPTS = ("In the beginning", "And the king said", "A small", "The sea", "hope (noun):")
WARM_UP = 50  #: generations after which memory is looked at


class Relay:
    """A TCP relay that can hold everything back, or cut every connection."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._goes = threading.Event()
        self._goes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    near.close()
                    continue
                self._open = [each for each in self._open if each.fileno() >= 0] + [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._goes.wait()
                to.sendall(data)
        for each in (source, to):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """End every connection."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def hold(self, seconds: float) -> None:
        """Let nothing through for so long."""
        self._goes.clear()
        time.sleep(seconds)
        self._goes.set()

    def close(self) -> None:
        """Listen no more."""
        self._goes.set()
        self._listener.close()
        self.cut()


class RelayProcess:
    """A relay in a process of its own: what it holds is none of the backbone's memory."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--relay", str(port)]
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True, bufsize=1
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self.port = int(self._process.stdout.readline())

    def cut(self) -> None:
        """End every connection."""
        self._input.write("cut\n")

    def hold(self, seconds: float) -> None:
        """Let nothing through for so long."""
        self._input.write(f"hold {seconds}\n")
        time.sleep(seconds)

    def close(self) -> None:
        """Listen no more."""
        self._input.close()
        self._process.wait()


def relay(port: int) -> int:
    """This file as a relay: says where it listens, and does what standard input says until that ends."""
    own = Relay(port)
    print(own.port, flush=True)
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "cut":
            own.cut()
        elif word == "hold":
            own.hold(float(seconds))
    own.close()
    return 0


@dataclass
class Place:
    """One of the workers: what it is started with, again and again."""

    number: int
    backend: str
    relay: RelayProcess
    home: Path
    memory: int
    process: subprocess.Popen[bytes] | None = None
    faults: list[str] = field(default_factory=list)
    identities: int = 0

    @property
    def name(self) -> str:
        """The name that the backbone knows it by."""
        return f"w{self.number}-{self.identities}"

    def start(self, invite: Callable[[int], str], *, anew: bool = False, fault: str = "") -> None:
        """Start the worker: as itself, or `anew` with a key that nobody knows yet."""
        if anew or not self.identities:
            self.identities += 1
        home = self.home / str(self.identities)
        is_new = not home.exists()
        home.mkdir(parents=True, exist_ok=True)
        environ = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{FAULTY.parent}",
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "OPENBLAS_NUM_THREADS": "1",
        }
        i16 = ["--activations", "i16"] if self.backend == "i16" else []
        backend = "native" if self.backend == "i16" else self.backend
        join = ["join", *([invite(self.relay.port)] if is_new else []), "--backend", backend, *i16, "--threads", "1"]
        join += ["--memory", str(self.memory), "--name", self.name]
        command = (
            [sys.executable, "-P", "-m", "worker"] if not fault else [sys.executable, "-P", str(FAULTY), fault, "--"]
        )
        with (home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *join], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )

    def end(self, number: int = signal.SIGKILL) -> None:
        """End the worker's process."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait()


class Trouble(threading.Thread):
    """Makes trouble until it is told to stop. Everything random comes of one seed.

    `is_asked` says of a worker's name whether a call is in flight there: kills wait a moment for one.
    """

    def __init__(
        self,
        places: Sequence[Place],
        invite: Callable[[int], str],
        is_asked: Callable[[str], bool],
        seed: int,
        every_s: float,
    ) -> None:
        super().__init__(daemon=True)
        self._is_asked = is_asked
        self._places, self._invite, self._random, self._every_s = places, invite, random.Random(seed), every_s  # noqa: S311
        self._end = threading.Event()
        self.made = Counter[str]()

    def run(self) -> None:
        """One trouble after the other."""
        kinds = ["kill"] * 12 + ["stop"] * 3 + ["cut"] * 3 + ["hold"] * 2 + ["garbage"] * 1
        while not self._end.wait(self._random.expovariate(1 / self._every_s)):
            place, kind = self._random.choice(self._places), self._random.choice(kinds)
            self.made[kind] += 1
            if kind == "kill":
                give_up = time.monotonic() + 0.1
                while not (is_asked := self._is_asked(place.name)) and time.monotonic() < give_up:
                    time.sleep(0.0002)
                place.end()
                self.made["kill with a call in flight"] += is_asked
                place.start(self._invite)
            elif kind == "stop" and place.process is not None:
                place.process.send_signal(signal.SIGSTOP)
                self._end.wait(self._random.uniform(0.05, 1.0))
                with suppress(ProcessLookupError):
                    place.process.send_signal(signal.SIGCONT)
            elif kind == "cut":
                place.relay.cut()
            elif kind == "hold":
                place.relay.hold(self._random.uniform(0.05, 1.0))
            elif kind == "garbage":  # who answers garbage is barred: the next one comes under another key
                place.end()
                fault = self._random.choice(["nan", "flip-epoch", "shape", "garbage", "twice"])
                place.start(self._invite, anew=True, fault=fault)
                self._end.wait(2.0)
                place.end()
                place.start(self._invite, anew=True)
            if place.process is not None and place.process.poll() is not None:
                place.start(self._invite, anew=True)

    def stop(self) -> None:
        """No more trouble."""
        self._end.set()
        self.join()


def memory_bytes() -> dict[str, int]:
    """What this process holds: its own memory, and pages of files that it maps, which the system takes back at will.

    A model's are among those, and are there once this process had to compute an expert itself.
    """
    fields = dict(re.findall(r"^(Rss\w+):\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
    return {"own": int(fields["RssAnon"]) * 1024, "mapped_files": int(fields["RssFile"]) * 1024}


class Undisturbed:
    """Experts in this process, each computed in the class that a map gives it: what the swarm's bits have to be."""

    is_here = False
    busiest_ns = 0
    class_changes: Sequence[Any] = ()
    doubts = 0

    def __init__(self, model: Model, sources: Mapping[str, LocalExperts], classes: ClassMap) -> None:
        self._model, self._sources, self._classes = model, sources, classes

    def send(self, layer: int, x: F32, ids: I32) -> F32:
        """Each class's rows, put together."""
        kinds = np.array(self._classes.experts[layer])[ids]
        rows = np.empty((*ids.shape, self._model.expert_width(layer)), np.float32)
        for kind, source in self._sources.items():
            if (kinds == kind).any():
                rows[kinds == kind] = source.send(layer, x, ids)[kinds == kind]
        return rows

    def ready(self, ticket: F32) -> bool:
        """Always."""
        return True

    def wait(self, ticket: F32) -> F32:
        """The rows."""
        return ticket

    def abandon(self) -> None:
        """Nothing is under way."""


def judged(answer: Answer, expected: Sequence[str]) -> str:
    """`right`, `changed`, or `class changed`: right up to the token from which a new map holds, which it tells."""
    end = min((change.token for change in answer.class_changes), default=len(expected))
    if answer.logits_sha256[:end] != list(expected[:end]) or len(answer.logits_sha256) != len(expected):
        return "changed"
    return "right" if answer.logits_sha256 == expected else "class changed"


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--backends", default="native:4", help="native:4, or native:2,i16:2")
    parser.add_argument(
        "--every", type=float, default=0.25, metavar="S", help="seconds between two troubles, on average"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--relay", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.relay is not None:
        return relay(args.relay)
    keep_heap_steady()  # as a server does
    kinds = [
        name
        for part in args.backends.split(",")
        for name in [part.partition(":")[0]] * int(part.partition(":")[2] or 1)
    ]

    model = load_model(DEMO, load_library(), make_backend("native"))
    tokenizer = load_tokenizer(model.gguf.metadata, "demo")
    options = GenerateOptions(max_tokens=args.tokens, ignore_eos=True, digest=True)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    sources = {str(model.numeric_class): model.local_experts}
    if "i16" in kinds:
        other = make_backend("native", Options(activations="i16"))
        weights = lambda layer: {e: model.expert(layer, e) for e in range(model.expert_count(layer))}  # noqa: E731
        sources[str(other.numeric_class)] = LocalExperts(other, weights)
    known = dict[tuple[str, int], list[str]]()  #: digests of the undisturbed run by class map and prompt

    def expected(classes: ClassMap, number: int) -> list[str]:
        if (classes.digest, number) not in known:
            alone = Engine(model, Undisturbed(model, sources, classes), context=512)
            known[classes.digest, number] = alone.generate(prompts[number], tokenizer, options).logits_sha256
        return known[classes.digest, number]

    half = sum(map(sum, expert_bytes(model).values())) * 55 // 100

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        book = InviteBook({"XDG_STATE_HOME": str(folder / "backbone")})
        with closing(socket.create_server(("127.0.0.1", 0))) as holder:
            port = int(holder.getsockname()[1])
        swarm = stack.enter_context(
            Swarm(model, [], local=model.local_experts, door=Door(Address("127.0.0.1", port), book))
        )

        def invite(relay_port: int) -> str:
            return str(new_invite(book, ("127.0.0.1",), relay_port, uses=1, ttl_s=3600, now=int(time.time())))

        places = [Place(i, kind, RelayProcess(port), folder / f"w{i}", half) for i, kind in enumerate(kinds)]
        for place in places:
            place.start(invite)
            stack.callback(place.relay.close)
            stack.callback(place.end)
        while [r.state for r in swarm.report()].count("serving") < len(places):
            swarm.serve_due(0.1)
        engine = Engine(model, swarm, context=512)

        def is_asked(name: str) -> bool:
            member = swarm._dispatcher._members.get(name)
            return member is not None and bool(member.in_flight)

        trouble = Trouble(places, invite, is_asked, args.seed, args.every)
        trouble.start()
        found, memory, started, done = Counter[str](), dict[int, dict[str, int]](), time.monotonic(), 0
        while done < args.generations:
            number, classes = done % len(prompts), swarm.class_map
            answer = engine.generate(prompts[number], tokenizer, options)
            found["lost" if len(answer.ids) < args.tokens else judged(answer, expected(classes, number))] += 1
            done += 1
            swarm.serve_due(0)
            if done in (WARM_UP, args.generations):
                memory[done] = memory_bytes()
            if sys.stderr.isatty() or done % 50 == 0:
                print(f"{done} answers: {dict(found)}; troubles {dict(trouble.made)}", file=sys.stderr)
        trouble.stop()
        tallies = [*(report.tally for report in swarm.report()), swarm.earlier.tally]
        result: dict[str, Any] = {
            "generations": done,
            "seconds": round(time.monotonic() - started, 1),
            "answers": dict(found),
            "troubles": dict(trouble.made),
            "workers": len(swarm.report()) + swarm.earlier.workers,
            "dropped": swarm.dropped,
            "refused": swarm.refused,
            "retried": sum(tally.retried for tally in tallies),
            "hedges": sum(tally.hedged_won + tally.hedged_lost for tally in tallies),
            "computed_locally": swarm.local_causes(),
            "class_changes": len(swarm.class_changes),
            "memory_bytes": memory,
        }
    print(json.dumps(result, indent=None if args.json else 2))
    return 1 if found["lost"] or found["changed"] else 0


if __name__ == "__main__":
    sys.exit(main())
