"""``python -m hotbed``."""

import sys

from hotbed.cli import main

sys.exit(main())
