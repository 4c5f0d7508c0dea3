"""The ``hotbed`` command: ``main.py`` has the parser, and every other file but ``arguments.py`` is one command.

A command has ``add_arguments(parser)`` and ``run(parsed)``; what it does is a short story over the library.
"""
