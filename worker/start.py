"""Where the `worker` command begins: what goes wrong before there is a command is one line, too."""

from __future__ import annotations

import sys

from protocol.install import explain


def main() -> int:
    """Run the command; returns its exit code."""
    try:
        from .cli import main as run  # imported here: it takes a moment, in which somebody may press Ctrl-C
    except KeyboardInterrupt:
        sys.exit("worker: stopped")
    except ImportError as error:  # another distribution may own one of our five import names, or one is missing
        sys.exit(explain(error))
    return run()
