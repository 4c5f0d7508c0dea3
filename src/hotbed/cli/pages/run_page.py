"""Read the records of runs, and draw them as a page: ``hotbed inspect RUN --html FILE``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple, cast

from hotbed.checkpoint import Directory, directory, runs_in
from hotbed.checkpoint.storage import read_yaml_uri
from hotbed.checks import is_int
from hotbed.cli.pages.report_page import (
    TIER_COLORS,
    Columns,
    Page,
    ReportTable,
    draw_page,
    format_cell,
    set_rows,
    shorten,
)
from hotbed.errors import DataError, PlanError
from hotbed.parsing import TextError, parse_json
from hotbed.plan import Plan
from hotbed.train.runs.report import METRIC_NAMES, METRICS, PLAN, RECIPE, SUMMARY, size
from hotbed.train.throughput import SETTLING_STEPS

MOST_BARS = 40  # largest number of tables in the figure of bytes
MOST_RANKS, MOST_TABLES = 64, 60
"""Largest number of columns and rows in a plan's map. It has the first ranks, and the tables with the most tiles."""
_NOT_METRICS = {"step", "samples"}
_TRAINING = {
    "samples_per_s": "samples/s, without the first 5 steps",
    "grad_norm_dense": "norm of the dense part's gradients",
    "hit_rate": "hit rate of caches",
    "stall_share": "share of time in waits for batches",
    "queue_depth": "batches that were ready",
    "imbalance_bytes": "bytes of the fullest rank ÷ mean of ranks",
    "imbalance_lookups": "rows read by the busiest rank ÷ mean of ranks",
    "imbalance_time": "table time of the busiest rank ÷ mean of ranks",
    "sync_s": "seconds of averaging replicas",
    "read_bytes": "bytes read from files",
    "written_bytes": "bytes written to files",
    "waited_s": "seconds in waits for files",
}
_TIME = {
    "steps_s": "training",
    "waited_s": "waits for batches",
    "first_steps_s": "first steps, with compilation",
    "paused_s": "evaluations and checkpoints",
}
_PARTS = {
    "lookup": "lookups in tables",
    "forward": "forward pass without lookups",
    "ranks": "sum of losses over ranks",
    "backward": "backward pass",
    "tables": "update of tables",
    "dense": "update of the dense part",
}
"""Parts of a step, named as in `hotbed.train.step`."""
_ENVIRONMENT = ("hardware", "device", "torch", "hotbed", "precision", "precision_because", "threads", "ranks", "seed")
# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """Records of one run. If a resumed run repeated a step, only the later record is kept."""

    path: str
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any] | None  # None if the run has not finished
    train: Mapping[int, Mapping[str, Any]]  # by step
    valid: Mapping[int, Mapping[str, Any]]
    plan: Plan | None  # None if there is one process that keeps all rows in its device's memory

    @property
    def seed(self) -> object:
        """The training seed."""
        return self.recipe.get("train", {}).get("seed")

    def curves(self, *, of_valid: bool = False) -> dict[str, dict[int, float]]:
        """Return the finite numbers of the training records by name and step, in the order of recording.

        With ``of_valid``, return the numbers of the evaluation records instead.
        """
        found: dict[str, dict[int, float]] = {}
        for step, record in (self.valid if of_valid else self.train).items():
            for name, value in record.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    found.setdefault(name, {})[step] = float(value)
        return found


class MeanInterval(NamedTuple):
    """A mean over runs with its 95 % confidence interval (Student's t). For one run, all three numbers are equal."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of several runs' values, with its confidence interval."""
    middle = mean(values)
    if len(values) == 1:
        return MeanInterval(middle, middle, middle)
    factor = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    half = factor * stdev(values) / math.sqrt(len(values))
    return MeanInterval(middle, middle - half, middle + half)


Series = Sequence[tuple[int, MeanInterval]]  # steps with means and intervals


def render_runs(runs: Sequence[RunRecords]) -> str:
    """Return the HTML page of a run. For several runs that differ only in the seed, curves are means over the runs."""
    run = runs[0]
    state = "finished" if run.summary is not None else f"not finished; recorded up to step {max(run.train):,}"
    if run.summary is not None and "steps" in run.summary:
        state += f" after {run.summary['steps']:,} steps, {run.summary['samples']:,} samples"
    seeds = f"{len(runs)} runs (seeds {', '.join(str(r.seed) for r in runs)})"
    several = f" Curves are means of {seeds} with 95 % intervals by Student’s t." if len(runs) > 1 else ""
    with draw_page(str(run.recipe.get("name", run.path))) as page:
        page.text(f"{run.path}: {state}.{several}")
        _test(page, runs)
        _learning(page, runs)
        _time(page, run)
        _tables(page, run)
        if run.plan is None:
            page.heading("Plan", "There is one process, and all rows are in the memory of its device.")
        else:
            drawn, note = draw_plan(page, run.plan)
            page.heading("Plan", note)
            page.figures(drawn, wide=True)
        if run.summary is None:
            page.heading("Environment", "The environment is recorded when a run has finished.")
        else:
            page.heading("Environment")
            rows = [[name.replace("_", " "), str(run.summary[name])] for name in _ENVIRONMENT if name in run.summary]
            page.table(ReportTable("", ["fact", "value"], rows, left=["value"]))
        return page.render()


def _test(page: Page, runs: Sequence[RunRecords]) -> None:
    tested = [run.summary["test"] for run in runs if run.summary is not None and run.summary.get("test")]
    if not tested:
        page.heading("Test", "No test was recorded.")
        return
    several = f" of {len(tested)} runs" if len(tested) > 1 else "; the spread between runs is unknown"
    tasks: Sequence[str] = list(tested[0].get("tasks", {}))
    columns = [tested, *([t.get("tasks", {}).get(task, {}) for t in tested] for task in tasks)]
    rows = [
        [METRIC_NAMES.get(name) or name, *(_format_mean([of.get(name) for of in column]) for column in columns)]
        for name in dict.fromkeys(n for column in columns for n, v in column[0].items() if isinstance(v, float))
    ]
    head = ["metric", *(["mean of labels", *tasks] if tasks else ["test"])]
    page.heading("Test", f"{tested[0].get('samples', 0):,} samples{several}.")
    page.table(ReportTable("", head, rows))


def _format_mean(values: Sequence[Any]) -> str:
    if not all(isinstance(value, float) for value in values):
        return ""
    found = interval(values)
    return f"{found.mean:.5f}" + (f" ({found.low:.5f} to {found.high:.5f})" if len(values) > 1 else "")


def _learning(page: Page, runs: Sequence[RunRecords]) -> None:
    trained, valid = ([run.curves(of_valid=of_valid) for run in runs] for of_valid in (False, True))
    names = {name: f"valid {METRIC_NAMES.get(name, name)}" for name in valid[0] if name not in _NOT_METRICS}
    page.heading("Loss and metrics", "" if runs[0].valid else "No evaluation during training was recorded.")
    loss = _curves(page, "training loss", {"": _mean(trained, "loss")})
    page.figures(loss, *(_curves(page, title, {"": _mean(valid, name)}) for name, title in names.items()))
    lacks = "Gradient norms were not recorded, because they are sharded or would have stalled the device."
    page.heading("Training", "" if "grad_norm_dense" in trained[0] else lacks)
    rates = {name[3:]: _mean(trained[:1], name) for name in trained[0] if name.startswith("lr_")}
    drawn = [_curves(page, title, {"": _mean(trained, n)}) for n, title in _TRAINING.items() if n in trained[0]]
    page.figures(_curves(page, "learning rates", rates), *drawn)


def _mean(runs: Sequence[Mapping[str, Mapping[int, float]]], name: str) -> Series:
    """Return the mean and interval of a curve at each step that all runs have."""
    curves = [run.get(name, {}) for run in runs]
    steps = sorted(step for step in curves[0] if all(step in curve for curve in curves))
    return [(step, interval([curve[step] for curve in curves])) for step in steps]


def _curves(page: Page, title: str, series: Mapping[str, Series]) -> str:
    axes = page.axes(title)
    for number, (name, points) in enumerate(series.items()):
        steps, color, marker = [step for step, _ in points], f"C{number}", "." if len(points) < 10 else ""
        axes.plot(steps, [i.mean for _, i in points], color=color, label=name, marker=marker)
        axes.fill_between(steps, [i.low for _, i in points], [i.high for _, i in points], color=color, alpha=0.2, lw=0)
    if any(series):
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    return page.svg(axes, title)


def _time(page: Page, run: RunRecords) -> None:
    def draw_shares(title: str, unit: str, values: Mapping[str, float], more: Sequence[Sequence[str]] = ()) -> None:
        total = sum(values.values()) or 1.0
        rows = [[name, f"{value:,.2f} {unit}", f"{value / total:.1%}"] for name, value in values.items()]
        page.figures(page.bars(title, values))
        page.table(ReportTable("", ["", "time", "share"], [*rows, *more]))

    page.heading("Time")
    summary, more = run.summary or {}, list[Sequence[str]]()
    if time := summary.get("time"):
        if "ids_exchange_s" in summary:
            hidden = f"{summary['ids_exchange_hidden_share']:.1%} hidden"
            more = [("exchange of ids, overlapped", f"{summary['ids_exchange_s']:,.2f} s", hidden)]
        draw_shares("seconds", "s", {title: float(time[name]) for name, title in _TIME.items() if name in time}, more)
    else:
        page.text("The time of the whole run is recorded when the run has finished.")
    curves = run.curves()
    recorded = {title: curves.get(f"step_{part}_s", {}) for part, title in _PARTS.items()}
    steps = {title: [s for step, s in curve.items() if step > SETTLING_STEPS] for title, curve in recorded.items()}
    if times := {title: 1000 * median(seconds) for title, seconds in steps.items() if seconds}:
        page.text(f"Parts of a step: medians of {max(map(len, steps.values())):,} logged steps on the first rank.")
        draw_shares("milliseconds of a step", "ms", times)
        return
    page.text(f"Parts of steps were not recorded. They are timed on CPUs, in logged steps after step {SETTLING_STEPS}.")


def _tables(page: Page, run: RunRecords) -> None:
    summary = run.summary or {}
    if not (tables := summary.get("tables")):
        page.heading("Tables", "Tables are recorded when a run has finished.")
        return
    columns: Columns = {
        "table": lambda t: str(t["table"]),
        "rows": lambda t: f"{t['rows']:,}",
        "dim": lambda t: f"{t['dim']:,}",
        "dtype": lambda t: str(t["dtype"]),
        "bytes": lambda t: size(t["bytes"]),
        "ids per sample": lambda t: format_cell(t["ids_per_sample"], ".3g"),
        "gradient": lambda t: format_cell(t.get("grad_norm"), ".3g"),
        "hit rate": lambda t: format_cell(t.get("hit_rate"), ".1%"),
    }
    columns = {name: cell for name, cell in columns.items() if any(cell(table) != "–" for table in tables)}
    by_size = sorted(tables, key=lambda table: -int(table["bytes"]))[:MOST_BARS]
    text = f"{len(tables):,} tables, {size(sum(int(table['bytes']) for table in tables))} of rows and moments."
    if len(by_size) < len(tables):
        text += f" The largest {len(by_size)} are drawn."
    if memory := summary.get("memory"):
        text += f" Caches served {memory['hit_rate']:.1%} of their lookups."
    if "gradient" in columns:
        text += " Gradient: the norm of a table’s gradients in a step, as the root mean square over all logged steps."
    page.heading("Tables", text)
    mib = {str(table["table"]): table["bytes"] / 2**20 for table in by_size}
    page.figures(page.bars("MiB of rows and moments", mib))
    page.table(ReportTable.of("", tables, columns))


def draw_plan(page: Page, plan: Plan) -> tuple[str, str]:
    """Draw a plan as a map with a row per table, a column per rank, and rings for copies. Return the map and a note."""
    tables = set(sorted(plan.by_table, key=lambda name: -len(plan.by_table[name]))[:MOST_TABLES])
    rows = {name: row for row, name in enumerate(name for name in plan.by_table if name in tables)}
    ranks = min(plan.world_size, MOST_RANKS)
    axes = page.axes("tables by rank", 2.2 + max(0.2 * ranks, 2.6), 1.1 + 0.2 * len(rows))
    tiles = [tile for tile in plan.tiles if tile.table in rows]
    owned = {tier: {(t.owner, rows[t.table]) for t in tiles if t.tier == tier} for tier in TIER_COLORS}
    copies = {(reader, rows[t.table]) for t in tiles for reader in t.readers}
    for name, cells in {**owned, "copy": copies}.items():
        style: dict[str, Any] = {"marker": "s", "s": 70, "color": TIER_COLORS.get(name)}
        if name == "copy":
            style = {"s": 20, "facecolors": "white", "edgecolors": "#222222"}
        if drawn := sorted(cell for cell in cells if cell[0] < ranks):
            axes.scatter(*zip(*drawn, strict=True), label=name, **style)
    axes.set_xlim(-0.7, ranks - 0.3)
    set_rows(axes, [shorten(name, 40) for name in rows])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("rank")
    note = f"{len(plan.by_table):,} tables in {len(plan.tiles):,} tiles on {plan.world_size:,} ranks"
    if len(rows) < len(plan.by_table) or ranks < plan.world_size:
        note += f"; drawn are the {len(rows):,} with the most tiles, on the first {ranks:,} ranks"
    return page.svg(axes, "the plan", legend=4), f"{note}."


def read_runs(path: str | Path) -> list[RunRecords]:
    """Read a run. For a directory of runs, read the newest run.

    If the newest run is finished, also read all finished runs that differ from it only in `train.seed`.
    """
    folder = directory(path)
    if folder.has(RECIPE):
        return [_read(folder)]
    runs = [run for run in reversed(runs_in(folder)) if run.has(RECIPE)]
    newest = _read(runs[0])
    found = {newest.seed: newest}
    expected = {**newest.recipe, "train": {**newest.recipe.get("train", {}), "seed": None}}
    for run in runs[1:]:
        if newest.summary is not None and run.has(SUMMARY):
            recipe = read_mapping(run, RECIPE)
            train = {**recipe.get("train", {})}
            seed = train.setdefault("seed", None)
            if {**recipe, "train": train | {"seed": None}} == expected:
                found.setdefault(seed, _read(run))  # the newest of each seed
    return list(found.values())


def _read(folder: Directory) -> RunRecords:
    train, valid = dict[int, Mapping[str, Any]](), dict[int, Mapping[str, Any]]()
    lines = folder.read(METRICS).split(b"\n")[:-1] if folder.has(METRICS) else []  # the last line may be cut
    for number, line in enumerate(lines, 1):
        try:
            record: Any = parse_json(line)
            if not isinstance(record, dict):
                raise TextError(f"is {record!r}, expected an object")
            if not is_int(step := record.get("step")):
                raise TextError(f"has step {step!r}, expected an integer")
        except TextError as error:
            message = f"{folder}/{METRICS}, line {number:,} {error}. Copy the run again, or remove this line"
            raise DataError(message) from None
        match record.get("event"):
            case "resume":
                train, valid = ({s: r for s, r in of.items() if s <= step} for of in (train, valid))
            case "train":
                train[step] = record
            case "eval":
                valid[step] = record
            case _:  # checkpoints and schedules are not drawn
                pass
    if not train:
        problem = f"/{METRICS} has no training records" if folder.has(METRICS) else f" has no {METRICS}"
        raise DataError(f"{folder}{problem} yet. Wait until train.log_every steps have been trained")
    try:
        plan = Plan.from_json(folder.read(PLAN)) if folder.has(PLAN) else None
    except PlanError as error:
        raise DataError(f"{folder}/{PLAN}: {error}. Copy the run again") from None
    summary = read_mapping(folder, SUMMARY) if folder.has(SUMMARY) else None
    recipe = read_mapping(folder, RECIPE)
    return RunRecords(path=str(folder), recipe=recipe, summary=summary, train=train, valid=valid, plan=plan)


def read_mapping(folder: Directory, name: str) -> Mapping[str, Any]:
    """Read the recipe or the summary of a run."""
    try:
        found = read_yaml_uri((folder / name).path) if name == RECIPE else parse_json(folder.read(name))
        if isinstance(found, Mapping):
            return cast("Mapping[str, Any]", found)
        problem = "is not a recipe" if name == RECIPE else "is not a JSON object"
    except TextError as error:
        problem = str(error)
    remove = "" if name == RECIPE else ", or remove this file"
    raise DataError(f"{folder}/{name} {problem}. Copy the run again{remove}")
