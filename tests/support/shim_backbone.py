"""The real `backbone` on a machine whose CUDA device is this CPU: `python shim_backbone.py tolerance run ...`."""

from __future__ import annotations

import sys

import fake_cupy

from backbone import cli

if __name__ == "__main__":
    sys.modules["cupy"] = fake_cupy.make()
    sys.exit(cli.main())
