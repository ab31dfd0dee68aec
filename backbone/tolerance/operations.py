"""Level 1: single operations and experts of a model, each side against float64, at several widths.

Inputs come of random bits under a seed; weights are the model's own. Legend: T rows, W width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernels import exact
from kernels.errors import KernelError
from kernels.formats import GGMLType
from kernels.interface import F32, DenseBackend, Operation
from kernels.matrix import Matrix
from kernels.state import Rows
from kernels.synthetic import floats, stream

from ..model import BoundModel
from .measures import F64, Floats, growth
from .sides import Side

WIDTHS = (1, 8, 9, 256)
EPS = 1e-6
OUTLIER_EVERY, OUTLIER_SIZE = 256, 8.0  #: one of so many columns is so many times the usual, as hidden rows have it
MOST_ROWS = 4096  #: of a matrix, of which more would measure the same once more
MERGED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """What is computed of rows x [T, W], and what that would be without rounding."""

    name: str
    x: F32  # [max(WIDTHS), W]
    exact: F64
    compute: Callable[[Side, F32], Floats | None]  #: None where a side cannot


def hidden_rows(seed: int, name: str, count: int, width: int) -> F32:
    """Rows [count, width] like those that a normalised residual has: near normal, with a few large columns."""
    bits = stream("tolerance", seed, name)
    x = floats(bits, count, width)
    large = (bits.random_raw(-(-width // OUTLIER_EVERY)) % width).astype(np.intp)
    x[:, large] *= np.float32(OUTLIER_SIZE)
    return x


def cases(model: BoundModel, seed: int, *sides: Side) -> Iterator[Case]:
    """Of every kind that the model has; of experts one that these sides are about."""
    yield from _products(model, seed)
    width = next(iter(model.gguf.tensors[name].dims[0] for name in _matrices(model).values()))
    x, weight = hidden_rows(seed, "norm", max(WIDTHS), width), 1 + 0.1 * hidden_rows(seed, "weight", 1, width)[0]
    yield _case(
        "rms_norm", x, exact.rms_norm(x, weight, EPS), [_operation("rms_norm", (0,), 1, weight=weight, eps=EPS)]
    )
    yield _case("softmax", x, exact.softmax(x), [_operation("softmax", (0,), 0)])
    gate = x.astype(np.float64)
    swiglu = [_operation("copy", (0,), 1), _operation("silu", (1,), 1), _operation("mul", (1, 0), 1)]
    yield _case("swiglu", x, exact.ELEMENTWISE["silu"](gate) * gate, swiglu)
    for name in sorted(exact.ELEMENTWISE.keys() & {step.op for step in model.program.steps}):
        yield _case(name, x, exact.ELEMENTWISE[name](gate), [_operation(name, (0,), 0)])
    yield from _experts(model, seed, sides)


def _matrices(model: BoundModel) -> dict[str, str]:
    """One tensor of each quant type that the dense path multiplies by: the largest."""
    found = dict[str, str]()
    names = {step.tensors["weight"] for step in model.program.steps if step.op == "matmul"}
    for name in sorted(names, key=lambda name: (-model.gguf.tensors[name].nbytes, name)):
        found.setdefault(model.gguf.tensors[name].type.name, name)
    return found


def _products(model: BoundModel, seed: int) -> Iterator[Case]:
    for kind, name in sorted(_matrices(model).items()):
        whole = model.matrix(name)
        weight = Matrix(whole.type, min(whole.rows, MOST_ROWS), whole.cols, whole.data[:MOST_ROWS])
        x = hidden_rows(seed, name, max(WIDTHS), weight.cols)
        operations = [_operation("matmul", (0,), 1, weight=weight)]
        yield _case(f"matmul {kind} ({name})", x, exact.matmul(x.astype(np.float64), weight), operations)


def _about(model: BoundModel, layer: int, sides: Sequence[Side]) -> list[int]:
    """Experts of a layer that all sides are about; another one in each layer comes first."""
    count = model.expert_count(layer)
    order = [(layer + i) % count for i in range(count)]
    return [e for e in order if all(side.holds is None or e in side.holds.get(layer, ()) for side in sides)]


def _computing(sides: Sequence[Side]) -> Callable[[int, int], set[str]]:
    """Who computes an expert (layer, expert): its class of each placement, and its worker where that is one alone."""
    swarms = [side.session.swarm for side in sides if side.session is not None and side.session.swarm is not None]
    known = [(str(i), swarm.class_map, swarm.live()) for i, swarm in enumerate(swarms)]

    def who(layer: int, expert: int) -> set[str]:
        found = set[str]()
        for side, classes, workers in known:
            holders = [worker.name for worker in workers if expert in worker.holds.get(layer, ())]
            found.add(f"{side} class {classes.of(layer, expert)}")
            found.update(f"{side} worker {name}" for name in holders if len(holders) == 1)
        return found

    return who


def _experts(model: BoundModel, seed: int, sides: Sequence[Side]) -> Iterator[Case]:
    """Of each kind, by quant types, shape and activation, one expert; of a placement one of each class and worker."""
    seen, who = dict[tuple[Any, ...], set[str]](), _computing(sides)
    for layer, names in model.expert_tensors.items():
        types = tuple(model.slice_type(names[part]).name for part in ("gate", "up", "down"))
        (hidden, width), activation = model.slice_shape(names["gate"]), model.activation(layer)
        kind = (*types, hidden, width, activation)
        name = f"experts {'/'.join(dict.fromkeys(types))} {width}x{hidden} {activation}"
        for expert in _about(model, layer, sides):
            if kind in seen and who(layer, expert) <= seen[kind]:
                continue
            seen.setdefault(kind, set()).update(who(layer, expert))
            yield _of_expert(model, seed, f"{name} (layer {layer}, expert {expert})", layer, expert, width)


def _of_expert(model: BoundModel, seed: int, name: str, layer: int, expert: int, width: int) -> Case:
    def compute(side: Side, rows: F32) -> Floats | None:
        found = side.rows(layer, rows, np.full((len(rows), 1), expert, np.int32))
        return None if found is None else found[:, 0]

    x = hidden_rows(seed, f"expert {layer}", max(WIDTHS), width)
    return Case(name, x, exact.expert_rows(model.expert(layer, expert), x), compute)


def _operation(name: str, inputs: tuple[int, ...], out: int, **constants: Any) -> Operation:
    return Operation(name=name, inputs=inputs, outputs=(out,), constants=constants, layer=0)


def _case(name: str, x: F32, wanted: F64, operations: Sequence[Operation]) -> Case:
    def compute(side: Side, rows: F32) -> Floats | None:
        return None if side.backend is None else run(side.backend, operations, rows)

    return Case(name, x, wanted, compute)


def run(backend: DenseBackend, operations: Sequence[Operation], x: F32) -> Floats:
    """What the last of the operations leaves, of x [T, W] in slot 0."""
    data = np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1)
    table = Matrix.of(GGMLType.F32, len(x), x.shape[1], data)  # an embedding whose token t is row t
    program = backend.program([_operation("embed", (), 0, weight=table), *operations], [1, 1])
    at = np.arange(len(x))
    began = program.begin(Rows(at.astype(np.int32), at.astype(np.int64), [program.sequence()] * len(x), at))
    try:
        began.run(0, 1 + len(operations))
        return began.values(operations[-1].outputs[0]).copy()
    finally:
        began.close()


# ---- what is found


def _bits(rows: Floats) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def _found(rows: Floats, wanted: F64) -> dict[str, Any]:
    # JSON has no infinity: a row that is not finite gives null.
    error = asdict(exact.error_of(rows.astype(np.float64), wanted))
    return {name: value if math.isfinite(value) else None for name, value in error.items()} | {"sha256": _bits(rows)}


def _of_side(side: Side, case: Case) -> dict[str, Any] | None:
    """By width; None where the side cannot compute it."""
    found, widest = dict[str, Any](), case.compute(side, case.x)
    if widest is None:
        return None
    for width in WIDTHS:
        rows = widest if width == len(widest) else case.compute(side, np.ascontiguousarray(case.x[:width]))
        if rows is None:
            return None
        same = _bits(rows) == _bits(widest[:width])
        found[str(width)] = _found(rows, case.exact[:width]) | {"equals_wider": same}
    return found


def measure(case: Case, a: Side, b: Side) -> dict[str, Any]:
    """Both sides' errors by width, and whether their bits are the same. A side that fails says so."""
    found: dict[str, Any] = {"case": case.name, "is_expert": case.name.startswith("experts ")}
    for name, side in (("a", a), ("b", b)):
        try:
            found[name] = _of_side(side, case)
        except KernelError as error:
            found[name], found[f"{name}_failed"] = None, " ".join(str(error).split())[:300]
    both = [found[name] for name in ("a", "b")]
    found["identical"] = None not in both and all(
        both[0][width]["sha256"] == both[1][width]["sha256"] for width in map(str, WIDTHS)
    )
    return found


def merging(model: BoundModel, side: Side, seed: int) -> dict[str, Any] | None:
    """How the combine's error grows with the number of experts that are merged: by its exponent, 0.5 for sqrt(k).

    Rows of unit weight, so that each expert adds an error of its own. None without experts.
    """
    if not model.expert_tensors:
        return None
    layer, able = max(((la, _about(model, la, [side])) for la in model.expert_tensors), key=lambda of: len(of[1]))
    able = sorted(able)[:16]
    if not able:
        return None
    x = hidden_rows(seed, "merge", MERGED_ROWS, model.slice_shape(model.expert_tensors[layer]["gate"])[1])
    rows = side.rows(layer, x, np.tile(np.array(able, np.int32), (len(x), 1)))
    if rows is None:
        return None
    wanted = np.stack([exact.expert_rows(model.expert(layer, e), x) for e in able], axis=1)
    count = len(able)
    errors = np.empty((len(x), count))
    merged, truth = rows[:, 0].copy(), wanted[:, 0].copy()
    for k in range(count):
        if k:
            merged += rows[:, k]
            truth += wanted[:, k]
        errors[:, k] = np.linalg.norm(merged.astype(np.float64) - truth, axis=1)
    fit = growth(range(1, count + 1), errors)
    return {
        "layer": layer,
        "merged": list(range(1, count + 1)),
        "error": errors.mean(axis=0).tolist(),
        "exponent": None if fit is None else asdict(fit),
    }
