"""Compare models with DLRM seed by seed, and show what was found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.quality_results import half_width

BASELINE = "DLRM"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"


def difference(own: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Mean of the differences of each seed, and half of its 95 % interval (Student's t)."""
    of_seed = [a - b for a, b in zip(own, other, strict=True)]
    return statistics.fmean(of_seed), half_width(of_seed)


def verdict(own: Sequence[float], other: Sequence[float]) -> str:
    """``beats`` if the whole interval of the differences is above 0, else ``does not``."""
    mean, half = difference(own, other)
    return "beats" if math.isfinite(half) and mean > half else "does not"


def seeds_of(model: Mapping[str, Any], metric: str = "score") -> list[float]:
    """A metric on test of each seed of the chosen settings."""
    return [run["test"][metric] for _, run in sorted(model.get("seeds", {}).items())]


def comparisons(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of the planted logs: what each model reached, and whether it beats DLRM."""
    for log, found in results.items():
        of_models = found["models"]
        baseline = seeds_of(of_models.get(BASELINE, {}))
        for name, model in of_models.items():
            own = seeds_of(model)
            if not own:
                continue
            row = [log, name, f"{found['attainable']['score']:.4f}", f"{statistics.fmean(own):.4f}"]
            if name != BASELINE and len(baseline) == len(own) > 1:
                mean, half = difference(own, baseline)
                row += [f"{mean:+.4f} ± {half:.4f}", verdict(own, baseline)]
            else:
                row += ["–", "–"]
            yield row


def by_label(results: Mapping[str, Any]) -> Iterator[str]:
    """For logs of two labels, a sentence with the AUC of each."""
    for log, found in results.items():
        metrics = [metric for metric in found["attainable"] if metric.startswith("AUC of ")]
        if len(metrics) > 1:
            said = ["attainable " + ", ".join(f"{m[7:]} {found['attainable'][m]:.4f}" for m in metrics)]
            for name, model in found["models"].items():
                if seeds_of(model):
                    values = ", ".join(f"{m[7:]} {statistics.fmean(seeds_of(model, m)):.4f}" for m in metrics)
                    said.append(f"{name} {values}")
            yield f"AUC of each label of *{log}*: {'; '.join(said)}."


def real_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of the real log: means over seeds, and their spread."""
    for model, of_seeds in found.items():
        runs = [run for run in of_seeds.values() if "auc" in run]
        if not runs:
            continue
        of_auc, of_loss = ([run[metric] for run in runs] for metric in ("auc", "logloss"))
        spread = f"{statistics.stdev(of_auc):.4f}" if len(of_auc) > 1 else "–"
        row = [model, f"{statistics.fmean(of_auc):.4f}", spread, f"{statistics.fmean(of_loss):.4f}", str(len(runs))]
        yield row


PLANTED_HEADER = ("log", "model", "attainable", "reached", "to DLRM", "")
REAL_HEADER = ("model", "AUC", "± of seeds", "logloss", "seeds")


def markdown(data: Mapping[str, Any]) -> str:
    """The tables of a results file."""
    about = data["about"]
    sizes = [f"{log} {f['facts']['samples']:,}" for log, f in data["planted"].items()]
    lines = [
        f"{about['measured on']}; training samples: {', '.join(sizes)}; {data['settings']['trials']} trials for each "
        f"model, {data['settings']['seeds']} seeds",
        "",
        *_table(PLANTED_HEADER, comparisons(data["planted"])),
        "",
        *by_label(data["planted"]),
    ]
    if data["real"]:
        lines += ["", "Real log, 99,000 training samples, recipes unedited:", ""]
        lines += _table(REAL_HEADER, real_rows(data["real"]))
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterator[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
