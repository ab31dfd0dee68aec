"""The checks of device sources find what they are for, in a sample; and what is required is not skipped."""

from __future__ import annotations

from collections.abc import Callable

import device_checks
import pytest
from device_checks import CUDA_TARGETS, HIP_TARGETS, Refused, need
from device_sample import BESIDE, CAST_DOUBLE, DEFINES, DOUBLE, HALF, NO_BARRIER, NO_SEMICOLON, SOURCE, with_fault

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
