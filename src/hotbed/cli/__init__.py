"""Commands of the ``hotbed`` program: ``hotbed NAME`` is ``cli/NAME.py``.

Each command file defines ``add_arguments(parser)`` and ``run(parsed)``. `main` calls them and maps errors to exit
statuses. `arguments` reads recipes with overrides and writes ``--json`` files. `hotbed.cli.drafts` drafts recipes for
``hotbed init``, and `hotbed.cli.pages` draws data, runs and plans.
"""
