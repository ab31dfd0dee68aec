"""The table of formats against ggml's: ids, names, sizes; and lengths of rows."""

from __future__ import annotations

import gguf
import pytest

from kernels.formats import FORMATS, REFUSED, GGMLType, row_bytes


@pytest.mark.parametrize("type_", GGMLType, ids=lambda t: t.name)
def test_names_and_sizes_are_ggmls(type_: GGMLType) -> None:
    theirs = gguf.GGMLQuantizationType(int(type_))
    assert theirs.name == type_.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (FORMATS[type_].block, FORMATS[type_].nbytes)


def test_every_type_that_ggml_has_is_supported_or_named() -> None:
    ours = {int(type_): type_.name for type_ in GGMLType}
    assert not ours.keys() & REFUSED.keys()
    for theirs in gguf.GGMLQuantizationType:
        assert (ours | dict(REFUSED))[int(theirs)] == theirs.name


def test_row_bytes() -> None:
    assert row_bytes(GGMLType.F32, 3) == 12
    assert row_bytes(GGMLType.Q4_K, 512) == 288
    assert row_bytes(GGMLType.MXFP4, 0) == 0
    with pytest.raises(ValueError, match="row length 100 is no multiple of Q4_K's block of 256 values"):
        row_bytes(GGMLType.Q4_K, 100)
