"""Models in several files: opened by the first one, and refused when a part is missing, misplaced or foreign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tinygguf as t
from tinygguf import Tiny

from kernels.errors import GGUFError
from kernels.gguf import open_gguf


def write_parts(folder: Path, count: int = 3, **change: Any) -> list[Path]:
    """Parts w0, w1, ... of one tensor each; `no1=5` changes part 1's split.no, and so on."""
    paths = []
    for i in range(count):
        tiny = Tiny().key("split.no", t.U16, change.get(f"no{i}", i))
        tiny.key("split.count", t.U16, change.get(f"count{i}", count))
        tiny.key("split.tensors.count", t.I32, change.get("tensors", count))
        tiny.tensor(f"w{change.get(f'name{i}', i)}", (8,), 0, bytes([i]) * 32)
        paths.append(tiny.write(folder / f"m-{i + 1:05}-of-{count:05}.gguf"))
    return paths


def refusal(path: Path) -> str:
    with pytest.raises(GGUFError) as raised:
        open_gguf(path)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(str(path.parent))
    return message.removeprefix(f"{path.parent}/")


def test_all_parts_by_the_first(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    with open_gguf(paths[0]) as file:
        assert file.paths == tuple(paths)
        assert file.path == paths[0]
        assert [file.tensors[f"w{i}"].part for i in range(3)] == [0, 1, 2]
        assert [int(file.data(f"w{i}")[0]) for i in range(3)] == [0, 1, 2]


def test_parts_that_the_gguf_package_wrote(tmp_path: Path) -> None:
    weights = {f"blk.{i}.w": np.random.default_rng(i).standard_normal((4, 8)).astype(np.float32) for i in range(5)}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "tiny", split_max_tensors=2)
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "m-00001-of-00003.gguf") as file:
        assert len(file.paths) == 3
        assert file.metadata["general.architecture"] == "tiny"
        assert {n: file.data(n).tobytes() for n in file.tensors} == {n: w.tobytes() for n, w in weights.items()}


def test_a_part_of_one_is_a_whole(tmp_path: Path) -> None:
    path = Tiny().key("split.no", t.U16, 0).key("split.count", t.U16, 1).write(tmp_path / "any name.gguf")
    with open_gguf(path) as file:
        assert file.paths == (path,)


def test_another_part_than_the_first(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    assert refusal(paths[1]) == f"m-00002-of-00003.gguf: part 2 of 3; open the first one, {paths[0]}"


@pytest.mark.parametrize("name", ["odd.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf", "m-1-of-3.gguf"])
def test_a_name_that_does_not_say_the_part(tmp_path: Path, name: str) -> None:
    path = write_parts(tmp_path)[0].rename(tmp_path / name)
    assert refusal(path) == f"{name}: part 1 of 3, and its name does not end in -00001-of-00003.gguf; rename it"


def test_missing_parts(tmp_path: Path) -> None:
    first, second, third = write_parts(tmp_path)
    third.unlink()
    assert "1 of 3 parts are missing; put m-00003-of-00003.gguf and any others into its folder" in refusal(first)
    second.unlink()
    assert "2 of 3 parts are missing; put m-00002-of-00003.gguf" in refusal(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no1": 2}, "m-00002-of-00003.gguf: says to be part 3 of 3, and its name says part 2 of 3; get it again"),
        ({"count2": 4}, "m-00003-of-00003.gguf: says to be part 3 of 4, and its name says part 3 of 3; get it again"),
        ({"count1": 0}, "m-00002-of-00003.gguf: says to be no part, and its name says part 2 of 3; get it again"),
        ({"no1": 7}, "m-00002-of-00003.gguf: split.no is 7 and split.count is 3; there is no such part"),
        ({"name1": 0}, "m-00002-of-00003.gguf: the tensor w0 comes twice"),
        ({"tensors": 4}, "m-00001-of-00003.gguf: its 3 parts hold 3 tensors, and it declares 4"),
        ({"tensors": -1}, "m-00001-of-00003.gguf: its 3 parts hold 3 tensors, and it declares -1"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path: Path, change: dict[str, int], message: str) -> None:
    assert refusal(write_parts(tmp_path, **change)[0]).startswith(message)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    assert refusal(paths[0]).startswith("m-00002-of-00003.gguf: tensor w1: its 32 bytes at")


ODD = [(t.ARRAY, (t.U32, [1, 2, 3])), (t.STRING, "x\ny"), (t.F32, 2.0), (t.ARRAY, (t.STRING, ["a"])), (t.BOOL, True)]


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
@pytest.mark.parametrize("odd", ODD)
def test_keys_of_another_kind(tmp_path: Path, key: str, odd: tuple[int, Any]) -> None:
    for i in range(2):
        tiny = Tiny()
        for name, whole in (("split.no", i), ("split.count", 2), ("split.tensors.count", 0)):
            tiny.key(name, *(odd if name == key and i == 0 else (t.U16, whole)))
        tiny.write(tmp_path / f"m-{i + 1:05}-of-00002.gguf")
    message = refusal(tmp_path / "m-00001-of-00002.gguf")
    assert message == f"m-00001-of-00002.gguf: {key} must be a whole number; convert the model again"
