"""`python -m penstock.cli`, for a Python whose scripts are not on the path."""

import sys

from penstock.cli import main

sys.exit(main())
