"""``python -m hotbed``."""

import sys

from hotbed.cli.main import main

sys.exit(main())
