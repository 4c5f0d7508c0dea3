"""Keep scores of runs in a file, compare them with intervals for new seeds *and* new samples, show the differences.

A difference ΔAUC = AUC(configuration) − AUC(fp32) is uncertain for two reasons:

- *Seeds.* With other initial values, training samples and rounding, Δ comes out otherwise. All configurations of a seed
  share the first two, so differences are taken seed by seed; their mean over S seeds has a t interval with S − 1
  degrees of freedom. All of it is for this test set.
- *Test set.* Other test samples would give another Δ for the very same models. The test set is cut into B blocks. Their
  Δs, each averaged over the seeds, are independent draws, so their mean has a t interval with B − 1 degrees of freedom.
  (An AUC is unbiased on a block as on the whole. DeLong's variance estimates the same without blocks, but needs every
  prediction of every run; B numbers per run can be kept, so that seeds can be added later.)

Neither interval alone is sound: the first ignores that all seeds are tested on the same samples, the second that only a
few models were trained. The two errors are independent, so the half-widths are added as squares (MOVER: Zou and Donner
2008, with symmetric intervals). Some of the seeds' noise is in the blocks as well, so the result errs on the wide side.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.pages import put_between
from hotbed.auc import auc
from hotbed.config import Precision
from hotbed.specs import RowDtype
from hotbed.train.report import environment

ROOT = Path(__file__).resolve().parents[1]

Log = Literal["planted", "real"]
LOGS: tuple[Log, ...] = get_args(Log)

_Z = 1.959964
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)

RESOLUTION = 3e-4
"""Loss of AUC that a run on the planted log is to resolve: the 95 % interval is at most this far from its middle."""

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

_HEADER = (
    *("rows", "compute", "bytes per row", "seeds", "AUC"),
    *("ΔAUC · 10⁴", "of seeds", "of test set", "Δlogloss · 10⁴", "loss of AUC"),
)


# -- scores and intervals ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """How good one model is on the test set, and on each of its blocks in order."""

    auc: float
    logloss: float
    block_auc: list[float]
    block_logloss: list[float]

    @staticmethod
    def of(logits: Tensor, labels: Tensor, blocks: int) -> Scores:
        """Score logits ``[N]`` against labels ``[N]``; block k is the k-th of ``blocks`` equal parts in order."""
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
        pairs = zip(logits.tensor_split(blocks), labels.tensor_split(blocks), strict=True)
        return Scores(
            auc(logits, labels),
            float(loss.mean()),
            [round(auc(*pair), 8) for pair in pairs],
            [round(float(part.mean()), 8) for part in loss.tensor_split(blocks)],
        )


@dataclass(frozen=True)
class Difference:
    """A mean paired difference and the half-widths of its 95 % intervals; infinite where there is one seed or block."""

    mean: float
    seeds: float
    test: float

    @property
    def half_width(self) -> float:
        """Half-width of the interval for new seeds and new test samples."""
        return math.hypot(self.seeds, self.test)


def paired_difference(
    whole: Sequence[tuple[float, float]], blocks: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> Difference:
    """Difference between two configurations over the seeds that both have.

    Parameters
    ----------
    whole
        Per seed: the metric of the configuration and of what it is compared with, on the whole test set.
    blocks
        Per seed: the same on each block.
    """
    of_seed = [a - b for a, b in whole]
    of_block = [statistics.mean(column) for column in zip(*(map(float.__sub__, a, b) for a, b in blocks), strict=True)]
    return Difference(statistics.mean(of_seed), half_width(of_seed), half_width(of_block))


def half_width(values: Sequence[float]) -> float:
    """Half-width of the 95 % t interval of a mean: t · s / √n."""
    if len(values) < 2:
        return math.inf
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(df: int) -> float:
    """97.5 % quantile of Student's t; from 10 degrees of freedom on by its expansion (Abramowitz and Stegun 26.7.5)."""
    if df <= len(_T):
        return _T[df - 1]
    z = _Z
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / df + g2 / df**2 + g3 / df**3


# -- what is compared ----------------------------------------------------------------------------------------------


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


# -- what is shown -------------------------------------------------------------------------------------------------


def verdict(difference: Difference) -> str:
    """What the interval of a ΔAUC says about a loss."""
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    if high < 0:
        return "yes, below 3e-4" if low >= -RESOLUTION else "yes"
    return "below 3e-4 if any" if low >= -RESOLUTION else "not resolved"


def print_results(console: Console, results: Results) -> None:
    """One table per log."""
    for log in LOGS:
        lines = compare(results.runs(log))
        if lines:
            table = Table(*_HEADER, title=f"{log} log", title_justify="left", caption=_caption(results, log))
            for line in lines:
                table.add_row(*_cells(line))
            console.print(table)


def markdown(results: Results) -> str:
    """The same tables, with their captions."""
    parts: list[str] = []
    for log in LOGS:
        lines = compare(results.runs(log))
        if lines:
            rows = [_HEADER, ("---",) * len(_HEADER), *map(_cells, lines)]
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
            parts.append(f"### {log.capitalize()} log\n\n{_caption(results, log)}\n\n{table}")
    return "\n\n".join(parts)


def render(results: Results, page: Path) -> None:
    """Put the tables between the markers of a page."""
    put_between(page, BEGIN, END, markdown(results))


def draw(results: Results, path: Path) -> bool:
    """Chart of ΔAUC with its intervals, one panel per log; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels = [(log, lines) for log in LOGS if (lines := compare(results.runs(log)))]
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    for i, (log, lines) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        shown = [line for line in lines if line.config != BASELINE][::-1]
        colours = ["tab:orange" if line.config.compute == "bf16" else "tab:blue" for line in shown]
        for y, (line, colour) in enumerate(zip(shown, colours, strict=True)):
            half = line.auc_difference.half_width
            axes.errorbar(
                line.auc_difference.mean * 1e4,
                y,
                xerr=half * 1e4 if math.isfinite(half) else None,
                fmt="o",
                color=colour,
                capsize=3,
            )
        axes.set_yticks(range(len(shown)), [f"{line.config.rows} / {line.config.compute}" for line in shown])
        axes.axvspan(-RESOLUTION * 1e4, 0, color="tab:green", alpha=0.15)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("ΔAUC · 10⁴ against fp32 / fp32 (95 % interval)")
        axes.set_title(f"{log} log")
    figure.savefig(path, dpi=150)
    return True


def _cells(line: Line) -> tuple[str, ...]:
    first = line.config.rows, line.config.compute, f"{line.row_bytes:.1f}", str(line.seeds), f"{line.auc:.5f}"
    if line.config == BASELINE:
        return (*first, *"–––––")
    auc, logloss = line.auc_difference, line.logloss_difference
    return (*first, _interval(auc), _scaled(auc.seeds), _scaled(auc.test), _interval(logloss), verdict(auc))


def _interval(difference: Difference) -> str:
    return f"{_scaled(difference.mean, '+')} ± {_scaled(difference.half_width)}"


def _scaled(value: float, sign: str = "") -> str:
    """In units of 1e-4."""
    return f"{value * 1e4:{sign}.2f}" if math.isfinite(value) else "?"


def _caption(results: Results, log: Log) -> str:
    section: dict[str, Any] = results.data[log]
    facts = {**section["about"], **{k: v for k, v in section["settings"].items() if k in ("samples", "test_samples")}}
    where = sorted({run["measured_on"] for run in section["runs"]})
    return "; ".join([*(f"{key.replace('_', ' ')} {_fact(value)}" for key, value in facts.items()), *where])


def _fact(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5f}" if isinstance(value, float) else str(value)


def measured_on() -> str:
    """Commit, hardware and torch."""
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    about = environment(torch.device("cpu"))
    return f"commit {commit or 'unknown'}, {about['hardware']}, torch {about['torch']}"
