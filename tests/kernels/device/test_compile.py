"""The checks of device sources find what they are for, in a sample; and what is required is not skipped."""

from __future__ import annotations

from collections.abc import Callable

import device_checks
import pytest
from device_checks import CUDA_TARGETS, HIP_TARGETS, Refused, need
from device_sample import BESIDE, CAST_DOUBLE, DEFINES, DOUBLE, HALF, NO_BARRIER, NO_SEMICOLON, SOURCE, with_fault

from kernels.device.opencl_devices import F16_EXTENSION
from kernels.device.sources import Program, all_programs

#: Each compiler's check of a text, by its word.
COMPILERS: dict[str, tuple[str, Callable[[str], None]]] = {
    **{f"nvrtc {t}": ("nvrtc", lambda s, t=t: device_checks.nvrtc(s, DEFINES, t)) for t in CUDA_TARGETS},
    **{f"hip {t}": ("hip", lambda s, t=t: device_checks.hip(s, DEFINES, t)) for t in HIP_TARGETS},
    "opencl c": ("clang", lambda s: device_checks.opencl_c(s, DEFINES)),
}

#: `turn` over rows of 40 columns: of the two groups of a row one is not full.
RUN = """
import sys
import numpy as np
from device_sample import DEFINES
from kernels.device.opencl_ctypes import open_device

device = open_device(environ={})
module = device.build(sys.argv[1], DEFINES)
x, y = np.arange(80, dtype=np.float32), np.empty(80, np.float32)
given, made = device.alloc(x.nbytes), device.alloc(y.nbytes)
device.write(given, x)
device.launch(module, "turn", (2, 2), 32, [given, made, np.int32(40), np.float32(2)])
device.read(made, y)
print(y[:3])
"""


@pytest.mark.parametrize("name", COMPILERS)
def test_a_sound_source_compiles(name: str) -> None:
    word, check = COMPILERS[name]
    need(word)
    check(SOURCE)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_syntax_error_is_found_where_it_is(name: str) -> None:
    word, check = COMPILERS[name]
    need(word)
    line = with_fault(NO_SEMICOLON).splitlines().index("  BARRIER()") + 1
    with pytest.raises(Refused, match=rf"[(:]{line}\b.*error|[(:]{line + 1}\b.*error"):
        check(with_fault(NO_SEMICOLON))


@pytest.mark.parametrize("fault", [DOUBLE, CAST_DOUBLE, HALF], ids=["double", "cast double", "half"])
def test_opencl_c_without_extensions_has_neither_double_nor_half(fault: tuple[str, str]) -> None:
    need("clang")
    with pytest.raises(Refused, match=r"cl_khr_fp64|double|half"):
        device_checks.opencl_c(with_fault(fault), DEFINES)


def compile_with(word: str, program: Program, *extensions: str) -> None:
    need(word)
    if word == "nvrtc":
        for target in CUDA_TARGETS:
            device_checks.nvrtc(program.source, {**program.defines, "EXACT_DIVIDE": "1"}, target)
    elif word == "hip":
        for target in HIP_TARGETS:
            device_checks.hip(program.source, {**program.defines, "EXACT_DIVIDE": "1"}, target)
    else:
        device_checks.opencl_c(program.source, program.defines, *extensions)


@pytest.mark.parametrize("program", list(all_programs()), ids=lambda p: p.name)
@pytest.mark.parametrize("word", ["nvrtc", "hip", "clang"])
def test_every_program_compiles_everywhere(word: str, program: Program) -> None:
    compile_with(word, program)


@pytest.mark.parametrize("program", list(all_programs("f16")), ids=lambda p: p.name)
@pytest.mark.parametrize("word", ["nvrtc", "hip", "clang"])
def test_every_program_with_f16_sums_compiles_where_there_is_f16(word: str, program: Program) -> None:
    compile_with(word, program, F16_EXTENSION)
    if word == "clang":
        with pytest.raises(Refused, match="half"):
            device_checks.opencl_c(program.source, program.defines)


#: Small cases of every kernel, held to native's bits, with groups that are not full and lanes that are not filled.
EVERY_KERNEL = """
import numpy as np
from attention_kit import Case, program_of
from native_kit import PLAIN_ROPE, bound, given, native, operation, result, rows_of, run, same_bits, weights
from kernels.device.backend import DeviceBackend
from kernels.device.opencl_ctypes import open_device
from kernels.formats import GGMLType
from kernels.interface import ExpertWeights, Options

random = np.random.default_rng(0)
device, cpu = DeviceBackend("opencl", open_device(environ={}), Options()), native()
assert device.numeric_class == cpu.numeric_class
for kind, width in ((GGMLType.Q4_K, 256), (GGMLType.Q5_0, 32), (GGMLType.F16, 40)):
    held = {
        e: ExpertWeights(
            gate=weights(kind, 10, width, random),
            up=weights(kind, 10, width, random),
            down=weights(GGMLType.F32, width, 10, random),
            activation="silu",
        )
        for e in (0, 2)
    }
    x = random.standard_normal((3, width)).astype(np.float32)
    for pairs in ([[0, 2]], [[0, 0], [1, 0], [2, 0], [0, 2]]):
        pairs = np.array(pairs, np.int32)
        same_bits(device.load(held).rows(x, pairs), cpu.load(held).rows(x, pairs))
    scores = operation("matmul", (0,), (1,), weight=weights(kind, 3, width, random))
    table = weights(kind, 9, width, random)
    banks = {each: each.load(held | {1: held[0]}) for each in (device, cpu)}
    def program(each):
        return [
            operation("embed", (), (0,), weight=table),
            operation("rms_norm", (0,), (0,), weight=np.ones(width, np.float32), eps=1e-6),
            operation("rope", (0,), (0,), **PLAIN_ROPE | {"dimensions": 4, "heads": 4}),
            operation("silu", (0,), (0,)),
            scores,
            operation("softmax", (1,), (1,)),
            operation("top_k", (1, -1), (2,), count=2, layer=0),
            operation("normalize", (2,), (2,), on_weights=True, layer=0),
            operation("experts", (0, 2), (3,), bank=lambda: banks[each], outputs=width, layer=0),
            operation("split", (3,), (4, 5), widths=(8, width - 8)),
            operation("last", (4,), (4,)),
        ]
    for slot in (0, 3, 4):
        same_bits(result(program(device), 5, slot, device), result(program(cpu), 5, slot, cpu))
case = Case(keys=35, width=20, window=9, sinks=True, softcap=4.0)
operations, expected, _ = program_of(case, cpu)
ours = bound(operations, device)
same_bits(
    run(ours, operations, rows_of(35, ours.sequence()), 3), run(expected, operations, rows_of(35, expected.sequence()), 3)
)
print("sound")
"""


def test_no_kernel_races_or_leaves_its_memory() -> None:
    need("oclgrind")
    assert device_checks.oclgrind(EVERY_KERNEL).strip() == "sound"


def test_oclgrind_runs_a_sound_kernel() -> None:
    need("oclgrind")
    # Column 8 of the second group lies beyond the row: its partner was never stored, so only sound columns are shown.
    assert device_checks.oclgrind(RUN, SOURCE).strip() == "[62.75 60.75 58.75]"


@pytest.mark.parametrize(
    ("fault", "found"), [(NO_BARRIER, "data race"), (BESIDE, "Invalid write")], ids=["no barrier", "beside"]
)
def test_oclgrind_finds_faults_that_results_may_not_show(fault: tuple[str, str], found: str) -> None:
    need("oclgrind")
    with pytest.raises(Refused, match=found):
        device_checks.oclgrind(RUN, with_fault(fault))


def test_oclgrind_reports_statements_that_fail() -> None:
    need("oclgrind")
    with pytest.raises(Refused, match="does not compile"):
        device_checks.oclgrind(RUN, with_fault(NO_SEMICOLON))


def test_a_check_that_is_required_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "lacks", lambda word: f"there is no {word}")
    monkeypatch.setenv("TESTS_REQUIRE", "gcc hip")
    with pytest.raises(AssertionError, match="required here: there is no hip"):
        need("hip")
    with pytest.raises(pytest.skip.Exception):
        need("nvrtc")
