"""``RUNS/NAME`` stands for its newest run in every command that takes a run."""

import json
from pathlib import Path

import pytest

from hotbed.checkpoint import save_checkpoint
from hotbed.cli.main import main
from tests.cli.cases import Output, refused, small_recipe, train, write_yaml


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """Directory of the newer one of two runs, of which the older has more steps, beside one without a checkpoint."""
    recipe = write_yaml(tmp_path_factory.mktemp("named") / "small.yaml", small_recipe(prepared))
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
    "checkpoint convert --to torch": ["checkpoint", "convert", "RUNS", "OUT/program", "--to", "torch"],
    "--init_from": ["train", "RECIPE", "--init_from", "RUNS", "--name", "next", "--train.steps", "1", "--out", "OUT/r"],
    "--resume": ["train", "RECIPE", "--resume", "RUNS", "--name", "next", "--train.steps", "5", "--out", "OUT/r"],
}


@pytest.mark.parametrize("command", CASES)
def test_the_newest_run_is_taken(command: str, newest: Path, prepared: Path, tmp_path: Path, capsys: Output) -> None:
    recipe = newest.parents[2] / "small.yaml"
    found = {"RUNS": newest.parent, "DATA": prepared, "RECIPE": recipe}
    argv = [str(found.get(arg, arg)).replace("OUT", str(tmp_path)) for arg in CASES[command]]
    file = tmp_path / "result.json"
    capsys.readouterr()
    assert main([*argv, "--json", str(file)]) == 0
    shown = capsys.readouterr()
    if command == "checkpoint convert":
        assert json.loads((tmp_path / "converted" / "manifest.json").read_text())["step"] == 3
    elif command == "checkpoint convert --to torch":
        assert (tmp_path / "program" / "model.pt2").exists()
    elif command == "inspect":
        assert json.loads(file.read_text())["path"] == str(newest)
    else:
        assert str(newest / "checkpoints" / "last-00000003") in (shown.out + shown.err).replace("\n", "")


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: Output) -> None:
    save_checkpoint(tmp_path / "elsewhere" / "nothing", {})
    message = refused(["eval", "--checkpoint", str(tmp_path)], capsys)
    assert "nor a run or a directory of runs with a checkpoint" in message
