"""Workers from whom the path is withheld get their experts over the wire, and open no model file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from swarm_kit import NoLocal, TinyExperts, ask, pids_of, some_rows, swarm_of


@pytest.mark.parametrize("share_path", [False, True])
def test_only_a_worker_that_was_given_the_path_opens_the_file(tmp_path: Path, share_path: bool) -> None:
    model = TinyExperts(tmp_path / "tiny.gguf")
    x, ids = some_rows(model)
    with swarm_of(model, 2, local=NoLocal(), share_path=share_path) as swarm:
        rows = ask(swarm, 0, x, ids)
        opened = [_opens(pid, model.path) for pid in pids_of(swarm)]
    assert np.array_equal(rows, model.local().send(0, x, ids))
    assert opened == [share_path, share_path]


def _opens(pid: int, path: Path) -> bool:
    """Whether a process has a file mapped or open."""
    mapped = str(path) in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return mapped or any(link.readlink() == path for link in Path(f"/proc/{pid}/fd").iterdir())
