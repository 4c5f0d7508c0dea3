"""Protects that servers find a full model, then changes that lead on from it, whatever becomes of the run."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotbed.checkpoint import find_checkpoint, read_manifest
from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.storage import directory
from hotbed.config import Recipe
from hotbed.errors import CheckpointError, RecipeError
from hotbed.serve.model_files import ChangeSet, ExportedModel
from hotbed.train.runs import model_export as export
from hotbed.train.runs.build import new_source
from hotbed.train.runs.model_export import Exporter
from hotbed.train.runs.publish import WENT_BACK, Publisher
from tests.cli.cases import Output, train
from tests.serve.models import vectors_of
from tests.train.numbers import POSITIVE
from tests.train.numbers import recipe_of_numbers as recipe_of

OPTIONS = ["--train.checkpoint", "last", "--train.checkpoint_every", "3", "--train.checkpoint_in_background", "false"]


def published(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.is_dir())


def values_of(model: ExportedModel) -> dict[str, torch.Tensor]:
    rows = {name: vectors_of(model, name, torch.arange(t.rows)) for name, t in model.manifest.tables.items()}
    return {**rows, **model.dense().state_dict()}


def followed(place: Path, first: str, changes: list[str]) -> dict[str, torch.Tensor]:
    """What a server has that begins with a full model and applies changes."""
    model = ExportedModel.open(place / first)
    values, state = values_of(model), model.manifest.state
    for name in changes:
        change = ChangeSet.open(place / name)
        assert change.manifest.base.state == state
        state = change.manifest.sequence.state
        for table, _, ids, vectors in change.rows():
            values[table][ids] = vectors
        values |= change.dense()
    return values


def assert_equal(values: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.equal(value, others[name]), name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_of(tmp_path_factory.mktemp("publish"), [POSITIVE])


@pytest.fixture(scope="module")
def run(recipe: Path) -> Any:
    """A run's directory of checkpoints of steps 3, 6, 9, 12 and 15."""
    status, _, run = train(recipe, *OPTIONS, "--train.keep_last", "9")
    assert status == 0
    return directory(run / "checkpoints")


@pytest.fixture(scope="module")
def exporter(recipe: Path) -> Exporter:
    found = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    return Exporter(found, new_source(found.data))


class Place:
    """A directory that the run publishes to. Versions have names such as "change 6"."""

    def __init__(self, path: Path, exporter: Exporter, run: Any) -> None:
        self.path, self.exporter, self.run = path, exporter, run

    def begin(self, step: int = 0, full_every: int = 9, run: Any = None) -> None:
        """Start, or resume, to publish the run's checkpoints."""
        self.publisher = Publisher(directory(self.path), self.exporter, full_every)
        self.publisher.begin(step, run or self.run)

    def publish(self, *steps: int) -> None:
        for step in steps:
            self.publisher.publish(self.run / f"last-{step:08d}")
            self.publisher.finish()

    @property
    def versions(self) -> list[str]:
        return [f"{kind} {int(step)}" for kind, _, step in (name.rpartition("-") for name in published(self.path))]

    def followed(self, first: int, *changes: int) -> dict[str, torch.Tensor]:
        """What a server has that begins with a full model and applies changes."""
        return followed(self.path, f"model-{first:012d}", [f"change-{step:012d}" for step in changes])


@pytest.fixture
def place(tmp_path: Path, exporter: Exporter, run: Any) -> Place:
    return Place(tmp_path / "published", exporter, run)


def test_a_run_publishes_its_checkpoints(tmp_path: Path, exporter: Exporter, run: Any) -> None:
    place, recipe, plain = tmp_path / "published", recipe_of(tmp_path, [POSITIVE]), run
    to_place = ["--train.publish", str(place)]
    status, _, run = train(recipe, *OPTIONS, "--train.steps", "9", *to_place)
    assert status == 0
    newest = find_checkpoint(run)
    exporter.write_model(tmp_path / "now", newest)
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
    exporter.write_model(tmp_path / "plain", plain / "last-00000009")
    assert_equal(values_of(ExportedModel.open(tmp_path / "plain")), now)


def test_a_new_run_does_not_mix_its_models_with_others(place: Place, recipe: Path, capsys: Output) -> None:
    place.begin()
    place.publish(3, 6)
    capsys.readouterr()
    status, _, _ = train(recipe, *OPTIONS, "--train.publish", str(place.path))
    assert status == 2
    assert "up to change-000000000006" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"train.publish is set, but train.checkpoint is 'none'"):
        values = yaml.safe_load(recipe.read_text())
        Recipe.from_dict({**values, "train": {**values["train"], "publish": "x", "checkpoint": "none"}})


def test_what_is_published_while_runs_stop_fail_and_go_back(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.begin(full_every=2)
    place.publish(3, 6)
    assert place.versions == ["change 6", "model 3"]
    assert place.publisher.needed() == {"last-00000006"}
    place.publish(6)  # the same again
    assert len(place.publisher.records) == 2
    place.publish(9)  # a full model beside the second change
    assert place.versions == ["change 6", "change 9", "model 3", "model 9"]
    # A disk that fails: the next change has all since.
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "hotbed"):
        patched.setattr(Exporter, "write_change", _fails)
        place.publish(12)
    assert "last-00000012 was not published; the next export will include its changes: no space" in caplog.text
    assert place.publisher.needed() == {"last-00000009"}
    place.publish(15)
    change = ChangeSet.open(place.path / "change-000000000015").manifest
    assert (change.base.step, change.sequence.step) == (9, 15)
    assert_equal(place.followed(3, 6, 9, 15), place.followed(9, 15))
    # What a killed process left, and a run that goes on from step 9: until 15 is past there are full models only.
    (place.path / "change-000000000018").mkdir()
    (place.path / "change-000000000018" / "rows.parquet").write_text("")
    place.begin(9, full_every=2)
    assert place.versions == ["change 6", "change 9", "model 3", "model 9"]
    assert place.publisher.needed() == {"last-00000009"}
    place.publish(12)
    assert place.versions == ["model 9", "model 12"]  # that of 3, and what leads on, is removed
    # A run whose checkpoints are elsewhere cannot tell what changed.
    place.begin(12, full_every=2, run=directory(tmp_path / "elsewhere"))
    place.publish(15)
    assert place.versions == ["model 12", "model 15"]


def test_a_run_that_went_back_begins_with_a_full_model_though_it_was_killed(place: Place) -> None:
    place.begin()
    place.publish(3, 6, 9)
    for _ in range(2):  # killed before it has published anything
        place.begin(6)
        assert place.versions == ["change 6", "model 3"]
    place.publish(9)
    assert place.versions == ["change 6", "model 3", "model 9"]
    assert (place.path / WENT_BACK).exists()
    place.publish(12)  # the first one past where servers may be
    assert place.versions == ["model 9", "model 12"]
    assert not (place.path / WENT_BACK).exists()


def test_changes_between_models_with_other_inputs_are_refused(
    tmp_path: Path, run: Any, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kinds(manifest: Manifest) -> dict[str, str]:
        return {"user": "text" if manifest.step > 3 else "integers"}

    monkeypatch.setattr(export, "id_kinds_of", kinds)
    with pytest.raises(CheckpointError, match=r"last-00000006 .*Remove --since"):
        exporter.write_change(tmp_path / "change", run / "last-00000006", run / "last-00000003")
    assert not (tmp_path / "change").exists()


def test_a_full_model_that_fails_does_not_keep_changes_from_going_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.begin(full_every=1)
    place.publish(3)
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "hotbed"):
        patched.setattr(Exporter, "write_model", _fails)
        place.publish(6, 9)
    assert "step 6 was published as a change, but not as a full model: no space" in caplog.text
    assert place.versions == ["change 6", "change 9", "model 3"]
    place.publish(12)
    assert place.versions == ["change 6", "change 9", "change 12", "model 3", "model 12"]


def _fails(*_: object, **__: object) -> None:
    raise CheckpointError("no space")


def test_one_that_waits_gives_way_to_the_newest(tmp_path: Path, place: Place) -> None:
    place.begin()
    for step in (3, 6, 9, 12, 15):
        place.publisher.publish(place.run / f"last-{step:08d}")
        assert f"last-{step:08d}" in place.publisher.needed()
    place.publisher.finish()
    *changes, first = published(place.path)
    assert first.startswith("model-")
    assert max(int(name.rpartition("-")[2]) for name in (*changes, first)) == 15
    place.exporter.write_model(tmp_path / "now", place.run / "last-00000015")
    assert_equal(followed(place.path, first, changes), values_of(ExportedModel.open(tmp_path / "now")))
