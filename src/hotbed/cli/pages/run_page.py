"""Read the records of runs, and draw them as a page: ``hotbed inspect RUN --html FILE``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple, cast

from hotbed.checkpoint import Directory, directory, runs_in
from hotbed.checkpoint.single_files import read_yaml_uri
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

MOST_BARS = 40
"""Largest number of tables in the figure of bytes."""
MOST_RANKS, MOST_TABLES = 64, 60
"""Largest number of columns and rows in a plan's map: the first ranks, and the tables with the most tiles."""
_NOT_METRICS = {"step", "samples"}
_TRAINING = {
    "samples_per_s": "samples/s, without the first 5 steps",
    "grad_norm_dense": "norm of the dense part's gradients",
    "hit_rate": "hit rate of caches",
    "stall_share": "share of time in waits for batches",
    "queue_depth": "batches that were ready",
    "imbalance_bytes": "bytes of the fullest rank ÷ mean",
    "imbalance_lookups": "rows read by the busiest rank ÷ mean",
    "imbalance_time": "table time of the busiest rank ÷ mean",
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
    """Records of one run. Steps that a resumed run repeated are recorded once."""

    path: str
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any] | None  # None if the run has not finished
    train: Mapping[int, Mapping[str, Any]]  # by step
    valid: Mapping[int, Mapping[str, Any]]
    plan: Plan | None  # None if one process keeps all rows in its device's memory

    @property
    def seed(self) -> object:
        """The training seed."""
        return self.recipe.get("train", {}).get("seed")

    def curve(self, name: str, *, of_valid: bool = False) -> dict[int, float]:
        """Return the recorded numbers of this name by step."""
        records = self.valid if of_valid else self.train
        return {step: float(r[name]) for step, r in records.items() if _is_number(r.get(name))}

    def names(self, *, of_valid: bool = False) -> list[str]:
        """Return the names of recorded numbers, in the order of recording."""
        records = self.valid if of_valid else self.train
        return list(dict.fromkeys(n for record in records.values() for n, v in record.items() if _is_number(v)))


class MeanInterval(NamedTuple):
    """A mean over runs with its 95 % confidence interval (Student's t). All three are equal for one run."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of runs' values and its interval."""
    middle = mean(values)
    if len(values) == 1:
        return MeanInterval(middle, middle, middle)
    factor = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    half = factor * stdev(values) / math.sqrt(len(values))
    return MeanInterval(middle, middle - half, middle + half)


Series = Sequence[tuple[int, MeanInterval]]
"""Steps with means and intervals."""


def render_runs(runs: Sequence[RunRecords]) -> str:
    """Return the page of a run; for several runs that differ only in their seed, curves are means."""
    run = runs[0]
    with draw_page(str(run.recipe.get("name", run.path))) as page:
        page.text(_state(runs))
        for heading, draw in (
            ("Test", lambda: _test(page, runs)),
            ("Loss and metrics", lambda: _learning(page, runs)),
            ("Training", lambda: _training(page, runs)),
            ("Time", lambda: _time(page, run)),
            ("Tables", lambda: _tables(page, run)),
            ("Plan", lambda: _plan(page, run)),
            ("Environment", lambda: _environment(page, run)),
        ):
            page.heading(heading)
            draw()
        return page.render()


def _state(runs: Sequence[RunRecords]) -> str:
    run = runs[0]
    state = "finished" if run.summary is not None else f"not finished; recorded up to step {max(run.train):,}"
    if run.summary is not None and "steps" in run.summary:
        state += f" after {run.summary['steps']:,} steps, {run.summary['samples']:,} samples"
    if len(runs) == 1:
        return f"{run.path}: {state}."
    seeds = ", ".join(str(r.seed) for r in runs)
    return (
        f"{run.path}: {state}. Curves are means of {len(runs)} runs (seeds {seeds}) with 95 % intervals by Student’s t."
    )


def _test(page: Page, runs: Sequence[RunRecords]) -> None:
    tested = [run.summary["test"] for run in runs if run.summary is not None and run.summary.get("test")]
    if not tested:
        page.text("No test was recorded.")
        return
    several = f" of {len(tested)} runs" if len(tested) > 1 else "; the spread between runs is unknown"
    tasks: Sequence[str] = list(tested[0].get("tasks", {}))
    columns = [tested, *([t.get("tasks", {}).get(task, {}) for t in tested] for task in tasks)]
    rows = [
        [METRIC_NAMES.get(name) or name, *(_format_mean([of.get(name) for of in column]) for column in columns)]
        for name in dict.fromkeys(n for column in columns for n, v in column[0].items() if isinstance(v, float))
    ]
    head = ["metric", *(["mean of labels", *tasks] if tasks else ["test"])]
    page.text(f"{tested[0].get('samples', 0):,} samples{several}.")
    page.table(ReportTable("", head, rows))


def _format_mean(values: Sequence[Any]) -> str:
    """Return a metric's mean over runs with its interval, or nothing if a run lacks the metric."""
    if not all(isinstance(value, float) for value in values):
        return ""
    found = interval(values)
    return f"{found.mean:.5f}" + (f" ({found.low:.5f} to {found.high:.5f})" if len(values) > 1 else "")


def _learning(page: Page, runs: Sequence[RunRecords]) -> None:
    drawn = [_curves(page, "training loss", {"": _mean(runs, "loss")})]
    drawn += [
        _curves(page, f"valid {METRIC_NAMES.get(name, name)}", {"": _mean(runs, name, of_valid=True)})
        for name in runs[0].names(of_valid=True)
        if name not in _NOT_METRICS
    ]
    page.text("" if runs[0].valid else "No evaluation during training was recorded.")
    page.figures(*drawn)


def _training(page: Page, runs: Sequence[RunRecords]) -> None:
    names = runs[0].names()
    if "grad_norm_dense" not in names:
        page.text("Gradient norms were not recorded, because they are sharded or would have stalled the device.")
    rates = {name[3:]: _mean(runs[:1], name) for name in names if name.startswith("lr_")}
    drawn = [_curves(page, "learning rates", rates)]
    drawn += [_curves(page, title, {"": _mean(runs, name)}) for name, title in _TRAINING.items() if name in names]
    page.figures(*drawn)


def _mean(runs: Sequence[RunRecords], name: str, *, of_valid: bool = False) -> Series:
    """Return means and intervals at the steps that all runs have."""
    curves = [run.curve(name, of_valid=of_valid) for run in runs]
    steps = sorted(step for step in curves[0] if all(step in c for c in curves))
    return [(step, interval([c[step] for c in curves])) for step in steps]


def _curves(page: Page, title: str, series: Mapping[str, Series]) -> str:
    """Draw curves over steps with bands for their intervals; few points are dots."""
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
    summary = run.summary or {}
    time: Mapping[str, float] = summary.get("time") or {}
    if not time:
        page.text("The time of the whole run is recorded when the run has finished.")
    else:
        shares = {title: float(time[name]) for name, title in _TIME.items() if name in time}
        hidden = [("exchange of ids, overlapped", summary["ids_exchange_s"])] if "ids_exchange_s" in summary else []
        notes = {name: f"{summary['ids_exchange_hidden_share']:.1%} hidden" for name, _ in hidden}
        _shares_of(page, "seconds", "s", shares, notes, dict(hidden))
    curves = {title: run.curve(f"step_{part}_s") for part, title in _PARTS.items()}
    steps = {title: [s for step, s in curve.items() if step > SETTLING_STEPS] for title, curve in curves.items()}
    times = {title: 1000 * median(seconds) for title, seconds in steps.items() if seconds}
    if not times:
        page.text(
            f"Parts of steps were not recorded. They are timed on CPUs, in logged steps after step {SETTLING_STEPS}."
        )
        return
    page.text(f"Parts of a step: medians of {max(map(len, steps.values())):,} logged steps on the first rank.")
    _shares_of(page, "milliseconds of a step", "ms", times)


def _shares_of(
    page: Page,
    title: str,
    unit: str,
    values: Mapping[str, float],
    notes: Mapping[str, str] | None = None,
    more: Mapping[str, float] | None = None,
) -> None:
    """Draw amounts of time as bars, and list them with their shares."""
    total = sum(values.values()) or 1.0
    shares = {name: f"{value / total:.1%}" for name, value in values.items()} | dict(notes or {})
    rows = [[name, f"{value:,.2f} {unit}", shares[name]] for name, value in {**values, **(more or {})}.items()]
    page.figures(page.bars(title, values))
    page.table(ReportTable("", ["", "time", "share"], rows))


def _tables(page: Page, run: RunRecords) -> None:
    summary = run.summary or {}
    tables: Sequence[Mapping[str, Any]] = summary.get("tables", [])
    if not tables:
        page.text("Not recorded: the run has not finished.")
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
    few = f" The largest {len(by_size)} are drawn." if len(by_size) < len(tables) else ""
    norms = " A gradient is the norm of a table’s gradients in a step, as root mean square over logged steps."
    memory: Mapping[str, Any] = summary.get("memory", {})
    cached = f" Caches served {memory['hit_rate']:.1%} of their lookups." if memory else ""
    page.text(
        f"{len(tables):,} tables, {size(sum(int(table['bytes']) for table in tables))} of rows and moments."
        f"{few}{cached}{norms if 'gradient' in columns else ''}"
    )
    mib = {str(table["table"]): table["bytes"] / 2**20 for table in by_size}
    page.figures(page.bars("MiB of rows and moments", mib))
    page.table(ReportTable.of("", tables, columns))


def _plan(page: Page, run: RunRecords) -> None:
    if run.plan is None:
        page.text("One process; all rows are in its device's memory.")
        return
    drawn, note = draw_plan(page, run.plan)
    page.text(note)
    page.figures(drawn, wide=True)


def draw_plan(page: Page, plan: Plan) -> tuple[str, str]:
    """Draw a plan as a map, and return it with a note: a row per table, a column per rank, rings for copies."""
    tables = set(sorted(plan.by_table, key=lambda name: -len(plan.by_table[name]))[:MOST_TABLES])
    rows = {name: row for row, name in enumerate(name for name in plan.by_table if name in tables)}
    ranks = min(plan.world_size, MOST_RANKS)
    axes = page.axes("tables by rank", 2.2 + max(0.2 * ranks, 2.6), 1.1 + 0.2 * len(rows))
    tiles = [tile for tile in plan.tiles if tile.table in rows]
    marks: list[tuple[str, set[tuple[int, int]], dict[str, Any]]] = [
        (tier, {(t.owner, rows[t.table]) for t in tiles if t.tier == tier}, {"marker": "s", "s": 70, "color": color})
        for tier, color in TIER_COLORS.items()
    ]
    copies = {(reader, rows[t.table]) for t in tiles for reader in t.readers}
    marks.append(("copy", copies, {"s": 20, "facecolors": "white", "edgecolors": "#222222"}))
    for name, cells, style in marks:
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


def _environment(page: Page, run: RunRecords) -> None:
    summary = run.summary
    if summary is None:
        page.text("The environment is recorded when a run has finished.")
        return
    rows = [[name.replace("_", " "), str(summary[name])] for name in _ENVIRONMENT if name in summary]
    page.table(ReportTable("", ["fact", "value"], rows, left=["value"]))


# -- records -----------------------------------------------------------------------------------------------------


def read_runs(path: str | Path) -> list[RunRecords]:
    """Read a run; or the newest run of a name, and its finished runs that differ only in ``train.seed``."""
    folder = directory(path)
    if folder.has(RECIPE):
        return [_read(folder)]
    runs = [run for run in reversed(runs_in(folder)) if run.has(RECIPE)]
    newest = _read(runs[0])
    found = {newest.seed: newest}
    for run in runs[1:]:
        if newest.summary is not None and run.has(SUMMARY):
            recipe = read_mapping(run, RECIPE)
            if _without_seed(recipe) == _without_seed(newest.recipe):
                found.setdefault(recipe.get("train", {}).get("seed"), _read(run))  # the newest of each seed
    return list(found.values())


def _without_seed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {**recipe, "train": {k: v for k, v in recipe.get("train", {}).items() if k != "seed"}}


def _read(folder: Directory) -> RunRecords:
    train, valid = dict[int, Mapping[str, Any]](), dict[int, Mapping[str, Any]]()
    lines = folder.read(METRICS).split(b"\n")[:-1] if folder.has(METRICS) else []  # the last line may be cut
    for number, line in enumerate(lines, 1):
        try:
            step, record = _parse_record(line)
        except TextError as error:
            message = f"{folder}/{METRICS}, line {number:,} {error}. Copy the run again, or remove that line"
            raise DataError(message) from None
        match record.get("event"):
            case "resume":
                for of in (train, valid):
                    for later in [s for s in of if s > step]:
                        del of[later]
            case "train":
                train[step] = record
            case "eval":
                valid[step] = record
            case _:  # checkpoints and schedules are not drawn
                pass
    if not train:
        problem = f"/{METRICS} has no training records" if folder.has(METRICS) else f" has no {METRICS}"
        raise DataError(f"{folder}{problem} yet. Wait until train.log_every steps are trained")
    try:
        plan = Plan.from_json(folder.read(PLAN)) if folder.has(PLAN) else None
    except PlanError as error:
        raise DataError(f"{folder}/{PLAN}: {error}. Copy the run again") from None
    summary = read_mapping(folder, SUMMARY) if folder.has(SUMMARY) else None
    return RunRecords(
        path=str(folder), recipe=read_mapping(folder, RECIPE), summary=summary, train=train, valid=valid, plan=plan
    )


def _parse_record(line: bytes) -> tuple[int, Mapping[str, Any]]:
    """Return a line's step and values."""
    record = parse_json(line)
    if not isinstance(record, Mapping):
        raise TextError(f"is {record!r}, expected an object")
    values = cast("Mapping[str, Any]", record)
    if not is_int(step := values.get("step")):
        raise TextError(f"has step {step!r}, expected an integer")
    return step, values


def read_mapping(folder: Directory, name: str) -> Mapping[str, Any]:
    """Read the recipe or the summary of a run."""
    try:
        found = read_yaml_uri((folder / name).path) if name == RECIPE else parse_json(folder.read(name))
        if isinstance(found, Mapping):
            return cast("Mapping[str, Any]", found)
        problem = "is not a recipe" if name == RECIPE else "is not a JSON object"
    except TextError as error:
        problem = str(error)
    remove = "" if name == RECIPE else ", or remove that file"
    raise DataError(f"{folder}/{name} {problem}. Copy the run again{remove}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
