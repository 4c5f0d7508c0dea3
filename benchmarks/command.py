"""Run hotbed's commands from benchmarks."""

from __future__ import annotations

from hotbed.commands.main import main


def run(*argv: object) -> None:
    """A command of hotbed's, in this process; ends it where the command fails."""
    if status := main([str(arg) for arg in argv]):
        raise SystemExit(status)
