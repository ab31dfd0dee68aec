"""`python -m worker`."""

import sys

from .cli import main

sys.exit(main())
