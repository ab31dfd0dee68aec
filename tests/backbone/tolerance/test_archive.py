"""Archives of arrays: whole or not there, and never read as anything but what was expected."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backbone.errors import UsageError
from backbone.tolerance.archive import ArchiveReader, ArchiveWriter

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def write(path: Path) -> Path:
    with ArchiveWriter(path) as archive:
        archive.array("a/rows", ROWS)
        archive.array("ids", np.array([3, 1, 2], np.int32))
        archive.json("run.json", {"n": 1})
    return path


def test_what_is_written_is_read_and_numpy_reads_it_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.run")
    reader = ArchiveReader(path, "p")
    assert reader.array("a/rows", "<f4", (3, 4)).tobytes() == ROWS.tobytes()
    assert reader.array("ids", "<i4", (3,)).tolist() == [3, 1, 2]
    assert reader.json("run.json", 100) == {"n": 1}
    reader.close()
    with np.load(path, allow_pickle=False) as found:
        assert found["a/rows"].tolist() == ROWS.tolist()
        assert found["ids"].dtype == np.int32


def test_equal_content_is_equal_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a").read_bytes() == write(tmp_path / "b").read_bytes()


def test_a_failure_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.run"
    path.write_bytes(b"before")

    def stopped_half_way() -> None:
        with ArchiveWriter(path) as archive:
            archive.array("ids", ROWS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped_half_way()
    assert [one.name for one in tmp_path.iterdir()] == ["a.run"]
    assert path.read_bytes() == b"before"


def test_it_says_where_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file"), ArchiveWriter(tmp_path / "none" / "x"):
        pass


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "why"),
    [
        ("a/rows", "<f8", (3, 4), "is no array <f8 of shape"),
        ("a/rows", "<f4", (4, 3), "is no array <f4 of shape"),
        ("a/rows", "<i4", (3, 4), "is no array <i4 of shape"),
        ("a/rows", "<f4", (12,), "is no array <f4 of shape"),
        ("a/rows", "<f4", (2**20, 2**21), "where 8796093022208 to"),
        ("rows", "<f4", (3, 4), "rows.npy is not there"),
    ],
)
def test_only_what_was_expected(tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...], why: str) -> None:
    reader = ArchiveReader(write(tmp_path / "a"), "--a saved:a")
    with pytest.raises(UsageError) as error:
        reader.array(name, dtype, shape)
    reader.close()
    assert why in str(error.value)
    assert str(error.value).startswith("--a saved:a: ")


def stored(path: Path, name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> ArchiveReader:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(name, data)
    return ArchiveReader(path, "p")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "is no JSON"),
        (b"[" * 90_000, "is no JSON"),
        (b"[1]", "is no JSON object"),
        (b'{"x": NaN}', "is no JSON: NaN is no number"),
        (b"\xff", "is no JSON"),
        (b" " * 100_001, "is damaged: 100001 bytes where 0 to 100000 are due"),
    ],
)
def test_json_that_is_none(tmp_path: Path, data: bytes, why: str) -> None:
    reader = stored(tmp_path / "a", "run.json", data)
    with pytest.raises(UsageError, match=f"p: run.json {why}"):
        reader.json("run.json", 100_000)
    reader.close()


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    """A bomb would be one."""
    reader = stored(tmp_path / "a", "run.json", b" " * 10_000, zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="stored as they are"):
        reader.json("run.json", 100_000)
    reader.close()


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        np.savez(file, x=np.array([{"a": 1}], object))
    reader = ArchiveReader(path, "p")
    with pytest.raises(UsageError, match=r"p: x\.npy"):
        reader.array("x", "<f4", (1,))
    reader.close()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(tmp_path: Path, value: float) -> None:
    with ArchiveWriter(tmp_path / "a") as archive:
        archive.array("x", np.array([1, value]))
    reader = ArchiveReader(tmp_path / "a", "p")
    with pytest.raises(UsageError, match="holds numbers that are not finite"):
        reader.array("x", "<f8", (2,))
    reader.close()


def test_a_list_of_members_that_fills_the_memory_is_not_read(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "a").read_bytes())
    struct.pack_into("<L", content, len(content) - 22 + 12, 2**29)  # size of the central directory
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UsageError, match="more members than any run has"):
        ArchiveReader(tmp_path / "a", "p")
    zip64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 2**40, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "a").write_bytes(zip64 + locator + end)
    with pytest.raises(UsageError, match="more members than any run has"):
        ArchiveReader(tmp_path / "a", "p")


@pytest.mark.parametrize("content", [b"", b"PK", b"x" * 100])
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UsageError, match="p: is no whole archive"):
        ArchiveReader(tmp_path / "a", "p")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="p: cannot be read: No such file"):
        ArchiveReader(tmp_path / "none", "p")


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_told_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(write(tmp_path / "a").read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.sampled_from([len(content), len(content), len(content) // 2, len(content) - 1]))
    (tmp_path / "b").write_bytes(content[:end])
    try:
        reader = ArchiveReader(tmp_path / "b", "p")
    except UsageError as error:
        assert str(error).startswith("p: ")
        return
    try:
        assert reader.array("a/rows", "<f4", (3, 4)).tobytes() == ROWS.tobytes()  # CRC-32 holds it
        assert reader.json("run.json", 100) == {"n": 1}
    except UsageError as error:
        assert str(error).startswith("p: ")
    finally:
        reader.close()
