"""``--resume auto`` where checkpoints are damaged, or lack what they need: what is taken, set aside or left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

from hotbed.checkpoint import differential, directory, save_checkpoint
from hotbed.checkpoint.manifest import base_of
from tests.cli.cases import Output, refused, train
from tests.train.test_resume import AUTO, OFTEN, names, runs, train_until_killed


@pytest.fixture
def killed(recipe: Path) -> Path:
    """The directory of a run that was killed after step 10, with checkpoints of steps 3, 6 and 9."""
    train_until_killed(recipe, 10, *OFTEN, *AUTO)
    (run,) = runs(recipe)
    return run


def file_of(checkpoint: Path, part: str) -> Path:
    (file,) = checkpoint.glob(f"{part}-*.safetensors")
    return file


def damage(checkpoint: Path, part: str = "model") -> None:
    file = file_of(checkpoint, part)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_not_taken_but_the_one_before_it(recipe: Path, killed: Path, capsys: Output) -> None:
    damage(killed / "checkpoints" / "last-00000009")
    (killed / "checkpoints" / "last-00000010").mkdir()
    (killed / "checkpoints" / "last-00000010" / "model.safetensors").write_text("half")
    (killed / "checkpoints" / "last-00000002").mkdir()  # older ones are of no interest
    capsys.readouterr()
    status, summary, _ = train(recipe, *OFTEN, *AUTO)
    shown = capsys.readouterr().err
    assert status == 0
    assert "warning: " in shown
    assert "block 0 of 1" in shown
    assert "last-00000009 is renamed to damaged-last-00000009-" in shown
    assert "last-00000010 was never finished and is ignored" in shown
    assert "last-00000002" not in shown
    assert f"resumed from {killed}/checkpoints/last-00000006 at step 6" in shown
    assert names(killed) == [f"last-{step:08d}" for step in (3, 6, 9, 12, 15, 18, 19)]
    assert summary["test"] == train(recipe, "--name", "whole")[1]["test"]


def test_differences_to_a_damaged_base_are_not_taken_but_the_full_one_before(
    recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential, "MOST_SHARE", 10.0)
    options = [*OFTEN, *AUTO, "--train.checkpoint_full_every", "2"]
    train_until_killed(recipe, 16, *options)
    (run,) = runs(recipe)
    place = run / "checkpoints"
    assert {name: base_of(directory(place / name)) for name in names(run)} == {
        "last-00000003": None,
        "last-00000006": "last-00000003",
        "last-00000009": None,
        "last-00000012": "last-00000009",
        "last-00000015": None,
    }
    shutil.rmtree(place / "last-00000015")
    file = file_of(place / "last-00000009", "tables")
    damage(place / "last-00000009", "tables")
    capsys.readouterr()
    status, summary, _ = train(recipe, *options)
    shown = capsys.readouterr().err
    assert status == 0
    for name in ("last-00000012", "last-00000009"):
        assert f"{name} is renamed to damaged-{name}-" in shown
    assert f"warning: {place}/last-00000009/{file.name}: block 0 of 1" in shown  # why the difference is not taken
    assert f"resumed from {place}/last-00000006 at step 6" in shown
    assert summary["test"] == train(recipe, "--name", "whole")[1]["test"]


@pytest.mark.parametrize("how", ["text", "file", "bytes"])
def test_what_counts_as_damage(how: str, recipe: Path, killed: Path, capsys: Output) -> None:
    place = killed / "checkpoints" / "last-00000009"
    if how == "text":
        (place / "manifest.json").write_text((place / "manifest.json").read_text()[:-100])
    elif how == "file":
        file_of(place, "dense").unlink()
    else:
        file_of(place, "dense").write_bytes(b"")
    assert train(recipe, *AUTO, *OFTEN)[0] == 0
    assert "last-00000009 is renamed to damaged-last-00000009-" in capsys.readouterr().err


def test_if_all_checkpoints_are_damaged_nothing_begins(recipe: Path, killed: Path, capsys: Output) -> None:
    for name in names(killed):
        damage(killed / "checkpoints" / name)
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), *AUTO, *OFTEN]
    message = refused(argv, capsys)
    assert f"all checkpoints in {killed}/checkpoints are damaged: " in message
    assert "its content has changed; " in message
    assert message.endswith("Remove them to start")
    assert (runs(recipe), len(names(killed))) == ([killed], 3)


@pytest.mark.parametrize("how", ["absent", "another"])
def test_a_difference_whose_base_is_not_there_is_left_alone(
    how: str, recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential, "MOST_SHARE", 10.0)
    options = [*OFTEN, *AUTO, "--train.checkpoint_full_every", "3"]
    train_until_killed(recipe, 10, *options)
    (run,) = runs(recipe)
    place = run / "checkpoints"
    base, last = place / "last-00000003", place / "last-00000009"
    assert base_of(directory(last)) == base.name
    base.rename(place / "moved")
    if how == "another":
        save_checkpoint(base, {"model": nn.Linear(2, 2)})
    before = {file.name: file.read_bytes() for file in last.iterdir()}
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), *options]
    message = refused(argv, capsys)
    assert f"{last} is a difference to {base}" in message
    assert ("which is gone; copy it to that place" if how == "absent" else "copy the checkpoints again") in message
    assert {file.name: file.read_bytes() for file in last.iterdir()} == before
    shutil.rmtree(base, ignore_errors=True)
    (place / "moved").rename(base)
    capsys.readouterr()
    assert train(recipe, *options)[0] == 0
    assert f"resumed from {last} at step 9" in capsys.readouterr().err
