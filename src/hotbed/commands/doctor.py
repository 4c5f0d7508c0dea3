"""Say what hotbed finds on this machine, and measure it: ``hotbed doctor [DIR] [--measure FILE]``."""

from __future__ import annotations

from argparse import Namespace
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hotbed.commands.arguments import Parser, add_json, check_json, console, write_json
from hotbed.config import Device
from hotbed.errors import RecipeError
from hotbed.locations import local
from hotbed.machine import fit_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from rich.console import Console

    from hotbed.commands.checks import Check

WIDE_SPREAD = 0.5
"""Spread from which a figure is doubted."""
MARKS = {"ok": "✓", "absent": "–", "problem": "✗"}


def add_arguments(parser: Parser) -> None:
    """Add the directory, and the options of measuring."""
    parser.usage = "hotbed doctor [DIR] [--measure FILE [--quick] [--device cpu] [--ranks [2,4]]] [--json FILE]"
    parser.add_argument("dir", nargs="?", default=".", help="Where runs and tables on disk would go.")
    parser.add_argument("--measure", help="Measure, for minutes, and write a hardware profile (YAML).")
    parser.add_argument("--quick", action="store_true", help="Measure less, in a fraction of the time.")
    parser.add_argument("--device", type=Device, default="auto", help="What is measured: auto, cpu or cuda.")
    parser.add_argument(
        "--ranks",
        type=list[int] | None,
        help="Numbers of processes between which exchanges are measured; default: [2,4], or 2, 4, … up to all GPUs.",
    )
    add_json(parser)


def run(parsed: Namespace) -> None:
    """Check, print what was found, and measure."""
    from hotbed.commands.checks import check_all

    folder = local("DIR", parsed.dir)
    if parsed.measure is None:
        for option in ("quick", "ranks"):
            if getattr(parsed, option):
                raise RecipeError(f"--{option} is for measuring; say where the profile goes with --measure FILE")
        checks = check_all(folder)
        print_checks(console(), checks)
        write_json(parsed.json, {"command": "doctor", "checks": [check._asdict() for check in checks]})
        return
    check_json(parsed.measure, "--measure")
    from hotbed.checkpoint.single_files import write_text
    from hotbed.files import yaml_text
    from hotbed.measure.machine_profile import MeasureOptions, measure

    options = MeasureOptions(device=parsed.device, ranks=parsed.ranks, quick=parsed.quick)
    fit_threads()
    with _stages(console(stderr=True)) as tell:
        profile = measure(options, folder, tell)
    about = {key: profile[key] for key in profile if key != "figures"}
    write_text(parsed.measure, f"{yaml_text(about)}\n{yaml_text({'figures': profile['figures']}, width=110)}\n")
    print_profile(console(), profile)
    console().print(f"profile: {parsed.measure}", soft_wrap=True)
    write_json(parsed.json, {"command": "doctor", "profile": profile})


@contextmanager
def _stages(to: Console) -> Generator[Callable[[str], None]]:
    """Show the current stage: on a terminal in one line, which no thread redraws, else in a line each."""
    if not to.is_terminal:
        yield lambda stage: to.print(f"{stage} …")
        return
    from rich.live import Live

    with Live(console=to, auto_refresh=False, transient=True) as live:
        yield lambda stage: live.update(f"{stage} …", refresh=True)


def print_profile(to: Console, profile: Mapping[str, Any]) -> None:
    """Print a line for each figure, and for each point of a curve, with its spread and its source."""
    from rich.table import Table

    table = Table()
    for column in ("figure", "value", "spread", "source"):
        table.add_column(column, justify="right" if column in ("value", "spread") else "left")
    for name, entry in profile["figures"].items():
        about = entry if isinstance(entry, dict) else {"value": entry, "source": ""}
        for at, value in _leaves(about["value"]):
            spread = dict(_leaves(about.get("spread", {}))).get(at)
            table.add_row(
                f"{name} {at}".strip(), _shown(name, value), "" if spread is None else f"{spread:.0%}", about["source"]
            )
    to.print(profile["description"], soft_wrap=True, highlight=False)
    to.print(table)
    spreads = [v for e in profile["figures"].values() if isinstance(e, dict) for _, v in _leaves(e.get("spread", {}))]
    wide = sum(isinstance(spread, float) and spread > WIDE_SPREAD for spread in spreads)
    if wide:
        to.print(
            f"{wide} of {len(spreads)} figures differ by more than {WIDE_SPREAD:.0%} between repeats: something else "
            "was running; measure again on an idle machine",
            soft_wrap=True,
        )


def _shown(name: str, value: Any) -> str:
    from hotbed.plan.hardware import DIMENSIONS
    from hotbed.plan.quantities import show

    return str(value) if isinstance(value, str | bool) else show(value, DIMENSIONS[name])


def _leaves(value: Any, at: str = "") -> list[tuple[str, Any]]:
    """The values of a figure, with their places in its curves."""
    if not isinstance(value, dict):
        return [(at, value)]
    return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{at} {key}".strip())]


def print_checks(to: Console, checks: Sequence[Check]) -> None:
    """Print a line for each check, and what to do below those that ask for it."""
    width = max(len(check.what) for check in checks)
    for check in checks:
        to.print(f"{MARKS[check.state]} {check.what:{width}}  {check.found}", soft_wrap=True, highlight=False)
        if check.advice:
            to.print(f"  {'':{width}}  → {check.advice}", soft_wrap=True, highlight=False)
    problems = sum(check.state == "problem" for check in checks)
    to.print("nothing is wrong" if not problems else f"{problems} to mend, marked {MARKS['problem']}")
