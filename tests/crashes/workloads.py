"""Commands that reach every phase, on a small log, and what they leave."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hotbed.checkpoint import Directory, checkpoints_in, directory, verify_checkpoint
from hotbed.checkpoint.tensor_files import UNFINISHED
from hotbed.errors import HotbedError
from tests.crashes.points import DIGESTS

NEVER_THE_SAME = {"samples_per_s", "seconds", "time", "waited_s", "stalled_s"}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A command that phases are reached in.

    Attributes
    ----------
    name
        Of it.
    phases
        In which processes die.
    args
        Of the command; ``FOLDER`` stands for where it runs.
    ranks
        Processes.
    begun
        Arguments of a command that is run first, and to its end; the one that dies goes on from there.
    makes
        What the command makes in its folder, if it does not train.
    whole
        What is there only when that is whole.
    """

    name: str
    phases: tuple[str, ...]
    args: tuple[str, ...]
    ranks: int = 1
    begun: tuple[str, ...] | None = None
    makes: str | None = None
    whole: str | None = None

    @property
    def slug(self) -> str:
        """Name for options and folders."""
        return self.name.replace(" ", "-")


TRAIN = ("train", "DATA/recipe.yaml", "--out", "FOLDER/runs", "--resume", "auto")
TIERS = ("--memory.tier", "disk", "--memory.cache_rows", "64", "--memory.directory", "FOLDER/rows")
CHAIN = ("--train.checkpoint_full_every", "4", "--train.keep_last", "2")
KEPT = (*TRAIN, "--train.checkpoint_full_every", "4", "--train.keep_last", "9", "--train.steps", "8")
ROWS = ("--parallel.plan", "row", "--parallel.timeout_s", "60")
REPLICAS = ("--parallel.replicas", "2", "--parallel.sync_every", "2", "--parallel.timeout_s", "60")
WIDE = ("--data.dim", "32", "--model.init_args.bottom", "[16, 32]")  # columns are cut in parts of 16
GRID = ("--parallel.plan", "grid", *WIDE, "--parallel.timeout_s", "60")
WORKLOADS = (
    Workload(name="one process", phases=("training", "saving", "publication"), args=(*TRAIN, "--train.epochs", "2")),
    Workload(name="chain", phases=("difference", "publication"), args=(*TRAIN, *CHAIN)),
    Workload(name="go on", phases=("loading",), args=(*TRAIN, *CHAIN), begun=(*TRAIN, *CHAIN, "--train.steps", "9")),
    Workload(
        name="tiers",
        phases=("training", "write-back", "evictions", "saving", "difference"),
        args=(*TRAIN, *TIERS, *CHAIN),
    ),
    Workload(
        name="dynamic",
        phases=("evictions", "saving"),
        args=(*TRAIN, "--model.class_path", "tests.crashes.models.DynamicDLRM"),
    ),
    Workload(
        name="prepare",
        phases=("preparing",),
        args=("prepare", "DATA/log.tsv", "FOLDER/prepared", "--threshold", "2"),
        makes="prepared",
        whole="prepared",
    ),
    Workload(
        name="compact",
        phases=("compaction",),
        args=("checkpoint", "compact", "FOLDER/runs/crash", "FOLDER/compacted"),
        begun=KEPT,
        makes="compacted",
        whole="compacted/manifest.json",
    ),
    Workload(
        name="changes",
        phases=("export",),
        args=("checkpoint", "changes", "FOLDER/runs/crash", "--since", "2", "--out", "FOLDER/changes.parquet"),
        begun=KEPT,
        makes="changes.parquet",
        whole="changes.parquet",
    ),
    Workload(name="two ranks", phases=("exchange", "saving"), args=(*TRAIN, *ROWS), ranks=2),
    Workload(name="grid", phases=("exchange", "difference"), args=(*TRAIN, *GRID, *CHAIN), ranks=2),
    Workload(
        name="ranks go on",
        phases=("loading",),
        args=(*TRAIN, *ROWS, *CHAIN),
        ranks=2,
        begun=(*TRAIN, *ROWS, *CHAIN, "--train.steps", "9"),
    ),
    Workload(name="two replicas", phases=("replicas",), args=(*TRAIN, *REPLICAS), ranks=2),
)


def make_data(folder: Path) -> Path:
    """A small log, its dataset, a recipe of a run of seconds, and a plan for two ranks that send pooled vectors."""
    from hotbed import make_plan
    from hotbed.config import Recipe
    from hotbed.data import write_synthetic_log
    from hotbed.data.preparation.prepare_dataset import prepare
    from hotbed.train.runs.build import open_source, tables_of

    folder.mkdir(parents=True, exist_ok=True)
    write_synthetic_log(folder / "log.tsv", 1500, seed=1)
    prepare(folder / "log.tsv", folder / "prepared", threshold=2, valid_fraction=0.1, test_fraction=0.1)
    data = Recipe.from_dict(yaml.safe_load(make_recipe(folder, folder / "prepared").read_text(encoding="utf-8"))).data
    plan = make_plan(tables_of(open_source(data), data), 2, wire="pooled")
    (folder / "pooled.json").write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    return folder


def make_recipe(folder: Path, prepared: Path) -> Path:
    """A recipe of a run of seconds."""
    recipe = {
        "name": "crash",
        "data": {"path": str(prepared), "dim": 8, "valid_split": "valid"},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {
            "batch_size": 128,
            "device": "cpu",
            "precision": "fp32",
            "epochs": 1,
            "eval_every": 7,
            "log_every": 1,
            "checkpoint": "last",
            "checkpoint_every": 2,
            "keep_last": 2,
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


# -- what a command leaves -----------------------------------------------------------------------------------------


def published(folder: Path) -> list[Directory]:
    """Checkpoints of all runs in a folder."""
    return [
        checkpoint
        for place in sorted(folder.glob("runs/*/*/checkpoints"))
        for checkpoint in checkpoints_in(directory(place))
    ]


def unreadable(folder: Path) -> list[str]:
    """What is wrong with published checkpoints, every byte of which is read."""
    faults: list[str] = []
    compacted = [directory(folder / "compacted")] if (folder / "compacted" / "manifest.json").exists() else []
    for checkpoint in (*published(folder), *compacted):
        try:
            verify_checkpoint(checkpoint)
        except HotbedError as error:
            faults.append(str(error))
    return faults


def result_of(workload: Workload, folder: Path) -> dict[str, Any]:
    """What a command that has ended leaves, for comparison to the bit."""
    if workload.makes is not None:
        made = folder / workload.makes
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        files = [made] if made.is_file() else sorted(path for path in made.rglob("*") if path.is_file())
        files = [path for path in files if path.name != UNFINISHED]  # it means nothing beside a manifest
        found = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        return {**found, "left behind": len(hidden)}
    (run,) = (path.parent for path in folder.glob("runs/*/*/summary.json"))  # one that died early began another
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    digest = json.loads((folder / DIGESTS).read_text(encoding="utf-8").splitlines()[-1])
    losses: dict[str, Any] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["event"] in ("train", "eval"):
            same = {key: value for key, value in record.items() if key in ("loss", "auc", "logloss", "lr", "samples")}
            losses[f"{record['event']} {record['step']}"] = same
    kept = [checkpoint.name for checkpoint in published(folder)]
    test = {key: value for key, value in summary["test"].items() if key not in NEVER_THE_SAME}
    return {**digest, **losses, "test": test, "steps": summary["steps"], "kept": kept[-1:]}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not the same."""
    return sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
