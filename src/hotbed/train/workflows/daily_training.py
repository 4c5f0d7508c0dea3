"""Train a model day by day, for as long as there are days: ``hotbed daily``.

A day is a run of `train` that goes on from the checkpoint of the day before, and takes ``train.epochs`` passes over its
samples: the epochs of the model go on counting. Before its first step the model, which has not seen the day, is
evaluated on it (progressive validation). Then the day's checkpoint is published, and last its record is added to
``days.jsonl``, which makes the day a finished one. All state passes from day to day through checkpoints, so one command
for five days, five commands, and a command that is killed and given again train the same bits.

What is in ``OUT``: ``days.jsonl``; ``checkpoints/last-STEP``; and by day a run's directory with ``before.json`` (what
was measured before training), ``seen.npz`` (rows looked up until then) and ``changes.parquet``, if it was asked for.
After a restart from an earlier day, later directories end in ``-2``, and what they replace stays as it was.
"""

from __future__ import annotations

import gc
import json
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
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
from hotbed.train.directory_lease import DirectoryLock, lock
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.ranks.process_group import end_groups, is_first, on_first
from hotbed.train.runs.build import open_source
from hotbed.train.runs.callbacks import remove_unneeded
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.resume import NEVER, refuse_another_recipe
from hotbed.train.runs.run import Continuation, train
from hotbed.train.runs.stored_model import uncut
from hotbed.train.trainer import Trainer


def train_days(
    recipe: Recipe, days: Days, out: Path, console: Console, restart_from: date | None = None
) -> list[Record]:
    """Train every day that has data and is not trained yet; all ranks must call this."""
    refuse_endings(recipe)
    recipe, ignored = whole_days(recipe)
    for message in ignored if is_first() else ():
        console.print(message, soft_wrap=True)
    with _locked(out) as held:
        table: DayTable | None = None

        def opened() -> None:
            nonlocal table
            table = DayTable(out, recipe, days, restart_from)

        def following() -> Day | None:
            return None if table is None else table.next(console)

        def finish(day: Day, started: float) -> None:
            assert table is not None
            held.check()
            table.finish(day, time.monotonic() - started, console)

        on_first(opened)
        while (day := on_first(following)) is not None:
            started = time.monotonic()
            if not day.is_trained:
                _train(recipe, day, console)
                gc.collect()  # models are in cycles: yesterday's tables would stay beside today's
                end_groups()
            on_first(partial(finish, day, started))
        return on_first(lambda: [] if table is None else table.records)


def refuse_endings(recipe: Recipe) -> None:
    """Raise `RecipeError` if a recipe says when training is over, changes with what is left, or is of retrieval."""
    wanted, without_end = recipe.train, "trains every day in whole, without end; leave it out"
    retrieval = "evaluates probabilities, and would know the items of one day alone; leave it out, or train with hotbed"
    retrieval += " train on the days together"
    keep = "keeps a checkpoint for each day; leave it out, and say with --keep for how many days"
    for key, value, may, daily in (
        ("train.steps", wanted.steps, (None,), without_end),
        ("train.patience", wanted.patience, (None, "auto"), without_end),
        ("train.checkpoint", wanted.checkpoint, ("auto", "last"), without_end),
        ("schedule.decay_start", recipe.schedule.decay_start, (None,), without_end),
        ("hot.batches", recipe.hot.batches, (None, "mixed", "split"), without_end),
        ("retrieval", None if recipe.retrieval is None else "set", (None,), retrieval),
        ("train.keep_every", wanted.keep_every, (None,), keep),
    ):
        if value not in may:
            raise RecipeError(f"{key} is {value}, but hotbed daily {daily}")


def whole_days(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe of one whole day, and a sentence for each setting that is ignored because days have no end.

    Every row of a day is trained, so rules that cut rows into splits are dropped together with the splits that they
    make. The next day's evaluation before training takes the place of a test split.
    """
    ignored: list[str] = []
    source = uncut(recipe.data.source)
    given = recipe.data.source.init_args
    dropped = [key for key in given if key not in source.init_args]
    dropped += [key for key in source.init_args if source.init_args[key] != given.get(key)]
    if dropped:
        ignored.append(
            f"data.source.init_args.{', '.join(dropped)} is ignored: hotbed daily trains all rows of a day, and "
            "evaluates on them first"
        )
        if recipe.data.valid_split is not None and recipe.train.patience == "auto" and recipe.train.epochs > 1:
            ignored.append(
                f"train.epochs {recipe.train.epochs} is ignored: it is the most that training may take while the "
                "validation split improves, and daily trains without one. Each day is trained once; to train each day "
                f"several times, remove {dropped[0]} from data.source.init_args"
            )
            recipe = replace(recipe, train=replace(recipe.train, epochs=1))
        recipe = replace(recipe, data=replace(recipe.data, source=source, valid_split=None, test_split=None))
    if recipe.schedule.decay_share is not None:
        ignored.append(
            f"schedule.decay_share {recipe.schedule.decay_share:g} is ignored: learning rates do not decay where "
            "training has no end"
        )
        recipe = replace(recipe, schedule=replace(recipe.schedule, decay_share=None))
    return recipe, ignored


def _train(recipe: Recipe, day: Day, console: Console) -> None:
    """Evaluate on a day's data, and train on them."""
    of_day = replace(
        recipe,
        data=replace(recipe.data, path=day.data, test_split=None),
        train=replace(recipe.train, epochs=day.epochs, checkpoint="last", checkpoint_dir=day.place, patience=None),
    )
    run = RunDirectory(day.folder.parent, day.folder.name)
    run.reopen(day.folder)
    if is_first():
        console.print(f"{day.day}: {day.data}", soft_wrap=True)
    is_new = day.before is None and recipe.init.checkpoint is None
    continuation = Continuation(before=partial(_measure, day, is_new), kept=day.kept)
    try:
        train(of_day, run, console, resume=day.resume or NEVER, continuation=continuation)
    except StoppedError as error:
        raise StoppedError(
            f"stopped by a signal on {day.day}; a checkpoint is saved, and the same command goes on", error.signal
        ) from error


def _measure(day: Day, is_new: bool, trainer: Trainer, source: Source, batches: Loader) -> None:
    """Write what the model of the day before makes of a day, and how this one differs; once, before it is trained.

    A model that ``is_new``, neither trained on a day nor begun with another's checkpoint, is not evaluated.
    """
    before, file = day.before, day.folder / BEFORE
    if day.is_begun and on_first(file.exists):  # else training begins with the data as they are now
        return
    counts = DayCounts(source, on_first(lambda: {} if before is None else read_seen(before / SEEN)))
    metrics: dict[str, Any] | None = None
    if is_new:
        for batch in batches:
            counts.add(batch)
            trainer.clock.count()  # for the watchdog
    else:
        with _uncounted(trainer.model):
            metrics = trainer.evaluate(Watched(batches, counts)).to_dict()
    counts.gather(trainer.ranks)
    with trainer.ranks.together(f"write {file}"):
        if trainer.ranks.is_first:
            write_seen(day.folder / SEEN, counts.seen())
            write_json(file, {"metrics": metrics, **counts.record()})


@contextmanager
def _uncounted(model: nn.Module) -> Generator[None]:
    """Leave the counts of ids that were out of range as they are: training on the day counts them."""
    counters = [c for m in model.modules() if isinstance(c := getattr(m, "bad_ids", None), Counter)]
    before = [dict(cast("Counter[str]", counter)) for counter in counters]
    yield
    for counter, values in zip(counters, before, strict=True):
        counter.clear()
        counter.update(values)


@contextmanager
def _locked(out: Path) -> Generator[DirectoryLock]:
    """Keep a directory of days for this command; all ranks must call this, the first one has it."""
    held = lock(LocalDirectory(out))

    def enter() -> None:
        held.__enter__()

    on_first(enter)
    try:
        yield held
    finally:
        if is_first():
            held.__exit__()


# -- drift between days ------------------------------------------------------------------------------------------------

BINNED = "bins_of_sizes"
"""Key of a record's bins."""
_TABLE = "table "  # NumPy takes some names for its own


class Watched:
    """Batches of a loader, counted as they pass."""

    def __init__(self, loader: Loader, counts: DayCounts) -> None:
        self._loader, self._counts, self.source = loader, counts, loader.source

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self._counts.add(batch)
            yield batch


class DayCounts:
    """Count a day's ids that were never seen before, its labels, and the distributions of its numbers.

    Batches are counted on their way to an evaluation. Counts of ranks and of days add up. Two days are compared by the
    population stability index (`hotbed.data.inspection`).
    """

    def __init__(self, source: Source, seen: Mapping[str, np.ndarray[Any, Any]]) -> None:
        schema = source.schema
        self._columns, self._labels = tuple(schema.dense), tuple(schema.labels)
        rows = {table.name: table.rows for table in schema.tables(1)}
        self._table = {column.name: column.table_name for column in schema.sparse}
        self._rows = rows
        self._seen = {name: _bits(count, seen.get(name)) for name, count in rows.items()}
        self._new = {name: np.zeros_like(bits) for name, bits in self._seen.items()}
        self._lookups = torch.zeros(2, dtype=torch.float64)  # all, and those of rows never looked up before
        self._positives = torch.zeros(1 + len(self._labels), dtype=torch.float64)  # samples, sums of labels
        self._bins = torch.zeros(len(self._columns), BINS, dtype=torch.float64)

    def add(self, batch: Batch) -> None:
        """Count a batch in the host's memory."""
        self._positives[0] += len(batch)
        if batch.labels is not None:
            self._positives[1:] += batch.labels.double().sum(0)
        if batch.dense is not None:
            bins = bins_of(batch.dense)
            for i in range(len(self._columns)):
                self._bins[i] += torch.bincount(bins[:, i], minlength=BINS)
        for column, table in self._table.items():
            ids = batch.sparse[column].values.numpy()
            distinct, times = np.unique(ids, return_counts=True)
            here = (distinct >= 0) & (distinct < self._rows[table])
            distinct, times = distinct[here], times[here]
            byte, bit = distinct >> 3, (1 << (distinct & 7)).astype(np.uint8)
            unknown = (self._seen[table][byte] & bit) == 0
            self._lookups += torch.tensor([times.sum(), times[unknown].sum()], dtype=torch.float64)
            np.bitwise_or.at(self._new[table], byte[unknown], bit[unknown])

    def gather(self, ranks: Ranks) -> None:
        """Add what the other ranks have; all of them must call this, and end with the same."""
        if ranks.link is None:
            return
        for counts in (self._lookups, self._positives, self._bins):
            counts.copy_(ranks.gather(counts[None]).sum(0))
        for bits in self._new.values():
            every = ranks.gather(torch.from_numpy(bits)[None]).numpy()
            np.bitwise_or.reduce(every, axis=0, out=bits)

    def seen(self) -> dict[str, np.ndarray[Any, Any]]:
        """A bit per row that was looked up on this day or any before."""
        return {name: bits | self._new[name] for name, bits in self._seen.items()}

    def record(self) -> dict[str, Any]:
        """What was counted, as plain values; by numerical column, samples by bin."""
        samples, lookups = float(self._positives[0]), float(self._lookups[0])
        rates = {
            label: float(total) / max(samples, 1)
            for label, total in zip(self._labels, self._positives[1:], strict=True)
        }
        return {
            "samples": int(samples),
            "lookups": int(lookups),
            "unseen_share": float(self._lookups[1]) / max(lookups, 1),
            "new_rows": {name: int(np.unpackbits(bits).sum()) for name, bits in self._new.items()},
            "label_means": rates,
            BINNED: {
                name: {str(i): int(own[i]) for i in own.nonzero()[:, 0].tolist()}
                for name, own in zip(self._columns, self._bins, strict=True)
            },
        }


def stability(bins: Mapping[str, Mapping[str, int]], reference: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Population stability index of each column that two days have, the largest first."""
    found: dict[str, float] = {}
    for column in bins.keys() & reference.keys():
        keys = bins[column].keys() | reference[column].keys()
        found[column] = stability_index(
            *(np.array([of[column].get(key, 0) for key in sorted(keys, key=int)]) for of in (bins, reference))
        )
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def write_seen(path: Path, seen: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write the rows that were ever looked up; the file appears whole or not at all."""
    with new_file(path) as file, file.open("wb") as stream:
        np.savez_compressed(stream, **cast("dict[str, Any]", {f"{_TABLE}{name}": of for name, of in seen.items()}))


def read_seen(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read what `write_seen` wrote; nothing, where there is no such file."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name.removeprefix(_TABLE): stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedError(f"{path} is damaged ({error}); remove it: rows then count as never seen") from error


def _bits(rows: int, earlier: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """A bit per row, those of an earlier day taken over; tables may have grown."""
    bits = np.zeros(-(-rows // 8), np.uint8)
    if earlier is not None:
        known = min(len(earlier), len(bits))
        bits[:known] = earlier[:known]
    return bits


# -- the table of days -------------------------------------------------------------------------------------------------

DAYS, BEFORE, SEEN, CHANGES = "days.jsonl", "before.json", "seen.npz", "changes.parquet"
MEASURED = ("samples", "metrics", "unseen_share", "new_rows", "label_means")
"""Entries of ``before.json`` that go into a record."""
_KEYS = ("folder", "checkpoint", "step", "epoch", "data")
Record = dict[str, Any]


def read_days(out: Path) -> list[Record]:
    """The records of a directory's days; none, where no day is finished."""
    file = out / DAYS
    if not file.exists():
        return []
    records: list[Record] = []
    for number, text in enumerate(read_text(file).splitlines(), 1):
        try:
            record = json.loads(text)
            date.fromisoformat(record["day"])
            if not record.get("skipped"):
                _ = [record[key] for key in _KEYS]
        except (ValueError, TypeError, KeyError):
            raise DamagedError(f"{file}, line {number:,} is no record of a day; restore the file") from None
        records.append(record)
    return records


def lines_of(records: Sequence[Record]) -> str:
    """Records as text."""
    return "".join(json.dumps(record) + "\n" for record in records)


def measured(folder: Path, day: str) -> dict[str, Any]:
    """What was measured of a day before it was trained on."""
    file = folder / BEFORE
    try:
        found = parse_json(read_limited(file))
    except (FileNotFoundError, TextError, ValueError) as error:
        why = "is gone" if isinstance(error, FileNotFoundError) else f"is damaged ({error})"
    else:
        if isinstance(found, dict) and all(key in found for key in MEASURED):
            return cast("dict[str, Any]", found)
        why = "is damaged"
    raise DamagedError(f"{file} {why}; restore it, or train that day and those after it anew: --restart_from {day}")


def line_of(record: Record, metrics: Mapping[str, float | None]) -> str:
    """The figures of a day in a line."""
    shown = [f"{record['samples']:,} samples"]
    shown += [
        f"{name} {metrics[name]:.5f}" for name in ("auc", "logloss", "calibration") if metrics.get(name) is not None
    ]
    shown.append(f"{record['unseen_share']:.2%} of lookups never seen before")
    if "evicted" in record:
        shown.append(f"{sum(record['evicted'].values()):,} ids evicted")
    return ", ".join(shown)


LOOK_AHEAD = 31
"""Days after one without data that are looked for, to tell a gap from the end."""


@dataclass(frozen=True, kw_only=True)
class Days:
    """Which days to train."""

    data: str  # path or URI of a day's data, with ``{date}`` or ``{date:%Y/%m/%d}`` in it
    # first, last: the first day of all, by default that of earlier commands; and the last, by default the last that has
    # data
    first: date | None = None
    last: date | None = None
    skip: frozenset[date] = frozenset()  # days that have no data and never will
    marker: str | None = None  # file that a day's folder has once it is complete, as ``_SUCCESS``
    keep: int | None = None  # days whose checkpoints are kept; None: all
    changes: bool = False  # whether to write the rows that each day has changed, for servers

    def __post_init__(self) -> None:
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.data) if name is not None]
            differs = self.path(date(2001, 2, 3)) != self.path(date(2001, 2, 4))
            differs = differs and set(fields) == {"date"}
            where = "put {date} where the day is, as 2026-01-31, or {date:%Y/%m/%d}"
            problem = "" if differs else f"must differ by day; {where}"
        except (ValueError, IndexError, KeyError) as error:
            problem = f"which is no pattern of days ({error}); write {{date}}"
        if problem:
            raise RecipeError(f"data.path is {self.data!r}, {problem}")
        check("--keep", self.keep, Count | None, RecipeError)
        if self.first is not None and self.last is not None and self.last < self.first:
            raise RecipeError(f"--until is {self.last}, which is before --from {self.first}")

    def path(self, day: date) -> str:
        """Where a day's data are."""
        return self.data.format(date=day)


class Day(NamedTuple):
    """A day to train."""

    # day, data: which, and where its data are
    day: date
    data: str
    # folder, place: its directory, and where checkpoints go
    folder: Path
    place: str
    resume: str | None  # the checkpoint to go on from
    epochs: int  # epochs of the model when the day is trained
    is_trained: bool  # whether it is: then only its record is missing
    is_begun: bool  # whether it has a checkpoint of its own
    before: Path | None  # directory of the day before; None for the first
    kept: list[int]  # steps of the days before, whose checkpoints stay


class DayTable:
    """``days.jsonl`` of a directory, and what it says is next; made by the first rank."""

    def __init__(self, out: Path, recipe: Recipe, days: Days, restart_from: date | None) -> None:
        self._out, self._days, self._recipe = out, days, recipe
        self.records = read_days(out)
        self._generation = 1 + len(list(out.glob("days-*.jsonl")))
        self._restart_from, self._set_aside = restart_from, list[Record]()
        if restart_from is not None:
            self._set_aside, self.records = self.records, self._before(restart_from)
            self._generation += 1
        place = recipe.train.checkpoint_dir or str(out.resolve() / "checkpoints")
        self._place = directory(place)
        if self._generation > 1:
            self._place = directory(place).sibling(f"{directory(place).name}-{self._generation}")
        began = date.fromisoformat(self.records[0]["day"]) if self.records else None
        if began is None and days.first is None:
            raise RecipeError(f"{out} has no day yet; say with which to begin: --from 2026-01-31")
        if began is not None and days.first not in (None, began):
            raise RecipeError(
                f"--from is {days.first}, but {out} began with {began}; leave it out, or use another --out"
            )
        self._first = cast("date", began or days.first)

    @property
    def trained(self) -> list[Record]:
        """Records of the days that were not skipped."""
        return [record for record in self.records if not record.get("skipped")]

    def next(self, console: Console) -> Day | None:
        """The day to train next; None if all are trained that have data, or that were asked for."""
        while True:
            day = self._first if not self.records else date.fromisoformat(self.records[-1]["day"]) + timedelta(days=1)
            if self._days.last is not None and day > self._days.last:
                if self._restart_from is not None:
                    raise RecipeError(f"--until is {self._days.last}, which is before --restart_from {day}")
                console.print(f"all days until {self._days.last} are trained")
                return None
            if day not in self._days.skip:
                break
            self._add({"day": str(day), "skipped": True})
        data = self._days.path(day)
        if not _is_there(data):
            self._refuse_gap(day, data)
            if self._restart_from is not None:
                raise DataError(f"there are no data of {day} ({data}) to restart from; nothing is set aside")
            console.print(f"there are no data of {day} yet ({data}); nothing is left to train", soft_wrap=True)
            return None
        if self._days.marker is not None and not _is_there(f"{data.rstrip('/')}/{self._days.marker}"):
            raise DataError(
                f"{data} has no {self._days.marker} yet, so {day} is still being written; give the same command again "
                "when it is there"
            )
        found = self._to_train(day, data)
        if self._restart_from is not None:
            self._refuse_untrainable(found)
            self._begin_anew()
        found.folder.mkdir(parents=True, exist_ok=True)
        return found

    def _to_train(self, day: date, data: str) -> Day:
        before = self.trained[-1] if self.trained else None
        epochs = self._recipe.train.epochs + (0 if before is None else int(before["epoch"]))
        folder = self._out / (f"{day}" if self._generation == 1 else f"{day}-{self._generation}")
        own = _newest(self._place, -1 if before is None else before["step"])
        if own is not None and not ((folder / BEFORE).exists() and _data_of(own) == data):
            raise CheckpointError(
                f"{own} is newer than all days in {self._out}, but not of {day}: does another model use {self._place}? "
                "give train.checkpoint_dir a directory of this model's own, or remove the checkpoint"
            )
        resume = str(own) if own is not None else None if before is None else str(before["checkpoint"])
        is_trained = own is not None and _position(own)["epoch"] >= epochs
        return Day(
            day,
            data,
            folder,
            self._place.path,
            resume,
            epochs,
            is_trained,
            own is not None,
            None if before is None else self._out / before["folder"],
            [record["step"] for record in self.trained],
        )

    def finish(self, done: Day, seconds: float, console: Console) -> None:
        """Publish what a day has changed, add its record, and remove checkpoints that are not to be kept."""
        before = self.trained[-1] if self.trained else None
        checkpoint = _newest(self._place, -1)
        assert checkpoint is not None
        manifest, position = read_manifest(checkpoint), _position(checkpoint)
        found = measured(done.folder, str(done.day))
        since = None if before is None else before["checkpoint"]
        if self._days.changes:
            export_changes(checkpoint, done.folder / CHANGES, since)
        record: Record = {
            "day": str(done.day),
            "data": done.data,
            "folder": done.folder.name,
            "checkpoint": checkpoint.path,
            "step": manifest.step,
            "epoch": position["epoch"],
            **{key: found[key] for key in MEASURED},
            "drift": self._drift(found.get(BINNED, {})),
            **_of_dynamic_tables(checkpoint, since),
            "bytes": manifest.nbytes,
            "base": None if manifest.base is None else manifest.base.name,
            "seconds": round(seconds, 1),
        }
        self._add(record)
        self._remove_old()
        metrics: Mapping[str, float | None] = found["metrics"] or {}
        console.print(f"{done.day} is trained: {line_of(record, metrics)}", soft_wrap=True)

    def _drift(self, bins: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, float]]:
        """Population stability indices of numericals against the day before and the first."""
        if not self.trained:
            return {}
        return {
            name: stability(bins, measured(self._out / record["folder"], record["day"]).get(BINNED, {}))
            for name, record in (("day_before", self.trained[-1]), ("first_day", self.trained[0]))
        }

    def _add(self, record: Record) -> None:
        self.records.append(record)
        if self._restart_from is None:  # else `_begin_anew` writes it
            write_text(self._out / DAYS, lines_of(self.records))

    def _remove_old(self) -> None:
        """Remove this generation's checkpoints but those of the newest days, and of no day."""
        days = self.trained if self._days.keep is None else self.trained[-self._days.keep :]
        kept = [directory(record["checkpoint"]) for record in days]
        with lock(self._place) as held:  # training has given it back
            others = [c for c in checkpoints_in(self._place) if not any(are_same(c, k) for k in kept)]
            held.check()
            remove_unneeded(self._place, others)

    def _before(self, day: date) -> list[Record]:
        """The records before a day to restart from; `RecipeError` if there is no such day, or no way back to it."""
        earlier = [record for record in self.records if date.fromisoformat(record["day"]) < day]
        if len(earlier) == len(self.records):
            last = self.records[-1]["day"] if self.records else "none"
            raise RecipeError(f"--restart_from is {day}, but the last day that was trained is {last}; leave it out")
        trained = [record for record in earlier if not record.get("skipped")]
        if trained and not directory(trained[-1]["checkpoint"]).has(MANIFEST):
            kept = [r["day"] for r in self.records if _has_checkpoint(r)]
            raise RecipeError(
                f"--restart_from is {day}, but the checkpoint of {trained[-1]['day']} was removed (--keep); there are "
                f"those of {', '.join(kept) or 'no day'}"
            )
        return earlier

    def _refuse_untrainable(self, day: Day) -> None:
        """Raise what would keep a day from being trained, before anything is set aside for it."""
        if day.resume is not None:
            refuse_another_recipe(day.resume, self._recipe)
        open_source(replace(self._recipe.data, path=day.data, test_split=None))

    def _begin_anew(self) -> None:
        """Set the records from a day on aside; their checkpoints and directories stay as they are."""
        write_text(self._out / f"days-{self._generation - 1}.jsonl", lines_of(self._set_aside))
        write_text(self._out / DAYS, lines_of(self.records))
        self._restart_from = None

    def _refuse_gap(self, day: date, data: str) -> None:
        """Raise `DataError` if a day without data was asked for, or a later one has some."""
        ahead = (day + timedelta(days=n) for n in range(1, LOOK_AHEAD + 1))
        later = next((d for d in ahead if _is_there(self._days.path(d))), None)
        why = f"there are some of {later}" if later else f"--until is {self._days.last}"
        if later is not None or self._days.last is not None:
            raise DataError(
                f"there are no data of {day} ({data}), but {why}; give the same command again when they are there, or "
                f"--skip {day} if they never will be"
            )


def _of_dynamic_tables(checkpoint: Directory, since: str | None) -> dict[str, dict[str, int]]:
    """By dynamic table, how many ids have rows after a day, and how many of the day before's have none any more."""
    counts = count_ids(checkpoint, since)
    return {key: {table: of[key] for table, of in counts.items()} for key in ("ids", "evicted")} if counts else {}


def _is_there(data: str) -> bool:
    path = location(data)
    return path.exists() if isinstance(path, Path) else remote_files(path) is not None


def _newest(place: Directory, after: int) -> Directory | None:
    found = [c for c in checkpoints_in(place, "last") if step_of(c) > after]
    return found[-1] if found else None


def _position(checkpoint: Directory) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", read_manifest(checkpoint).parts["position"])


def _data_of(checkpoint: Directory) -> str | None:
    """Path of the data that a checkpoint was made with."""
    recipe = read_manifest(checkpoint).recipe or {}
    return recipe.get("data", {}).get("path")


def _has_checkpoint(record: Record) -> bool:
    return "checkpoint" in record and directory(record["checkpoint"]).has(MANIFEST)
