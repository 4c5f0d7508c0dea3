"""Keep the table of a model's days: which are trained, with which figures, and which is next.

``days.jsonl`` has a record per day, in order; a day is finished when its record is there. After a restart from an
earlier day, the table of before is ``days-1.jsonl``, and directories of later days and checkpoints end in ``-2``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple, cast

from rich.console import Console

from hotbed.checkpoint import MANIFEST, Directory, checkpoints_in, directory, read_manifest
from hotbed.checkpoint.changes import export_changes
from hotbed.checkpoint.manifest import step_of
from hotbed.checkpoint.single_files import exists
from hotbed.config import Recipe
from hotbed.errors import DamagedError, DataError, RecipeError
from hotbed.files import read_text, write_text
from hotbed.locations import location, remote_files
from hotbed.train.checkpointing import are_same
from hotbed.train.drift import stability
from hotbed.train.retention import remove_unneeded

DAYS, BEFORE, SEEN, CHANGES = "days.jsonl", "before.json", "seen.npz", "changes.parquet"
LOOK_AHEAD = 31
"""Days after one without data that are looked for, to tell a gap from the end."""
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Days:
    """Which days to train.

    Attributes
    ----------
    data
        Path or URI of a day's data, with ``{date}`` or ``{date:%Y/%m/%d}`` in it.
    first, last
        The first day of all, by default that of earlier commands; and the last, by default the last that has data.
    skip
        Days that have no data and never will.
    marker
        File that a day's folder has once it is complete, as ``_SUCCESS``.
    keep
        Days whose checkpoints are kept; None: all.
    changes
        Whether to write the rows that each day has changed, for servers.
    """

    data: str
    first: date | None = None
    last: date | None = None
    skip: frozenset[date] = frozenset()
    marker: str | None = None
    keep: int | None = None
    changes: bool = False

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
    """A day to train.

    Attributes
    ----------
    day, data
        Which, and where its data are.
    folder, place
        Its directory, and where checkpoints go.
    resume
        The checkpoint to go on from.
    epochs
        Epochs of the model when the day is trained.
    is_trained
        Whether it is: then only its record is missing.
    is_begun
        Whether it has a checkpoint of its own.
    before
        Directory of the day before; None for the first.
    kept
        Steps of the days before, whose checkpoints stay.
    """

    day: date
    data: str
    folder: Path
    place: str
    resume: str | None
    epochs: int
    is_trained: bool
    is_begun: bool
    before: Path | None
    kept: list[int]


class DayTable:
    """``days.jsonl`` of a directory, and what it says is next; made by the first rank.

    Parameters
    ----------
    out
        The directory.
    recipe, days
        As `hotbed.train.daily.train_days` has them.
    restart_from
        Likewise.
    """

    def __init__(self, out: Path, recipe: Recipe, days: Days, restart_from: date | None) -> None:
        self._out, self._days, self._epochs = out, days, recipe.train.epochs
        self.records = read_days(out)
        if restart_from is not None:
            self._restart(restart_from)
        self._generation = 1 + len(list(out.glob("days-*.jsonl")))
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
                console.print(f"all days until {self._days.last} are trained")
                return None
            if day not in self._days.skip:
                break
            self._add({"day": str(day), "skipped": True})
        data = self._days.path(day)
        if not _is_there(data):
            self._refuse_gap(day, data)
            console.print(f"there are no data of {day} yet ({data}); nothing is left to train", soft_wrap=True)
            return None
        if self._days.marker is not None and not exists(location(f"{data.rstrip('/')}/{self._days.marker}")):
            raise DataError(
                f"{data} has no {self._days.marker} yet, so {day} is still being written; give the same command again "
                "when it is there"
            )
        return self._to_train(day, data)

    def _to_train(self, day: date, data: str) -> Day:
        before = self.trained[-1] if self.trained else None
        epochs = self._epochs + (0 if before is None else int(before["epoch"]))
        folder = self._out / (f"{day}" if self._generation == 1 else f"{day}-{self._generation}")
        folder.mkdir(parents=True, exist_ok=True)
        own = _newest(self._place, -1 if before is None else before["step"])
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
        found: dict[str, Any] = json.loads(read_text(done.folder / BEFORE))
        if self._days.changes:
            since = None if before is None else before["checkpoint"]
            export_changes(checkpoint, done.folder / CHANGES, since)
        record: Record = {
            "day": str(done.day),
            "data": done.data,
            "folder": done.folder.name,
            "checkpoint": checkpoint.path,
            "step": manifest.step,
            "epoch": position["epoch"],
            **{key: found[key] for key in ("samples", "metrics", "unseen_share", "new_rows", "label_means")},
            "drift": self._drift(found["bins"]),
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
            name: stability(bins, json.loads(read_text(self._out / record["folder"] / BEFORE))["bins"])
            for name, record in (("day_before", self.trained[-1]), ("first_day", self.trained[0]))
        }

    def _add(self, record: Record) -> None:
        self.records.append(record)
        write_text(self._out / DAYS, "".join(json.dumps(r) + "\n" for r in self.records))

    def _remove_old(self) -> None:
        """Remove this generation's checkpoints but those of the newest days, and of no day."""
        days = self.trained if self._days.keep is None else self.trained[-self._days.keep :]
        kept = [directory(record["checkpoint"]) for record in days]
        others = [c for c in checkpoints_in(self._place) if not any(are_same(c, k) for k in kept)]
        remove_unneeded(self._place, others)

    def _restart(self, day: date) -> None:
        """Set the records from a day on aside; their checkpoints and directories stay as they are."""
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
        number = 1 + len(list(self._out.glob("days-*.jsonl")))
        write_text(self._out / f"days-{number}.jsonl", "".join(json.dumps(r) + "\n" for r in self.records))
        self.records = earlier
        write_text(self._out / DAYS, "".join(json.dumps(r) + "\n" for r in earlier))

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


def read_days(out: Path) -> list[Record]:
    """The records of a directory's days; none, where no day is finished.

    Raises
    ------
    DamagedError
        If a line is not one.
    """
    file = out / DAYS
    if not file.exists():
        return []
    records: list[Record] = []
    for number, text in enumerate(read_text(file).splitlines(), 1):
        try:
            record = json.loads(text)
            date.fromisoformat(record["day"])
        except (ValueError, TypeError, KeyError):
            raise DamagedError(f"{file}, line {number:,} is no record of a day; restore the file") from None
        records.append(record)
    return records


def line_of(record: Record, metrics: Mapping[str, float | None]) -> str:
    """The figures of a day in a line."""
    shown = [f"{record['samples']:,} samples"]
    shown += [
        f"{name} {metrics[name]:.5f}" for name in ("auc", "logloss", "calibration") if metrics.get(name) is not None
    ]
    return ", ".join([*shown, f"{record['unseen_share']:.2%} of lookups never seen before"])


def _is_there(data: str) -> bool:
    path = location(data)
    return path.exists() if isinstance(path, Path) else remote_files(path) is not None


def _newest(place: Directory, after: int) -> Directory | None:
    found = [c for c in checkpoints_in(place, "last") if step_of(c) > after]
    return found[-1] if found else None


def _position(checkpoint: Directory) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", read_manifest(checkpoint).parts["position"])


def _has_checkpoint(record: Record) -> bool:
    return "checkpoint" in record and directory(record["checkpoint"]).has(MANIFEST)
