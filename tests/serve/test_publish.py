"""Protects that servers find a full model, then changes that lead on from it, whatever becomes of the run."""

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from hotbed.checkpoint import find_checkpoint, read_manifest
from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.storage import directory
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.errors import CheckpointError, RecipeError
from hotbed.serve.follower import Follower, open_newest
from hotbed.serve.model_files import ChangeSet, ExportedModel
from hotbed.train.runs import model_export as export
from hotbed.train.runs.build import new_source
from hotbed.train.runs.model_export import Exporter
from hotbed.train.runs.publish import WENT_BACK, Publisher
from hotbed.train.workflows.prediction import predict
from tests.cli.cases import Output, train
from tests.cli.test_daily import write_day, write_recipe
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


def test_a_new_run_does_not_mix_its_models_with_others(
    tmp_path: Path, recipe: Path, run: Any, exporter: Exporter, capsys: Output
) -> None:
    place = tmp_path / "published"
    publisher = Publisher(directory(place), exporter, 9)
    publisher.begin(0, run)
    publish(publisher, run / "last-00000003", run / "last-00000006")
    capsys.readouterr()
    status, _, _ = train(recipe, *OPTIONS, "--train.publish", str(place))
    assert status == 2
    assert "up to change-000000000006" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"train.publish is set, but train.checkpoint is 'none'"):
        values = yaml.safe_load(recipe.read_text())
        Recipe.from_dict({**values, "train": {**values["train"], "publish": "x", "checkpoint": "none"}})


def publish(publisher: Publisher, *checkpoints: Any) -> None:
    for checkpoint in checkpoints:
        publisher.publish(checkpoint)
        publisher.finish()


def test_what_is_published_while_runs_stop_fail_and_go_back(
    tmp_path: Path, run: Any, exporter: Exporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "published"
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
    assert "last-00000012 was not published; the next export will include its changes: no space" in caplog.text
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


def test_a_run_that_went_back_begins_with_a_full_model_though_it_was_killed(
    tmp_path: Path, run: Any, exporter: Exporter
) -> None:
    place = tmp_path / "published"
    last = {step: run / f"last-{step:08d}" for step in (3, 6, 9, 12)}
    publisher = Publisher(directory(place), exporter, 9)
    publisher.begin(0, run)
    publish(publisher, last[3], last[6], last[9])
    for _ in range(2):  # killed before it has published anything
        publisher = Publisher(directory(place), exporter, 9)
        publisher.begin(6, run)
        assert published(place) == ["change-000000000006", "model-000000000003"]
    publish(publisher, last[9])
    assert published(place) == ["change-000000000006", "model-000000000003", "model-000000000009"]
    assert (place / WENT_BACK).exists()
    publish(publisher, last[12])  # the first one past where servers may be
    assert published(place) == ["model-000000000009", "model-000000000012"]
    assert not (place / WENT_BACK).exists()


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
    tmp_path: Path, run: Any, exporter: Exporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "published"
    publisher = Publisher(directory(place), exporter, 1)
    publisher.begin(0, run)
    publish(publisher, run / "last-00000003")
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "hotbed"):
        patched.setattr(Exporter, "write_model", _fails)
        publish(publisher, run / "last-00000006", run / "last-00000009")
    assert "step 6 was published as a change, but not as a full model: no space" in caplog.text
    changes = ["change-000000000006", "change-000000000009"]
    assert published(place) == [*changes, "model-000000000003"]
    publish(publisher, run / "last-00000012")
    assert published(place) == [*changes, "change-000000000012", "model-000000000003", "model-000000000012"]


def test_a_looked_up_table_that_changed_is_published_in_a_full_model_and_served(tmp_path: Path) -> None:
    def train_day(number: int, shift: int) -> None:
        """The table gives each item another value on each day."""
        write_day(tmp_path / "logs", number, samples=200)
        pq.write_table(
            pa.table({"id": list(range(20)), "category": [(i + shift) % 20 for i in range(20)]}),
            tmp_path / "items.parquet",
        )
        options = ["--data", f"{tmp_path}/logs/day={{date}}", "--out", str(tmp_path / "out")]
        assert main(["daily", str(recipe), *options, "--from", "2026-01-01", "--until", f"2026-01-0{number + 1}"]) == 0

    recipe = write_recipe(tmp_path)
    values = yaml.safe_load(recipe.read_text())
    lookup = {"name": "category", "lookup": "item", "file": str(tmp_path / "items.parquet"), "key": "id"}
    schema = values["data"]["source"]["init_args"]["schema"]
    schema["features"] = [{**lookup, "value": "category", "rows": 50}]
    values["train"] |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "publish": str(tmp_path / "published")}
    recipe.write_text(yaml.safe_dump(values))
    train_day(0, 0)
    served = open_newest(tmp_path / "published", threads=1)
    following = Follower(served, tmp_path / "published")
    train_day(1, 7)
    following.poll()
    assert (following.applied, following.refused) == ({"model": 1}, {})
    rows = pq.read_table(tmp_path / "logs" / "day=2026-01-02").select(["user", "item", "x"]).slice(0, 9)
    pq.write_table(rows, tmp_path / "rows.parquet")
    predict(str(find_checkpoint(tmp_path / "checkpoints")), tmp_path / "rows.parquet", tmp_path / "scores.parquet")
    wanted = pq.read_table(tmp_path / "scores.parquet")["score"].to_pylist()
    assert served.score(rows)[0][:, 0].tolist() == wanted


def _fails(*_: object, **__: object) -> None:
    raise CheckpointError("no space")


def test_one_that_waits_gives_way_to_the_newest(tmp_path: Path, run: Any, exporter: Exporter) -> None:
    place = tmp_path / "published"
    publisher = Publisher(directory(place), exporter, 9)
    publisher.begin(0, run)
    for step in (3, 6, 9, 12, 15):
        publisher.publish(run / f"last-{step:08d}")
        assert f"last-{step:08d}" in publisher.needed()
    publisher.finish()
    *changes, first = published(place)
    assert first.startswith("model-")
    assert max(int(name.rpartition("-")[2]) for name in (*changes, first)) == 15
    exporter.write_model(tmp_path / "now", run / "last-00000015")
    assert_equal(followed(place, first, changes), values_of(ExportedModel.open(tmp_path / "now")))
