"""Predict training steps from a measured profile of this machine, then run them: how far off is the cost model?

    hotbed doctor --measure measured.yaml                                           # on an idle machine
    python -m benchmarks.predicted --predict --hardware measured.yaml --json FILE   # runs nothing
    python -m benchmarks.predicted --measure --json FILE                            # adds what was measured, and a plot
    python -m benchmarks.predicted --auto --hardware measured.yaml --json FILE      # plan auto against hand-made plans

Predictions are written before anything has run, and ``--predict`` refuses a file that has measurements. Cases run in
turn, ``--rounds`` times, each between real processes over Gloo; hosts with limited bandwidth are network namespaces
(Linux, root). Cases that are far off stay in the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.net.hosts import Hosts, available, run_ranks
from hotbed.checkpoint.storage import write_text_uri
from hotbed.errors import HotbedError
from hotbed.files import json_text
from hotbed.measure.step_overheads import StepJob, build_request, step_seconds
from hotbed.plan import Plan
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import search
from hotbed.plan.step_time import estimate_step, parts_of_busiest
from hotbed.train.runs.report import environment

STEPS = 16
TIMEOUT_S = 300
PAYLOAD = 1448 / 1514
"""Of an Ethernet frame, what a long TCP transfer carries."""
MEDIAN_LIMIT, WORST_LIMIT = 0.15, 0.40
"""Errors that the cost model is meant to keep."""
AUTO_LIMIT = 0.05


@dataclass(frozen=True)
class Case:
    """A step between so many ranks; with ``mbit_per_s`` each is a host of its own, on a link of that bandwidth."""

    ranks: int
    job: StepJob
    mbit_per_s: float | None = None


WIDE = StepJob(tables=8, rows=(200_000,), dim=64, batch=2048, bottom=(128,), top=(128, 64, 1))
"""410 MB of tables, uniform ids."""
SKEWED = replace(WIDE, rows=(100_000,), zipf=1.05, ids=4, batch=512)
SMALL = replace(WIDE, tables=4, rows=(20_000,), batch=1024, zipf=1.05)
SLOWER = {"tier": "disk", "cache_rows": 4000}

CASES: Mapping[str, Case] = {
    "1 rank": Case(1, WIDE),
    "1 rank, wide MLPs": Case(1, replace(WIDE, dim=32, batch=1024, bottom=(512, 256), top=(512, 256, 1))),
    "1 rank, 26 tables": Case(1, replace(SKEWED, tables=26, rows=(50_000,), dim=16, batch=1024)),
    "1 rank, bf16 rows beside fp32": Case(1, replace(WIDE, dtypes=("fp32", "bf16"), batch=1024)),
    "1 rank, host": Case(1, replace(SMALL, plan={"*": {"tier": "host"}})),
    "1 rank, disk with a cache": Case(1, replace(SMALL, plan={"*": SLOWER})),
    "2 ranks, table": Case(2, replace(WIDE, plan="table")),
    "2 ranks, row": Case(2, replace(WIDE, plan="row", batch=4096)),
    "2 ranks, column": Case(2, replace(WIDE, plan="column", rows=(100_000,), dim=128)),
    "2 ranks, data-parallel": Case(2, replace(SMALL, plan="dp", tables=8)),
    "2 ranks, row with a hot prefix": Case(2, replace(SKEWED, plan={"*": {"rows": 0, "hot_rows": 2000}})),
    "2 ranks, row, bf16 at 100 Mbit/s": Case(
        2, replace(WIDE, plan="row", batch=512, forward_codec="bf16", backward_codec="bf16"), 100
    ),
    "2 ranks, table, fp32 at 1 Gbit/s": Case(2, replace(WIDE, plan="table"), 1000),
    "3 ranks, row, skewed": Case(3, replace(SKEWED, plan="row")),
    "4 ranks, row, int8 at 300 Mbit/s": Case(
        4, replace(WIDE, plan="row", batch=512, forward_codec="int8", backward_codec="bf16"), 300
    ),
    "4 ranks, grid": Case(4, replace(WIDE, plan="grid", batch=512)),
    "4 ranks, 2 replicas averaged every 2 steps": Case(
        4, replace(WIDE, plan="row", batch=512, replicas=2, sync_every=2)
    ),
    "4 ranks, half data-parallel, half row": Case(
        4, replace(SKEWED, rows=(5_000, 100_000), batch=256, plan={"t[0246]": "dp", "*": "row"})
    ),
}
"""The fixed list."""

MIXED = replace(SKEWED, rows=(200, 2_000, 20_000, 100_000), ids=2)
AUTO_CASES: Mapping[str, Case] = {
    "2 ranks": Case(2, MIXED),
    "2 ranks, wide rows": Case(2, replace(MIXED, dim=128, batch=1024)),
    "2 ranks at 100 Mbit/s": Case(2, replace(MIXED, batch=256), 100),
    "3 ranks, tables alike": Case(3, replace(MIXED, rows=(50_000,), zipf=0.0, ids=1, tables=9)),
    "4 ranks": Case(4, replace(MIXED, batch=256)),
    "4 ranks at 300 Mbit/s": Case(4, replace(MIXED, batch=256, forward_codec="bf16", backward_codec="bf16"), 300),
}
HAND_MADE: Mapping[str, str | Mapping[str, Any]] = {
    "table": "table",
    "row": "row",
    "column": "column",
    "grid": "grid",
    "dp": "dp",
    "row with a hot prefix": {"*": {"rows": 0, "hot_rows": 2000}},
    "small tables dp, others table": {"t[0145]": "dp", "*": "table"},
    "small tables dp, others row": {"t[0145]": "dp", "*": "row"},
    "small tables table, others row": {"t[0145]": "table", "*": "row"},
}
"""What `--auto` is held against; tables 0, 1, 4 and 5 are the small ones where rows differ."""

DEFINITIONS = {
    "predicted_ms": "hotbed.plan.step_time.estimate_step of the profile, made before anything ran",
    "measured_ms": "a training step of the slowest rank: median over the steps of a round, median over rounds",
    "error": "predicted ÷ measured − 1",
    "same_plans": "hand-made plans that plan auto equals: what they differ by is the noise of the measurement",
    "against_best": "step under plan auto ÷ under the fastest hand-made plan − 1, all in the same processes, in turn",
}


class RefusedError(Exception):
    """Something that was asked for cannot be; the message says what to do."""


# -- predictions ----------------------------------------------------------------------------------------------------


def machine(profile: Hardware, case: Case) -> Hardware:
    """The machine with the links of a case: what ranks send each other is the least of both."""
    if case.mbit_per_s is None:
        return profile
    link = min(case.mbit_per_s * 1e6 / 8 * PAYLOAD, profile.node_link)
    return profile.with_(node_link=link, network=link, all_to_all={}, all_reduce={})


def predicted(profile: Hardware, case: Case, plan: Plan | None = None) -> dict[str, Any]:
    """What the cost model says of a case."""
    job = case.job
    model = CostModel(job.workload(case.ranks), case.ranks // job.replicas, machine(profile, case))
    plan = plan or job.make_plan(case.ranks)
    costs = model.ranks(plan)
    step = estimate_step(plan, costs, model).to_dict()
    return {"predicted_ms": 1e3 * step["step"], "parts_s": step, "busiest_rank_s": parts_of_busiest(costs)}


def profile_of(file: str | None) -> Hardware:
    """A measured profile with overheads, or `RefusedError`."""
    if file is None:
        raise RefusedError("predictions need --hardware FILE; make it with `hotbed doctor --measure FILE`")
    found = Hardware.load(file)
    if "step" not in found.overheads:
        raise RefusedError(
            f"{file} has no overheads of training steps, without which a CPU's steps are far too short; measure this "
            "machine with `hotbed doctor --measure FILE`"
        )
    return found


def predict(profile: Hardware, file: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Write predictions of all cases; whatever else the file has stays."""
    known = read(file)
    if any("measured_ms" in row for row in known.get("cases", {}).values()):
        raise RefusedError(
            f"{file} has measurements, and predictions come before these; give another --json, or remove the file"
        )
    rows = {name: {"case": described(case), **predicted(profile, case)} for name, case in cases.items()}
    if known.get("cases", {}).keys() - rows.keys() and known["hardware"] != profile.name:
        raise RefusedError(
            f"{file} has predictions of other cases for {known['hardware']}, not {profile.name}; give another --json"
        )
    about = {"hardware": profile.name, "description": profile.description, "predicted": now()}
    return known | about | {"cases": known.get("cases", {}) | rows, "definitions": DEFINITIONS}


def described(case: Case) -> dict[str, Any]:
    """A case as JSON has it."""
    return json.loads(json.dumps(asdict(case)))


def read(file: Path) -> dict[str, Any]:
    """What a file of results has; nothing if there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def now() -> str:
    """The time, to seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# -- measurements ---------------------------------------------------------------------------------------------------


def run(case: Case, jobs: Sequence[StepJob], repeats: int, steps: int) -> list[list[float]]:
    """Seconds of a step of each job in each repeat, between the ranks of a case."""
    if case.mbit_per_s is None:
        return step_seconds(jobs, case.ranks, repeats=repeats, steps=steps).steps
    request = json.dumps(build_request(jobs, repeats, steps))
    with Hosts(case.ranks, case.mbit_per_s) as hosts:
        found = run_ranks(hosts, [sys.executable, "-m", "hotbed.measure.step_overheads", request], TIMEOUT_S)
    return found[0]["steps"]


def measure(
    found: dict[str, Any], file: Path, cases: Mapping[str, Case], rounds: int, steps: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run all cases in turn, and put what was measured beside the predictions; the file is written after each round."""
    rows = found.get("cases", {})
    for name, case in cases.items():
        if rows.get(name, {}).get("case") != described(case):
            raise RefusedError(f"{file} has no prediction of '{name}' as it is now; run --predict first")
    unable = available() if any(case.mbit_per_s for case in cases.values()) else None
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name, case in cases.items():
            if case.mbit_per_s is None or unable is None:
                tell(f"round {i + 1} of {rounds}: {name}")
                taken[name] += run(case, [case.job], 1, steps)[0]
        about = {**environment(torch.device("cpu")), "date": now(), "rounds": i + 1, "steps": steps}
        found = {**found, "cases": {**rows, **_measured(rows, taken, unable)}, "measured": about}
        found = found | {"summary": summary_of(found["cases"])}
        write_text_uri(file, json_text(found))
    return found


def _measured(
    rows: Mapping[str, dict[str, Any]], taken: Mapping[str, Sequence[float]], unable: str | None
) -> dict[str, dict[str, Any]]:
    """Rows of cases with their seconds of all rounds so far, or why there are none."""
    found: dict[str, dict[str, Any]] = {}
    for name, seconds in taken.items():
        found[name] = rows[name] | {"not_measured": unable}
        if seconds:
            ms = 1e3 * statistics.median(seconds)
            error = rows[name]["predicted_ms"] / ms - 1
            found[name] = rows[name] | {"measured_ms": ms, "rounds_ms": [1e3 * s for s in seconds], "error": error}
    return found


def summary_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Number of cases that were measured, median and largest of their errors; None where there are none."""
    errors = [abs(row["error"]) for row in rows.values() if "error" in row]
    if not errors:
        return None
    return {"cases": len(errors), "median_error": statistics.median(errors), "worst_error": max(errors)}


def compare(
    profile: Hardware,
    cases: Mapping[str, Case],
    repeats: int,
    steps: int,
    tell: Callable[[str], None],
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Steps under plan auto and under hand-made plans, in the same processes, in turn; rows of other cases stay."""
    rows: dict[str, Any] = dict(known)
    for name, case in cases.items():
        if case.mbit_per_s is not None and (unable := available()):
            rows[name] = {"not_measured": unable}
            continue
        tell(name)
        auto = search(case.job.workload(case.ranks), case.ranks, machine(profile, case)).plan
        jobs = {"auto": replace(case.job, plan=auto.to_dict())}
        jobs |= {plan: replace(case.job, plan=schemes) for plan, schemes in HAND_MADE.items()}
        seconds = dict(zip(jobs, run(case, list(jobs.values()), repeats, steps), strict=True))
        ms = {plan: 1e3 * statistics.median(of) for plan, of in seconds.items()}
        best = min((plan for plan in ms if plan != "auto"), key=ms.__getitem__)
        placed = {plan: tiles_of(job.make_plan(case.ranks)) for plan, job in jobs.items()}
        said = {p: predicted(profile, case, job.make_plan(case.ranks))["predicted_ms"] for p, job in jobs.items()}
        rows[name] = {
            "case": described(case),
            "measured_ms": ms,
            "predicted_ms": said,
            "best": best,
            "same_plans": [plan for plan in HAND_MADE if placed[plan] == placed["auto"]],
            "against_best": ms["auto"] / ms[best] - 1,
            "auto": auto.to_dict(),
        }
    return {"cases": rows, "worst": max((r["against_best"] for r in rows.values() if "best" in r), default=None)}


def tiles_of(plan: Plan) -> list[str]:
    """What a plan places where, in one order."""
    return sorted(map(repr, plan.tiles))


# -- what is shown --------------------------------------------------------------------------------------------------


def show(to: Console, found: Mapping[str, Any]) -> None:
    """Print a row for each case, as Markdown has tables."""
    table = Table("case", "predicted, ms", "measured, ms", "error", box=MARKDOWN)
    for name, row in found["cases"].items():
        measured = f"{row['measured_ms']:.2f}" if "measured_ms" in row else row.get("not_measured", "")
        error = f"{row['error']:+.0%}" if "error" in row else ""
        table.add_row(name, f"{row['predicted_ms']:.2f}", measured, error)
    to.print(table)
    if summary := found.get("summary"):
        to.print(
            f"error of {summary['cases']} cases: median {summary['median_error']:.1%} (goal {MEDIAN_LIMIT:.0%}), worst "
            f"{summary['worst_error']:.1%} (goal {WORST_LIMIT:.0%})",
            soft_wrap=True,
        )


def show_auto(to: Console, found: Mapping[str, Any]) -> None:
    """Print plan auto against the best hand-made plan of each case."""
    table = Table("case", "auto, ms", "best hand-made", "ms", "auto against it", "auto is the same as", box=MARKDOWN)
    for name, row in found["cases"].items():
        if "best" not in row:
            table.add_row(name, "", row["not_measured"], "", "", "")
            continue
        ms, best = row["measured_ms"], row["best"]
        same = ", ".join(f"{plan} ({ms[plan]:.2f})" for plan in row["same_plans"])
        table.add_row(name, f"{ms['auto']:.2f}", best, f"{ms[best]:.2f}", f"{row['against_best']:+.1%}", same)
    to.print(table)
    if found["worst"] is not None:
        to.print(f"plan auto is at worst {found['worst']:+.1%} from the best (goal {AUTO_LIMIT:.0%})", soft_wrap=True)


def draw(found: Mapping[str, Any], file: Path) -> bool:
    """Draw predicted against measured milliseconds; False where matplotlib is not installed."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rcParams["svg.hashsalt"] = "hotbed"  # the same results give the same bytes
    rows = {name: row for name, row in found["cases"].items() if "error" in row}
    values = [row[key] for row in rows.values() for key in ("predicted_ms", "measured_ms")]
    ends = min(values) / 1.3, max(values) * 1.3
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    for limit, color in ((WORST_LIMIT, "0.94"), (MEDIAN_LIMIT, "0.86")):
        lower, upper = ([end * (1 + sign * limit) for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, lower, upper, color=color)
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    for i, (name, row) in enumerate(rows.items(), 1):
        axes.plot(row["measured_ms"], row["predicted_ms"], "o", markersize=4, label=f"{i}  {name}: {row['error']:+.0%}")
        place = row["measured_ms"], row["predicted_ms"]
        axes.annotate(str(i), place, xytext=(4, 3), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title(f"Training steps; shaded: within {MEDIAN_LIMIT:.0%} and {WORST_LIMIT:.0%}", loc="left")
    figure.legend(loc="outside lower left", ncols=2, fontsize=7, frameon=False)
    figure.savefig(file, format="svg", metadata={"Date": None})
    return True


def main() -> int:
    """Predict, measure or compare; 1 where that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("predict", "measure", "auto"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--hardware", help="file of hotbed doctor --measure")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a round")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        of = AUTO_CASES if args.auto else CASES
        if unknown := [name for name in args.only or () if name not in of]:
            raise RefusedError(f"there is no case '{unknown[0]}'; there are {', '.join(of)}")
        cases = {name: of[name] for name in args.only or of}
        known = read(args.json)
        if args.predict:
            found = predict(profile_of(args.hardware), args.json, cases)
        elif args.measure:
            found = measure(known, args.json, cases, args.rounds, args.steps, console.print)
        else:
            before = known.get("auto", {}).get("cases", {})
            compared = compare(profile_of(args.hardware), cases, args.rounds, args.steps, console.print, before)
            found = known | {"auto": compared}
    except (RefusedError, HotbedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.json.write_text(json_text(found), encoding="utf-8")
    if args.auto:
        show_auto(console, found["auto"])
        return 0
    show(console, found)
    if args.measure and found["summary"]:
        picture = args.json.with_suffix(".svg")
        console.print(f"plot: {picture}" if draw(found, picture) else "no plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
