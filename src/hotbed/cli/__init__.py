"""Which commands does the ``hotbed`` program have? ``hotbed NAME`` is ``cli/NAME.py``.

Each command file defines ``add_arguments(parser)`` and ``run(parsed)``.
"""
