"""``python -m dobnb``."""

import sys

from dobnb.cli import main

sys.exit(main())
