"""``RUNS/NAME`` stands for its newest run in every command that takes a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotbed.checkpoint import save_checkpoint
from hotbed.cli.main import main
from tests.cli.cases import Output, train


@pytest.fixture
def newest(recipe: Path) -> Path:
    """Directory of the newer one of two runs, of which the older has more steps, beside one without a checkpoint."""
    train(recipe, "--train.steps", "4")
    _, _, run = train(recipe, "--train.steps", "3")
    (run.parent / "29991231-235959").mkdir()  # killed before it wrote anything
    return run


CASES = {
    "eval": ["eval", "--checkpoint", "RUNS"],
    "predict": ["predict", "RUNS", "DATA", "--split", "test", "--out", "OUT/scores.csv"],
    "inspect": ["inspect", "RUNS"],
    "checkpoint inspect": ["checkpoint", "inspect", "RUNS"],
    "checkpoint verify": ["checkpoint", "verify", "RUNS"],
    "checkpoint convert": ["checkpoint", "convert", "RUNS", "OUT/converted"],
    "--init_from": ["train", "RECIPE", "--init_from", "RUNS", "--name", "next", "--train.steps", "1", "--out", "OUT/r"],
    "--resume": ["train", "RECIPE", "--resume", "RUNS", "--name", "next", "--train.steps", "5", "--out", "OUT/r"],
}


@pytest.mark.parametrize("command", CASES)
def test_the_newest_run_is_taken(command: str, newest: Path, recipe: Path, prepared: Path, capsys: Output) -> None:
    found = {"RUNS": newest.parent, "DATA": prepared, "RECIPE": recipe}
    argv = [str(found.get(arg, arg)).replace("OUT", str(recipe.parent)) for arg in CASES[command]]
    file = recipe.parent / "result.json"
    capsys.readouterr()
    assert main([*argv, "--json", str(file)]) == 0
    shown = capsys.readouterr()
    if command == "checkpoint convert":
        manifest = json.loads((recipe.parent / "converted" / "manifest.json").read_text())
        assert manifest["step"] == 3
    elif command == "inspect":
        assert json.loads(file.read_text())["path"] == str(newest)
    else:
        assert str(newest / "checkpoints" / "last-00000003") in (shown.out + shown.err).replace("\n", "")


def test_models_as_programs_take_it_too(newest: Path, recipe: Path) -> None:
    assert main(["checkpoint", "convert", str(newest.parent), str(recipe.parent / "program"), "--to", "torch"]) == 0
    assert (recipe.parent / "program" / "model.pt2").exists()


def test_without_a_run_it_says_what_it_takes(tmp_path: Path, capsys: Output) -> None:
    save_checkpoint(tmp_path / "elsewhere" / "nothing", {})
    assert main(["eval", "--checkpoint", str(tmp_path)]) == 2
    assert "nor a run or a directory of runs with a checkpoint" in capsys.readouterr().err
