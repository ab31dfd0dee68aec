"""The GGUF reader: right files read as the `gguf` package reads them, wrong ones refused with their numbers."""

from __future__ import annotations

import hashlib
import os
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import tinygguf as t
from shared_data import SHARED, needs_shared
from tinygguf import Tiny, small

from kernels.errors import GGUFError
from kernels.formats import GGMLType
from kernels.gguf import open_gguf
from kernels.gguf_header import MAX_KEYS, MAX_TENSORS
from kernels.gguf_values import MAX_STRINGS


def refusal(path: Path) -> str:
    with pytest.raises(GGUFError) as raised:
        open_gguf(path)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(path.parent))
    return message.removeprefix(f"{path}: ")


def same_as_oracle(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        fields = {k: f for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            ours = file.metadata[key]
            theirs = field.contents()
            if isinstance(theirs, list):
                assert list(ours) == theirs
            else:
                assert ours == theirs
                assert type(ours) is type(theirs)
        assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
        for tensor in oracle.tensors:
            info = file.tensors[tensor.name]
            assert int(info.type) == int(tensor.tensor_type)
            assert info.dims == tuple(int(d) for d in tensor.shape)
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
            assert file.data(tensor.name).tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_a_small_file(tmp_path: Path, version: int) -> None:
    tiny = small()
    tiny.version = version
    path = tiny.write(tmp_path / "tiny.gguf")
    same_as_oracle(path)
    with open_gguf(path) as file:
        assert file.metadata["list.strings"][2] == "Ġü"
        assert file.metadata["list.strings"][-1] == "🙂"
        assert file.metadata["list.strings"][1:3] == ["", "Ġü"]
        with pytest.raises(IndexError):
            file.metadata["list.strings"][4]
        view = file.data("q.weight")
        assert not view.flags.writeable
        assert np.array_equal(np.concatenate([file.expert_data("q.weight", e) for e in range(2)]), view)
        with pytest.raises(IndexError, match="experts 0 to 1, not 2"):
            file.expert_data("q.weight", 2)
    assert view[0] == tiny.data[64]  # a view outlives its file


SLOW_FOR_THE_ORACLE = {"ggml-vocab-llama-bpe.gguf", "ggml-vocab-qwen2.gguf"}


@needs_shared
def test_real_files() -> None:
    assert SHARED is not None
    paths = [path for path in sorted(SHARED.glob("**/*.gguf")) if path.name not in SLOW_FOR_THE_ORACLE]
    assert len(paths) > 20
    for path in paths:
        same_as_oracle(path)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW_FOR_THE_ORACLE))
def test_real_large_vocabularies(name: str) -> None:
    assert SHARED is not None
    same_as_oracle(SHARED / "golden" / "tokenizers" / name)


def test_a_large_vocabulary_opens_at_once(tmp_path: Path) -> None:
    size = 262_144  # Gemma's
    tiny = Tiny().key("tokens", t.ARRAY, (t.STRING, [f"▁{i}" for i in range(size)]))
    path = tiny.key("scores", t.ARRAY, (t.F32, [-float(i) for i in range(size)])).write(tmp_path / "vocab.gguf")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with open_gguf(path) as file:
            seconds.append(time.perf_counter() - start)
        assert len(file.metadata["tokens"]) == len(file.metadata["scores"]) == size
        assert file.metadata["tokens"][-1] == f"▁{size - 1}"
        assert file.metadata["scores"][-1] == 1 - size
    assert min(seconds) < 0.5  # measured: 0.04


def test_alignment_is_honoured(tmp_path: Path) -> None:
    tiny = Tiny(alignment=128).key("general.alignment", t.U32, 128)
    same_as_oracle(tiny.tensor("a", (3,), 0, b"x" * 12).tensor("b", (3,), 0, b"y" * 12).write(tmp_path / "a.gguf"))


def test_a_file_without_tensors(tmp_path: Path) -> None:
    with open_gguf(Tiny().key("general.architecture", t.STRING, "v").write(tmp_path / "v.gguf")) as file:
        assert not file.tensors
        assert file.metadata == {"general.architecture": "v"}


def one_tensor(dims: tuple[int, ...] = (4,), type_id: int = 0, offset: int = 0, data: bytes = b"\0" * 64) -> Tiny:
    return Tiny(tensors=[("w", dims, type_id, offset)], data=data)


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (Tiny(magic=b"GGML"), "the file begins with b'GGML', not b'GGUF'; this is no GGUF file"),
        (Tiny(version=1), "GGUF version 1 is not supported, versions 2 and 3 are; convert the model again"),
        (Tiny(version=4), "GGUF version 4 is not supported, versions 2 and 3 are; convert the model again"),
        (Tiny(version=3 << 24), "the file is big-endian; convert it to a little-endian one"),
        (Tiny(key_count=1 << 60), "the number of keys is 1152921504606846976, which need 14987979559889010688 bytes or more at 24, and the file ends at 32; it is damaged"),
        (Tiny(tensor_count=1 << 60), "the number of tensors is 1152921504606846976, which need 36893488147419103232 bytes or more at 24, and the file ends at 32"),
        (Tiny().key("a", t.U32, 1).key("a", t.U32, 2), "the key 'a' comes twice"),
        (Tiny().key(b"\xff", t.U32, 1), "key 0 of 1 at byte 32 is not UTF-8"),
        (Tiny().key("a", t.STRING, b"\xff"), "the value of 'a' at byte 45 is not UTF-8"),
        (Tiny(keys=[("a", struct.pack("<I", 13))]), "'a' has the unknown value type 13"),
        (Tiny(keys=[("a", struct.pack("<IIQ", 9, 9, 0))]), "'a' is an array of arrays, which is not supported"),
        (Tiny(keys=[("a", struct.pack("<IIQ", 9, 99, 0))]), "'a' is an array of the unknown value type 99, which is not supported"),
        (
            Tiny(keys=[("a", struct.pack("<IIQ", 9, 4, 1 << 61))]),
            f"the length of 'a' is {1 << 61}, which need {1 << 63} bytes or more at 49, and the file ends at 64; it is damaged",
        ),
        (
            Tiny(keys=[("a", struct.pack("<IIQQ", 9, 8, 1, 1 << 50))]),
            f"string 0 of 1 of 'a' reaches to {(1 << 50) + 57}, and the file ends at 64; it is damaged",
        ),
        (Tiny(keys=[("a", struct.pack("<IIQQ", 9, 8, 1, 8))]), "string 0 of 1 of 'a' reaches to 65, and the file ends at 64"),
        (
            Tiny(keys=[("a", struct.pack("<IQ", 8, 1 << 63))]),
            "the value of 'a' needs 9223372036854775808 bytes at 45, and the file ends at 64; it is damaged",
        ),
        (Tiny().key("general.alignment", t.U32, 24), "general.alignment is 24; it must be a power of two"),
        (Tiny().key("general.alignment", t.U32, 0), "general.alignment is 0; it must be a power of two"),
        (Tiny().key("general.alignment", t.I32, -32), "general.alignment is -32; it must be a power of two"),
        (Tiny().key("general.alignment", t.STRING, "x"), "general.alignment must be a whole number"),
        (Tiny().key("general.alignment", t.BOOL, True), "general.alignment must be a whole number"),
        (Tiny().key("general.alignment", t.ARRAY, (t.U32, [32] * 500)), "general.alignment must be a whole number"),
        (one_tensor(dims=()), "tensor w has 0 dimensions; from 1 to 4 are allowed"),
        (one_tensor(dims=(1,) * 5), "tensor w has 5 dimensions; from 1 to 4 are allowed"),
        (one_tensor(dims=(4, 0)), "tensor w has dimensions 4 x 0; none may be 0"),
        (one_tensor(type_id=16), "tensor w has type 16 (IQ2_XXS), which is not supported; get the model in one of F32, F16, Q4_0, "),
        (one_tensor(type_id=31), "tensor w has type 31 (Q4_0_4_4), which is not supported; get the model in one of F32, "),
        (one_tensor(type_id=99), "tensor w has type 99 (unknown to us), which is not supported; get the model in one of F32, "),
        (one_tensor((100,), 12), "tensor w: row length 100 is no multiple of Q4_K's block of 256 values"),
        (one_tensor(offset=8), "tensor w begins at 8, no multiple of the alignment 32"),
        (one_tensor((17,)), "tensor w: its 68 bytes at 64 reach past the end of the file at 128; it is damaged or cut off"),
        (
            one_tensor((1 << 62, 1 << 62, 4, 4)),
            f"tensor w: its {1 << 130} bytes at 96 reach past the end of the file at 160; it is damaged or cut off",
        ),
        (one_tensor(offset=1 << 63), f"tensor w: its 16 bytes at {(1 << 63) + 64} reach past the end of the file at 128"),
        (Tiny(tensors=[("w", (4,), 0, 0), ("w", (4,), 0, 32)], data=b"\0" * 64), "the tensor w comes twice"),
        (Tiny(tensors=[("v", (16,), 0, 0), ("w", (4,), 0, 32)], data=b"\0" * 64), "the tensors v and w overlap: the one ends at 160 and the other begins at 128"),
        (
            Tiny(tensors=[("v", (8,), 0, 0), ("w", (4,), 0, 31)], data=b"\0" * 64, alignment=1).key("general.alignment", t.U32, 1),
            "the tensors v and w overlap: the one ends at 155 and the other begins at 154",
        ),
        (Tiny(tensors=[(b"\xfe", (4,), 0, 0)], data=b"\0" * 64), "the name of tensor 0 of 1 at byte 32 is not UTF-8"),
        (Tiny(keys=[("a\n\x1b[31m", struct.pack("<I", 77))]), r"'a\n\x1b[31m' has the unknown value type 77"),
        (Tiny(keys=[("k" * 5000, struct.pack("<I", 77))]), f"'{'k' * 100}...' has the unknown value type 77"),
        (Tiny(tensors=[("a\nb", (4,), 16, 0)], data=b"\0" * 64), r"tensor a\nb has type 16 (IQ2_XXS)"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, tiny: Tiny, message: str) -> None:
    assert refusal(tiny.write(tmp_path / "bad.gguf")).startswith(message)


def test_a_string_in_a_list_that_is_not_utf8_is_told_when_it_is_read(tmp_path: Path) -> None:
    path = Tiny().key("a", t.ARRAY, (t.STRING, [b"ok", b"\xff"])).write(tmp_path / "a.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match="'a': string 1 is not UTF-8"):
        list(file.metadata["a"])


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.gguf") == "cannot be read: No such file or directory"
    assert refusal(tmp_path / "a\0b") == "cannot be read: embedded null byte"
    assert refusal(tmp_path) == "is a folder; name a .gguf file"
    (tmp_path / "empty.gguf").touch()
    assert refusal(tmp_path / "empty.gguf") == "the file is empty; get it again"
    os.mkfifo(tmp_path / "pipe.gguf")
    assert refusal(tmp_path / "pipe.gguf") == "is no regular file; name a .gguf file"


def test_truths_are_truths_whatever_their_byte(tmp_path: Path) -> None:
    path = Tiny(keys=[("a", struct.pack("<IIQ", 9, 7, 3) + b"\0\1\2")]).write(tmp_path / "a.gguf")
    with open_gguf(path) as file:
        assert file.metadata["a"].dtype == np.bool_
        assert file.metadata["a"].tobytes() == b"\0\1\1"


def test_a_closed_model(tmp_path: Path) -> None:
    path = small().write(tmp_path / "tiny.gguf")
    file = open_gguf(path)
    view = file.data("a.weight")
    before = view.tobytes()
    file.close()
    assert view.tobytes() == before
    assert list(file.metadata["list.floats"]) == [0.5, -1.0]
    with pytest.raises(ValueError, match=r"tiny\.gguf is closed"):
        file.data("a.weight")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the kernel does not list what is mapped")
def test_a_file_is_unmapped_with_its_last_view(tmp_path: Path) -> None:
    path = small().write(tmp_path / "mapped-once.gguf")

    def is_mapped() -> bool:
        return path.name in Path("/proc/self/maps").read_text()

    file = open_gguf(path)
    view = file.data("a.weight")
    file.close()
    assert is_mapped()
    del view
    assert not is_mapped()
    assert len(file.metadata["list.strings"]) == 4


def test_experts_are_the_third_dimension(tmp_path: Path) -> None:
    with (
        open_gguf(small().write(tmp_path / "tiny.gguf")) as file,
        pytest.raises(ValueError, match=r"a\.weight has 2 dimensions; experts are the third of three"),
    ):
        file.expert_data("a.weight", 0)


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    rows = (1 << 20) + 1
    path = Tiny(tensors=[("wide", (4096, rows), 0, 0)]).write(tmp_path / "sparse.gguf")
    os.truncate(path, path.stat().st_size + 4096 * 4 * rows)
    with open_gguf(path) as file:
        assert file.tensors["wide"].dims == (4096, rows)
        assert file.tensors["wide"].type is GGMLType.F32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (struct.pack("<IQ", 8, 1 << 35), f"the value of 'a' needs {1 << 35} bytes at 45, and metadata and tensor table may take"),
        (struct.pack("<IIQ", 9, 7, 1 << 36), f"the length of 'a' is {1 << 36}, which need {1 << 36} bytes or more at 49, and metadata"),
        (struct.pack("<IIQ", 9, 8, 1 << 31), f"the length of 'a' is {1 << 31}, which need {1 << 34} bytes or more at 49, and metadata"),
        (struct.pack("<IIQ", 9, 8, MAX_STRINGS + 1), f"the length of 'a' is {MAX_STRINGS + 1}; no model has more than {MAX_STRINGS}"),
    ],
)  # fmt: skip
def test_the_head_of_a_sparse_file_costs_nothing(tmp_path: Path, body: bytes, message: str) -> None:
    """A terabyte of zeros holds strings without end; they are refused before anything of their size is made."""
    path = Tiny(keys=[("a", body)]).write(tmp_path / "sparse.gguf")
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        assert refusal(path).startswith(message)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_strings_are_counted_over_all_lists(tmp_path: Path) -> None:
    path = Tiny(keys=[("a", struct.pack("<IIQ", 9, 8, 5) + bytes(40)), ("b", struct.pack("<IIQ", 9, 8, MAX_STRINGS - 4))]).write(tmp_path / "s.gguf")  # fmt: skip
    os.truncate(path, 1 << 30)
    assert refusal(path).startswith(f"the length of 'b' is {MAX_STRINGS - 4}; no model has more than {MAX_STRINGS - 5}")


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (Tiny(key_count=MAX_KEYS + 1), f"the number of keys is {MAX_KEYS + 1}; no model has more than {MAX_KEYS}"),
        (Tiny(tensor_count=MAX_TENSORS + 1), f"the number of tensors is {MAX_TENSORS + 1}; no model has more than"),
    ],
)
def test_keys_and_tensors_beyond_any_model(tmp_path: Path, tiny: Tiny, message: str) -> None:
    path = tiny.write(tmp_path / "many.gguf")
    os.truncate(path, 1 << 30)
    assert refusal(path).startswith(message)


def test_what_is_released_leaves_the_memory_of_the_process_and_reads_the_same(tmp_path: Path) -> None:
    path, data = tmp_path / "big.gguf", np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
    Tiny().tensor("a", (2 << 20,), 0, data.tobytes()).tensor("b", (16,), 0, bytes(range(64))).write(path)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with open_gguf(path) as file:
        first = hashlib.sha256(file.data("a")).digest()
        before = resident()
        file.release("a")
        assert before - resident() > 6 << 20
        assert hashlib.sha256(file.data("a")).digest() == first == hashlib.sha256(data).digest()
        file.release("b")
        assert file.data("b").tobytes() == bytes(range(64))
    file.release("a")  # of a file that is closed there is nothing to release
