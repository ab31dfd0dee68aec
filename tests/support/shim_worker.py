"""The real worker on a machine whose CUDA device is this CPU: `python shim_worker.py`."""

from __future__ import annotations

import sys

import fake_cupy

from worker import cli

if __name__ == "__main__":
    sys.modules["cupy"] = fake_cupy.make()
    sys.exit(cli.main(["local"]))
