"""Keep the table of a model's days: which are trained, with which figures, and which is next.

``days.jsonl`` has a record per day, in order; a day is finished when its record is there. After a restart from an
earlier day, the table of before is ``days-1.jsonl``, and directories of later days and checkpoints end in ``-2``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple, cast

from rich.console import Console

from hotbed.checkpoint import MANIFEST, Directory, checkpoints_in, directory, read_manifest
from hotbed.checkpoint.changes import count_ids, export_changes
from hotbed.checkpoint.manifest import step_of
from hotbed.config import Recipe
from hotbed.errors import CheckpointError, DamagedError, DataError, RecipeError
from hotbed.files import read_text, write_text
from hotbed.locations import location, remote_files
from hotbed.parsing import TextError, parse_json, read_limited
from hotbed.train.build import open_source
from hotbed.train.checkpointing import are_same
from hotbed.train.drift import BINNED, stability
from hotbed.train.lease import lock
from hotbed.train.resume import refuse_another_recipe
from hotbed.train.retention import remove_unneeded

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
        except (ValueError, IndexError, KeyError) as error:
            raise RecipeError(
                f"data.path is {self.data!r}, which is no pattern of days ({error}); write {{date}}"
            ) from None
        if set(fields) != {"date"} or not differs:
            raise RecipeError(
                f"data.path is {self.data!r}, must differ by day; put {{date}} where the day is, as 2026-01-31, or "
                "{date:%Y/%m/%d}"
            )
        if self.keep is not None and self.keep < 1:
            raise RecipeError(f"--keep is {self.keep:,}, must be at least 1")
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
