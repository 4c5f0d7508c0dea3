"""``python -m hotbed``."""

import sys

from hotbed.commands.main import main

sys.exit(main())
