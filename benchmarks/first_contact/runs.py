"""Run unedited ``hotbed init`` and ``hotbed train`` as a user does: as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_contact.planted import Dataset


def first_run(name: str, dataset: Dataset, folder: Path, seed: int) -> dict[str, Any]:
    """What hotbed reached on the test split; of an error, its message.

    A headerless log in Criteo's layout, of which ``init`` makes no recipe, goes through ``hotbed demo``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe, summary = folder / "recipe.yaml", folder / f"summary-{seed}.json"
    recipe.unlink(missing_ok=True)
    drafted = _hotbed("init", dataset.path, *dataset.options, "--out", recipe)
    trained = ["--out", folder / "runs", "--json", summary]
    if drafted.returncode == 0:
        done = _hotbed("train", recipe, "--train.seed", seed, *trained)
    elif dataset.path.suffix in (".tsv", ".gz"):
        done = _hotbed("demo", dataset.path, "--seed", seed, *trained)
    else:
        return {"error": _last_line(drafted.stderr)}
    if done.returncode != 0:
        return {"error": _last_line(done.stderr)}
    test = json.loads(summary.read_text(encoding="utf-8"))["test"]
    if test is None:
        return {"error": "the recipe has no test split"}
    expected = dataset.splits["test"][2]
    note = {} if test["samples"] == expected else {"note": f"tested on {test['samples']:,} samples, not {expected:,}"}
    return {"auc": test["auc"], "logloss": test["logloss"], **note}


def _hotbed(*args: Any) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", "hotbed", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
