"""`python -m worker`."""

import sys

from protocol.install import explain

try:
    from .cli import main
except ImportError as error:  # another distribution may own one of our five import names
    sys.exit(explain(error))

sys.exit(main())
