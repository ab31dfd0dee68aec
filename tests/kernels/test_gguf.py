"""The GGUF reader: right files read as the `gguf` package reads them, wrong ones refused with their numbers."""

from __future__ import annotations

import os
import struct
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


@needs_shared
def test_real_files() -> None:
    assert SHARED is not None
    for path in sorted(SHARED.glob("**/*.gguf")):
        if path.stat().st_size < 3_000_000 or "vocab-gpt-2" in path.name:
            same_as_oracle(path)


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
        (Tiny(key_count=1 << 60), "the number of keys is 1152921504606846976, more than the 32 bytes of the file can hold"),
        (Tiny(tensor_count=1 << 60), "the number of tensors is 1152921504606846976, more than the 32 bytes can hold"),
        (Tiny().key("a", t.U32, 1).key("a", t.U32, 2), "the key 'a' comes twice"),
        (Tiny().key(b"\xff", t.U32, 1), "key 0 of 1 at byte 32 is not UTF-8"),
        (Tiny().key("a", t.STRING, b"\xff"), "the value of 'a' at byte 45 is not UTF-8"),
        (Tiny(keys=[("a", struct.pack("<I", 13))]), "'a' has the unknown value type 13"),
        (Tiny(keys=[("a", struct.pack("<IIQ", 9, 9, 0))]), "'a' is an array of nested arrays, which is not supported"),
        (Tiny(keys=[("a", struct.pack("<IIQ", 9, 99, 0))]), "'a' is an array of unknown value type 99s, which is not supported"),
        (
            Tiny(keys=[("a", struct.pack("<IIQ", 9, 4, 1 << 61))]),
            "the length of 'a' is 2305843009213693952, more than the 64 bytes of the file can hold",
        ),
        (
            Tiny(keys=[("a", struct.pack("<IIQQ", 9, 8, 1, 1 << 50))]),
            "string 0 of 1 of 'a' reaches past the end of the file at 64",
        ),
        (
            Tiny(keys=[("a", struct.pack("<IQ", 8, 1 << 63))]),
            "the value of 'a' needs 9223372036854775808 bytes at 45, and the file ends at 64; it is damaged",
        ),
        (Tiny().key("general.alignment", t.U32, 24), "general.alignment is 24; it must be a power of two"),
        (Tiny().key("general.alignment", t.U32, 0), "general.alignment is 0; it must be a power of two"),
        (Tiny().key("general.alignment", t.STRING, "x"), "general.alignment is 'x'; it must be a power of two"),
        (one_tensor(dims=()), "tensor w has 0 dimensions; from 1 to 4 are allowed"),
        (one_tensor(dims=(1,) * 5), "tensor w has 5 dimensions; from 1 to 4 are allowed"),
        (one_tensor(dims=(4, 0)), "tensor w has dimensions 4 x 0; none may be 0"),
        (one_tensor(type_id=16), "tensor w has type 16 (IQ2_XXS), which is not supported; F32, "),
        (one_tensor(type_id=99), "tensor w has type 99 (unknown to us), which is not supported; F32, "),
        (one_tensor((100,), 12), "tensor w: row length 100 is no multiple of Q4_K's block of 256 values"),
        (one_tensor(offset=8), "tensor w begins at 8, no multiple of the alignment 32"),
        (one_tensor((17,)), "tensor w: its 68 bytes at 64 reach past the end of the file at 128; it is damaged or cut off"),
        (
            one_tensor((1 << 62, 1 << 62, 4, 4)),
            f"tensor w: its {1 << 130} bytes at 96 reach past the end of the file at 160; it is damaged or cut off",
        ),
        (one_tensor(offset=1 << 63), f"tensor w: its 16 bytes at {(1 << 63) + 64} reach past the end of the file at 128"),
        (Tiny(tensors=[("w", (4,), 0, 0), ("w", (4,), 0, 32)], data=b"\0" * 64), "the tensor w comes twice"),
        (Tiny(tensors=[("v", (16,), 0, 0), ("w", (4,), 0, 32)], data=b"\0" * 64), "the tensors v and w overlap at byte 128"),
        (Tiny(tensors=[(b"\xfe", (4,), 0, 0)], data=b"\0" * 64), "the name of tensor 0 of 1 at byte 32 is not UTF-8"),
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
    assert refusal(tmp_path).endswith("cannot be read: Is a directory")
    (tmp_path / "empty.gguf").touch()
    assert refusal(tmp_path / "empty.gguf") == "the file is empty"


def parts(folder: Path, count: int = 3, **change: int) -> list[Path]:
    paths = []
    for i in range(count):
        tiny = Tiny().key("split.no", t.U16, change.get(f"no{i}", i)).key("split.count", t.U16, count)
        tiny.key("split.tensors.count", t.I32, change.get("tensors", count))
        tiny.tensor(f"w{change.get(f'name{i}', i)}", (8,), 0, bytes([i]) * 32)
        paths.append(tiny.write(folder / f"m-{i + 1:05}-of-{count:05}.gguf"))
    return paths


def test_split_files(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    with open_gguf(paths[0]) as file:
        assert file.paths == tuple(paths)
        assert [int(file.data(f"w{i}")[0]) for i in range(3)] == [0, 1, 2]


def test_wrong_split_files(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    assert refusal(paths[1]) == f"part 00002 of 3; open the first one, {paths[0]}"
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(paths[0].read_bytes())
    assert refusal(odd) == "part of 3, but its name does not end in -00001-of-00003.gguf; rename it"
    paths[2].unlink()
    assert refusal(paths[0]) == "1 of 3 parts are missing, the first of them m-00003-of-00003.gguf"
    with pytest.raises(GGUFError, match=r"00002-of-00003.gguf: says to be part 2 of 3, counted from 0, not 1 of 3"):
        open_gguf(parts(tmp_path, no1=2)[0])
    with pytest.raises(GGUFError, match="the tensor w0 comes twice"):
        open_gguf(parts(tmp_path, name1=0)[0])
    with pytest.raises(GGUFError, match="its 3 parts hold 3 tensors, and it declares 4"):
        open_gguf(parts(tmp_path, tensors=4)[0])


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    rows = (1 << 20) + 1
    path = Tiny(tensors=[("wide", (4096, rows), 0, 0)]).write(tmp_path / "sparse.gguf")
    os.truncate(path, path.stat().st_size + 4096 * 4 * rows)
    with open_gguf(path) as file:
        assert file.tensors["wide"].dims == (4096, rows)
        assert file.tensors["wide"].type is GGMLType.F32
