"""`python -m backbone`."""

import sys

from .cli import main

sys.exit(main())
