"""Write and print the results of a run: its directory, summary, tables of metrics, and progress.

On a terminal, a bar shows progress; otherwise plain lines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from hotbed.checkpoint import Taken, directory, runs_in
from hotbed.config import Recipe
from hotbed.embed import Distributed, collections_of
from hotbed.files import read_yaml, write_json, write_text
from hotbed.machine import cpu, release, usable_cores
from hotbed.optim import SparseOptimizer
from hotbed.parsing import yaml_text
from hotbed.plan import Plan
from hotbed.plan.cost import table_bytes
from hotbed.store import Traffic
from hotbed.train.checkpoints import are_same
from hotbed.train.metrics import RESERVED_NAMES, Metrics
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.runs.callbacks import Callback, KeepBest
from hotbed.train.throughput import Balance
from hotbed.train.trainer import Trainer

RECIPE = "recipe.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
PLAN = "plan.json"


class RunDirectory:
    """Directory of a run: ``ROOT/NAME/TIME/{recipe.yaml, metrics.jsonl, summary.json, checkpoints/}``."""

    def __init__(self, root: Path, name: str) -> None:
        self._parent = root / name

    def share(self, ranks: Ranks) -> None:
        """Use the directory of the first rank on all ranks; all ranks must call this."""
        if ranks.size > 1:
            with ranks.together("create the run's directory"):
                own = self.path if ranks.is_first else None
            self.__dict__["path"] = ranks.path(own)

    def earlier(self, checkpoint_dir: str | None) -> Iterator[Path]:
        """Yield the runs ``ROOT/NAME/…`` that have this ``checkpoint_dir`` in their recipe, newest first."""
        for run in reversed(runs_in(self._parent)):
            if not run.has(RECIPE):
                continue
            recipe = cast("Mapping[str, Any]", read_yaml(Path(run.path) / RECIPE) or {})
            kept: str | None = recipe.get("train", {}).get("checkpoint_dir")
            if kept == checkpoint_dir or (
                kept and checkpoint_dir and are_same(directory(kept), directory(checkpoint_dir))
            ):
                yield Path(run.path)

    def reopen(self, path: Path) -> None:
        """Use the directory of an earlier run."""
        self.__dict__["path"] = path

    @cached_property
    def path(self) -> Path:
        """Path of the directory, which is created on first use, so that an invalid recipe creates no directory."""
        time = datetime.now().strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
            path = self._parent / f"{time}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return path
        raise FileExistsError(f"{self._parent} already has 999 runs that were started in second {time}. Try again")

    @property
    def checkpoints(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.path / "checkpoints"

    def begin(self, recipe: Recipe, plan: Plan | None = None) -> None:
        """Write the complete ``recipe.yaml`` and the plan; if the run is resumed, remove its old summary."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        write_text(self.path / RECIPE, recipe_yaml(recipe))
        if plan is not None:
            write_text(self.path / PLAN, plan.to_json())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, which marks the run as finished."""
        write_json(self.path / SUMMARY, summary)


def recipe_yaml(recipe: Recipe) -> str:
    """Return the complete recipe as YAML."""
    return yaml_text(_to_lists(recipe.to_dict())) + "\n"


def _to_lists(value: Any) -> Any:
    """Replace tuples by lists, because YAML would write a Python tag."""
    if isinstance(value, dict):
        return {key: _to_lists(entry) for key, entry in value.items()}
    return [_to_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def environment(device: torch.device) -> dict[str, str]:
    """Return the hardware, device and versions of torch and hotbed, because results depend on them."""
    hardware = f"{cpu().name}, {usable_cores()} cores"
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}; {hardware}"
    return {"hardware": hardware, "device": device.type, "torch": str(torch.__version__), "hotbed": release()}


# -- tables ------------------------------------------------------------------------------------------------------------

METRIC_NAMES = {
    "auc": "AUC",
    "logloss": "logloss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "gauc": "GAUC",
}


def print_metrics(
    console: Console, title: str, metrics: Mapping[str, Any], best: Mapping[str, float] | None = None
) -> None:
    """Print a table of metrics: means, values by task, and the ``best`` attainable values if they are known."""
    console.print(title, style="table.title", soft_wrap=True)
    table = RichTable()
    table.add_column("metric")
    tasks: Mapping[str, Mapping[str, Any]] = metrics.get("tasks", {})
    table.add_column("mean of labels" if tasks else "reached", justify="right")
    for task in tasks:
        table.add_column(task, justify="right", overflow="fold")
    if best:
        table.add_column("best attainable", justify="right")
    own = dict.fromkeys(name for of in (metrics, *tasks.values()) for name in of if name not in RESERVED_NAMES)
    for name in [*METRIC_NAMES, *own]:
        if name in metrics or name in own:
            cells = [
                metrics.get(name),
                *(task.get(name) for task in tasks.values()),
                *([best.get(name)] if best else []),
            ]
            table.add_row(METRIC_NAMES.get(name, name), *map(_number, cells))
    console.print(table)
    for prefix, values in [(f"label '{label}', ", task) for label, task in tasks.items()] or [("", metrics)]:
        for name, reason in values.get("undefined", {}).items():
            console.print(f"{prefix}{METRIC_NAMES[name]}: – ({reason})", highlight=False, soft_wrap=True)


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Print metrics, throughput and the directory of a finished run."""
    if summary["test"] is not None:
        title = f"{summary['name']}: test, {summary['test']['samples']:,} samples"
        print_metrics(console, title, summary["test"], summary.get("best_attainable"))
    lines = [
        f"{summary['steps']:,} steps, {summary['samples']:,} samples, {summary['samples_per_s']:,.0f} samples/s "
        f"on {summary['hardware']}"
    ]
    if summary.get("best_step") not in (None, summary["steps"]):
        lines.append(f"the model of step {summary['best_step']:,} was tested and kept, because its evaluation was best")
    if "precision_because" in summary:
        threads = f"{summary['threads']} thread{'s' if summary['threads'] > 1 else ''} per process"
        lines.append(f"precision {summary['precision']} ({summary['precision_because']}), {threads}")
    if "ranks" in summary:
        hidden = summary["ids_exchange_hidden_share"]
        lines.append(f"{summary['ranks']} processes; {hidden:.0%} of the exchange of ids overlapped with other work")
    for feature, count in summary["ids_out_of_range"].items():
        lines.append(f"feature {feature}: {count:,} ids were out of range and dropped or hashed (data.on_bad_id)")
    for line in [*lines, f"run: {summary['run']}"]:
        console.print(line, soft_wrap=True)


def print_taken(console: Console, checkpoint: str, report: Sequence[Taken]) -> None:
    """Print which entries of a checkpoint a new model loaded; loaded parameters are only counted."""
    console.print(f"from {checkpoint}", soft_wrap=True)
    table = RichTable()
    for name in ("", "name", "loaded", "note"):
        table.add_column(name, overflow="fold")
    for entry in report:
        if entry.what != "parameter" or not entry.taken:
            table.add_row(entry.what, entry.name, "yes" if entry.taken else "no", entry.note)
    console.print(table)
    parameters = sum(entry.what == "parameter" and entry.taken for entry in report)
    console.print(f"{parameters} parameters of the dense part were loaded")


def _number(value: float | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None or math.isnan(value) else f"{value:.5f}"


def size(count: int) -> str:
    """Format a number of bytes in its largest binary unit."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"


_STAGES = {
    "read": "reading the log",
    "count": "counting values",
    "write": "writing the dataset",
    "accesses": "counting accesses",
    "inspect": "reading all rows",
    "against": "reading rows to compare",
    "pack": "packing hot and cold samples",
    "measure": "measuring numericals",
    "export": "copying rows",
    "quantiles": "measuring quantiles",
    "predict": "predicting",
}


class StageProgress:
    """Show progress through named stages inside the context, e.g. of `hotbed.prepare`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units of a stage are finished."""
        new = stage != self._stage
        self._stage = stage
        if self._bar is not None:
            task = self._bar.task_ids[0]
            if new:
                self._bar.reset(task, description=_STAGES[stage])
            self._bar.update(task, completed=done, total=total)
        elif new:
            self._console.print(f"{_STAGES[stage]} …")


class ShowProgress(Callback):
    """Show loss, throughput and time left, in a progress bar on a terminal and otherwise in plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def on_numerics(self, trainer: Trainer, chosen: str) -> None:
        """Print the chosen precision and matrix library."""
        self._console.print(chosen)

    def on_train_start(self, trainer: Trainer) -> None:
        """Show an empty bar."""
        if self._console.is_terminal:
            columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("train", total=trainer.steps_total, completed=trainer.step, note="")
            self._bar.start()

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Update the bar."""
        if self._bar is not None:
            stalled = _stalled({"stall_share": trainer.clock.stall_share})
            note = f"loss {loss:.4f}  {trainer.samples_per_s:,.0f} samples/s{stalled}{_time_left(trainer)}"
            self._bar.update(self._bar.task_ids[0], completed=trainer.step, note=note)

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Print the record as a line, unless there is a bar."""
        if self._bar is None:
            of = f"/{trainer.steps_total:,}" if trainer.steps_total else ""
            self._console.print(
                f"step {trainer.step:,}{of}  loss {record['loss']:.4f}  "
                f"{record['samples_per_s']:,.0f} samples/s{_stalled(record)}{_time_left(trainer)}"
            )

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Print the metrics as a line."""
        values, names = {"AUC": metrics.auc, "logloss": metrics.logloss}, {"AUC": "auc", "logloss": "logloss"}
        if trainer.numerics.is_retrieval:
            values = metrics.others
        shown = [
            f"{name} – ({metrics.undefined.get(names.get(name, name), 'undefined')})"
            if math.isnan(value)
            else f"{name} {value:.5f}"
            for name, value in values.items()
        ]
        self._console.print(f"step {trainer.step:,}  valid {'  '.join(shown)}", soft_wrap=True)

    def on_train_end(self, trainer: Trainer) -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar; the caller calls this also after a failure."""
        if self._bar is not None:
            self._bar.stop()


def _time_left(trainer: Trainer) -> str:
    """Format the estimated time left; return an empty text during the first steps, when the time is unknown."""
    seconds = trainer.clock.seconds_for(trainer.steps_total - trainer.step) if trainer.steps_total else None
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f"  {minutes}:{seconds:02d} left"


def _stalled(record: Mapping[str, float]) -> str:
    """Format the share of time that training waited for batches; return an empty text if it is below 1 %."""
    share = record.get("stall_share", 0.0)
    return f"  {share:.0%} stalled" if share >= 0.01 else ""


# -- summary -----------------------------------------------------------------------------------------------------------


def summary_of(
    recipe: Recipe,
    trainer: Trainer,
    run: RunDirectory,
    ids: Mapping[str, int],
    taken: Sequence[Taken],
    tested: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the summary of a run; all ranks must call this.

    ``ids`` has the number of invalid ids by feature, ``taken`` has the entries that were loaded from
    ``init.checkpoint``, and ``tested`` has the metrics of the test split.
    """
    records = trainer.saver.records
    return {
        "name": recipe.name,
        "seed": recipe.train.seed,
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "samples": trainer.samples,
        "samples_per_s": trainer.samples_per_s,
        "stall_share": trainer.clock.stall_share,
        "time": trainer.clock.seconds,
        **trainer.numerics.summary(),
        "best_step": next((c.step for c in trainer.callbacks if isinstance(c, KeepBest)), None),
        "test": tested,
        "ids_out_of_range": dict(ids),
        "checkpoints": {"saved": len(records), "stalled_s": sum(record["stalled_s"] for record in records)},
        **({"init": [t.to_dict() for t in taken]} if taken else {}),
        **_ranks_summary(trainer),
        **_memory(trainer),
        "tables": summarize_tables(trainer),
        **environment(trainer.device),
        "run": str(run.path),
    }


def _memory(trainer: Trainer) -> dict[str, Any]:
    """Summarize the caches and files that store rows; return an empty dict if all rows are in device memory."""
    collections, traffic = collections_of(trainer.model).values(), trainer.traffic
    if traffic == Traffic():
        return {}
    held = {"table_bytes": sum(c.nbytes for c in collections), "disk_bytes": sum(c.disk_bytes for c in collections)}
    return {"memory": {**held, "hit_rate": traffic.hit_rate, **asdict(traffic)}}


def summarize_tables(trainer: Trainer) -> list[dict[str, Any]]:
    """Summarize each table: size, ids per sample, hit rate, gradient norm; all ranks must call this."""
    clock = trainer.clock
    moments = {
        name: optimizer.rule.moments
        for optimizer in trainer.optimizers.values()
        if isinstance(optimizer, SparseOptimizer)
        for group in optimizer.param_groups
        for name in group["tables"]
    }
    collections = collections_of(trainer.model)
    norms = trainer.training_step.logged.norms(trainer.ranks.add, trainer.ranks.virtual.total)
    found: list[dict[str, Any]] = []
    for path, collection in collections.items():
        served = collection.served
        counts = iter(trainer.ranks.add(*chain.from_iterable(served.values())))
        rates = {t: h / (h + m) if h + m else None for t, h, m in zip(served, counts, counts, strict=True)}
        for table in collection.tables.values():
            ids = sum(clock.ids[f.name] for f in collection.features if f.table == table.name)
            whole = f"{path}.{table.name}"
            found.append(
                {
                    "table": whole if len(collections) > 1 else table.name,
                    "rows": table.rows,
                    "dim": table.dim,
                    "dtype": table.dtype,
                    "bytes": table_bytes(table, moments.get(whole, moments.get(table.name, ()))),
                    # Measured on the first rank; None before its first batch
                    "ids_per_sample": ids / clock.drawn if clock.drawn else None,
                    "hit_rate": rates[table.name],
                    "grad_norm": norms[path, table.name],
                }
            )
    return found


def _ranks_summary(trainer: Trainer) -> dict[str, Any]:
    """Summarize how evenly ranks work and how much their exchanges overlap; return an empty dict for one rank."""
    if trainer.ranks.size == 1:
        return {}
    replicas = trainer.model.wire.replicas if isinstance(trainer.model, Distributed) else None
    averaged: dict[str, Any] = {}
    if replicas is not None:
        averaged["replicas"] = replicas.link.size
    if replicas is not None and not replicas.exact:
        averaged |= {"syncs": replicas.syncs, "sync_waited_s": replicas.waited_s}
    return {
        **averaged,
        **Balance(trainer.model).record(),
        "ranks": trainer.ranks.size,
        "ids_exchange_s": trainer.prefetcher.exchange_s,
        "ids_exchange_hidden_share": trainer.prefetcher.hidden_share,
    }
