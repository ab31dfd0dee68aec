"""The control groups that this process is in, by the system's own tables; nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")


def folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Each cgroup that can bound this process, from its own to the outermost one that is mounted here.

    With its version, 1 or 2. `controller` is "cpu", "memory" and so on; `root` holds `sys` and `proc`.
    """
    paths = dict[int, str]()  # by version
    for line in read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    for version, mounted, place in _mounts(controller, root):
        if version in paths:
            yield from ((version, folder) for folder in _folders(place, mounted, paths[version]))


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, Path]]:
    """Mounted cgroup trees of a controller: version, the cgroup that is mounted, and where."""
    for line in read(root / "proc/self/mountinfo").splitlines():
        first, _, second = line.partition(" - ")
        fields, options = first.split(), second.split()
        if len(fields) < 5 or len(options) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(options[0], 0)
        if version == 2 or (version == 1 and controller in options[2].split(",")):
            mounted, place = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), field) for field in fields[3:5])
            yield version, mounted, root / place.lstrip("/")


def _folders(place: Path, mounted: str, path: str) -> Iterator[Path]:
    """The folder of a cgroup and of each one above it. A container may be mounted from elsewhere: then its top."""
    own, top = PurePosixPath(path), PurePosixPath(mounted)
    inside = own.relative_to(top) if own.is_relative_to(top) and ".." not in own.parts else PurePosixPath()
    yield from (place / above for above in (inside, *inside.parents))


def read(file: Path) -> str:
    """A file's text without the white space around it; empty when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
