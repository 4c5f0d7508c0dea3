"""What is compared, the file that results are kept in, and the differences between its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.quality_stats import Difference, Scores, paired_difference
from hotbed.config import Precision
from hotbed.specs import RowDtype

Log = Literal["planted", "real"]
LOGS: tuple[Log, ...] = get_args(Log)


@dataclass(frozen=True)
class Config:
    """One way to train the same model.

    Attributes
    ----------
    dtype
        Of the rows.
    compute
        Of the dense part: ``bf16`` trains under autocast. Evaluations are float32 always.
    hot
        Whether the first, most frequent rows of each table are float32.
    reseeded
        Whether initial values come from another seed: what noise between equally good models looks like.
    """

    dtype: RowDtype
    compute: Precision = "fp32"
    hot: bool = False
    reseeded: bool = False

    @property
    def rows(self) -> str:
        """What the rows are, for people."""
        return self.dtype + ", hot fp32" * self.hot + ", other seed" * self.reseeded

    @property
    def name(self) -> str:
        """Name on the command line and in results."""
        return f"{self.dtype}{'+hot' * self.hot}{'+reseeded' * self.reseeded}/{self.compute}"


BASELINE = Config("fp32")
NARROW = (
    *(Config("bf16"), Config("fp16")),
    *(Config("fp8"), Config("fp8", hot=True), Config("int8"), Config("int8", hot=True)),
)
CONFIGS = {
    config.name: config
    for config in (
        BASELINE,
        Config("fp32", reseeded=True),
        Config("fp32", compute="bf16"),
        *(replace(config, compute=compute) for config in NARROW for compute in get_args(Precision)),
    )
}


class Results:
    """Runs by log, seed and configuration, in a JSON file that is written after each addition.

    Parameters
    ----------
    path
        The file; what is in it already is kept. None keeps results in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {}
        if path is not None and path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))

    def begin(self, log: Log, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Name a log's settings, and facts about it.

        Raises
        ------
        SystemExit
            If the file holds runs of other settings, which cannot be compared with those to come.
        """
        plain = json.loads(json.dumps(settings))
        section = self.data.setdefault(log, {"settings": plain, "about": {}, "runs": []})
        if section["settings"] != plain:
            raise SystemExit(
                f"{self.path} holds runs on the {log} log with settings {section['settings']}, now they are {plain}; "
                "give another --json, or delete the file"
            )
        section["about"] = dict(about)

    def missing(self, log: Log, seed: int, configs: Sequence[Config]) -> list[Config]:
        """Which of these configurations are still to be run with a seed."""
        done = {run["config"] for run in self.runs(log) if run["seed"] == seed}
        return [config for config in configs if config.name not in done]

    def add(self, log: Log, seed: int, config: Config, scores: Scores, *, row_bytes: float, measured_on: str) -> None:
        """Add a run to a log that was begun, and write the file."""
        about = {"row_bytes": row_bytes, "measured_on": measured_on}
        run = {"seed": seed, "config": config.name, **asdict(scores), **about}
        self.data[log]["runs"].append(run)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_name(f".{self.path.name}.unfinished")
            unfinished.write_text(json.dumps(self.data) + "\n", encoding="utf-8")
            unfinished.replace(self.path)

    def runs(self, log: Log) -> list[dict[str, Any]]:
        """All runs on a log."""
        return self.data.get(log, {}).get("runs", [])


@dataclass(frozen=True)
class Line:
    """A configuration against the baseline, over the seeds that both have; ``auc`` is the mean over these seeds."""

    config: Config
    seeds: int
    row_bytes: float
    auc: float
    auc_difference: Difference
    logloss_difference: Difference


def compare(runs: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Every configuration that has a seed in common with the baseline, in the order of `CONFIGS`."""
    by_config: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_config.setdefault(run["config"], {})[run["seed"]] = run
    base = by_config.get(BASELINE.name, {})
    lines: list[Line] = []
    for config in CONFIGS.values():
        pairs = [(run, base[seed]) for seed, run in sorted(by_config.get(config.name, {}).items()) if seed in base]
        if pairs:
            row_bytes, auc = (sum(run[key] for run, _ in pairs) / len(pairs) for key in ("row_bytes", "auc"))
            lines.append(
                Line(config, len(pairs), row_bytes, auc, _difference("auc", pairs), _difference("logloss", pairs))
            )
    return lines


def _difference(metric: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Difference:
    return paired_difference(
        [(run[metric], base[metric]) for run, base in pairs],
        [(run[f"block_{metric}"], base[f"block_{metric}"]) for run, base in pairs],
    )
