"""Read published rows, fit the constants, predict the others, and show how far off each is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from benchmarks.published.setups import FOLDER, Planned, Setup, cold_of, planned, read, samples_per_s, sizes
from hotbed.files import read_yaml

MOST_ROUNDS = 20
LARGEST = {"activation_passes": 1e3, "launches_per_layer": 1e4, "two_d_mflop": 1e6, "cpu_serial_share": 1.0}
"""The largest value of each constant, in the order of fitting."""
TOLERANCE, WORST = 0.2, 2.0  # goal for the median error of a source, and largest ratio of any row


def published() -> dict[str, Any]:
    """Read all published figures and their setups."""
    found: dict[str, Any] = read_yaml(FOLDER / "rows.yaml")  # pyright: ignore[reportAssignmentType]
    return found


class Predictor:
    """Predicts rows. Each setup is planned once."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.setups = {name: Setup(**values) for name, values in given["setups"].items()}
        self._planned: Callable[[Setup], Planned] = cache(planned)

    def rate(self, name: str, constants: Mapping[str, float]) -> float:
        setup = self.setups[name]
        cold = cold_of(setup)
        return samples_per_s(self._planned(setup), None if cold is None else self._planned(cold), constants)

    def row(self, row: Mapping[str, Any], constants: Mapping[str, float]) -> float:
        """Return the prediction of a row in its unit."""
        of = row["of"]
        if row["kind"] == "size":
            return sizes(read(self.setups[of])[1])[row["measure"]]
        if isinstance(of, str):
            return self.rate(of, constants)
        return self.rate(of[0], constants) / self.rate(of[1], constants) * row.get("scale", 1.0)


def fitted(
    given: Mapping[str, Any], predictor: Predictor, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Fit each constant on its row by bisection, in turn, until none changes. A larger constant means a lower rate.

    A constant is 0 or its largest value if no value between them fits its row. Constants in ``known`` are not changed.
    """
    rows = {row["id"]: row for row in given["rows"]}
    known = known or {}
    constants = dict.fromkeys(LARGEST, 0.0) | {**known}
    for _ in range(MOST_ROUNDS):
        before = dict(constants)
        for name, most in LARGEST.items():
            if name in given["constants"] and name not in known:
                row = rows[given["constants"][name]["fitted on"]]
                constants[name] = _meeting(predictor, row, constants, name, most)
        if all(abs(constants[name] - before[name]) <= 1e-4 * constants[name] for name in constants):
            break
    return constants


def _meeting(
    predictor: Predictor, row: Mapping[str, Any], constants: Mapping[str, float], name: str, most: float
) -> float:
    """Return the value of a constant that fits a row while the others stay."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        faster = predictor.row(row, {**constants, name: middle}) > row["published"]
        low, high = (middle, high) if faster else (low, middle)
    return high


def predictions(
    given: Mapping[str, Any],
    predictor: Predictor,
    constants: Mapping[str, float],
    known: Mapping[str, float],
) -> Iterator[dict[str, Any]]:
    """Yield rows with ``predicted`` and ``ratio`` (predicted ÷ published). Former predictions are ``known``."""
    for row in given["rows"]:
        about = {key: row[key] for key in ("id", "source", "quantity", "unit", "published", "split")}
        if row["split"] == "excluded":
            yield about | {"missing": row["missing"]}
        else:
            value = known[row["id"]] if row["id"] in known else predictor.row(row, constants)
            yield about | {"kind": row["kind"], "predicted": value, "ratio": value / row["published"]}


def results(given: Mapping[str, Any], constants: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the content of the results file."""
    done = {row["id"] for row in rows}
    left = [row["id"] for row in given["rows"] if row["id"] not in done and row["split"] != "excluded"]
    about = {"looks": given["looks"], "constants": constants, "left": left}
    return {**about, "sources": summary(rows), "rows": rows}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each source the median errors of held-out rows, and rows that are off by more than `WORST`."""
    found: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(row["source"] for row in rows):
        held = [row for row in rows if row["source"] == source and row["split"] == "held out"]
        rates = [abs(row["ratio"] - 1) for row in held if row["kind"] == "rate"]
        errors = [abs(row["ratio"] - 1) for row in held]
        found[source] = {
            "held_out": len(held),
            "rates": len(rates),
            "median_error_of_rates": statistics.median(rates) if rates else None,
            "median_error": statistics.median(errors) if errors else None,
            "off_by_more_than_2": [row["id"] for row in held if not 1 / WORST <= row["ratio"] <= WORST],
        }
        median = found[source]["median_error_of_rates"]
        found[source]["reached"] = (
            median is not None and median <= TOLERANCE and not found[source]["off_by_more_than_2"]
        )
    return found
