"""Models in several files, PREFIX-00001-of-00003.gguf and so on: which they are, and whether each is in its place.

Opens no file and knows no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import GGUFError
from .gguf_header import whole_number

_NAME = re.compile(r"(?P<stem>.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)


def all_parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """All files of a model, of which this one must be the first; itself alone when it is no part."""
    number, count = _place(path, metadata)
    if count <= 1:
        return (path,)
    ending = f"-{number:05}-of-{count:05}.gguf"
    match = _NAME.fullmatch(path.name)
    if match is None or not path.name.endswith(ending):
        raise GGUFError(f"{path}: part {number} of {count}, and its name does not end in {ending}; rename it")
    paths = tuple(path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if number != 1:
        raise GGUFError(f"{path}: part {number} of {count}; open the first one, {paths[0]}")
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise GGUFError(
            f"{path}: {len(missing)} of {count} parts are missing; put {missing[0]} and any others into its folder"
        )
    return paths


def check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    """GGUFError when a file is not the part that its name says."""
    found = _place(path, metadata)
    if found != (number, count):
        says = "no part" if not found[1] else f"part {found[0]} of {found[1]}"
        raise GGUFError(f"{path}: says to be {says}, and its name says part {number} of {count}; get it again")


def check_total(path: Path, metadata: Mapping[str, Any], parts: int, tensors: int) -> None:
    """GGUFError when the first part declares another number of tensors than all parts have."""
    declared = whole_number(metadata, "split.tensors.count", tensors, str(path))
    if declared != tensors:
        raise GGUFError(
            f"{path}: its {parts} parts hold {tensors} tensors, and it declares {declared}; a part of another model?"
        )


def _place(path: Path, metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Which part of how many, counted from 1 as in the names (from 0 in the metadata). Of 0 when it is none."""
    count = whole_number(metadata, "split.count", 0, str(path))
    number = whole_number(metadata, "split.no", 0, str(path)) + 1
    if count < 0 or (count and not 1 <= number <= count):
        raise GGUFError(f"{path}: split.no is {number - 1} and split.count is {count}; there is no such part")
    return number, count
