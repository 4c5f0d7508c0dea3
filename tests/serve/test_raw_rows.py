"""Protects that a server makes ids of raw values as `hotbed prepare` made those that its model was trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import yaml

from hotbed.checkpoint.storage import directory
from hotbed.cli.main import main
from hotbed.data import SplitBinarySource
from hotbed.data.files.criteo import COLUMNS, DENSE, LABEL, SPARSE
from hotbed.errors import CheckpointError, DataError, SpecError
from hotbed.serve.follower import open_newest
from hotbed.serve.model_files import ChangeSet, ExportedModel
from hotbed.serve.served_model import RefusedError, ServedModel
from tests.cli.cases import Output, refused, train
from tests.cli.test_raw_rows import recipe_of
from tests.serve.processes import running

ROWS = 60
Rows = list[dict[str, Any]]


class Exported(NamedTuple):
    """An exported model, the same rows raw and prepared, and their scores by `hotbed predict`."""

    model: Path
    raw: Rows
    prepared: Rows
    scores: list[float]

    def assert_scored(self, model: ServedModel, rows: Rows) -> None:
        """The model gives these rows, raw or prepared, their scores."""
        scores, _ = model.score(model.encoder.table(by_column(rows)))
        assert scores[:, 0].tolist() == self.scores


def by_column(rows: Rows) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in COLUMNS[1:]}


def copied(place: Path, exported: Exported, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> Path:
    """Copy an exported model, as if it were written later, with another manifest."""
    shutil.copytree(exported.model, place)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["written"] += 1
    change(manifest)
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


def unprepared(manifest: dict[str, Any]) -> None:
    """Change a manifest into one of a release that exported no vocabularies."""
    for file in manifest.pop("vocabularies").values():
        del manifest["files"][file]
    del manifest["encoder"]["preparation"]


@pytest.fixture(name="exported", scope="module")
def _exported(tmp_path_factory: pytest.TempPathFactory, log: Path, prepared: Path) -> Exported:
    folder = tmp_path_factory.mktemp("raw")
    recipe = folder / "small.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(prepared, steps=8)))
    status, _, run = train(recipe)
    assert status == 0
    model, out = folder / "model", folder / "scores.parquet"
    assert main(["export", str(run), str(model)]) == 0
    assert main(["predict", str(run), str(prepared), "--split", "test", "--out", str(out), "--device", "cpu"]) == 0
    frame = pl.read_csv(log, separator="\t", has_header=False, new_columns=list(COLUMNS), infer_schema=False)
    raw = frame[-300:][:ROWS].drop(LABEL).with_columns(pl.col(DENSE).cast(pl.Int64))
    batch = SplitBinarySource(prepared).read("test", 0)
    assert batch.dense is not None
    columns = {name: batch.dense[:ROWS, i].double().tolist() for i, name in enumerate(DENSE)}
    columns |= {name: batch.sparse[name].values[:ROWS].tolist() for name in SPARSE}
    return Exported(
        model, raw.to_dicts(), pl.DataFrame(columns).to_dicts(), pl.read_parquet(out)["score"].to_list()[:ROWS]
    )


def test_raw_values_are_answered_with_the_scores_of_predict(exported: Exported) -> None:
    with running(exported.model, "--port", 0) as client:
        assert client.ask("POST", "/score", exported.raw).json["scores"] == exported.scores
        assert [client.score(row)[0] for row in exported.raw[:5]] == exported.scores[:5]
        name = client.ask("POST", "/score", exported.raw[:1]).json["model"]
        inputs = {of["name"]: of["datatype"] for of in client.ask("GET", f"/v2/models/{name}").json["inputs"]}
        assert inputs == {**dict.fromkeys(SPARSE, "BYTES"), **dict.fromkeys(DENSE, "FP64")}
        tensors = [
            {"name": n, "datatype": kind, "shape": [ROWS], "data": [row[n] for row in exported.raw]}
            for n, kind in inputs.items()
        ]
        answer = client.ask("POST", f"/v2/models/{name}/infer", {"inputs": tensors}).json
        assert answer["outputs"][0]["data"] == exported.scores
        for wrong, message in [
            ({"C1": 5}, "column 'C1', row 0: got 5, expected text"),
            ({"C1": "no"}, "column 'C1': 'no' at row 0; expected a hexadecimal number of at most 8 digits"),
            ({"I1": -7}, "column 'I1': -7 at row 0; expected an integer of at least −3"),
        ]:
            answer = client.ask("POST", "/score", [{**exported.raw[0], **wrong}])
            assert answer.status == 400
            assert message in answer.json["error"]


def test_encoded_ids_are_answered_where_the_server_is_told_so(exported: Exported) -> None:
    with running(exported.model, "--port", 0, "--encoded", "true") as client:
        assert client.ask("POST", "/score", exported.prepared).json["scores"] == exported.scores
        answer = client.ask("POST", "/score", exported.raw)
        assert answer.status == 400
        assert "expected an integer" in answer.json["error"]
        assert "raw values" in answer.json["error"]


def test_an_export_of_before_takes_encoded_ids_and_says_who_takes_raw_values(
    tmp_path: Path, exported: Exported
) -> None:
    model = ServedModel.open(copied(tmp_path / "model", exported, unprepared))
    exported.assert_scored(model, exported.prepared)
    with pytest.raises(DataError, match="hotbed prepare, export it with this release"):
        model.encoder.table(by_column(exported.raw))
    model.close()


def test_vocabularies_are_mapped_and_checked(tmp_path: Path, exported: Exported) -> None:
    place = copied(tmp_path / "model", exported)
    model = ExportedModel.open(place)
    assert list(model.manifest.vocabularies) == list(SPARSE)
    preparation = model.encoder().preparation
    assert preparation is not None
    table = preparation.read("C1")
    assert len(table.keys) == preparation.entry.vocabularies["C1"].values
    start = pa.total_allocated_bytes()
    kept = [preparation.read(name) for name in SPARSE]
    assert sum(len(t.keys) for t in kept) > 100
    assert pa.total_allocated_bytes() == start
    file = place / model.manifest.vocabularies["C1"]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"C1\.arrow is damaged"):
        ServedModel.open(place)
    with pytest.raises(CheckpointError, match=r"C1\.arrow is not a table of keys and values"):
        ServedModel.open(place, verify=False)
    shutil.copy(place / model.manifest.vocabularies["C2"], file)
    assert len(preparation.read("C2").keys) != preparation.entry.vocabularies["C1"].values
    description = json.loads((place / "manifest.json").read_text())
    description["files"][model.manifest.vocabularies["C1"]]["bytes"] = file.stat().st_size
    (place / "manifest.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="vocabulary of table 'C1': got 75 values"):
        ServedModel.open(place, verify=False)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"C1\.arrow is missing"):
        ServedModel.open(place)
    manifest = json.loads((place / "manifest.json").read_text())
    del manifest["vocabularies"]["C1"]
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="vocabularies has no values of table 'C1'"):
        ExportedModel.open(place).encoder()


def test_columns_of_other_types_are_no_raw_values(exported: Exported) -> None:
    encoder = ExportedModel.open(exported.model).encoder()
    numbers = {name: pa.array(np.zeros(1)) for name in DENSE}
    with pytest.raises(SpecError, match="column 'C1': got list<item: string>"):
        encoder.batch(pa.table({**numbers, **{name: pa.array([["a"]]) for name in SPARSE}}))
    with pytest.raises(SpecError, match="column 'I1': got string, expected numbers"):
        texts = {name: pa.array(["a"]) for name in SPARSE}
        encoder.batch(pa.table({**numbers, "I1": pa.array(["5"]), **texts}))


def test_a_cache_of_models_at_uris_can_be_named(tmp_path: Path, exported: Exported, s3: str, capsys: Output) -> None:
    uri = s3.replace("PATH", "raw")
    place = directory(uri)
    for file in sorted(f for f in exported.model.rglob("*") if f.is_file()):
        folder = place / str(file.parent.relative_to(exported.model)) if file.parent != exported.model else place
        writer = folder.writer(file.name)
        writer.write(memoryview(file.read_bytes()))
        writer.finish()
    with running(uri, "--port", 0, "--cache", tmp_path / "cache") as client:
        assert client.ask("POST", "/score", exported.raw).json["scores"] == exported.scores
    assert len(list((tmp_path / "cache").iterdir())) > len(SPARSE)
    (tmp_path / "file").write_text("")
    told = refused(["serve", str(exported.model), "--port", "0", "--cache", str(tmp_path / "file")], capsys)
    assert "--cache: got " in told


def test_a_server_needs_no_file_of_a_vocabulary_once_it_is_open(tmp_path: Path, exported: Exported) -> None:
    place = copied(tmp_path / "model", exported)
    model = ServedModel.open(place)
    shutil.rmtree(place / "vocabulary")
    exported.assert_scored(model, exported.raw)
    model.close()


def test_a_model_of_data_that_were_prepared_otherwise_is_not_taken_over(tmp_path: Path, exported: Exported) -> None:
    def hashed(manifest: dict[str, Any]) -> None:
        unprepared(manifest)
        manifest["encoder"]["ids"] = "hash"

    def rounded(manifest: dict[str, Any]) -> None:
        manifest["encoder"]["preparation"]["numericals"] = "as_is"

    changes = {"none": unprepared, "other": rounded, "same": lambda manifest: None}
    none, other, same = (copied(tmp_path / name, exported, change) for name, change in changes.items())
    for is_encoded, first, later in [
        (False, exported.model, none),
        (True, exported.model, none),
        (True, exported.model, other),
        (True, none, same),
    ]:
        model = ServedModel.open(first, encoded=is_encoded)
        with pytest.raises(RefusedError, match="differently prepared") as told:
            model.take_over(ExportedModel.open(later))
        assert told.value.reason == "other_model"
        model.close()
    model = ServedModel.open(exported.model)
    model.take_over(ExportedModel.open(other))
    assert model.encoder.preparation is not None
    assert model.encoder.preparation.entry.numericals == "as_is"
    model.take_over(ExportedModel.open(same))
    exported.assert_scored(model, exported.raw)
    model.close()
    with pytest.raises(CheckpointError, match="hash was trained on hashed values"):
        ServedModel.open(copied(tmp_path / "hash", exported, hashed), encoded=True)


def test_raw_values_are_taken_from_version_to_version(tmp_path: Path, log: Path, prepared: Path) -> None:
    recipe, published = tmp_path / "small.yaml", tmp_path / "published"
    recipe.write_text(yaml.safe_dump(recipe_of(prepared, publish=str(published), publish_full_every=1, epochs=9)))
    saving = ("--train.checkpoint_every", "2", "--train.checkpoint_in_background", "false")
    rows = pl.read_csv(log, separator="\t", has_header=False, new_columns=list(COLUMNS), infer_schema=False)[:ROWS]
    rows = rows.drop(LABEL).with_columns(pl.col(DENSE).cast(pl.Int64))
    rows.write_parquet(tmp_path / "rows.parquet")

    def trained(steps: int) -> list[float]:
        status, _, run = train(recipe, *saving, "--train.steps", str(steps), "--resume", "auto")
        assert status == 0
        out = tmp_path / f"scores-{steps}.parquet"
        assert main(["predict", str(run), str(tmp_path / "rows.parquet"), "--out", str(out), "--device", "cpu"]) == 0
        return pl.read_parquet(out)["score"].to_list()

    first = trained(2)
    with closing(open_newest(published)) as following, closing(open_newest(published)) as replaced:
        table = following.encoder.table(rows.to_dict(as_series=False))
        assert following.score(table)[0][:, 0].tolist() == first
        last = trained(4)
        assert last != first
        following.apply(ChangeSet.open(published / "change-000000000004"))
        replaced.take_over(ExportedModel.open(published / "model-000000000004"))
        for model in (following, replaced):
            scores, step = model.score(model.encoder.table(rows.to_dict(as_series=False)))
            assert (scores[:, 0].tolist(), step) == (last, 4)
