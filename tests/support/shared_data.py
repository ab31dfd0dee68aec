"""Where the oracle files are: `tests/golden` always, and the larger shared set where a checkout lies beside it."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
_SHARED = ROOT.parent / "shared"
SHARED: Path | None = _SHARED if (_SHARED / "golden").is_dir() else None
needs_shared = pytest.mark.skipif(
    SHARED is None, reason="the larger golden set (../shared) is not beside this checkout"
)
