"""`python -m worker`."""

import sys

from .start import main

sys.exit(main())
