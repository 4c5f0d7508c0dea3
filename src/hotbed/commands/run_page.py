"""Draw what a run has recorded as one HTML file without scripts: ``hotbed inspect RUN --html FILE``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from hotbed.commands.run_figures import Figures, Series
from hotbed.commands.run_records import RunRecords, interval
from hotbed.commands.svg import html_page, html_table
from hotbed.train.report import METRIC_NAMES, size
from hotbed.train.throughput import SETTLING_STEPS

_STYLE = (
    ".figures{display:flex;flex-wrap:wrap;gap:12px}figure{margin:0;width:400px;max-width:100%}"
    "figure svg{width:100%}.wide{overflow-x:auto}.wide figure{width:auto;max-width:none}.wide figure svg{width:auto}"
    "td,th{white-space:nowrap}td:first-child,th:first-child,.facts td{text-align:left;white-space:normal}"
    "td:first-child{min-width:9ch}"
)
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


def page(runs: Sequence[RunRecords]) -> str:
    """Make the page of a run, or of several that differ in their seed alone, newest first: curves are then means."""
    figures, run = Figures(), runs[0]
    name = str(run.recipe.get("name", run.path))
    body = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{_told(runs)}</p>",
        *_section("Test", _test(runs)),
        *_section("Loss and metrics", _learning(figures, runs)),
        *_section("Training", _training(figures, runs)),
        *_section("Where the time went", _time(figures, run)),
        *_section("Tables", _tables(figures, run)),
        *_section("Plan", _plan(figures, run)),
        *_section("Environment", _environment(run)),
    ]
    return html_page(name, body, _STYLE)


def _section(title: str, content: Iterable[str]) -> list[str]:
    return [f"<h2>{title}</h2>", *content]


def _told(runs: Sequence[RunRecords]) -> str:
    run = runs[0]
    state = "finished" if run.summary is not None else f"not finished; recorded up to step {max(run.train):,}"
    if run.summary is not None and "steps" in run.summary:
        state += f" after {run.summary['steps']:,} steps, {run.summary['samples']:,} samples"
    told = f"{escape(run.path)}: {state}."
    if len(runs) > 1:
        seeds = escape(", ".join(str(r.seed) for r in runs))
        told += f" Curves are means of {len(runs)} runs (seeds {seeds}) with 95 % intervals by Student’s t."
    return told


def _test(runs: Sequence[RunRecords]) -> list[str]:
    tested = [run.summary["test"] for run in runs if run.summary is not None and run.summary.get("test")]
    if not tested:
        return ["<p>No test was recorded.</p>"]
    several = f" of {len(tested)} runs" if len(tested) > 1 else "; one run says nothing of how far others would differ"
    tasks: Sequence[str] = list(tested[0].get("tasks", {}))
    columns = [tested, *([t.get("tasks", {}).get(task, {}) for t in tested] for task in tasks)]
    rows = [
        [METRIC_NAMES.get(name) or name, *(_with_interval([of.get(name) for of in column]) for column in columns)]
        for name in dict.fromkeys(n for column in columns for n, v in column[0].items() if isinstance(v, float))
    ]
    header = ["metric", *(["mean of labels", *tasks] if tasks else ["test"])]
    return [f"<p>{tested[0].get('samples', 0):,} samples{several}.</p>", _table(header, rows)]


def _with_interval(values: Sequence[Any]) -> str:
    """The mean of a metric over runs, and its interval where there are several; nothing if a run lacks it."""
    if not all(isinstance(value, float) for value in values):
        return ""
    found = interval(values)
    return f"{found.mean:.5f}" + (f" ({found.low:.5f} to {found.high:.5f})" if len(values) > 1 else "")


def _learning(figures: Figures, runs: Sequence[RunRecords]) -> list[str]:
    drawn = [figures.curves("training loss", {"": _mean(runs, lambda run: run.curve("loss"))})]
    for name in runs[0].names(of_valid=True):
        if name not in _NOT_METRICS:
            found = _mean(runs, lambda run, name=name: run.curve(name, of_valid=True))
            drawn.append(figures.curves(f"valid {METRIC_NAMES.get(name, name)}", {"": found}))
    note = [] if runs[0].valid else ["<p>No evaluation during training was recorded.</p>"]
    return [*note, _figures(drawn)]


def _mean(runs: Sequence[RunRecords], curve: Callable[[RunRecords], Mapping[int, float]]) -> Series:
    """Means and intervals at the steps that all runs have."""
    curves = [curve(run) for run in runs]
    steps = sorted(step for step in curves[0] if all(step in c for c in curves))
    return [(step, interval([c[step] for c in curves])) for step in steps]


def _training(figures: Figures, runs: Sequence[RunRecords]) -> list[str]:
    names = runs[0].names()
    rates = [name for name in names if name.startswith("lr_")]
    drawn = [figures.curves("learning rates", {n[3:]: _mean(runs[:1], lambda r, n=n: r.curve(n)) for n in rates})]
    for name, title in _TRAINING.items():
        if name in names:
            drawn.append(figures.curves(title, {"": _mean(runs, lambda run, name=name: run.curve(name))}))
    note = "<p>Gradients’ norms were not recorded: the host would have had to wait for them, or they are sharded.</p>"
    return [*([] if "grad_norm_dense" in names else [note]), _figures(drawn)]


def _time(figures: Figures, run: RunRecords) -> list[str]:
    return [*_whole_time(figures, run), *_parts_of_steps(figures, run)]


def _whole_time(figures: Figures, run: RunRecords) -> list[str]:
    time: Mapping[str, float] | None = None if run.summary is None else run.summary.get("time")
    if not time:
        return ["<p>The time of the whole run is not recorded: it has not finished.</p>"]
    shares = {title: float(time[name]) for name, title in _TIME.items() if name in time}
    total = sum(shares.values()) or 1.0
    rows = [[title, f"{seconds:,.2f} s", f"{seconds / total:.1%}"] for title, seconds in shares.items()]
    assert run.summary is not None
    if "ids_exchange_s" in run.summary:
        hidden = run.summary["ids_exchange_hidden_share"]
        rows.append(["exchange of ids, beside", f"{run.summary['ids_exchange_s']:,.2f} s", f"{hidden:.1%} hidden"])
    return [_figures([figures.bars("seconds", shares)]), _table(["", "time", "share"], rows)]


def _parts_of_steps(figures: Figures, run: RunRecords) -> list[str]:
    curves = {title: run.curve(f"step_{part}_s") for part, title in _PARTS.items()}
    steps = {title: [s for step, s in curve.items() if step > SETTLING_STEPS] for title, curve in curves.items()}
    times = {title: 1000 * median(seconds) for title, seconds in steps.items() if seconds}
    if not times:
        told = f"in steps that are logged, but for the first {SETTLING_STEPS}"
        return [f"<p>Parts of steps were not recorded: they are timed on CPUs, {told}.</p>"]
    total, count = sum(times.values()), max(map(len, steps.values()))
    rows = [[title, f"{ms:,.2f} ms", f"{ms / total:.1%}"] for title, ms in times.items()]
    return [
        f"<p>Parts of a step: medians of {count:,} that were logged, on the first rank.</p>",
        _figures([figures.bars("milliseconds of a step", times)]),
        _table(["", "time", "share"], rows),
    ]


def _tables(figures: Figures, run: RunRecords) -> list[str]:
    tables: Sequence[Mapping[str, Any]] = [] if run.summary is None else run.summary.get("tables", [])
    if not tables:
        return ["<p>Not recorded: the run has not finished.</p>"]
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
    by_size = sorted(tables, key=lambda table: -int(table["bytes"]))[: Figures.most_bars]
    mib = {str(table["table"]): table["bytes"] / 2**20 for table in by_size}
    few = f" The largest {len(by_size)} are drawn." if len(by_size) < len(tables) else ""
    whole = size(sum(int(table["bytes"]) for table in tables))
    told = " A gradient is the norm of those of a table’s vectors in a step, the root mean square over logged steps."
    norms = told if "gradient" in dict(columns) else ""
    memory: Mapping[str, Any] = (run.summary or {}).get("memory", {})
    held = "" if not memory else f" Caches served {memory['hit_rate']:.1%} of the lookups that asked them."
    return [
        f"<p>{len(tables):,} tables, {whole} of rows and moments.{few}{held}{norms}</p>",
        _figures([figures.bars("MiB of rows and moments", mib)]),
        _table([name for name, _ in columns], [[row[i] for _, i in columns] for row in rows]),
    ]


def _plan(figures: Figures, run: RunRecords) -> list[str]:
    if run.plan is None:
        return ["<p>One process; all rows are in the memory of its device.</p>"]
    drawn, note = figures.plan(run.plan)
    return [f"<p>{note}</p>", f'<div class="wide">{drawn}</div>']


def _environment(run: RunRecords) -> list[str]:
    if run.summary is None:
        return ["<p>It is recorded when a run has finished.</p>"]
    rows = [[name.replace("_", " "), str(run.summary[name])] for name in _ENVIRONMENT if name in run.summary]
    return [_table([], rows, "facts")]


def _figures(drawn: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(drawn)}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    return f'<div class="wide">{html_table(head, rows, kind)}</div>'
