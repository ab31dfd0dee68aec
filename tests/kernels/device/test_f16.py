"""Products with F16 sums: a class of its own, held to an emulation that was written from its description."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import fake_cupy
import numpy as np
import pytest
from canonical import F16, F32, fma_f16, products_f16
from cuda_shim import ShimDevice
from device_kit import device_backend, needs_opencl
from native_kit import bound, f32_matrix, given, operation, result, rows_of, run, same_bits, weights
from numpy.typing import NDArray

from kernels import registry
from kernels.device import cuda, opencl, opencl_ctypes, probe
from kernels.device.backend import DeviceBackend
from kernels.device.driver import Driver
from kernels.errors import BackendUnavailable
from kernels.formats import FORMATS, GGMLType
from kernels.interface import ExpertBank, ExpertWeights, NumericClass, Options
from kernels.matrix import Matrix
from kernels.quants import dequantise

F16_SUMS = Options(accumulation="f16")
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
WIDTHS = (1, 2, 9)
#: Rows of whole runs of 256 columns; of runs that are not full; of lanes that are not filled, and of fewer than lanes.
CASES = [
    *((type_, 512) for type_ in GGMLType),
    *((type_, 352) for type_ in GGMLType if FORMATS[type_].block <= 32),
    *((type_, cols) for type_ in FLOATS for cols in (1, 31, 269)),
]
BAR = 2e-3  #: of the worst row's error in an expert


def shim() -> DeviceBackend:
    """The backend with F16 sums on the CUDA branch."""
    return device_backend("cuda-shim", "f16")


class Emulated:
    """Experts with F16 sums by the emulation; their activations are native's, which are tested elsewhere."""

    def __init__(self, experts: dict[int, ExpertWeights]) -> None:
        self._experts = {
            i: (e, *(dequantise(m.type, m.data) for m in (e.gate, e.up, e.down))) for i, e in experts.items()
        }

    def rows(self, x: F32, pairs: NDArray[np.int32]) -> F32:
        return np.concatenate([self._row(x[row : row + 1], expert) for row, expert in pairs.tolist()])

    def _row(self, x: F32, expert: int) -> F32:
        e, gate, up, down = self._experts[expert]
        g, u = (_with(products_f16(w, x), b) for w, b in ((gate, e.gate_bias), (up, e.up_bias)))
        hidden = result([given(0, g), operation(e.activation, (0,), (0,))], 1) * u
        return _with(products_f16(down, hidden), e.down_bias)


def _with(rows: F32, bias: F32 | None) -> F32:
    return rows if bias is None else rows + bias


def expert(
    type_: GGMLType, width: int, hidden: int, *, up: GGMLType | None = None, word: str = "silu", biases: bool = False
) -> ExpertWeights:
    random = np.random.default_rng(int(type_) + width)

    def bias(n: int) -> F32 | None:
        return random.standard_normal(n).astype(np.float32) if biases else None

    return ExpertWeights(
        gate=weights(type_, hidden, width, random),
        up=weights(up or type_, hidden, width, random),
        down=weights(type_, width, hidden, random),
        activation=word,
        gate_bias=bias(hidden),
        up_bias=bias(hidden),
        down_bias=bias(width),
    )


def products(backend: DeviceBackend, matrix: Matrix, x: F32) -> F32:
    """matrix times each row of x, in one batch."""
    return result([given(0, x), operation("matmul", (0,), (1,), weight=matrix)], len(x), 1, backend)


# ---- the arithmetic itself


def rounded(exact: Fraction) -> float:
    """The nearest F16, ties to even; by integers alone."""
    if not exact:
        return 0.0
    size, power = abs(exact), -24
    while size >= Fraction(2) ** (power + 11):
        power += 1
    units = size / Fraction(2) ** power
    whole = units.numerator // units.denominator
    rest = units - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    value = whole * 2.0**power
    return float("inf" if value > 65504 else value) * (1 if exact > 0 else -1)


def hard_cases() -> tuple[F16, F16, F16]:
    """Finite numbers of every size; and sums at a tie or just beside it, where rounding twice goes wrong."""
    random = np.random.default_rng(4)
    bits = random.integers(0, 1 << 16, (3, 12000)).astype(np.uint16).view(np.float16)
    a, b, c = bits[:, np.isfinite(bits).all(axis=0)]
    # c has 11 bits, its last 2^-12; the product is half of that, and what is far below F32's last bit beside it
    near = (random.integers(1024, 2048, 3000) * random.choice([-1, 1], 3000) * 2.0**-12).astype(np.float16)
    tie = (2.0**-13 * (1 + 2.0**-10 * random.integers(-1, 2, 3000))).astype(np.float16)
    far = np.array([1, -1, 1 + 2.0**-10, 1 - 2.0**-10], np.float16)[random.integers(0, 4, 3000)]
    wide = np.full(3000, 2048, np.float16)  # beside which the product's last bit is 2^-31
    tiny = (1 + 2.0**-10 * random.integers(-3, 4, 3000)).astype(np.float16)
    return (
        np.concatenate([a, tie, tiny]),
        np.concatenate([b, far, np.where(random.random(3000) < 0.5, tiny, -tiny)]),
        np.concatenate([c, near, wide]),
    )


def test_fma_rounds_once_in_the_emulation_and_on_the_shim() -> None:
    a, b, c = hard_cases()
    with np.errstate(over="ignore"):
        ours = fma_f16(a, b, c)
        product = (a.astype(np.float64) * b.astype(np.float64)).astype(np.float32)
        twice = (product + c.astype(np.float32)).astype(np.float16)
    exact = [rounded(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in np.stack([a, b, c], 1).tolist()]
    assert (ours == exact).all()
    assert (twice != exact).any()
    assert np.isinf(exact).any()
    source = """
    extern "C" __global__ __launch_bounds__(1) void fma_of(const unsigned short *a, const unsigned short *b,
                                                           const unsigned short *c, unsigned short *y, int n) {
      union { unsigned short u; _Float16 f; } v[4];
      for (int i = 0; i < n; i++) {
        v[0].u = a[i], v[1].u = b[i], v[2].u = c[i];
        v[3].f = __builtin_fmaf16(v[0].f, v[1].f, v[2].f);
        y[i] = v[3].u;
      }
    }
    """
    device, count = ShimDevice(), len(a)
    theirs = np.empty(count, np.float16)
    buffers = [device.alloc(2 * count) for _ in range(4)]
    for buffer, values in zip(buffers, (a, b, c), strict=False):
        device.write(buffer, values)
    device.launch(device.build(source, {}), "fma_of", (1, 1), 1, [*buffers, np.int32(count)])
    device.read(buffers[3], theirs)
    assert (theirs == exact).all()


# ---- bits


def test_the_known_answer_is_the_emulation_s() -> None:
    asked = probe.questions("f16")
    banks: list[tuple[ExpertBank, F32]] = [(Emulated(experts), x) for experts, x in asked]
    assert probe.digest(banks) == probe.CANONICAL["f16"]
    for experts, x in asked:
        halves = [np.abs(dequantise(m.type, m.data)) for m in (experts[0].gate, experts[0].up, experts[0].down)]
        assert all(((h > 0) & (h < 2.0**-14)).sum() > 50 for h in halves)  # a device that flushes them gives others
        assert np.abs(x[1]).max() < 2.0**-60


def test_the_class_is_found_by_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shim().numeric_class == NumericClass(name="canonical-1", accumulation="f16")
    assert registry.stand_in(shim()) is None  # no CPU has its bits
    monkeypatch.setitem(probe.CANONICAL, "f16", probe.CANONICAL["f32"])
    other = DeviceBackend("cuda", ShimDevice(), F16_SUMS).numeric_class
    assert other == NumericClass(name="cuda CUDA on this CPU (cuda_shim.h)", accumulation="f16")


@pytest.mark.parametrize(("type_", "cols"), CASES, ids=lambda v: str(getattr(v, "name", v)))
def test_products_of_every_type_and_width(type_: GGMLType, cols: int) -> None:
    random = np.random.default_rng(cols)
    matrix = weights(type_, 19, cols, random)
    x = (random.standard_normal((WIDTHS[-1], cols)) * 2.0 ** random.integers(-9, 9, (1, cols))).astype(np.float32)
    expected = products_f16(dequantise(type_, matrix.data), x)
    for width in WIDTHS:
        same_bits(products(shim(), matrix, x[:width]), expected[:width])


def test_rows_of_any_size() -> None:
    """Beyond F16's range on both sides, with F32's smallest and largest; and the sum's own end is F32's."""
    random = np.random.default_rng(2)
    matrix = weights(GGMLType.Q4_0, 9, 320, random)
    x = np.repeat(random.standard_normal((1, 320)), 8, axis=0).astype(np.float32)
    x *= np.float32([1, 2.0**-149, 2.0**-130, 2.0**-40, 2.0**40, 2.0**100, 2.0**126, 0])[:, None]
    x[5, 3] = np.float32(2.0**-100)
    ours = products(shim(), matrix, x)
    assert np.isfinite(ours).all()
    same_bits(ours, products_f16(dequantise(matrix.type, matrix.data), x))
    assert (ours[3] == ours[0] * np.float32(2.0**-40)).all()
    assert (ours[4] == ours[0] * np.float32(2.0**40)).all()
    assert (ours[7] == 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so_in_its_own_row(bad: float) -> None:
    random = np.random.default_rng(3)
    matrix, x = f32_matrix(random.uniform(0.5, 1, (9, 64)).astype(np.float32)), np.ones((3, 64), np.float32)
    x[1, 40] = bad
    ours = products(shim(), matrix, x)
    assert not np.isfinite(ours[1]).any()
    same_bits(ours[::2], products_f16(dequantise(matrix.type, matrix.data), x[::2]))
    huge = f32_matrix(np.full((9, 64), 70000, np.float32))
    assert not np.isfinite(products(shim(), huge, x[:1])).any()  # no F16: whoever takes the rows looks for that


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_expert_rows_of_every_type_and_width(type_: GGMLType) -> None:
    held = {e: expert(type_, 256, 256) for e in (0, 3)}
    ours, theirs = shim().load(held), Emulated(held)
    x = np.random.default_rng(5).standard_normal((9, 256)).astype(np.float32)
    pairs = np.array([(r, 3 * (r % 3 == 1)) for r in (4, 8, 0, 1, 7, 2, 3, 6, 5)], np.int32)
    expected = theirs.rows(x, pairs)
    for width in WIDTHS:
        same_bits(ours.rows(x, pairs[:width]), expected[:width])


@pytest.mark.parametrize("word", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("up", [None, GGMLType.F16], ids=["one type", "two types"])
def test_experts_with_every_activation_and_biases(word: str, up: GGMLType | None) -> None:
    held = {1: expert(GGMLType.F32, 45, 70, word=word, biases=True, up=up)}
    x = np.random.default_rng(6).standard_normal((3, 45)).astype(np.float32)
    pairs = np.array([(2, 1), (0, 1)], np.int32)
    for chosen in (pairs, pairs[:1]):
        same_bits(shim().load(held).rows(x, chosen), Emulated(held).rows(x, chosen))


def test_a_dense_program_sums_products_alone_in_f16() -> None:
    random = np.random.default_rng(7)
    x, matrix = random.standard_normal((4, 64)).astype(np.float32), weights(GGMLType.Q8_0, 32, 64, random)
    norm = operation("rms_norm", (0,), (0,), weight=np.ones(64, np.float32), eps=1e-6)
    operations = [given(0, x), norm, operation("matmul", (0,), (1,), weight=matrix), operation("softmax", (1,), (1,))]
    normed = result(operations[:2], 4, 0)
    expected = result(
        [given(0, products_f16(dequantise(matrix.type, matrix.data), normed)), operation("softmax", (0,), (0,))], 4
    )
    program = bound(operations, shim())
    same_bits(run(program, operations, rows_of(4, program.sequence()), 1), expected)


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_an_expert_of_2048_inputs_is_near_float64(type_: GGMLType) -> None:
    """By the emulation, whose bits are the device's: rows as long as models have them, in less time."""
    held = expert(type_, 2048, 768)
    x = np.random.default_rng(8).standard_normal((2, 2048)).astype(np.float32)
    ours = Emulated({0: held}).rows(x, np.array([[0, 0], [1, 0]], np.int32))
    gate, up, down = (dequantise(m.type, m.data).astype(np.float64) for m in (held.gate, held.up, held.down))
    g = x @ gate.T
    exact = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
    error = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 1e-5 < error.max() <= BAR


def test_rows_of_2048_on_the_device() -> None:
    held = {0: expert(GGMLType.Q4_K, 2048, 256)}
    x = np.random.default_rng(9).standard_normal((1, 2048)).astype(np.float32)
    pairs = np.zeros((1, 2), np.int32)
    same_bits(shim().load(held).rows(x, pairs), Emulated(held).rows(x, pairs))


# ---- who has it


@pytest.mark.parametrize("name", ["native", "numpy", "auto"])
def test_a_cpu_sums_in_f32_and_says_so(name: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        registry.make_backend(name, F16_SUMS)
    named = "native" if name == "auto" else name
    assert str(caught.value) == (f"{named} sums products in f32 only; f16 needs an opencl or cuda device that has F16")


def test_what_nobody_sums_in() -> None:
    with pytest.raises(BackendUnavailable, match="no accumulation 'f8'; there are f32, f16"):
        registry.make_backend("native", Options(accumulation="f8"))


@pytest.mark.parametrize("open_device", [opencl.open_device, opencl_ctypes.open_device], ids=["pyopencl", "ctypes"])
@needs_opencl()
def test_an_opencl_device_without_the_extension_says_so(open_device: Callable[[], Driver]) -> None:
    device = open_device()
    assert not device.info.has_f16  # PoCL on a CPU
    with pytest.raises(BackendUnavailable) as caught:
        DeviceBackend("opencl", device, F16_SUMS)
    assert str(caught.value) == (
        f"opencl: {device.info.name} ({device.info.driver}) has no F16 arithmetic, so that it sums products in f32 only"
    )


@pytest.mark.parametrize(
    ("capability", "is_hip", "has_f16"),
    [((5, 2), False, False), ((5, 3), False, True), ((9, 0), False, True), ((5, 2), True, True)],
)
def test_cuda_has_it_from_its_compute_capability_on(
    capability: tuple[int, int], is_hip: bool, has_f16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fake_cupy.make()
    module.cuda.runtime.capability, module.cuda.runtime.is_hip = capability, is_hip
    monkeypatch.setitem(sys.modules, "cupy", module)
    assert cuda.open_device(environ={}).info.has_f16 == has_f16


def test_no_device_without_it_is_asked_to_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that has it, the F32 class is the same as ever."""
    built = list[Any]()
    device = ShimDevice()
    build = device.build
    monkeypatch.setattr(
        device, "build", lambda source, defines: built.append((source, defines)) or build(source, defines)
    )
    DeviceBackend("cuda", device, Options())
    assert built
    assert not any("F16_SUMS" in defines or "round_rows" in source for source, defines in built)
    device._info = replace(device.info, has_f16=False)
    built.clear()
    with pytest.raises(BackendUnavailable, match="has no F16 arithmetic"):
        DeviceBackend("cuda", device, F16_SUMS)
    assert not built
