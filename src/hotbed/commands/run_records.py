"""Read what runs have recorded, to draw it: a run's, or those of the runs of a name that differ in their seed alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, cast

from hotbed.checkpoint import Directory, directory, runs_in
from hotbed.checkpoint.single_files import read_yaml
from hotbed.checks import is_int
from hotbed.errors import DataError, PlanError
from hotbed.parsing import TextError, parse_json
from hotbed.plan import Plan
from hotbed.train.report import METRICS, PLAN, RECIPE, SUMMARY

# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1 on.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

Curve = dict[int, float]
"""Values by step."""


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

    def curve(self, name: str, *, of_valid: bool = False) -> Curve:
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


def read_runs(path: str | Path) -> list[RunRecords]:
    """Read a run, or of a name's runs the newest and all finished ones that differ from it in ``train.seed`` alone."""
    place = directory(path)
    if place.has(RECIPE):
        return [_read(place)]
    runs = [run for run in reversed(runs_in(place)) if run.has(RECIPE)]
    newest = _read(runs[0])
    found = {newest.seed: newest}
    for run in runs[1:]:
        if newest.summary is None or not run.has(SUMMARY) or _unseeded(_recipe(run)) != _unseeded(newest.recipe):
            continue
        records = _read(run)
        found.setdefault(records.seed, records)  # of runs of one seed the newest
    return list(found.values())


def _read(place: Directory) -> RunRecords:
    if not place.has(METRICS):
        raise DataError(
            f"{place} has no {METRICS}: nothing was recorded yet; wait until train.log_every steps are trained"
        )
    train, valid = dict[int, Mapping[str, Any]](), dict[int, Mapping[str, Any]]()
    for number, record in _lines(place):
        step = record.get("step")
        if not is_int(step):
            raise _damaged(place, number, f"has step {step!r}, must be an integer")
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
        raise DataError(
            f"{place}/{METRICS} has no record of training yet; wait until train.log_every steps are trained"
        )
    return RunRecords(
        path=str(place),
        recipe=_recipe(place),
        summary=_object(place, SUMMARY) if place.has(SUMMARY) else None,
        train=train,
        valid=valid,
        plan=_plan(place) if place.has(PLAN) else None,
    )


def _lines(place: Directory) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the numbers and values of all whole lines; one that a killed run has cut short is none."""
    for number, line in enumerate(place.read(METRICS).split(b"\n")[:-1], 1):
        try:
            record = parse_json(line)
        except TextError as error:
            raise _damaged(place, number, str(error)) from None
        if not isinstance(record, Mapping):
            raise _damaged(place, number, f"is {record!r}, must be an object")
        yield number, cast("Mapping[str, Any]", record)


def _recipe(place: Directory) -> Mapping[str, Any]:
    found = read_yaml((place / RECIPE).path)
    if not isinstance(found, Mapping):
        raise DataError(f"{place}/{RECIPE} is no recipe; copy the run again")
    return cast("Mapping[str, Any]", found)


def _plan(place: Directory) -> Plan:
    try:
        return Plan.from_json(place.read(PLAN))
    except PlanError as error:
        raise DataError(f"{place}/{PLAN}: {error}; copy the run again") from None


def read_json(place: Directory, name: str) -> object:
    """Read a JSON file of a run."""
    try:
        return parse_json(place.read(name))
    except TextError as error:
        raise DataError(f"{place}/{name} {error}; copy the run again, or remove that file") from None


def _object(place: Directory, name: str) -> Mapping[str, Any]:
    found = read_json(place, name)
    if not isinstance(found, Mapping):
        raise DataError(f"{place}/{name} is no JSON object; copy the run again, or remove that file")
    return cast("Mapping[str, Any]", found)


def _damaged(place: Directory, number: int, problem: str) -> DataError:
    return DataError(f"{place}/{METRICS}, line {number:,} {problem}; copy the run again, or remove that line")


def _unseeded(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {**recipe, "train": {k: v for k, v in recipe.get("train", {}).items() if k != "seed"}}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
