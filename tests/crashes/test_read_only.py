"""Commands that may not write where they should say so in one message, and leave nothing half written."""

from pathlib import Path

import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused, train
from tests.crashes.capabilities import obeying_permissions
from tests.crashes.workloads import make_recipe

CHAIN = ("--train.checkpoint_every", "4", "--train.checkpoint_full_every", "4", "--train.keep_last", "9")


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """A run with full checkpoints and differences."""
    folder = tmp_path_factory.mktemp("read-only")
    status, _, run = train(make_recipe(folder, prepared), *CHAIN, "--train.steps", "10")
    assert status == 0
    return run


COMMANDS = {
    "train": ["train", "RECIPE", "--out", "THERE/runs"],
    "train, checkpoints": ["train", "RECIPE", "--out", "OUT/runs", "--train.checkpoint_dir", "THERE/kept"],
    "train, rows": ["train", "RECIPE", "--out", "OUT/runs", "--memory.tier", "disk", "--memory.directory", "THERE"],
    "train, figures": ["train", "RECIPE", "--out", "OUT/runs", "--train.steps", "2", "--json", "THERE/summary.json"],
    "prepare": ["prepare", "LOG", "THERE/prepared"],
    "compact": ["checkpoint", "compact", "RUN", "THERE/compacted"],
    "convert": ["checkpoint", "convert", "RUN", "THERE/converted"],
    "changes": ["checkpoint", "changes", "RUN", "--out", "THERE/changes.parquet"],
    "predict": ["predict", "RUN", "DATA", "--split", "test", "--out", "THERE/predictions.parquet"],
    "inspect": ["inspect", "DATA", "--json", "THERE/inspected.json"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_directory_that_may_not_be_written_to_is_named(
    run: Path, prepared: Path, log: Path, tmp_path: Path, capsys: Output, command: list[str]
) -> None:
    there, out = tmp_path / "there", tmp_path / "out"
    there.mkdir()
    out.mkdir()
    places = {"THERE": there, "OUT": out, "RUN": run, "DATA": prepared, "LOG": log}
    places["RECIPE"] = run.parents[2] / "recipe.yaml"
    argv = command
    for name, place in places.items():
        argv = [arg.replace(name, str(place)) for arg in argv]
    there.chmod(0o555)
    try:
        with obeying_permissions():
            error = refused(argv, capsys)
    finally:
        there.chmod(0o755)
    assert error.startswith("hotbed: error: ")
    assert str(there) in error
    assert "ermission" in error
    assert list(there.iterdir()) == []


def test_checkpoints_that_may_not_be_read_are_named(run: Path, capsys: Output) -> None:
    (file,) = (run / "checkpoints").glob("last-00000004/model-*.safetensors")
    file.chmod(0)
    try:
        with obeying_permissions():
            error = refused(["checkpoint", "verify", str(file.parent)], capsys)
    finally:
        file.chmod(0o644)
    assert str(file) in error and "ermission" in error
    assert main(["checkpoint", "verify", str(file.parent)]) == 0
