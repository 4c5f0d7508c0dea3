"""Protects that servers find a full model, then changes that lead on from it, whatever becomes of the run."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotbed.checkpoint import find_checkpoint, read_manifest
from hotbed.checkpoint.storage import directory
from hotbed.config import Recipe
from hotbed.errors import CheckpointError, RecipeError
from hotbed.serve.format import ChangeSet, ExportedModel
from hotbed.train.build import new_source
from hotbed.train.export import Exporter
from hotbed.train.publish import Publisher
from tests.commands.cases import Output, train
from tests.train.numbers import POSITIVE
from tests.train.numbers import recipe_of_numbers as recipe_of

OPTIONS = ["--train.checkpoint", "last", "--train.checkpoint_every", "3", "--train.checkpoint_in_background", "false"]


def published(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def values_of(model: ExportedModel) -> dict[str, torch.Tensor]:
    rows = {name: model.vectors(name, torch.arange(t.rows)) for name, t in model.manifest.tables.items()}
    return {**rows, **model.dense().state_dict()}


def followed(place: Path, first: str, changes: list[str]) -> dict[str, torch.Tensor]:
    """What a server has that begins with a full model and applies changes."""
    model = ExportedModel.open(place / first)
    values, state, step = values_of(model), model.manifest.state, model.manifest.step
    for name in changes:
        change = ChangeSet.open(place / name)
        change.refuse_unless_after(state, step)
        state, step = change.manifest.sequence.state, change.manifest.sequence.step
        for table, _, ids, vectors in change.rows():
            values[table][ids] = vectors
        values |= change.dense()
    return values


def assert_equal(values: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.equal(value, others[name]), name


def exporter_of(recipe: Path) -> Exporter:
    found = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    return Exporter(found, new_source(found.data))


def test_a_run_publishes_its_checkpoints(tmp_path: Path) -> None:
    place, recipe = tmp_path / "published", recipe_of(tmp_path, [POSITIVE])
    to_place = ["--train.publish", str(place)]
    status, _, run = train(recipe, *OPTIONS, "--train.steps", "9", *to_place)
    assert status == 0
    newest = find_checkpoint(run)
    exporter_of(recipe).write_model(tmp_path / "now", newest)
    now = values_of(ExportedModel.open(tmp_path / "now"))
    *changes, first = published(place)  # which ones there are is a matter of time, not where they lead
    assert_equal(followed(place, first, changes), now)
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir()) == ["last-00000009"]

    # The run goes on, and so do its changes.
    status, _, again = train(recipe, *OPTIONS, "--train.steps", "12", *to_place, "--resume", "auto")
    assert (status, again) == (0, run)
    change = ChangeSet.open(place / "change-000000000012").manifest
    assert (change.base.step, change.sequence.state) == (9, read_manifest(find_checkpoint(run)).sha256)

    # Publishing changes no bit of the training.
    status, _, other = train(recipe, *OPTIONS, "--train.steps", "9", "--resume", "none")
    assert status == 0
    exporter_of(recipe).write_model(tmp_path / "plain", find_checkpoint(other))
    assert_equal(values_of(ExportedModel.open(tmp_path / "plain")), now)


def test_a_new_run_does_not_mix_its_models_with_others(tmp_path: Path, capsys: Output) -> None:
    place, recipe = tmp_path / "published", recipe_of(tmp_path, [POSITIVE])
    exporter, run = exporter_of(recipe), checkpoints_of(recipe)
    publisher = Publisher(directory(place), exporter, 9)
    publisher.begin(0, run)
    publish(publisher, run / "last-00000003", run / "last-00000006")
    capsys.readouterr()
    status, _, _ = train(recipe, *OPTIONS, "--train.publish", str(place))
    assert status == 2
    assert (
        "holds what another run has published, up to change-000000000006; go on from that run"
        in capsys.readouterr().err
    )
    with pytest.raises(RecipeError, match=r"train.publish is set, but train.checkpoint is 'none', so nothing is saved"):
        values = yaml.safe_load(recipe.read_text())
        Recipe.from_dict({**values, "train": {**values["train"], "publish": "x", "checkpoint": "none"}})


def checkpoints_of(recipe: Path) -> Any:
    """A run's directory of checkpoints of steps 3, 6, 9, 12 and 15."""
    status, _, run = train(recipe, *OPTIONS, "--train.keep_last", "9")
    assert status == 0
    return directory(run / "checkpoints")


def publish(publisher: Publisher, *checkpoints: Any) -> None:
    for checkpoint in checkpoints:
        publisher.publish(checkpoint)
        publisher.finish()


def test_what_is_published_while_runs_stop_fail_and_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, recipe = tmp_path / "published", recipe_of(tmp_path, [POSITIVE])
    exporter, run = exporter_of(recipe), checkpoints_of(recipe)
    last = {step: run / f"last-{step:08d}" for step in (3, 6, 9, 12, 15)}

    def begun(step: int, full_every: int = 2) -> Publisher:
        made = Publisher(directory(place), exporter, full_every)
        made.begin(step, run)
        return made

    publisher = begun(0)
    publish(publisher, last[3], last[6])
    assert published(place) == ["change-000000000006", "model-000000000003"]
    assert publisher.needed() == {"last-00000006"}
    publish(publisher, last[6])  # the same again
    assert len(publisher.records) == 2
    publish(publisher, last[9])  # a full model beside the second change
    assert published(place) == [
        *("change-000000000006", "change-000000000009", "model-000000000003", "model-000000000009"),
    ]
    # A disk that fails: the next change has all since.
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "hotbed"):
        patched.setattr(Exporter, "write_change", _fails)
        publish(publisher, last[12])
    assert "last-00000012 was not published, the next one will be with all since: no space" in caplog.text
    assert publisher.needed() == {"last-00000009"}
    publish(publisher, last[15])
    change = ChangeSet.open(place / "change-000000000015").manifest
    assert (change.base.step, change.sequence.step) == (9, 15)
    assert_equal(
        followed(place, "model-000000000003", [f"change-{n:012d}" for n in (6, 9, 15)]),
        followed(place, "model-000000000009", ["change-000000000015"]),
    )
    # What a killed process left, and a run that goes on from step 9: until 15 is past there are full models only.
    (place / "change-000000000018").mkdir()
    (place / "change-000000000018" / "rows.parquet").write_text("")
    publisher = begun(9)
    assert [name for name in published(place) if name > "change-000000000009" and name < "model"] == []
    assert publisher.needed() == {"last-00000009"}
    publish(publisher, last[12])
    assert published(place) == ["model-000000000009", "model-000000000012"]  # that of 3, and what leads on, is removed
    # A run whose checkpoints are elsewhere cannot tell what changed.
    publisher = Publisher(directory(place), exporter, 2)
    publisher.begin(12, directory(tmp_path / "elsewhere"))
    publish(publisher, last[15])
    assert published(place) == ["model-000000000012", "model-000000000015"]


def _fails(*_: object, **__: object) -> None:
    raise CheckpointError("no space")


def test_one_that_waits_gives_way_to_the_newest(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, [POSITIVE])
    run, place = checkpoints_of(recipe), tmp_path / "published"
    publisher = Publisher(directory(place), exporter_of(recipe), 9)
    publisher.begin(0, run)
    for step in (3, 6, 9, 12, 15):
        publisher.publish(run / f"last-{step:08d}")
        assert f"last-{step:08d}" in publisher.needed()
    publisher.finish()
    *changes, first = published(place)
    assert first.startswith("model-")
    assert max(int(name.rpartition("-")[2]) for name in (*changes, first)) == 15
    exporter_of(recipe).write_model(tmp_path / "now", run / "last-00000015")
    assert_equal(followed(place, first, changes), values_of(ExportedModel.open(tmp_path / "now")))
