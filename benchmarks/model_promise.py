"""Train every model under several plans, on one, two and three ranks, and compare hashes of all that was learned.

    python -m benchmarks.model_promise --json benchmarks/results/model_promise.json --page docs/models.md

Models, columns and samples are those of the contract (``tests/train/test_models.py``, `hotbed.testing.model`): small
ones, some of whose ids have weights; four steps of 24 samples. A hash is the SHA-256 of losses, tables, moments and
dense parameters. Plans must not change it. Ranks do, as they sum in another order. It fails where a plan changes one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.quality_results import measured_on
from hotbed.files import write_json
from hotbed.machine import cpu
from hotbed.testing.model import PLANS, recipe_of, trained
from hotbed.testing.processes import run_in_processes
from hotbed.train.report import environment
from tests.train.test_models import OF_MODELS

BEGIN, END = "<!-- promise: begin -->", "<!-- promise: end -->"
SHOWN = 16
"""Digits of a hash on the page."""
_OF_RANKS = ("whole tables", "cut into rows", "cut into columns", "copies on all ranks", "in the host's memory")
SETTINGS: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    1: {
        "in the device's memory": {},
        "in the host's memory": {"memory": {"tier": "host"}},
        "on disk, cached": {"memory": {"tier": "disk", "cache_rows": 8}},
    },
    2: {name: {"parallel": {"plan": PLANS[name]}} for name in _OF_RANKS},
    3: {name: {"parallel": {"plan": PLANS[name]}} for name in _OF_RANKS},
}
"""By number of ranks, what differs in the recipe."""

Hashes = dict[str, dict[str, str]]
"""SHA-256 by model and plan."""


def of_models(
    group: dist.ProcessGroup | None, recipes: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]
) -> Hashes:
    """Train each model with each of these settings, as one rank."""
    return {
        model: {name: trained(group, {**recipe, **own}) for name, own in settings.items()}
        for model, recipe in recipes.items()
    }


def hashes(names: Sequence[str] = (), ranks: Sequence[int] = tuple(SETTINGS)) -> dict[str, Hashes]:
    """Hashes by number of ranks; of all models, or of those that are named."""
    with tempfile.TemporaryDirectory() as folder:
        recipes: dict[str, Any] = {}
        for of in OF_MODELS:
            name = of.model.class_path.rpartition(".")[2]
            if not names or name in names:
                (place := Path(folder) / of.__name__).mkdir()
                recipes[of.__name__.removeprefix("Test")] = recipe_of(of, place)
        return {str(size): run_in_processes(size, of_models, recipes, SETTINGS[size])[0] for size in ranks}


def table(found: Mapping[str, Hashes]) -> list[str]:
    """Lines of a table in Markdown: a row per model, a hash per number of ranks."""
    heads = [f"{size} rank{'s' * (size != '1')}, {len(SETTINGS[int(size)])} plans" for size in found]
    lines = [f"| model | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for model in next(iter(found.values())):
        cells = (dict.fromkeys(of_size[model].values()) for of_size in found.values())
        shown = (f"`{next(iter(c))[:SHOWN]}`" if len(c) == 1 else f"**{len(c)} hashes**" for c in cells)
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return lines


def differing(found: Mapping[str, Hashes]) -> list[str]:
    """Say of which models a plan changed the hash."""
    return [
        f"{model} on {size} ranks: {', '.join(f'{name} {digest[:SHOWN]}' for name, digest in by_plan.items())}"
        for size, of_size in found.items()
        for model, by_plan in of_size.items()
        if len(set(by_plan.values())) > 1
    ]


def section(found: Mapping[str, Hashes], about: str) -> str:
    """What stands between the markers of the page."""
    plans = "; ".join(f"of {size}: {', '.join(of_size)}" for size, of_size in SETTINGS.items() if str(size) in found)
    return "\n".join([BEGIN, "", *table(found), "", f"Plans {plans}.", f"{about}.", "", END])


def main(argv: Sequence[str] | None = None) -> None:
    """Train all models, print the table, and write what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_promise", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[], help="Names of classes; default: all.")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="File to write.")
    parser.add_argument("--page", type=Path, help="Page whose table is replaced.")
    args = parser.parse_args(argv)
    found, machine = hashes(args.models, args.ranks), cpu()
    widest = next((name for name in ("avx512f", "avx2") if name in machine.flags), "neither AVX2 nor AVX-512")
    about = f"{measured_on()} ({machine.kind}, {widest})"
    Console(width=200).print("\n".join([*table(found), about]), markup=False, soft_wrap=True)
    if args.json is not None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(args.json, {"about": about, "time": now, **environment(torch.device("cpu")), "sha256": found})
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        args.page.write_text(before + section(found, about) + rest.split(END)[1], encoding="utf-8")
    if faults := differing(found):
        raise SystemExit("a plan changed what was learned: " + "; ".join(faults))


if __name__ == "__main__":
    main()
