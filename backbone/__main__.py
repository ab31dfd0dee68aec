"""`python -m backbone`."""

import sys

from .start import main

sys.exit(main())
