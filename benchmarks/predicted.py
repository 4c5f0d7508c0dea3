"""Predict training steps from a measured profile of this machine, then run them and compare.

    hotbed doctor --measure measured.yaml                                           # on an idle machine
    python -m benchmarks.predicted --predict --hardware measured.yaml --json FILE   # runs nothing
    python -m benchmarks.predicted --measure --json FILE                            # adds measurements, and a plot
    python -m benchmarks.predicted --auto --hardware measured.yaml --json FILE      # plan auto against hand-made plans

Predictions are written before anything runs, and ``--predict`` refuses a file with measurements. Cases run in turn,
``--rounds`` times, each between real processes over Gloo. Hosts with limited bandwidth are network namespaces (Linux,
root). Cases that are far off stay in the table. ``predicted_ms`` is `hotbed.plan.step_time.estimate_step`;
``measured_ms`` is a step of the slowest rank, median over the steps of a round, then over rounds; ``error`` is
predicted ÷ measured − 1; ``same_plans`` are hand-made plans that equal plan auto (their difference is noise);
``against_best`` is plan auto ÷ the fastest hand-made plan − 1, all in the same processes, in turn.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.net.hosts import Hosts, available, run_ranks
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.measure.step_overheads import StepJob, build_request, step_seconds
from hotbed.plan import Plan
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import search
from hotbed.plan.step_time import estimate_step, parts_of_busiest

STEPS = 16
PAYLOAD = 1448 / 1514  # share of an Ethernet frame that a long TCP transfer carries
MEDIAN_LIMIT, WORST_LIMIT = 0.15, 0.40  # goals for the errors of the cost model


@dataclass(frozen=True)
class Case:
    """A step between ranks. With ``mbit_per_s``, each rank is a host with a link of this bandwidth."""

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
"""Tables 0, 1, 4 and 5 are the small ones if rows differ."""


class RefusedError(HotbedError):
    """A request that cannot be fulfilled."""


def machine(profile: Hardware, case: Case) -> Hardware:
    if case.mbit_per_s is None:
        return profile
    link = min(case.mbit_per_s * 1e6 / 8 * PAYLOAD, profile.node_link)
    return profile.with_(node_link=link, network=link, all_to_all={}, all_reduce={})


def predicted(profile: Hardware, case: Case, plan: Plan | None = None) -> dict[str, Any]:
    job = case.job
    model = CostModel(job.workload(case.ranks), case.ranks // job.replicas, machine(profile, case))
    plan = plan or job.make_plan(case.ranks)
    costs = model.ranks(plan)
    step = estimate_step(plan, costs, model).to_dict()
    return {"predicted_ms": 1e3 * step["step"], "parts_s": step, "busiest_rank_s": parts_of_busiest(costs)}


def profile_of(file: str | None) -> Hardware:
    """Return a measured profile with the overheads of steps, without which predictions for a CPU are too short."""
    found = Hardware.load(file) if file else None
    if found is None or "step" not in found.overheads:
        raise RefusedError(f"--hardware has no overheads of steps: got {file}. Run `hotbed doctor --measure FILE`.")
    return found


def predict(profile: Hardware, file: Path, cases: Mapping[str, Case]) -> dict[str, Any]:
    """Return the content of the file with predictions of these cases."""
    known = runner.read_json(file)
    if any("measured_ms" in row for row in known.get("cases", {}).values()):
        raise RefusedError(f"{file} has measurements, but predictions come first. Remove it, or name another file.")
    if known.get("cases", {}).keys() - cases.keys() and known["hardware"] != profile.name:
        raise RefusedError(f"{file} is for other hardware: got {known['hardware']}, expected {profile.name}.")
    rows = {name: {"case": described(case), **predicted(profile, case)} for name, case in cases.items()}
    about = {"hardware": profile.name, "description": profile.description, "predicted": runner.about()["date"]}
    return known | about | {"cases": known.get("cases", {}) | rows}


def described(case: Case) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(case)))


def run(case: Case, jobs: Sequence[StepJob], repeats: int, steps: int) -> list[list[float]]:
    if case.mbit_per_s is None:
        return step_seconds(jobs, case.ranks, repeats=repeats, steps=steps).steps
    request = json.dumps(build_request(jobs, repeats, steps))
    with Hosts(case.ranks, case.mbit_per_s) as hosts:
        return run_ranks(hosts, [sys.executable, "-m", "hotbed.measure.step_overheads", request], 300)[0]["steps"]


def measure(found: dict[str, Any], file: Path, cases: Mapping[str, Case], rounds: int, steps: int) -> dict[str, Any]:
    """Run all cases in turn, and add measurements to the predictions. The file is written after each round."""
    rows = found.get("cases", {})
    for name, case in cases.items():
        if rows.get(name, {}).get("case") != described(case):
            raise RefusedError(f"{file} has no prediction of the present case '{name}'. Run --predict first.")
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name in runner.progress(list(cases), f"round {i + 1} of {rounds}"):
            case, row = cases[name], rows[name]
            if case.mbit_per_s is not None and (unable := available()):
                rows[name] = row | {"not_measured": unable}
                continue
            taken[name] += run(case, [case.job], 1, steps)[0]
            ms = 1e3 * statistics.median(taken[name])
            measured = {"measured_ms": ms, "rounds_ms": [1e3 * s for s in taken[name]]}
            rows[name] = row | measured | {"error": row["predicted_ms"] / ms - 1}
        errors = [abs(row["error"]) for row in rows.values() if "error" in row]
        found |= {"cases": rows, "measured": runner.about(rounds=i + 1, steps=steps), "summary": None}
        if errors:
            median = statistics.median(errors)
            found["summary"] = {"cases": len(errors), "median_error": median, "worst_error": max(errors)}
        write_json(file, found)
    return found


def compare(
    profile: Hardware, cases: Mapping[str, Case], repeats: int, steps: int, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure steps under plan auto and under hand-made plans in turn. Rows of other cases stay."""
    rows: dict[str, Any] = dict(known)
    for name in runner.progress(list(cases), "plan auto"):
        case = cases[name]
        if case.mbit_per_s is not None and (unable := available()):
            rows[name] = {"not_measured": unable}
            continue
        auto = search(case.job.workload(case.ranks), case.ranks, machine(profile, case)).plan
        jobs = {"auto": replace(case.job, plan=auto.to_dict())}
        jobs |= {plan: replace(case.job, plan=schemes) for plan, schemes in HAND_MADE.items()}
        seconds = dict(zip(jobs, run(case, list(jobs.values()), repeats, steps), strict=True))
        ms = {plan: 1e3 * statistics.median(of) for plan, of in seconds.items()}
        best = min((plan for plan in ms if plan != "auto"), key=ms.__getitem__)
        plans = {plan: job.make_plan(case.ranks) for plan, job in jobs.items()}
        tiles = {name: sorted(map(repr, plan.tiles)) for name, plan in plans.items()}
        rows[name] = {
            "case": described(case),
            "measured_ms": ms,
            "predicted_ms": {name: predicted(profile, case, plan)["predicted_ms"] for name, plan in plans.items()},
            "best": best,
            "same_plans": [plan for plan in HAND_MADE if tiles[plan] == tiles["auto"]],
            "against_best": ms["auto"] / ms[best] - 1,
            "auto": auto.to_dict(),
        }
    return {"cases": rows, "worst": max((r["against_best"] for r in rows.values() if "best" in r), default=None)}


def show(found: Mapping[str, Any]) -> None:
    keys = ("predicted_ms", "measured_ms", "error", "not_measured")
    runner.show("steps", [{"case": n} | {key: row.get(key) for key in keys} for n, row in found["cases"].items()])
    if found.get("summary"):
        print(f"{found['summary']} (goals: median {MEDIAN_LIMIT:.0%}, worst {WORST_LIMIT:.0%})")


def show_auto(found: Mapping[str, Any]) -> None:
    rows: list[dict[str, object]] = []
    for name, row in found["cases"].items():
        ms = row.get("measured_ms", {})
        measured = {"auto, ms": ms.get("auto"), "best": row.get("best"), "its ms": ms.get(row.get("best"))}
        same = ", ".join(f"{plan} ({ms[plan]:.2f})" for plan in row.get("same_plans", ()))
        rows.append({"case": name, **measured, "against best": row.get("against_best"), "the same as": same})
    runner.show(f"plan auto, at worst {found['worst']} from the best (goal 0.05)", rows)


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw predicted against measured milliseconds, with matplotlib."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "hotbed"  # equal results are drawn to equal bytes
    figure = Figure(figsize=(8, 7), layout="constrained")
    rows = {name: row for name, row in found["cases"].items() if "error" in row}
    values = [row[key] for row in rows.values() for key in ("predicted_ms", "measured_ms")]
    ends = min(values) / 1.3, max(values) * 1.3
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


def main() -> int:
    parser = runner.arguments(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("predict", "measure", "auto"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--hardware", help="File of `hotbed doctor --measure`.")
    parser.add_argument("--only", nargs="+", help="Names of cases.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="Steps of a round.")
    args = parser.parse_args()
    if args.json is None:
        parser.error("--json is missing")
    try:
        of = AUTO_CASES if args.auto else CASES
        if unknown := set(args.only or ()) - set(of):
            raise RefusedError(f"unknown cases: got {', '.join(unknown)}, expected some of {', '.join(of)}")
        cases = {name: of[name] for name in args.only or of}
        found = runner.read_json(args.json)
        if args.predict:
            found = predict(profile_of(args.hardware), args.json, cases)
        elif args.measure:
            found = measure(found, args.json, cases, args.rounds, args.steps)
        else:
            before = found.get("auto", {}).get("cases", {})
            found["auto"] = compare(profile_of(args.hardware), cases, args.rounds, args.steps, before)
    except HotbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_json(args.json, found)
    if args.auto:
        show_auto(found["auto"])
    else:
        show(found)
    if args.measure and found["summary"] and importlib.util.find_spec("matplotlib"):
        draw(found, args.json.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
