"""Protects that a server beside training scores as `hotbed predict` does by the newest checkpoint, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from hotbed.checkpoint import find_checkpoint, read_manifest
from hotbed.cli.main import main
from hotbed.errors import CheckpointError, DamagedError
from hotbed.serve.follower import Follower, open_newest
from hotbed.serve.model_files import ExportedModel
from tests.cli.cases import Output, refused, train
from tests.serve.clients import LONG_S
from tests.serve.processes import Running, running
from tests.train.test_stored_model import features, log, write_recipe

ROWS = 60
SAVING = ("--train.checkpoint_every", "3", "--train.checkpoint_in_background", "false")


def rows_of(folder: Path) -> list[Mapping[str, Any]]:
    """New rows, with users, items and numbers that training has not seen, and missing values."""
    new = log(ROWS, seed=1).drop("label")
    new = new.with_columns(item=pl.when(pl.int_range(pl.len()) % 7 == 0).then(None).otherwise("item"))
    new = new.with_columns(user=pl.when(pl.int_range(pl.len()) % 11 == 0).then(None).otherwise("user"))
    new.write_parquet(folder / "new.parquet")
    return new.to_dicts()


def predicted(run: Path, folder: Path) -> tuple[int, list[float]]:
    """The step of a run's newest checkpoint, and what `hotbed predict` says by it."""
    out = folder / "scores.parquet"
    out.unlink(missing_ok=True)
    assert main(["predict", str(run), str(folder / "new.parquet"), "--out", str(out), "--device", "cpu"]) == 0
    return read_manifest(find_checkpoint(run)).step, pl.read_parquet(out)["score"].to_list()


def applied(client: Running, kind: str) -> int:
    lines = client.ask("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(x.split()[-1])) for x in lines if x.startswith("hotbed_versions_applied") and kind in x)


def test_it_follows_from_version_to_version_and_begins_again_with_the_newest(tmp_path: Path) -> None:
    recipe, published, rows = write_recipe(tmp_path, 1200), tmp_path / "published", rows_of(tmp_path)
    to_place = (*SAVING, "--train.publish", str(published))
    status, _, run = train(recipe, *to_place, "--train.steps", "3")
    assert status == 0
    step, scores = predicted(run, tmp_path)
    items = tmp_path / "items.parquet"
    items.rename(tmp_path / "hidden")  # servers have looked-up tables of the exported model
    with running(published, "--port", 0, "--poll_s", 0.05) as client:
        answer = client.answer_of(step, rows)
        assert (answer["scores"], answer["version"]) == (scores, str(step))
        (tmp_path / "hidden").rename(items)
        assert train(recipe, *to_place, "--train.steps", "9", "--resume", "auto")[0] == 0
        step, scores = predicted(run, tmp_path)
        items.rename(tmp_path / "hidden")
        assert step == 9
        answer = client.answer_of(step, rows)
        assert (answer["scores"], answer["version"]) == (scores, "9")
        assert [client.score(row)[0] for row in rows[:3]] == scores[:3]
        assert applied(client, "change") >= 1
        client.process.kill()
        client.process.wait(LONG_S)
    with running(published, "--port", 0, "--poll_s", 3600) as client:  # it begins with the newest version
        answer = client.answer_of(0, rows)
        assert (answer["scores"], answer["version"]) == (scores, "9")


def test_a_day_with_another_looked_up_table_is_followed(tmp_path: Path) -> None:
    recipe, published, rows = write_recipe(tmp_path, 10), tmp_path / "published", rows_of(tmp_path)
    place = str(tmp_path / "checkpoints")
    given = ("--train.publish", str(published), "--train.checkpoint_dir", place, "--data.test_split", "null")
    source = ("--data.source.init_args.test_fraction", "0")
    argv = ["daily", str(recipe), "--data", f"{tmp_path}/days/{{date}}", "--from", "2026-01-01", *given, *source]
    for seed, date in enumerate(("2026-01-01", "2026-01-02")):
        (tmp_path / "days" / date).mkdir(parents=True)
        log(300, seed=seed).write_parquet(tmp_path / "days" / date / "log.parquet")

    def trained(date: str) -> list[float]:
        assert main([*argv, "--out", str(tmp_path / "daily"), "--until", date]) == 0
        return predicted(tmp_path / "checkpoints", tmp_path)[1]

    scores = trained("2026-01-01")
    with closing(open_newest(published)) as model:
        follower = Follower(model, published)
        columns = model.encoder.table({name: [row[name] for row in rows] for name in rows[0]})
        assert model.score(columns)[0][:, 0].tolist() == scores
        items = pl.read_parquet(tmp_path / "items.parquet")
        items.with_columns(kind=items["kind"].reverse()).write_parquet(tmp_path / "items.parquet")
        scores = trained("2026-01-02")
        follower.poll()
        assert not follower.refused
        found, step = model.score(columns)
        assert (found[:, 0].tolist(), step) == (scores, 6)


@pytest.fixture(name="exported", scope="module")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's exported model with derived inputs, and the table that it was trained with beside it."""
    folder = tmp_path_factory.mktemp("lookups")
    status, _, run = train(write_recipe(folder, 600), "--train.steps", "2")
    assert status == 0
    assert main(["export", str(run), str(folder / "model")]) == 0
    return folder


def test_an_exported_encoder_needs_no_file_beside_it(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported.parent)
    model = ExportedModel.open(exported / "model")
    looked_up = ["kind", "price", "seen_kinds"]
    assert sorted(p.name for p in (exported / "model" / "lookups").iterdir()) == [f"{n}.parquet" for n in looked_up]
    encoder = model.encoder()
    assert [d.name for d in encoder.schema.derived] == [f["name"] for f in features(exported / "items.parquet")]
    assert len(encoder.boundaries["age_group"]) == 7
    batch = encoder.batch(
        encoder.table({"user": [1, 2], "item": ["i3", "new"], "age": [31, None], "seen": [["i1"], []]})
    )
    assert batch.sparse["kind"].values[0] > 0
    assert batch.sparse["kind"].values[1] == 0  # an item that the table does not have
    assert torch.equal(batch.sparse["age_group"].values[1:], torch.tensor([0]))
    assert batch.sparse["user_kind"].values[1] == 0


KINDS = "lookups/kind.parquet"


def to_parquet(table: pa.Table) -> bytes:
    stream = pa.BufferOutputStream()
    parquet.write_table(table, stream)
    return stream.getvalue().to_pybytes()


def test_a_lookup_that_is_damaged_or_not_that_of_training_is_refused(
    exported: Path, tmp_path: Path, capsys: Output
) -> None:
    whole, table = (exported / "model" / KINDS).read_bytes(), parquet.read_table(exported / "model" / KINDS)
    manifest = json.loads((exported / "model" / "manifest.json").read_text())
    lookups = manifest["lookups"]
    without = {name: file for name, file in lookups.items() if name != "kind"}
    damage: list[tuple[bytes | None, str]] = [
        (whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], f"{KINDS} is damaged"),
        (whole[:-1], f"{KINDS}: got {len(whole) - 1:,} bytes, expected {len(whole):,}"),
        (None, f"{KINDS} is missing"),
    ]
    others = [  # with their size and hash in the manifest
        (b"no parquet", "encoder is invalid: "),
        (to_parquet(table.slice(1)), "expected 40 keys"),
        (to_parquet(table.rename_columns(["key", "other"])), "encoder is invalid: "),
        (to_parquet(pa.concat_tables([table, table])), "encoder is invalid: "),
    ]
    named = [
        (without, "lookups has no table for feature 'kind'"),
        ({**lookups, "kind": "../items.parquet"}, "lookups.kind: got '../items"),
        ({**lookups, "kind": "lookups/x.parquet"}, "expected a key of files"),
    ]
    cases = [(content, {}, message) for content, message in damage]
    for content, message in others:
        entry = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        cases.append((content, {"files": {**manifest["files"], KINDS: entry}}, message))
    cases += [(whole, {"lookups": changed}, message) for changed, message in named]
    for number, (content, changes, message) in enumerate(cases):
        model = tmp_path / str(number)
        shutil.copytree(exported / "model", model)
        (model / "manifest.json").write_text(json.dumps(manifest | changes))
        (model / KINDS).unlink() if content is None else (model / KINDS).write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            ExportedModel.open(model).encoder()
        assert message in str(caught.value), number
        assert isinstance(caught.value, DamagedError) or number >= len(damage)
        assert message in refused(["serve", str(model), "--port", "0"], capsys), number
