"""Read what runs have recorded, and draw it as a page: ``hotbed inspect RUN --html FILE``."""

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
    Figures,
    Table,
    drawing,
    html_figures,
    html_lines,
    html_page,
    html_table,
    shorten,
)
from hotbed.errors import DataError, PlanError
from hotbed.parsing import TextError, parse_json
from hotbed.plan import Plan
from hotbed.train.runs.report import METRIC_NAMES, METRICS, PLAN, RECIPE, SUMMARY, size
from hotbed.train.throughput import SETTLING_STEPS

MOST_BARS = 40
"""Tables in the figure of bytes, those with most."""
MOST_RANKS, MOST_TABLES = 64, 60
"""Columns and rows of a plan's map; of more, the first ranks, and the tables with most tiles."""
_NOT_METRICS = {"step", "samples"}
_TRAINING = {
    "samples_per_s": "samples/s, without the first 5 steps",
    "grad_norm_dense": "norm of the dense part's gradients",
    "hit_rate": "hit rate of caches",
    "stall_share": "share of time in waits for batches",
    "queue_depth": "batches that were ready",
    "imbalance_bytes": "bytes of the fullest rank ÷ mean",
    "imbalance_lookups": "rows read by the busiest rank ÷ mean",
    "imbalance_time": "time for tables of the busiest rank ÷ mean",
    "sync_s": "seconds of averages of replicas",
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
    "forward": "forward pass, but lookups",
    "ranks": "sum of losses over ranks",
    "backward": "backward pass",
    "tables": "update of tables",
    "dense": "update of all else",
}
"""Of a step, as `hotbed.train.step` names them."""
_ENVIRONMENT = ("hardware", "device", "torch", "hotbed", "precision", "precision_because", "threads", "ranks", "seed")
# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """What one run has recorded."""

    path: str  # its directory
    recipe: Mapping[str, Any]  # as it was trained
    summary: Mapping[str, Any] | None  # what the run came to; None where it has not finished
    train: Mapping[int, Mapping[str, Any]]  # by step; those that a resumed run repeated are there once
    valid: Mapping[int, Mapping[str, Any]]
    plan: Plan | None  # where tables are; None of a run in one process whose rows are all in the device's memory

    @property
    def seed(self) -> object:
        """The seed it was trained with."""
        return self.recipe.get("train", {}).get("seed")

    def curve(self, name: str, *, of_valid: bool = False) -> dict[int, float]:
        """Numbers of this name by step, where there are any."""
        records = self.valid if of_valid else self.train
        return {step: float(r[name]) for step, r in records.items() if _is_number(r.get(name))}

    def names(self, *, of_valid: bool = False) -> list[str]:
        """What its records have numbers of, in the order in which they came."""
        records = self.valid if of_valid else self.train
        return list(dict.fromkeys(n for record in records.values() for n, v in record.items() if _is_number(v)))


class Interval(NamedTuple):
    """A mean over runs with its 95 % confidence interval (Student's t); all equal where there is one run."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of runs' values and its interval."""
    middle = mean(values)
    if len(values) == 1:
        return Interval(middle, middle, middle)
    factor = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96
    half = factor * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


Series = Sequence[tuple[int, Interval]]
"""Steps with means and intervals."""


def page(runs: Sequence[RunRecords]) -> str:
    """Return the page of a run, or of several that differ in their seed alone, newest first: curves are then means."""
    run = runs[0]
    with drawing() as figures:
        sections = {
            "": html_lines(_state(runs)),
            "Test": _test(runs),
            "Loss and metrics": _learning(figures, runs),
            "Training": _training(figures, runs),
            "Where the time went": [*_whole_time(figures, run), *_parts_of_steps(figures, run)],
            "Tables": _tables(figures, run),
            "Plan": _plan(figures, run),
            "Environment": _environment(run),
        }
        return html_page(str(run.recipe.get("name", run.path)), sections)


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


def _test(runs: Sequence[RunRecords]) -> list[str]:
    tested = [run.summary["test"] for run in runs if run.summary is not None and run.summary.get("test")]
    if not tested:
        return html_lines("No test was recorded.")
    several = f" of {len(tested)} runs" if len(tested) > 1 else "; one run says nothing of how far others would differ"
    tasks: Sequence[str] = list(tested[0].get("tasks", {}))
    columns = [tested, *([t.get("tasks", {}).get(task, {}) for t in tested] for task in tasks)]
    rows = [
        [METRIC_NAMES.get(name) or name, *(_with_interval([of.get(name) for of in column]) for column in columns)]
        for name in dict.fromkeys(n for column in columns for n, v in column[0].items() if isinstance(v, float))
    ]
    head = ["metric", *(["mean of labels", *tasks] if tasks else ["test"])]
    return [*html_lines(f"{tested[0].get('samples', 0):,} samples{several}."), html_table(Table("", head, rows))]


def _with_interval(values: Sequence[Any]) -> str:
    """Return the mean of a metric over runs, and its interval if there are several; nothing if a run lacks it."""
    if not all(isinstance(value, float) for value in values):
        return ""
    found = interval(values)
    return f"{found.mean:.5f}" + (f" ({found.low:.5f} to {found.high:.5f})" if len(values) > 1 else "")


def _learning(figures: Figures, runs: Sequence[RunRecords]) -> list[str]:
    drawn = [_curves(figures, "training loss", {"": _mean(runs, "loss")})]
    for name in runs[0].names(of_valid=True):
        if name not in _NOT_METRICS:
            found = _mean(runs, name, of_valid=True)
            drawn.append(_curves(figures, f"valid {METRIC_NAMES.get(name, name)}", {"": found}))
    note = "" if runs[0].valid else "No evaluation during training was recorded."
    return [*html_lines(note), html_figures(drawn)]


def _training(figures: Figures, runs: Sequence[RunRecords]) -> list[str]:
    names = runs[0].names()
    rates = {name[3:]: _mean(runs[:1], name) for name in names if name.startswith("lr_")}
    drawn = [_curves(figures, "learning rates", rates)]
    drawn += [_curves(figures, title, {"": _mean(runs, name)}) for name, title in _TRAINING.items() if name in names]
    note = "Gradients’ norms were not recorded: the host would have had to wait for them, or they are sharded."
    return [*html_lines("" if "grad_norm_dense" in names else note), html_figures(drawn)]


def _mean(runs: Sequence[RunRecords], name: str, *, of_valid: bool = False) -> Series:
    """Return means and intervals at the steps that all runs have."""
    curves = [run.curve(name, of_valid=of_valid) for run in runs]
    steps = sorted(step for step in curves[0] if all(step in c for c in curves))
    return [(step, interval([c[step] for c in curves])) for step in steps]


def _curves(figures: Figures, title: str, series: Mapping[str, Series]) -> str:
    """Draw curves over steps, with a band where intervals are wide; few points are dots."""
    axes = figures.axes(title)
    for number, (name, points) in enumerate(series.items()):
        steps, color, marker = [step for step, _ in points], f"C{number}", "." if len(points) < 10 else ""
        axes.plot(steps, [i.mean for _, i in points], color=color, label=name, marker=marker)
        axes.fill_between(steps, [i.low for _, i in points], [i.high for _, i in points], color=color, alpha=0.2, lw=0)
    if any(series):
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    return figures.svg(axes.figure, title)


def _whole_time(figures: Figures, run: RunRecords) -> list[str]:
    time: Mapping[str, float] | None = None if run.summary is None else run.summary.get("time")
    if not time:
        return html_lines("The time of the whole run is not recorded: it has not finished.")
    shares = {title: float(time[name]) for name, title in _TIME.items() if name in time}
    total = sum(shares.values()) or 1.0
    rows = [[title, f"{seconds:,.2f} s", f"{seconds / total:.1%}"] for title, seconds in shares.items()]
    assert run.summary is not None
    if "ids_exchange_s" in run.summary:
        hidden = run.summary["ids_exchange_hidden_share"]
        rows.append(["exchange of ids, beside", f"{run.summary['ids_exchange_s']:,.2f} s", f"{hidden:.1%} hidden"])
    return [html_figures([figures.bars("seconds", shares)]), html_table(Table("", ["", "time", "share"], rows))]


def _parts_of_steps(figures: Figures, run: RunRecords) -> list[str]:
    curves = {title: run.curve(f"step_{part}_s") for part, title in _PARTS.items()}
    steps = {title: [s for step, s in curve.items() if step > SETTLING_STEPS] for title, curve in curves.items()}
    times = {title: 1000 * median(seconds) for title, seconds in steps.items() if seconds}
    if not times:
        told = f"in steps that are logged, but for the first {SETTLING_STEPS}"
        return html_lines(f"Parts of steps were not recorded: they are timed on CPUs, {told}.")
    total, count = sum(times.values()), max(map(len, steps.values()))
    rows = [[title, f"{ms:,.2f} ms", f"{ms / total:.1%}"] for title, ms in times.items()]
    return [
        *html_lines(f"Parts of a step: medians of {count:,} that were logged, on the first rank."),
        html_figures([figures.bars("milliseconds of a step", times)]),
        html_table(Table("", ["", "time", "share"], rows)),
    ]


def _tables(figures: Figures, run: RunRecords) -> list[str]:
    tables: Sequence[Mapping[str, Any]] = [] if run.summary is None else run.summary.get("tables", [])
    if not tables:
        return html_lines("Not recorded: the run has not finished.")
    rows = [
        [
            str(table["table"]),
            f"{table['rows']:,}",
            f"{table['dim']:,}",
            str(table["dtype"]),
            size(table["bytes"]),
            "–" if table["ids_per_sample"] is None else f"{table['ids_per_sample']:.3g}",
            "–" if table.get("grad_norm") is None else f"{table['grad_norm']:.3g}",
            "–" if table.get("hit_rate") is None else f"{table['hit_rate']:.1%}",
        ]
        for table in tables
    ]
    named = enumerate(["table", "rows", "dim", "dtype", "bytes", "ids per sample", "gradient", "hit rate"])
    columns = [(name, i) for i, name in named if any(row[i] != "–" for row in rows)]
    by_size = sorted(tables, key=lambda table: -int(table["bytes"]))[:MOST_BARS]
    mib = {str(table["table"]): table["bytes"] / 2**20 for table in by_size}
    few = f" The largest {len(by_size)} are drawn." if len(by_size) < len(tables) else ""
    whole = size(sum(int(table["bytes"]) for table in tables))
    told = " A gradient is the norm of those of a table’s vectors in a step, the root mean square over logged steps."
    norms = told if "gradient" in dict(columns) else ""
    memory: Mapping[str, Any] = (run.summary or {}).get("memory", {})
    held = "" if not memory else f" Caches served {memory['hit_rate']:.1%} of the lookups that asked them."
    return [
        *html_lines(f"{len(tables):,} tables, {whole} of rows and moments.{few}{held}{norms}"),
        html_figures([figures.bars("MiB of rows and moments", mib)]),
        html_table(Table("", [name for name, _ in columns], [[row[i] for _, i in columns] for row in rows])),
    ]


def _plan(figures: Figures, run: RunRecords) -> list[str]:
    if run.plan is None:
        return html_lines("One process; all rows are in the memory of its device.")
    drawn, note = draw_plan(figures, run.plan)
    return [*html_lines(note), html_figures([drawn], "wide")]


def draw_plan(figures: Figures, plan: Plan) -> tuple[str, str]:
    """Draw a map: a row per table, a column per rank, colors by tier, rings for copies. Return it and a note on it."""
    tables = set(sorted(plan.by_table, key=lambda name: -len(plan.by_table[name]))[:MOST_TABLES])
    rows = {name: row for row, name in enumerate(name for name in plan.by_table if name in tables)}
    ranks = min(plan.world_size, MOST_RANKS)
    axes = figures.axes("tables by rank", 2.2 + max(0.2 * ranks, 2.6), 1.1 + 0.2 * len(rows))
    tiles = [tile for tile in plan.tiles if tile.table in rows]
    marks: list[tuple[str, set[tuple[int, int]], dict[str, Any]]] = [
        (tier, {(t.owner, rows[t.table]) for t in tiles if t.tier == tier}, {"marker": "s", "s": 70, "color": color})
        for tier, color in TIER_COLORS.items()
    ]
    copies = {(reader, rows[t.table]) for t in tiles for reader in t.readers}
    marks.append(("copy", copies, {"s": 20, "facecolors": "white", "edgecolors": "#222222"}))
    for name, cells, style in marks:
        if shown := sorted(cell for cell in cells if cell[0] < ranks):
            axes.scatter(*zip(*shown, strict=True), label=name, **style)
    axes.set_xlim(-0.7, ranks - 0.3)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [shorten(name, 40) for name in rows])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("rank")
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False)
    note = f"{len(plan.by_table):,} tables in {len(plan.tiles):,} tiles on {plan.world_size:,} ranks"
    if len(rows) < len(plan.by_table) or ranks < plan.world_size:
        note += f"; drawn are the {len(rows):,} with most tiles, on the first {ranks:,} ranks"
    return figures.svg(axes.figure, "the plan"), f"{note}."


def _environment(run: RunRecords) -> list[str]:
    if run.summary is None:
        return html_lines("It is recorded when a run has finished.")
    rows = [[name.replace("_", " "), str(run.summary[name])] for name in _ENVIRONMENT if name in run.summary]
    return [html_table(Table("", ["fact", "value"], rows, left=["value"]))]


# -- records -----------------------------------------------------------------------------------------------------


def read_runs(path: str | Path) -> list[RunRecords]:
    """Read a run, or of a name's runs the newest and all finished ones that differ from it in ``train.seed`` alone."""
    place = directory(path)
    if place.has(RECIPE):
        return [_read(place)]
    runs = [run for run in reversed(runs_in(place)) if run.has(RECIPE)]
    newest = _read(runs[0])
    found = {newest.seed: newest}
    for run in runs[1:]:
        if newest.summary is not None and run.has(SUMMARY):
            recipe = read_mapping(run, RECIPE)
            if _unseeded(recipe) == _unseeded(newest.recipe):
                found.setdefault(recipe.get("train", {}).get("seed"), _read(run))  # the newest of each seed
    return list(found.values())


def _read(place: Directory) -> RunRecords:
    train, valid = dict[int, Mapping[str, Any]](), dict[int, Mapping[str, Any]]()
    lines = place.read(METRICS).split(b"\n")[:-1] if place.has(METRICS) else []  # a killed run may cut the last line
    for number, line in enumerate(lines, 1):
        try:
            step, record = _record(line)
        except TextError as error:
            message = f"{place}/{METRICS}, line {number:,} {error}; copy the run again, or remove that line"
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
        empty = f"/{METRICS} has no record of training yet" if place.has(METRICS) else ""
        problem = empty or f" has no {METRICS}: nothing was recorded yet"
        raise DataError(f"{place}{problem}; wait until train.log_every steps are trained")
    try:
        plan = Plan.from_json(place.read(PLAN)) if place.has(PLAN) else None
    except PlanError as error:
        raise DataError(f"{place}/{PLAN}: {error}; copy the run again") from None
    summary = read_mapping(place, SUMMARY) if place.has(SUMMARY) else None
    return RunRecords(
        path=str(place), recipe=read_mapping(place, RECIPE), summary=summary, train=train, valid=valid, plan=plan
    )


def _record(line: bytes) -> tuple[int, Mapping[str, Any]]:
    """Return the step and the values of one line."""
    record = parse_json(line)
    if not isinstance(record, Mapping):
        raise TextError(f"is {record!r}, must be an object")
    values = cast("Mapping[str, Any]", record)
    if not is_int(step := values.get("step")):
        raise TextError(f"has step {step!r}, must be an integer")
    return step, values


def read_mapping(place: Directory, name: str) -> Mapping[str, Any]:
    """Read the recipe or the summary of a run."""
    try:
        found = read_yaml_uri((place / name).path) if name == RECIPE else parse_json(place.read(name))
        if isinstance(found, Mapping):
            return cast("Mapping[str, Any]", found)
        problem = "is no recipe" if name == RECIPE else "is no JSON object"
    except TextError as error:
        problem = str(error)
    instead = "" if name == RECIPE else ", or remove that file"
    raise DataError(f"{place}/{name} {problem}; copy the run again{instead}")


def _unseeded(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {**recipe, "train": {k: v for k, v in recipe.get("train", {}).items() if k != "seed"}}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
