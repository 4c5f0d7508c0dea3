"""Data that vanishes or shrinks while a run reads it, and memory that runs out: one message, and the run can go on."""

import resource
import shutil
from pathlib import Path

import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused
from tests.crashes.workloads import make_recipe
from tests.matrix import full

LONG = ("--train.epochs", "2", "--train.checkpoint_every", "2", "--data.prefetch", "1", "--data.window", "1")


@pytest.mark.parametrize("how", [full("remove"), "cut"])
def test_data_that_is_lost_while_it_is_read_is_named_and_the_run_goes_on(
    prepared: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    shutil.copytree(prepared, data)
    recipe = make_recipe(tmp_path, data)
    monkeypatch.setenv("HOTBED_LOSES", f"{how}:{data}")
    argv = ["train", str(recipe), "--out", str(runs), "--resume", "auto"]
    model = ["--model.class_path", "tests.crashes.models.LosesData"]
    said = refused([*argv, *LONG, *model], capsys)
    assert str(data) in said, said
    shutil.rmtree(data)
    shutil.copytree(prepared, data)
    monkeypatch.setenv("HOTBED_LOSES", f"remove:{tmp_path / 'nothing'}")
    assert main([*argv, *LONG, *model]) == 0


@pytest.mark.parametrize("when", [full("init"), "step"])
def test_memory_that_runs_out_is_said_and_the_run_goes_on(
    prepared: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    recipe = make_recipe(tmp_path, prepared)
    argv = ["train", str(recipe), "--out", str(tmp_path / "runs"), "--resume", "auto", "--train.steps", "6"]
    argv += ["--model.class_path", "tests.crashes.models.LosesMemory", "--data.dim", "1024"]
    argv += ["--model.init_args.bottom", "[16, 1024]"]
    monkeypatch.setenv("HOTBED_LOSES", when)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        said = refused(argv, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert "memory" in said, said
    monkeypatch.setenv("HOTBED_LOSES", "never")
    assert main(argv) == 0
