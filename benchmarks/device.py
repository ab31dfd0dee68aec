"""Run on a machine with a GPU what CI cannot: bits, accuracy, speed and a swarm, as one JSON object.

    PYTHONPATH=. python benchmarks/device.py --backend cuda --out device.json
    PYTHONPATH=. python benchmarks/device.py --backend opencl --quick      # small, and also without a GPU, on PoCL

The object is on standard output, or in the file of --out. Exit code 0: every section holds; 1: one does not, or failed.
EXPERTSWARM_OPENCL_DEVICE and EXPERTSWARM_CUDA_DEVICE choose among several devices. Weights and inputs come of random
bits under a fixed seed and are the same on every machine, so that the sha256 of two machines' results can be compared:
"backend" and "native" of one canonical class have to agree everywhere. Every rate is a median.

    pass        every section holds
    quick       smaller shapes: the sha256 compare only with those of another quick run
    seconds     what the run took
    machine     backend, device (with its driver), memory_bytes (for experts), cpu, system, load (of a minute, before),
                numeric_class, native_class, engine_sha256 (as provenance has it), versions of what took part
    experts     bar (of worst_relative_l2), width and hidden of an expert, `types` by quant type:
                  widths: by rows in a call, each with
                    sha256, native_sha256   of the rows as little-endian float32
                    equals_native   the same bits; required where both are of one numeric class
                    repeats         a second call gave the same bits
                    equals_wider    the same bits as these rows have in the widest call
                    worst_relative_l2, median_relative_l2, least_cosine   over rows, against float64
                    largest_difference   of a value, against float64
                  equals_mixed      the rows have the same bits in a call with other experts' rows, in another order
                  holds
    operations  bar, `cases` by operation: the same fields, one width each (no equals_wider)
    copy        bytes, device_gb_s (by a kernel that copies; what is read and what is written both count),
                to_device_gb_s, from_device_gb_s
    throughput  by quant type, for "backend" and "native": what kernels.measure gives; for "backend" also
                decode_of_copy: decode_gb_s by device_gb_s, which no kernel that reads each weight once can much exceed
    swarm       ids of an answer of the demo model in one process by `native`; then `runs`: "one_class" (where the
                backend is of native's class) and "mixed" (with numpy too), each with workers (name, backend, class,
                calls, seconds), equal_ids, equal_logits (the sha256 of each token's; required of "one_class"), or
                refused: the line that the command ended with

A section that failed is {"error": one line, "holds": false}. An error is no measurement: it says nothing of the others.
"""

from __future__ import annotations

import kernels  # noqa: F401 - before numpy: it sets one BLAS thread, as in every real run

# isort: split
import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from backbone.discovery import DEMO
from backbone.provenance import engine_sha256
from kernels import exact, reference
from kernels.backends.cpu import cpu_model
from kernels.device import cuda, opencl_devices
from kernels.device.interface import Device
from kernels.device.kernels import Kernels
from kernels.errors import KernelError
from kernels.formats import GGMLType
from kernels.interface import F32, I32, DenseBackend, Operation
from kernels.matrix import Matrix
from kernels.measure import measure
from kernels.registry import make_backend
from kernels.state import Rows
from kernels.synthetic import expert, floats, matrix, stream

ROOT = Path(__file__).parents[1]
OPEN: dict[str, Callable[[], Device]] = {"opencl": opencl_devices.open_device, "cuda": cuda.open_device}
VERSIONS = ("numpy", "pyopencl", "cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0")
BAR = 1e-5  #: relative L2 of a row against float64, of an F32 class
WIDTHS = (1, 8, 9, 256)
PROMPT = "In the beginning"
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done."""

    width: int = 2048  #: of Qwen3-30B-A3B's experts
    hidden: int = 768
    keys: int = 1000
    copied: int = 1 << 28  #: bytes
    layer_bytes: int | None = None
    seconds: float = 4.0  #: of measuring a type with a backend
    types: tuple[str, ...] = ("Q4_K", "Q8_0")  #: that are measured
    tokens: int = 32


QUICK = Size(256, 256, 300, 1 << 22, 1 << 23, 0.2, ("Q4_K",), 8)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation as a program: what it leaves in a slot, and what that would be without rounding."""

    operations: list[Operation]
    slot: int
    count: int  #: rows
    exact: exact.F64


def sha256(rows: F32) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows, "<f4").tobytes()).hexdigest()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


# ---- bits and accuracy


def compared(ours: F32, again: F32, native: F32, wanted: exact.F64, *, is_one_class: bool) -> dict[str, Any]:
    """What every comparison of rows has."""
    found = exact.error_of(ours, wanted)
    mine, theirs = sha256(ours), sha256(native)
    repeats, equal = sha256(again) == mine, mine == theirs
    return {
        "sha256": mine,
        "native_sha256": theirs,
        "equals_native": equal,
        "repeats": repeats,
        # JSON has no infinity: a row that is not finite gives null.
        "worst_relative_l2": found.worst if math.isfinite(found.worst) else None,
        "median_relative_l2": found.median if math.isfinite(found.median) else None,
        "least_cosine": found.least_cosine,
        "largest_difference": found.largest if math.isfinite(found.largest) else None,
        "holds": repeats and found.worst <= BAR and (equal or not is_one_class),
    }


def pairs_of(rows: Any, chosen: Any) -> I32:
    """Pairs [P, 2] of rows and experts."""
    return np.stack(np.broadcast_arrays(rows, chosen), axis=1).astype(np.int32)


def experts(backend: DenseBackend, native: DenseBackend, size: Size) -> dict[str, Any]:
    """The feed-forward of an expert of every type."""
    is_one_class = backend.numeric_class == native.numeric_class
    types = {kind.name: guarded(partial(one_type, backend, native, size, kind, is_one_class)) for kind in GGMLType}
    holds = all(found["holds"] for found in types.values())
    return {"bar": BAR, "width": size.width, "hidden": size.hidden, "types": types, "holds": holds}


def one_type(
    backend: DenseBackend, native: DenseBackend, size: Size, kind: GGMLType, is_one_class: bool
) -> dict[str, Any]:
    """Rows of three experts, of which the first is compared at every width and the others are mixed in."""
    bits = stream("experts", kind.name)
    held = {i: expert(bits, kind, size.width, size.hidden) for i in range(3)}
    x = floats(bits, max(WIDTHS), size.width)
    bank, natives = backend.load(held), native.load(held)
    wanted = exact.expert_rows(held[0], x)
    widest = bank.rows(x, pairs_of(np.arange(len(x)), 0))
    widths = dict[str, Any]()
    for width in WIDTHS:
        some, pairs = x[:width], pairs_of(np.arange(width), 0)
        ours = bank.rows(some, pairs)
        again, theirs = bank.rows(some, pairs), natives.rows(some, pairs)
        found = compared(ours, again, theirs, wanted[:width], is_one_class=is_one_class)
        found["equals_wider"] = sha256(ours) == sha256(widest[:width])
        widths[str(width)] = found
    count = 40
    pairs = pairs_of(np.tile(np.arange(count), 3), np.repeat(np.arange(3), count))
    pairs = pairs[np.arange(3 * count) * 7 % (3 * count)]  # 7 and 120 have no common factor
    mixed = bank.rows(x, pairs)[pairs[:, 1] == 0]
    equal = sha256(mixed) == sha256(widest[pairs[pairs[:, 1] == 0, 0]])
    holds = equal and all(found["holds"] and found["equals_wider"] for found in widths.values())
    return {"widths": widths, "equals_mixed": equal, "holds": holds}


def operations(backend: DenseBackend, native: DenseBackend, size: Size) -> dict[str, Any]:
    """Every operation of the dense path."""
    is_one_class = backend.numeric_class == native.numeric_class

    def one(case: Case) -> dict[str, Any]:
        ours, again, theirs = (result(case, b) for b in (backend, backend, native))
        return compared(ours, again, theirs, case.exact, is_one_class=is_one_class)

    found = {name: guarded(partial(one, case)) for name, case in cases(size)}
    return {"bar": BAR, "cases": found, "holds": all(case["holds"] for case in found.values())}


def operation(name: str, inputs: tuple[int, ...], out: int, **constants: Any) -> Operation:
    memory = 0 if name == "attention" else -1
    return Operation(name=name, inputs=inputs, outputs=(out,), constants=constants, layer=0, memory=memory)


def given(slot: int, values: F32) -> Operation:
    """An embedding that puts row t of values into a slot: token t is row t."""
    data = np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1)
    rows, cols = values.shape
    return operation("embed", (), slot, weight=Matrix.of(GGMLType.F32, rows, cols, data))


def result(case: Case, backend: DenseBackend) -> F32:
    """What a case leaves on a backend, in a sequence of its own."""
    program = backend.program(case.operations, [1] * (1 + max(max(o.outputs) for o in case.operations)))
    at = np.arange(case.count)
    rows = Rows(at.astype(np.int32), at.astype(np.int64), [program.sequence()] * case.count, at)
    run = program.begin(rows)
    try:
        run.run(0, len(case.operations))
        return run.values(case.slot).copy()
    finally:
        run.close()


def cases(size: Size) -> Iterator[tuple[str, Case]]:
    """Every operation by name."""
    heads, kv_heads, each, eps = 8, 2, 64, 1e-6
    bits = stream("operations")
    x, y = floats(bits, 33, size.width), floats(bits, 33, size.width)
    long = floats(bits, size.keys, heads * each)
    weight, narrow = floats(bits, size.width), floats(bits, each)
    wide, other = x.astype(np.float64), y.astype(np.float64)

    def alone(name: str, values: F32, wanted: exact.F64, **constants: Any) -> tuple[str, Case]:
        """An operation in place."""
        return name, Case([given(0, values), operation(name, (0,), 0, **constants)], 0, len(values), wanted)

    first = [given(0, x), operation("rms_norm", (0,), 1, weight=weight, eps=eps)]
    yield "rms_norm", Case(first, 1, len(x), exact.rms_norm(x, weight, eps))
    by_head = exact.rms_norm(long.reshape(-1, each), narrow, eps).reshape(long.shape)
    yield alone("norm_heads", long, by_head, weight=narrow, heads=heads, eps=eps)
    yield alone("softmax", 3 * x, exact.softmax(3 * x))
    for name, function in exact.ELEMENTWISE.items():
        yield alone(name, 3 * x, function((3 * x).astype(np.float64)))
    yield alone("softcap", 9 * x, 7 * np.tanh((9 * x).astype(np.float64) / 7), cap=7.0)
    yield alone("scale", x, wide * float(np.float32(0.3)), factor=0.3)
    yield alone("add_bias", x, wide + weight, bias=weight)
    for name, wanted in (("add", wide + other), ("mul", wide * other)):
        yield name, Case([given(0, x), given(1, y), operation(name, (0, 1), 0)], 0, len(x), wanted)

    turning: dict[str, Any] = {
        "heads": heads,
        "dimensions": each // 2,
        "base": 10000.0,
        "factor": 1.0,
        "scaling": "none",
        "original_context": 0.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "log_multiplier": 0.0,
        "attn_factor": 1.0,
    }
    for name in ("rope", "rope_pairs"):
        cos, sin = reference.PREPARED[name](dict(turning))["table"].at(np.arange(len(long)))
        yield alone(name, long, exact.rope(long, cos, sin, heads, neighbours=name == "rope_pairs"), **turning)

    k, v = floats(bits, size.keys, kv_heads * each), floats(bits, size.keys, kv_heads * each)
    sinks = floats(bits, heads)
    options: dict[str, dict[str, Any]] = {"": {}, "_window": {"window": 77}, "_softcap": {"softcap": 3.0}}
    options["_sinks"] = {"sinks": sinks}
    for ending, option in options.items():
        fixed: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, **option}
        ops = [given(0, 2 * long), given(1, k), given(2, v), operation("attention", (0, 1, 2), 3, **fixed)]
        yield f"attention{ending}", Case(ops, 3, size.keys, exact.attention(2 * long, k, v, **fixed))

    for kind in GGMLType:
        m = matrix(bits, kind, 300, size.width)
        ops = [given(0, x), operation("matmul", (0,), 1, weight=m)]
        yield f"matmul_{kind.name}", Case(ops, 1, len(x), exact.matmul(wide, m))


# ---- speed


def copy(open_device: Callable[[], Device], size: Size) -> dict[str, Any]:
    """Bandwidth of copies on the device, to it and from it."""
    device = open_device()
    launches, width = Kernels(device), 1 << 14
    rows = size.copied // (4 * width)
    host = floats(stream("copy"), 1, width).repeat(rows, axis=0)
    source, to = device.alloc(host.nbytes), device.alloc(host.nbytes)
    back = np.empty_like(host)

    def on_device() -> None:
        launches.elementwise("copy", to, source, rows, width)
        device.wait()

    def rate(once: Callable[[], object], nbytes: int) -> float:
        once()
        times = list[float]()
        for _ in range(7):
            started = time.perf_counter()
            once()
            times.append(time.perf_counter() - started)
        return nbytes / median(times) / 1e9

    to_device = rate(lambda: device.write(source, host), host.nbytes)
    within = rate(on_device, 2 * host.nbytes)
    from_device = rate(lambda: device.read(to, back), host.nbytes)
    rates = {"device_gb_s": within, "to_device_gb_s": to_device, "from_device_gb_s": from_device}
    return {"bytes": host.nbytes, **rates, "holds": bool((back == host).all())}


def throughput(backend: DenseBackend, native: DenseBackend, size: Size, copied: dict[str, Any]) -> dict[str, Any]:
    """Experts a second, by type."""
    found = dict[str, Any]()
    for name in size.types:
        kind = GGMLType[name]
        theirs = asdict(measure(native, size.seconds, type=kind, layer_bytes=size.layer_bytes))
        ours = asdict(measure(backend, size.seconds, type=kind, layer_bytes=size.layer_bytes))
        device = copied.get("device_gb_s")
        ours["decode_of_copy"] = ours["decode_gb_s"] / device if device else None
        found[name] = {"backend": ours, "native": theirs}
    return {**found, "holds": True}


# ---- a swarm


def swarm(name: str, size: Size, workers: str, *, is_one_class: bool) -> dict[str, Any]:
    """Answers of the demo model, with the experts in worker processes."""
    alone = generate(size, "0")
    if "refused" in alone:
        return {**alone, "holds": False}
    asked = {"one_class": f"{name}:1,native:1"} if is_one_class else {}
    asked["mixed"] = workers
    runs = {which: one_run(size, some, alone, must_equal=which == "one_class") for which, some in asked.items()}
    return {"ids": alone["ids"], "runs": runs, "holds": all(run["holds"] for run in runs.values())}


def one_run(size: Size, workers: str, alone: dict[str, Any], *, must_equal: bool) -> dict[str, Any]:
    """One answer beside that of a single process."""
    found = generate(size, workers)
    if "refused" in found:
        return {"asked": workers, **found, "holds": False}
    ids, logits = found["ids"] == alone["ids"], found["logits_sha256"] == alone["logits_sha256"]
    kept = ("name", "backend", "class", "calls", "seconds")
    all_worked = all(worker["calls"] and not worker["failures"] for worker in found["workers"])
    return {
        "asked": workers,
        "workers": [{key: worker[key] for key in kept} for worker in found["workers"]],
        "timings": found["timings"],
        "equal_ids": ids,
        "equal_logits": logits,
        "holds": all_worked and ids and (logits or not must_equal),
    }


def generate(size: Size, workers: str) -> dict[str, Any]:
    """What `backbone generate --json` prints, or the line that it refused with."""
    # Settings of whoever runs this have no say, but for the choice of a device.
    kept = {opencl_devices.DEVICE, opencl_devices.LIBRARY, cuda.DEVICE}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("EXPERTSWARM_") or k in kept}
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-P", "-m", "backbone", "generate", "-m", str(DEMO), "--json", "--digest"]
    command += ["--backend", "native", "--workers", workers, "-n", str(size.tokens), PROMPT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        return {"refused": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- all of it


def guarded(section: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A section, or how it failed: the others are still of use."""
    try:
        return section()
    except Exception as error:  # whatever a device or its driver does
        return {"error": one_line(error), "holds": False}


def machine(backend: DenseBackend, native: DenseBackend) -> dict[str, Any]:
    """What the numbers were measured with."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "backend": backend.name,
        "device": backend.device,
        "memory_bytes": backend.memory_bytes,
        "cpu": cpu_model(),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),
        "numeric_class": str(backend.numeric_class),
        "native_class": str(native.numeric_class),
        "engine_sha256": engine_sha256(),
        "versions": versions,
    }


def report(name: str, size: Size, workers: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every section. BackendUnavailable when there is no such device, or no native backend to compare with."""
    started = time.perf_counter()
    backend, native = make_backend(name), make_backend("native")
    found: dict[str, Any] = {"pass": False, "quick": size is QUICK, "seconds": 0.0, "machine": machine(backend, native)}
    is_one_class = backend.numeric_class == native.numeric_class
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "experts": lambda: experts(backend, native, size),
        "operations": lambda: operations(backend, native, size),
        "copy": lambda: copy(OPEN[name], size),
        "throughput": lambda: throughput(backend, native, size, found["copy"]),
        "swarm": lambda: swarm(name, size, workers, is_one_class=is_one_class),
    }
    for section, run in sections.items():
        progress(section)
        found[section] = guarded(run)
    found["pass"] = all(found[section]["holds"] for section in sections)
    found["seconds"] = round(time.perf_counter() - started, 1)
    return found


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=sorted(OPEN), required=True)
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the object there")
    parser.add_argument("--quick", action="store_true", help="small shapes and little measuring")
    parser.add_argument("--workers", metavar="LIST", help="of the mixed swarm (default BACKEND:1,native:1,numpy:1)")
    args = parser.parse_args()
    workers = args.workers or f"{args.backend}:1,native:1,numpy:1"
    size = QUICK if args.quick else Size()
    try:
        found = report(args.backend, size, workers, lambda section: print(f"{section} ...", file=sys.stderr))
    except KernelError as error:
        print(f"device.py: error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(found, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
