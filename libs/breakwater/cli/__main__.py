"""`python -m breakwater.cli` is the command `breakwater`."""

import sys

from breakwater.cli.main import main

sys.exit(main())
