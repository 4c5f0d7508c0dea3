"""Say what hotbed finds on this machine, and measure it: ``hotbed doctor [DIR] [--measure FILE]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from hotbed.commands.arguments import add_json, console, write_json
from hotbed.locations import local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hotbed.commands.checks import Check

MARKS = {"ok": "✓", "absent": "–", "problem": "✗"}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the directory, and the options of measuring."""
    parser.usage = "hotbed doctor [DIR] [--measure FILE] [options]"
    parser.add_argument("dir", type=str, nargs="?", default=".", help="Where runs and tables on disk would go.")
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Check, and print what was found."""
    from hotbed.commands.checks import check_all

    checks = check_all(local("DIR", parsed.dir))
    print_checks(console(), checks)
    result: dict[str, Any] = {"command": "doctor", "checks": [check._asdict() for check in checks]}
    write_json(parsed.json, result)


def print_checks(to: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, and what to do below those that ask for it."""
    width = max(len(check.what) for check in checks)
    for check in checks:
        to.print(f"{MARKS[check.state]} {check.what:{width}}  {check.found}", soft_wrap=True, highlight=False)
        if check.advice:
            to.print(f"  {'':{width}}  → {check.advice}", soft_wrap=True, highlight=False)
    problems = sum(check.state == "problem" for check in checks)
    to.print("nothing is wrong" if not problems else f"{problems} to mend, marked {MARKS['problem']}")
