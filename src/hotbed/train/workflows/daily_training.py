"""Train a model day by day: ``hotbed daily``.

For each day, `train` resumes the previous day's checkpoint and trains ``train.epochs`` epochs of the day. Before its
first step, the previous day's model is evaluated on the day (progressive validation). After training, the day's changes
are written, and a record in ``days.jsonl`` marks the day as finished. All state is in checkpoints. So one command for
five days trains the same bits as five commands, or as a command that was killed and repeated.

``OUT`` contains ``days.jsonl``, ``checkpoints/last-STEP`` and a run directory per day. A day's directory has
``before.json`` (measured before training), ``seen.npz`` (rows looked up so far) and, with ``--changes``,
``changes.parquet``. After ``--restart_from``, names of new directories end in ``-2`` (then ``-3``, and so on), and the
old directories are kept.
"""

from __future__ import annotations

import gc
import json
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from rich.console import Console
from torch import nn

from hotbed.batch import Batch
from hotbed.checkpoint import MANIFEST, Directory, checkpoints_in, directory, read_manifest
from hotbed.checkpoint.changes import count_ids, export_changes
from hotbed.checkpoint.manifest import step_of
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.checks import Count, check
from hotbed.config import Recipe
from hotbed.data import Loader, Source
from hotbed.data.drafting.profile import BINS, bins_of
from hotbed.data.inspection import stability_index
from hotbed.errors import CheckpointError, DamagedError, DataError, RecipeError, StoppedError
from hotbed.files import new_file, read_text, write_json, write_text
from hotbed.locations import location, remote_files
from hotbed.parsing import TextError, parse_json, read_limited
from hotbed.train.checkpoints import are_same
from hotbed.train.directory_lock import lock
from hotbed.train.metrics import refuse_unnormalized
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.ranks.process_group import end_groups, is_first, on_first
from hotbed.train.runs.build import open_source
from hotbed.train.runs.callbacks import remove_unneeded
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.resume import NEVER, refuse_another_recipe
from hotbed.train.runs.run import Continuation, train
from hotbed.train.runs.stored_model import without_splits
from hotbed.train.trainer import Trainer

DAYS, BEFORE, SEEN, CHANGES = "days.jsonl", "before.json", "seen.npz", "changes.parquet"
MEASURED = ("samples", "metrics", "unseen_share", "new_rows", "label_means")
"""Entries of ``before.json`` that are copied to the day's record."""
BINNED = "bins_of_sizes"
"""Entry of ``before.json`` that counts the values of each numerical column by size class."""
LOOK_AHEAD = 31
"""After a day without data, this many days are searched, to distinguish a gap from the end of the data."""
_KEYS = ("folder", "checkpoint", "step", "epoch", "data")  # keys that the record of a trained day must have
_TABLE = "table "  # prefix of names in ``seen.npz``, because NumPy reserves some names
Record = dict[str, Any]
Bits = Mapping[str, np.ndarray[Any, Any]]
"""One bit per row of each table, as bytes ``[⌈rows ÷ 8⌉]`` by table name; the bit is 1 if the row was looked up."""


@dataclass(frozen=True, kw_only=True)
class Days:
    """Options of ``hotbed daily``."""

    data: str  # path or URI of a day's data with ``{date}`` or ``{date:%Y/%m/%d}``
    first: date | None = None  # first day (default: the first day of earlier commands)
    last: date | None = None  # last day (default: the last day with data)
    skip: frozenset[date] = frozenset()  # days without data
    marker: str | None = None  # a day is complete if its folder contains this file, e.g. ``_SUCCESS``
    keep: int | None = None  # the checkpoints of this many newest days are kept (default: of all days)
    changes: bool = False  # whether to write the rows that each day changed, for servers

    def __post_init__(self) -> None:
        problem = "expected a path with {date} (e.g. 2026-01-31) or {date:%Y/%m/%d}"
        try:
            fields = {name for _, name, _, _ in Formatter().parse(self.data) if name is not None}
            is_pattern = fields == {"date"} and self.path(date(2001, 2, 3)) != self.path(date(2001, 2, 4))
        except (ValueError, IndexError, KeyError) as error:
            is_pattern, problem = False, f"{problem} ({error})"
        if not is_pattern:
            raise RecipeError(f"data.path: got {self.data!r}, {problem}")
        check("--keep", self.keep, Count | None, RecipeError)
        if self.first is not None and self.last is not None and self.last < self.first:
            raise RecipeError(f"--until is {self.last}, expected at least --from {self.first}")

    def path(self, day: date) -> str:
        """Return the path or URI of a day's data."""
        return self.data.format(date=day)


class TrainingDay(NamedTuple):
    """A day to train, as the first rank broadcasts it."""

    day: date
    data: str  # path or URI
    folder: Path  # run directory of the day
    checkpoints: str  # directory of the checkpoints of all days
    resume: str | None  # checkpoint to resume
    epochs: int  # epochs of all days up to this one, which the model has trained after the day
    is_trained: bool  # whether training has finished, so that only the record is missing
    is_begun: bool  # whether the day has a checkpoint
    before: Path | None  # run directory of the previous day
    kept: list[int]  # steps of the previous days' checkpoints


def train_days(
    recipe: Recipe, days: Days, out: Path, console: Console, restart_from: date | None = None
) -> list[Record]:
    """Train the days that have data and are not trained yet, and return the records of all days.

    All ranks must call this.
    """
    refuse_endings(recipe)
    recipe, ignored = recipe_of_days(recipe)
    for message in ignored if is_first() else ():
        console.print(message, soft_wrap=True)
    # Only the first rank enters the lock and has a table. It broadcasts each day to train.
    held, tables = lock(LocalDirectory(out)), list[DayTable]()

    def begin() -> None:
        held.__enter__()
        tables.append(DayTable(out, recipe, days, restart_from))

    def finish(day: TrainingDay, start: float) -> None:
        held.check()
        tables[0].finish(day, time.monotonic() - start, console)

    try:
        on_first(begin)
        while (day := on_first(lambda: tables[0].next(console))) is not None:
            start = time.monotonic()
            if not day.is_trained:
                _train(recipe, day, console)
                gc.collect()  # reference cycles would keep the day's tables in memory
                end_groups()
            on_first(partial(finish, day, start))
        return on_first(lambda: tables[0].records)
    finally:
        if is_first():
            held.__exit__()


def refuse_endings(recipe: Recipe) -> None:
    """Raise `RecipeError` for settings that end training or assume a fixed data set, e.g. ``train.steps``."""
    train = recipe.train
    endless = "trains whole days without end"
    # Key, its value, allowed values, and the reason why other values are refused
    rules: tuple[tuple[str, object, tuple[object, ...], str], ...] = (
        ("train.steps", train.steps, (None,), endless),
        ("train.patience", train.patience, (None, "auto"), endless),
        ("train.checkpoint", train.checkpoint, ("auto", "last"), endless),
        ("schedule.decay_start", recipe.schedule.decay_start, (None,), endless),
        ("hot.batches", recipe.hot.batches, (None, "mixed", "split"), endless),
        ("retrieval", recipe.retrieval and "set", (None,), "would search only the items of one day"),
        ("train.keep_every", train.keep_every, (None,), "keeps the checkpoints of whole days (--keep)"),
    )
    for key, value, allowed, reason in rules:
        if value not in allowed:
            raise RecipeError(f"{key} is {value}, but hotbed daily {reason}. Remove {key} from the recipe")


def recipe_of_days(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe for training whole days, and a message for each ignored setting.

    All rows of a day are trained, so arguments of the source that divide data into splits are removed. The evaluation
    on the next day replaces the test split.
    """
    ignored: list[str] = []
    source, before = without_splits(recipe.data.source), recipe.data.source.init_args
    dropped = [key for key in before if key not in source.init_args]
    dropped += [key for key, value in source.init_args.items() if value != before.get(key)]
    if dropped:
        ignored.append(
            f"data.source.init_args.{', '.join(dropped)} is ignored, because hotbed daily evaluates and trains all "
            "rows of a day"
        )
        if recipe.data.valid_split is not None and recipe.train.patience == "auto" and recipe.train.epochs > 1:
            ignored.append(
                f"train.epochs {recipe.train.epochs} is ignored, because it limits early stopping on the valid split, "
                f"which hotbed daily does not use. Each day is trained for one epoch. To train train.epochs per day, "
                f"remove {dropped[0]} from data.source.init_args"
            )
            recipe = replace(recipe, train=replace(recipe.train, epochs=1))
        recipe = replace(recipe, data=replace(recipe.data, source=source, valid_split=None, test_split=None))
    if (share := recipe.schedule.decay_share) is not None:
        ignored.append(f"schedule.decay_share {share:g} is ignored, because training has no end")
        recipe = replace(recipe, schedule=replace(recipe.schedule, decay_share=None))
    return recipe, ignored


# -- one day -----------------------------------------------------------------------------------------------------------


def _train(recipe: Recipe, day: TrainingDay, console: Console) -> None:
    """Evaluate on a day's data, then train on it."""
    recipe = replace(
        recipe,
        data=replace(recipe.data, path=day.data, test_split=None),
        train=replace(
            recipe.train, epochs=day.epochs, checkpoint="last", checkpoint_dir=day.checkpoints, patience=None
        ),
    )
    run = RunDirectory(day.folder.parent, day.folder.name)
    run.reopen(day.folder)
    if is_first():
        console.print(f"{day.day}: {day.data}", soft_wrap=True)
    is_new = day.before is None and recipe.init.checkpoint is None
    continuation = Continuation(before=partial(_evaluate_before_training, day, is_new), kept=day.kept)
    try:
        train(recipe, run, console, resume=day.resume or NEVER, continuation=continuation)
    except StoppedError as error:
        raise StoppedError(
            f"stopped by a signal on {day.day}, after saving a checkpoint. Repeat the command to continue", error.signal
        ) from error


def _evaluate_before_training(
    day: TrainingDay, is_new: bool, trainer: Trainer, source: Source, batches: Loader
) -> None:
    """Write ``before.json``: the day's counts, and the metrics of the model before it is trained on the day.

    If the model ``is_new``, i.e. it was never trained, there are no metrics.
    """
    before, file = day.before, day.folder / BEFORE
    if day.is_begun and on_first(file.exists):
        return
    counts = DayCounts(source, on_first(lambda: {} if before is None else read_seen(before / SEEN)))
    counted, metrics = counts.counted(batches), None
    if is_new:
        for _ in counted:
            trainer.clock.count()  # shows the watchdog that evaluation makes progress
    else:
        refuse_unnormalized(trainer.model, batches)  # `counted` has no source, so `evaluate` cannot check this
        with _restored_id_counts(trainer.model):
            metrics = trainer.evaluate(counted).to_dict()
    counts.gather(trainer.ranks)
    with trainer.ranks.together(f"write {file}"):
        if trainer.ranks.is_first:
            write_seen(day.folder / SEEN, counts.seen())
            write_json(file, {"metrics": metrics, **counts.record()})


@contextmanager
def _restored_id_counts(model: nn.Module) -> Generator[None]:
    """Restore the counts of invalid ids after the body, because training on the day will count the same ids again."""
    counters = [c for m in model.modules() if isinstance(c := getattr(m, "bad_ids", None), Counter)]
    before = [dict(cast("Counter[str]", counter)) for counter in counters]
    yield
    for counter, values in zip(counters, before, strict=True):
        counter.clear()
        counter.update(values)


class DayCounts:
    """Count a day's samples, labels and lookups of new rows, and the distributions of its numerical columns."""

    def __init__(self, source: Source, seen: Bits) -> None:
        schema = source.schema
        self._columns, self._labels = tuple(schema.dense), tuple(schema.labels)
        self._rows = {table.name: table.rows for table in schema.tables(1)}
        self._table = {column.name: column.table_name for column in schema.sparse}
        self._seen = {name: np.zeros(-(-count // 8), np.uint8) for name, count in self._rows.items()}
        for name, bits in self._seen.items():  # the tables may have grown since ``seen`` was written
            earlier = seen.get(name, bits)[: len(bits)]
            bits[: len(earlier)] = earlier
        self._new = {name: np.zeros_like(bits) for name, bits in self._seen.items()}
        self._lookups = torch.zeros(2, dtype=torch.float64)  # number of lookups, and of lookups of new rows
        self._positives = torch.zeros(
            1 + len(self._labels), dtype=torch.float64
        )  # number of samples, and sum of each label
        self._bins = torch.zeros(len(self._columns), BINS, dtype=torch.float64)

    def counted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, which are in host memory, after counting each one."""
        for batch in batches:
            self.add(batch)
            yield batch

    def add(self, batch: Batch) -> None:
        """Count a batch in host memory."""
        self._positives[0] += len(batch)
        if batch.labels is not None:
            self._positives[1:] += batch.labels.double().sum(0)
        if batch.dense is not None:
            bins = bins_of(batch.dense)
            for i in range(len(self._columns)):
                self._bins[i] += torch.bincount(bins[:, i], minlength=BINS)
        for column, table in self._table.items():
            distinct, times = np.unique(batch.sparse[column].values.numpy(), return_counts=True)
            valid = (distinct >= 0) & (distinct < self._rows[table])
            distinct, times = distinct[valid], times[valid]
            byte, bit = distinct >> 3, (1 << (distinct & 7)).astype(np.uint8)
            unknown = (self._seen[table][byte] & bit) == 0
            self._lookups += torch.tensor([times.sum(), times[unknown].sum()], dtype=torch.float64)
            np.bitwise_or.at(self._new[table], byte[unknown], bit[unknown])

    def gather(self, ranks: Ranks) -> None:
        """Add up the counts of all ranks on every rank; all ranks must call this."""
        if ranks.link is None:
            return
        for counts in (self._lookups, self._positives, self._bins):
            counts.copy_(ranks.gather(counts[None]).sum(0))
        for bits in self._new.values():
            np.bitwise_or.reduce(ranks.gather(torch.from_numpy(bits)[None]).numpy(), axis=0, out=bits)

    def seen(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the rows that were looked up on this day or an earlier day."""
        return {name: bits | self._new[name] for name, bits in self._seen.items()}

    def record(self) -> dict[str, Any]:
        """Return the counts as plain values for ``before.json``."""
        samples, lookups = float(self._positives[0]), float(self._lookups[0])
        return {
            "samples": int(samples),
            "lookups": int(lookups),
            "unseen_share": float(self._lookups[1]) / max(lookups, 1),
            "new_rows": {name: int(np.unpackbits(bits).sum()) for name, bits in self._new.items()},
            "label_means": {
                label: float(total) / max(samples, 1)
                for label, total in zip(self._labels, self._positives[1:], strict=True)
            },
            BINNED: {
                name: {str(i): int(own[i]) for i in own.nonzero()[:, 0].tolist()}
                for name, own in zip(self._columns, self._bins, strict=True)
            },
        }


def stability(bins: Mapping[str, Mapping[str, int]], reference: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return the population stability index of each column that both days have, largest first.

    Both arguments have the number of values of a column by bin (`BINNED`).
    """
    found: dict[str, float] = {}
    for column in bins.keys() & reference.keys():
        keys = sorted(bins[column].keys() | reference[column].keys(), key=int)
        found[column] = stability_index(
            *(np.array([of[column].get(key, 0) for key in keys]) for of in (bins, reference))
        )
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def write_seen(path: Path, seen: Bits) -> None:
    """Write ``seen.npz``; the file appears when it is complete."""
    with new_file(path) as file, file.open("wb") as stream:
        np.savez_compressed(stream, **cast("dict[str, Any]", {f"{_TABLE}{name}": of for name, of in seen.items()}))


def read_seen(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read a file written by `write_seen`; return an empty dict if it does not exist."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name.removeprefix(_TABLE): stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedError(f"{path} is damaged ({error}). Remove the file; then all rows count as new") from error


# -- the table of days -------------------------------------------------------------------------------------------------


def read_days(out: Path) -> list[Record]:
    """Read the records of ``days.jsonl``."""
    file, records = out / DAYS, list[Record]()
    for number, text in enumerate(read_text(file).splitlines() if file.exists() else (), 1):
        try:
            record = json.loads(text)
            date.fromisoformat(record["day"])
            if not record.get("skipped"):
                _ = [record[key] for key in _KEYS]
        except (ValueError, TypeError, KeyError):
            raise DamagedError(
                f"{file}, line {number:,} is not the record of a day. Restore {DAYS} from a backup"
            ) from None
        records.append(record)
    return records


def write_days(file: Path, records: Sequence[Record]) -> None:
    """Write records, one JSON object per line."""
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def read_before(folder: Path, day: str) -> dict[str, Any]:
    """Read ``before.json`` of a day."""
    file, problem = folder / BEFORE, "lacks entries"
    try:
        found = parse_json(read_limited(file))
        if isinstance(found, dict) and all(key in found for key in MEASURED):
            return cast("dict[str, Any]", found)
    except FileNotFoundError:
        problem = "does not exist"
    except (TextError, ValueError) as error:
        problem = f"is damaged ({error})"
    raise DamagedError(f"{file} {problem}. Restore the file, or train again from its day on: --restart_from {day}")


class DayTable:
    """Records of ``days.jsonl``, which determine the next day to train; only the first rank has this object.

    With ``restart_from``, the old records are copied to ``days-N.jsonl``, and records from that day on are removed.
    This happens in `next`, after the data of that day was checked.
    """

    def __init__(self, out: Path, recipe: Recipe, days: Days, restart_from: date | None) -> None:
        self._out, self._days, self._recipe = out, days, recipe
        self.records = read_days(out)
        self._generation = 1 + len(list(out.glob("days-*.jsonl")))
        self._restart_from, self._set_aside = restart_from, list[Record]()
        if restart_from is not None:
            self._set_aside, self.records = self.records, self._records_before(restart_from)
            self._generation += 1
        self._checkpoints = directory(recipe.train.checkpoint_dir or str(out.resolve() / "checkpoints"))
        if self._generation > 1:
            self._checkpoints = self._checkpoints.sibling(f"{self._checkpoints.name}-{self._generation}")
        first = date.fromisoformat(self.records[0]["day"]) if self.records else days.first
        if first is None:
            raise RecipeError(f"{out} has no trained day yet. Pass the first day, e.g. --from 2026-01-31")
        if days.first not in (None, first):
            raise RecipeError(
                f"--from is {days.first}, but the first day of {out} is {first}. Remove --from, or change --out"
            )
        self._first = first

    @property
    def trained(self) -> list[Record]:
        """Records of the trained days."""
        return [record for record in self.records if not record.get("skipped")]

    def next(self, console: Console) -> TrainingDay | None:
        """Return the next day to train; None if that day has no data yet or is after ``--until``."""
        while True:
            day = self._first if not self.records else date.fromisoformat(self.records[-1]["day"]) + timedelta(days=1)
            if self._days.last is not None and day > self._days.last:
                if self._restart_from is not None:
                    raise RecipeError(f"--until is {self._days.last}, expected at least --restart_from {day}")
                console.print(f"all days until {self._days.last} are trained")
                return None
            if day not in self._days.skip:
                break
            self._add({"day": str(day), "skipped": True})
        data = self._days.path(day)
        if not _exists(data):
            self._refuse_gap(day, data)
            if self._restart_from is not None:
                raise DataError(
                    f"--restart_from is {day}, but {data} does not exist. Nothing was changed. Choose a day with data"
                )
            console.print(f"all days with data are trained: {day} has no data yet ({data})", soft_wrap=True)
            return None
        if self._days.marker is not None and not _exists(f"{data.rstrip('/')}/{self._days.marker}"):
            raise DataError(
                f"{data} has no {self._days.marker} yet, so {day} is incomplete. Repeat the command when it exists"
            )
        found = self._next(day, data)
        if self._restart_from is not None:
            if found.resume is not None:
                refuse_another_recipe(found.resume, self._recipe)
            open_source(replace(self._recipe.data, path=data, test_split=None))
            write_days(self._out / f"days-{self._generation - 1}.jsonl", self._set_aside)
            write_days(self._out / DAYS, self.records)
            self._restart_from = None
        found.folder.mkdir(parents=True, exist_ok=True)
        return found

    def _next(self, day: date, data: str) -> TrainingDay:
        before = self.trained[-1] if self.trained else None
        epochs = self._recipe.train.epochs + (0 if before is None else int(before["epoch"]))
        folder = self._out / (f"{day}" if self._generation == 1 else f"{day}-{self._generation}")
        own = self._newest(-1 if before is None else before["step"])
        resume = None if before is None else str(before["checkpoint"])
        is_trained = False
        if own is not None:
            manifest, resume = read_manifest(own), str(own)
            path = (manifest.recipe or {}).get("data", {}).get("path")
            if not (folder / BEFORE).exists() or path != data:
                raise CheckpointError(
                    f"{own} is newer than the checkpoints of all trained days in {self._out}, but does not belong to "
                    f"the next day, {day}. Remove the checkpoint, or change train.checkpoint_dir if another model uses "
                    "this directory"
                )
            is_trained = manifest.parts["position"]["epoch"] >= epochs
        return TrainingDay(
            day=day,
            data=data,
            folder=folder,
            checkpoints=self._checkpoints.path,
            resume=resume,
            epochs=epochs,
            is_trained=is_trained,
            is_begun=own is not None,
            before=None if before is None else self._out / before["folder"],
            kept=[record["step"] for record in self.trained],
        )

    def finish(self, day: TrainingDay, seconds: float, console: Console) -> None:
        """Write a day's changes, add its record, and remove old checkpoints."""
        since = self.trained[-1]["checkpoint"] if self.trained else None
        checkpoint = self._newest(-1)
        assert checkpoint is not None
        manifest, found = read_manifest(checkpoint), read_before(day.folder, str(day.day))
        if self._days.changes:
            export_changes(checkpoint, day.folder / CHANGES, since)
        drift: dict[str, dict[str, float]] = {}
        references = {"day_before": self.trained[-1], "first_day": self.trained[0]} if self.trained else {}
        for name, record in references.items():
            reference = read_before(self._out / record["folder"], record["day"]).get(BINNED, {})
            drift[name] = stability(found.get(BINNED, {}), reference)
        dynamic = count_ids(checkpoint, since)
        record: Record = {
            "day": str(day.day),
            "data": day.data,
            "folder": day.folder.name,
            "checkpoint": checkpoint.path,
            "step": manifest.step,
            "epoch": manifest.parts["position"]["epoch"],
            **{key: found[key] for key in MEASURED},
            "drift": drift,
            # Number of ids in each dynamic table, and number of ids that were evicted since the previous day
            **({key: {t: of[key] for t, of in dynamic.items()} for key in ("ids", "evicted")} if dynamic else {}),
            "bytes": manifest.nbytes,
            "base": None if manifest.base is None else manifest.base.name,
            "seconds": round(seconds, 1),
        }
        self._add(record)
        self._remove_old()
        metrics: Mapping[str, float | None] = found["metrics"] or {}
        shown = [f"{record['samples']:,} samples"]
        shown += [f"{k} {v:.5f}" for k in ("auc", "logloss", "calibration") if (v := metrics.get(k)) is not None]
        shown.append(f"{record['unseen_share']:.2%} of lookups are of new rows")
        if "evicted" in record:
            shown.append(f"{sum(record['evicted'].values()):,} ids evicted")
        console.print(f"{day.day} is trained: {', '.join(shown)}", soft_wrap=True)

    def _newest(self, after: int) -> Directory | None:
        """Return the newest checkpoint of a later step than ``after``, or None."""
        found = [c for c in checkpoints_in(self._checkpoints, "last") if step_of(c) > after]
        return found[-1] if found else None

    def _add(self, record: Record) -> None:
        self.records.append(record)
        if self._restart_from is None:
            write_days(self._out / DAYS, self.records)

    def _remove_old(self) -> None:
        """Remove checkpoints from the current directory, except for the ``--keep`` newest days."""
        days = self.trained if self._days.keep is None else self.trained[-self._days.keep :]
        kept = [directory(record["checkpoint"]) for record in days]
        with lock(self._checkpoints) as held:  # `train` has released its lock
            others = [c for c in checkpoints_in(self._checkpoints) if not any(are_same(c, k) for k in kept)]
            held.check()
            remove_unneeded(self._checkpoints, others)

    def _records_before(self, day: date) -> list[Record]:
        """Return the records before ``--restart_from``; the last trained day among them must have a checkpoint."""
        earlier = [record for record in self.records if date.fromisoformat(record["day"]) < day]
        if len(earlier) == len(self.records):
            last = self.records[-1]["day"] if self.records else "none"
            raise RecipeError(f"--restart_from is {day}, but the last trained day is {last}. Remove --restart_from")
        trained = [record for record in earlier if not record.get("skipped")]
        if trained and not directory(trained[-1]["checkpoint"]).has(MANIFEST):
            paths = {record["day"]: record.get("checkpoint") for record in self.records}
            kept = [name for name, path in paths.items() if path is not None and directory(path).has(MANIFEST)]
            raise RecipeError(
                f"--restart_from is {day}, but the checkpoint of {trained[-1]['day']} was removed (--keep). Choose "
                f"the day after one that has a checkpoint: {', '.join(kept) or 'none'}"
            )
        return earlier

    def _refuse_gap(self, day: date, data: str) -> None:
        """Raise `DataError` for a day without data if a later day has data, or if ``--until`` requires the day."""
        ahead = (day + timedelta(days=n) for n in range(1, LOOK_AHEAD + 1))
        later = next((d for d in ahead if _exists(self._days.path(d))), None)
        if later is not None or self._days.last is not None:
            reason = f"{later} has data" if later else f"--until is {self._days.last}"
            raise DataError(
                f"{day} has no data ({data}), but {reason}. Repeat the command when the data exists, or pass "
                f"--skip {day}"
            )


def _exists(data: str) -> bool:
    path = location(data)
    return path.exists() if isinstance(path, Path) else remote_files(path) is not None
