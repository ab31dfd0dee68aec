"""Ours against llama.cpp: the same file, the same threads, in turn, in one run.

    python benchmarks/against_llama_cpp.py -m MODEL [--llama-bench PATH] [-p 512] [-n 64] [--runs 5]
                                           [--threads 1,2] [--activations f32,i16] [--json]
    python benchmarks/against_llama_cpp.py -m MODEL --rpc --llama-bench PATH --rpc-server PATH [-n 64] ...

Each round runs each engine once in a process of its own, and every other round in the opposite order, so that what
else the machine does meets all alike. Shown are medians and extremes over the rounds, ratios of medians, and the share
of what the machine can do, measured in the same rounds: for decode the bytes of weights that a token reads against
plain reading of as many bytes, for prefill 2 operations a weight against an F32 matrix product. A token reads all of
the dense weights, one row of the embedding and its share of the experts; of a prompt only the last token needs the
head. The KV cache and attention are not counted.

Without `--llama-bench` the package `llama-cpp-python` is taken where it is installed. Either should be built for this
machine and without a GPU.

`--rpc`: decode of our swarm (two local workers, one thread each) against llama.cpp's RPC (two servers, one core and
one thread each); backbone and client have both cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbone.terminal import ProgressLine, table
from kernels.errors import GGUFError
from kernels.gguf import GGUFFile, open_gguf

HERE = Path(__file__).resolve().parent
START_SECONDS = 10.0  #: for an RPC server to listen
FEWEST_RUNS = 5
NO_LLAMA = (
    "no llama.cpp here: give --llama-bench PATH (in llama.cpp's sources: cmake -B build && cmake --build build "
    "--target llama-bench), or pip install llama-cpp-python"
)
NO_SERVER = (
    "--rpc needs --llama-bench PATH and --rpc-server PATH, of one build (in llama.cpp's sources: cmake -B build "
    "-DGGML_RPC=ON && cmake --build build --target llama-bench ggml-rpc-server)"
)

Rates = dict[str, float]  #: test (pp512, tg64) to tokens a second
Samples = dict[str, list[float]]  #: the same, with one for each round


class CannotCompare(Exception):
    """One line for the user."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs by the file's tensors: bytes of weights in decode, weights multiplied in prefill."""

    decode_bytes: int
    prefill_weights: int


def work_of(gguf: GGUFFile) -> Work:
    """Of experts, those that are used; of the embedding a row, unless it is the head too; prefill without the head."""
    architecture = gguf.metadata.get("general.architecture")
    used = gguf.metadata.get(f"{architecture}.expert_used_count", 0)
    head = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
    nbytes, weights = 0.0, 0.0
    for name, info in gguf.tensors.items():
        share = used / info.dims[-1] if "_exps." in name else 1.0
        if name == "token_embd.weight" and name != head:
            nbytes += info.nbytes / info.dims[1]
            continue
        nbytes += share * info.nbytes
        if len(info.dims) > 1 and name != head:
            weights += share * math.prod(info.dims)
    return Work(round(nbytes), round(weights))


@dataclass(frozen=True, slots=True)
class Engine:
    """Something that is measured: a name for the table, and what runs it once."""

    name: str
    run: Callable[[], Rates]


def output_of(command: Sequence[str], *, env: dict[str, str] | None = None) -> Any:
    """The JSON that a command prints. CannotCompare with its last line of errors."""
    try:
        done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotCompare(f"{command[0]}: {error.strerror or error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        raise CannotCompare(f"{' '.join(command)} ended with {how}: {last}")
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise CannotCompare(f"{' '.join(command)} printed no JSON: {done.stdout.strip()[:100]!r}") from None


def plain_environment() -> dict[str, str]:
    """As the user has it: importing `kernels` told the maths libraries to use one thread."""
    return {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}


def llama_bench(path: Path, model: Path, prompt: int, tokens: int, threads: int, more: Sequence[str] = ()) -> Rates:
    """One run of llama.cpp's own benchmark."""
    numbers = ["-p", str(prompt), "-n", str(tokens), "-t", str(threads)]
    command = [str(path), "-m", str(model), *numbers, "-r", "1", "-o", "json", *more]
    found = Rates()
    for row in output_of(command, env=plain_environment()):
        test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        found[test] = statistics.median(row["samples_ts"])
    return found


def llama_package(model: Path, prompt: int, tokens: int, threads: int) -> Rates:
    """One run through the Python package."""
    numbers = ["-p", str(prompt), "-n", str(tokens), "-t", str(threads)]
    found: Rates = output_of(
        [sys.executable, str(HERE / "llama_cpp_rates.py"), str(model), *numbers], env=plain_environment()
    )
    return found


def ours(model: Path, prompt: int, tokens: int, threads: int, activations: str, more: Sequence[str] = ()) -> Rates:
    """One run of `backbone bench`."""
    command = [sys.executable, "-m", "backbone", "bench", "-m", str(model), "-p", str(prompt), "-n", str(tokens)]
    command += ["-r", "1", "--threads", str(threads), "--activations", activations, "--json", *more]
    return {row["test"]: statistics.median(row["tokens_per_s"]) for row in output_of(command)["results"]}


def machine(threads: int, size: int) -> Rates:
    """What the machine can do at so many threads, for a token of so many bytes."""
    numbers = ["--threads", str(threads), "--bytes", str(size), "--json"]
    found = output_of([sys.executable, str(HERE / "machine_rates.py"), *numbers])
    return {key: found[key] for key in ("read_gb_s", "read_same_gb_s", "gemm_gflop_s")}


def in_turn(engines: Sequence[Engine], runs: int, told: Callable[[str, int], None]) -> dict[str, Samples]:
    """Each engine's rates of each test, over the rounds; every other round goes backwards."""
    found: dict[str, Samples] = {engine.name: {} for engine in engines}
    for i in range(runs):
        for engine in engines if i % 2 == 0 else engines[::-1]:
            told(engine.name, i)
            for test, rate in engine.run().items():
                found[engine.name].setdefault(test, []).append(rate)
    return found


def share_of_machine(test: str, rate: float, work: Work, can: Rates) -> float:
    """The part of what the machine can do that a rate makes use of."""
    if test.startswith("tg"):
        return work.decode_bytes * rate / (can["read_same_gb_s"] * 1e9)
    return 2 * work.prefill_weights * rate / (can["gemm_gflop_s"] * 1e9)


def results_of(found: dict[str, Samples], threads: int, work: Work, can: Rates | None) -> list[dict[str, Any]]:
    """A row for each test and engine. The first engine is what the others are compared with."""
    first, rows = next(iter(found)), list[dict[str, Any]]()
    for test in found[first]:
        base = statistics.median(found[first][test])
        for name, tests in found.items():
            rates = tests[test]
            median = statistics.median(rates)
            row = {"threads": threads, "test": test, "engine": name, "tokens_per_s": rates, "median": median}
            row |= {"min": min(rates), "max": max(rates), "ratio": median / base}
            if can is not None:
                row["of_machine"] = share_of_machine(test, median, work, can)
            rows.append(row)
    return rows


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    shown: list[tuple[str, ...]] = [("engine", "test", "threads", "t/s", "min", "max", "ratio", "of machine")]
    for row in rows:
        rates = (f"{row[key]:.1f}" for key in ("median", "min", "max"))
        share = f"{row['of_machine']:.0%}" if "of_machine" in row else "-"
        shown.append((row["engine"], row["test"], str(row["threads"]), *rates, f"{row['ratio']:.2f}x", share))
    return table(shown)


@contextmanager
def rpc_servers(path: Path) -> Iterator[str]:
    """Two servers on loopback, one core and one thread each; their addresses as llama.cpp takes them."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 or shutil.which("taskset") is None:
        raise CannotCompare("--rpc needs two cores and the command `taskset` (util-linux) to give each server one")
    with ExitStack() as stack:
        addresses = list[str]()
        for core in cores:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = ["taskset", "-c", str(core), str(path), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
            server = subprocess.Popen(
                command, env=plain_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
            _wait_for(server, path, port)
            addresses.append(f"127.0.0.1:{port}")
        yield ",".join(addresses)


def _wait_for(server: subprocess.Popen[bytes], path: Path, port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        if server.poll() is not None:
            raise CannotCompare(f"{path} ended with code {server.returncode} before it listened")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise CannotCompare(f"{path} does not listen after {START_SECONDS:.0f} s") from None
            time.sleep(0.05)  # another program's start: there is nothing to wait on but to ask again
        else:
            return


def alone(args: argparse.Namespace, threads: int, work: Work) -> list[Engine]:
    """llama.cpp, ours in each class, and the machine, at so many threads."""

    def theirs() -> Rates:
        if args.llama_bench is not None:
            return llama_bench(args.llama_bench, args.model, args.p, args.n, threads)
        return llama_package(args.model, args.p, args.n, threads)

    def class_of(activations: str) -> Engine:
        return Engine(f"ours {activations}", lambda: ours(args.model, args.p, args.n, threads, activations))

    limits = Engine("machine", lambda: machine(threads, work.decode_bytes))
    return [Engine("llama.cpp", theirs), *map(class_of, args.activations), limits]


def swarms(args: argparse.Namespace, servers: str) -> list[Engine]:
    """llama.cpp over its RPC servers, and ours over two local workers in each class."""
    more = ["-rpc", servers, "-ngl", "99"]

    def class_of(activations: str) -> Engine:
        run = lambda: ours(args.model, 0, args.n, 2, activations, ["--workers", "2"])  # noqa: E731
        return Engine(f"ours {activations}, two workers", run)

    theirs = Engine("llama.cpp, two servers", lambda: llama_bench(args.llama_bench, args.model, 0, args.n, 2, more))
    return [theirs, *map(class_of, args.activations)]


def compare(args: argparse.Namespace, work: Work) -> dict[str, Any]:
    """All measurements."""
    line, rows, limits = ProgressLine(sys.stderr), list[dict[str, Any]](), list[dict[str, Any]]()

    def told(name: str, done: int) -> None:
        line.show(f"{name}: round", done + 1, args.runs)

    try:
        if args.rpc:
            with rpc_servers(args.rpc_server) as servers:
                rows = results_of(in_turn(swarms(args, servers), args.runs, told), 2, work, None)
        for threads in [] if args.rpc else args.threads:
            found = in_turn(alone(args, threads, work), args.runs, told)
            can = {key: statistics.median(rates) for key, rates in found.pop("machine").items()}
            limits.append({"threads": threads, **can})
            rows += results_of(found, threads, work, can)
    finally:
        line.clear()
    return {
        "model": args.model.name,
        "decode_bytes": work.decode_bytes,
        "prefill_weights": work.prefill_weights,
        "runs": args.runs,
        "machine": limits,
        "results": rows,
    }


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", dest="model", type=Path, required=True, metavar="MODEL", help="GGUF file")
    parser.add_argument("-p", type=int, default=512, metavar="N", help="tokens of the prompt (0: no prefill test)")
    parser.add_argument("-n", type=int, default=64, metavar="N", help="tokens to decode (0: no decode test)")
    parser.add_argument("--runs", type=int, default=FEWEST_RUNS, metavar="N", help="rounds")
    parser.add_argument("--threads", type=_numbers, default=[1, 2], metavar="N,N")
    parser.add_argument("--activations", type=lambda text: text.split(","), default=["f32", "i16"], metavar="A,A")
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's benchmark")
    parser.add_argument("--rpc", action="store_true", help="two workers against two RPC servers, decode only")
    parser.add_argument("--rpc-server", type=Path, metavar="PATH", help="llama.cpp's ggml-rpc-server")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if min(args.p, args.n, args.runs - 1, *args.threads) < 0 or not args.p + args.n:
        parser.error("-p, -n: 0 or more and not both 0; --runs and --threads: 1 or more")
    return args


def _check(args: argparse.Namespace) -> None:
    if args.rpc and (args.llama_bench is None or args.rpc_server is None):
        raise CannotCompare(NO_SERVER)
    if args.llama_bench is None and importlib.util.find_spec("llama_cpp") is None:
        raise CannotCompare(NO_LLAMA)
    args.model = args.model.resolve()
    for name in ("llama_bench", "rpc_server"):
        path = getattr(args, name)
        if path is not None and not os.access(path, os.X_OK):
            raise CannotCompare(f"{path}: no program that can be run")
        setattr(args, name, path and path.resolve())


def main() -> int:
    args = _arguments()
    try:
        _check(args)
        with open_gguf(args.model) as gguf:
            work = work_of(gguf)
        found = compare(args, work)
    except (CannotCompare, GGUFError) as error:
        print(f"against_llama_cpp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"{found['model']}: {args.runs} rounds; a token reads {work.decode_bytes / 1e6:.1f} MB of weights in decode "
        f"and multiplies {work.prefill_weights / 1e6:.1f} M in prefill"
    )
    for can in found["machine"]:
        print(
            "{threads} threads: {read_gb_s:.1f} GB/s of memory, {read_same_gb_s:.1f} over as many bytes as a token "
            "reads; F32 products {gemm_gflop_s:.0f} GFLOP/s".format(**can)
        )
    print(as_text(found["results"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
