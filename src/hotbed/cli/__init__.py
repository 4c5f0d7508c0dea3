"""Commands of the ``hotbed`` program: ``hotbed NAME`` is ``cli/NAME.py``.

Each command file defines ``add_arguments(parser)`` and ``run(parsed)``.
"""
