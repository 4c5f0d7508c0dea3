"""Train models on the real log by unedited recipes, which ``hotbed init --model NAME`` drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.first_contact.real import PARQUET, real_dataset
from benchmarks.first_contact.runs import first_run

REAL_MODELS = ("DLRM", "WideDeep", "DCNv2", "DeepFM")
"""Models for whose columns the log has all: it has no histories, and one label."""


def real_runs(log: Path, work: Path, seeds: int, found: dict[str, Any]) -> Iterator[str]:
    """Fill ``found[model][seed]`` with AUC and logloss on the test split; yields after each run what it said."""
    dataset = real_dataset(PARQUET, log, work)
    for model in REAL_MODELS:
        of_seeds: dict[str, Any] = found.setdefault(model, {})
        chosen = replace(dataset, options=(*dataset.options, "--model", model))
        for seed in range(seeds):
            if "auc" in of_seeds.get(str(seed), {}):
                continue
            of_seeds[str(seed)] = first_run(PARQUET, chosen, work / model, seed)
            yield f"{model}, seed {seed}: {of_seeds[str(seed)]}"
