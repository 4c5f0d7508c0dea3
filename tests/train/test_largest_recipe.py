"""Train a model of 12 trillion parameters on one machine, kill it and go on: it costs the rows that were trained."""

from __future__ import annotations

import shutil
from pathlib import Path

from hotbed.checkpoint import checkpoints_in
from tests.cli.cases import train
from tests.train.test_resume import train_until_killed

RECIPES = Path(__file__).parents[2] / "recipes"
ROWS = 46_875_000_000
"""Of 256 columns."""
OPTIONS = [
    *("--data.path", str(RECIPES / "tables" / "neo_f.yaml"), "--memory.tier", "disk", "--memory.cache_rows", "4000"),
    *("--train.batch_size", "8", "--train.steps", "6", "--train.log_every", "1", "--train.precision", "fp32"),
    *("--train.checkpoint", "last", "--train.checkpoint_every", "2"),
    *("--parallel.forward_codec", "fp32", "--parallel.backward_codec", "fp32"),
]


def last_checkpoint(run: Path) -> dict[str, bytes]:
    """What a run has saved last, by file, without the part of a name that differs from save to save."""
    last = checkpoints_in(run / "checkpoints")[-1]
    assert last.name == "last-00000006"
    return {file.name.rpartition("-")[0]: file.read_bytes() for file in Path(last.path).glob("*.safetensors")}


def test_twelve_trillion_parameters_are_trained_killed_and_trained_on(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole" / "neo_f.yaml", tmp_path / "cut" / "neo_f.yaml"
    for recipe in (whole, cut):
        recipe.parent.mkdir()
        shutil.copy(RECIPES / "neo_f.yaml", recipe)
    options = [*OPTIONS, "--memory.directory", str(tmp_path)]
    status, summary, undisturbed = train(whole, *options)
    assert status == 0 and sum(table["rows"] for table in summary["tables"]) == ROWS
    train_until_killed(cut, 5, *options)
    status, _, resumed = train(cut, *options, "--resume", "auto")
    assert status == 0 and last_checkpoint(resumed) == last_checkpoint(undisturbed)
