"""Protects that an exported model has every row, id and parameter of the checkpoint, bit for bit, or does not exist."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.checkpoint import directory, find_checkpoint, save_checkpoint
from hotbed.checkpoint.differential import MOST_SHARE
from hotbed.cli.main import main
from hotbed.data import Encoder, Schema, SparseColumn
from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.nn.dense_program import DensePart, trace_dense_part
from hotbed.plan import Cut, make_plan
from hotbed.serve.model_files import ChangeSet, ExportedModel
from hotbed.serve.scorer import Scorer
from hotbed.specs import Dynamic, Table
from hotbed.train.runs import model_export as writing
from hotbed.train.runs.model_export import Model, write_change, write_model
from tests.cli.cases import Output, refused, train
from tests.serve.models import FORMS, TABLES, Wide, batch_of, described, model_of, vectors_of
from tests.train.numbers import POSITIVE
from tests.train.numbers import recipe_of_numbers as recipe_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_of(tmp_path_factory.mktemp("export"), [POSITIVE])
    options = ["--train.checkpoint_every", "5", "--train.keep_last", "9", "--train.checkpoint_full_every", "2"]
    status, _, run = train(recipe, "--train.checkpoint", "last", *options)
    assert status == 0
    return run


def test_changes_make_the_later_model_of_the_earlier_one(run: Path, tmp_path: Path) -> None:
    newest = find_checkpoint(run)
    earlier = newest.sibling("last-00000005")
    assert main(["export", str(earlier), str(tmp_path / "old")]) == 0
    assert main(["export", str(newest), str(tmp_path / "new")]) == 0
    assert main(["export", str(newest), str(tmp_path / "change"), "--since", "5"]) == 0
    old, new = (ExportedModel.open(tmp_path / name) for name in ("old", "new"))
    change = ChangeSet.open(tmp_path / "change")
    change.verify()
    assert (change.manifest.base.state, change.manifest.sequence.state) == (old.manifest.state, new.manifest.state)
    tables = {name: vectors_of(old, name, torch.arange(t.rows)) for name, t in old.manifest.tables.items()}
    for table, deleted, ids, vectors in change.rows():
        assert not len(deleted)
        tables[table][ids] = vectors
    for name, table in new.manifest.tables.items():
        assert torch.equal(tables[name], vectors_of(new, name, torch.arange(table.rows))), name
    dense = old.dense()
    dense.load_state_dict(change.dense())
    for name, value in new.dense().state_dict().items():
        assert torch.equal(dense.state_dict()[name], value), name


def test_what_cannot_be_exported_leaves_nothing(run: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    save_checkpoint(tmp_path / "plain", {"model": nn.Linear(2, 2)})
    other = recipe_of(tmp_path, [POSITIVE])
    other.write_text(other.read_text().replace("rows: 256", "rows: 128"))
    status, _, others = train(other, "--train.checkpoint", "last")
    assert status == 0
    made, file = tmp_path / "made", tmp_path / "x.pt2"
    file.write_text("")
    for argv, message in (
        ([str(run), str(tmp_path / "full")], "full exists already and contains a"),
        ([str(tmp_path / "plain"), str(made)], "plain has no recipe, so its model cannot be built"),
        ([str(run), str(made), "--since", "7"], "--since is 7, but neither"),
        ([str(run), str(made), "--since", str(others)], "got 256 × 8 in .*, expected 128 × 8 as in .*"),
        ([str(tmp_path / "none"), str(made)], "is not a checkpoint"),
        ([str(run)], r"--single FILE.pt2"),
        ([str(run), str(made), "--single", "x.pt2"], r"--single FILE.pt2"),
        ([str(run), "--single", str(tmp_path / "x.onnx")], r"\.pt2"),
        ([str(run), "--single", str(file)], "x.pt2 exists"),
        ([str(run), "--single", str(file), "--since", "5"], "--since has no effect with --single"),
    ):
        said = refused(["export", *argv], capsys)
        assert re.search(message, said), said
    assert not made.exists()


def test_a_remote_model_is_fetched_once(run: Path, tmp_path: Path) -> None:
    uri = f"memory://export-{tmp_path.name}/model"
    assert main(["export", str(run), uri]) == 0
    cache = tmp_path / "cache"
    model = ExportedModel.open(uri, cache)
    model.verify()
    files = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert set(files) == {entry.sha256 for entry in model.manifest.files.values()}
    assert ExportedModel.open(uri, cache).records("embeddings.user").shape == (256, 32)
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == files


def collection_of(model: nn.Module) -> EmbeddingCollection:
    return next(m for m in model.modules() if isinstance(m, EmbeddingCollection))


def step(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    names = list(collection_of(model).tables)
    for number in range(first, first + steps):
        draw = torch.Generator().manual_seed(number)
        ids = Jagged.from_dict({name: torch.randint(0, 300, (40,), generator=draw) for name in names})
        model(Batch(sparse=ids)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("tier", [None, "disk"])
def test_rows_of_every_form_are_the_same_bits(
    tier: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "WINDOW_BYTES", 4000)
    model: nn.Module = Wide(FORMS)
    if tier is not None:
        model = hb.distribute(model, make_plan(FORMS, 1, Cut(tier=tier)))  # pyright: ignore[reportArgumentType]
    optimizer = hb.optim.Adagrad(model, lr=0.1)
    step(model, optimizer, 3)
    first = save_checkpoint(tmp_path / "last-00000003", {"model": model}, step=3, track=True)
    step(model, optimizer, 1, first=3)
    save_checkpoint(tmp_path / "last-00000004", {"model": model}, step=4, base=first)
    assert MOST_SHARE == 0.5  # so that the second one is a difference
    expected = {t.name: collection_of(model).weight(t.name).float().clone() for t in FORMS}
    with torch.no_grad():
        scores = model(Batch(sparse=Jagged.from_dict({t.name: torch.arange(32) for t in FORMS})))
    about, program = described(model)
    place = directory(tmp_path / "last-00000004")
    write_model(tmp_path / "out", place, about, program)
    found = ExportedModel.open(tmp_path / "out")
    found.verify()
    for table in FORMS:
        name = f"embeddings.{table.name}"
        assert torch.equal(vectors_of(found, name, torch.arange(300)), expected[table.name]), name
        assert len(found.records(name)) == 300
        assert found.ids(name) is None
    vectors = {name: expected[feature.feature][:32] for name, feature in found.manifest.features.items()}
    with torch.no_grad():
        given = found.dense()(None, vectors)
        torch.testing.assert_close(given, scores)  # of layers that sum a row's columns in another order
        assert torch.equal(given, DensePart(model)(None, vectors))
    write_change(tmp_path / "change", place, directory(tmp_path / "last-00000003"), about)
    rows = {table: (ids, vectors) for table, _, ids, vectors in ChangeSet.open(tmp_path / "change").rows()}
    for table in FORMS:
        ids, vectors = rows[f"embeddings.{table.name}"]
        assert 0 < len(ids) <= 40
        assert torch.equal(vectors, expected[table.name][ids])


def test_ids_of_dynamic_tables_are_those_that_lookups_find(tmp_path: Path) -> None:
    options = Dynamic(capacity_bytes=1 << 14, ttl_steps=2)
    table = Table("t", "dynamic", 4, init_bound=0.1, dynamic=options)
    model = Wide([table])
    optimizer = hb.optim.SGD(model, lr=0.1)

    def train_on(ids: list[int]) -> None:
        model(Batch(sparse=Jagged.from_dict({"t": torch.tensor(ids)}))).sum().backward()
        optimizer.step()

    train_on([5, 10**12])
    train_on([7])
    save_checkpoint(tmp_path / "last-00000002", {"model": model}, step=2)
    for ids in ([8], [9]):
        train_on(ids)
    save_checkpoint(tmp_path / "last-00000004", {"model": model}, step=4)
    about, program = described(model)
    earlier, later = (directory(tmp_path / f"last-0000000{n}") for n in (2, 4))
    write_model(tmp_path / "out", later, about, program)
    exported = ExportedModel.open(tmp_path / "out")
    ids = exported.ids("embeddings.t")
    assert ids is not None
    assert sorted(ids[ids >= 0].tolist()) == [8, 9]  # the others were not seen for more than two steps
    model.eval()
    with torch.no_grad():
        for id_ in (7, 8, 9, 5):
            looked_up = about.collections["embeddings"](Jagged.from_dict({"t": torch.tensor([id_])}))["t"]
            at = torch.from_numpy(np.flatnonzero(ids == id_))
            assert torch.equal(vectors_of(exported, "embeddings.t", at).sum(0, keepdim=True), looked_up)
    write_change(tmp_path / "change", later, earlier, about)
    changes = list(ChangeSet.open(tmp_path / "change").rows())
    assert sorted(i for c in changes for i in c.deleted.tolist()) == [5, 7, 10**12]
    assert sorted(i for c in changes for i in c.ids.tolist()) == [8, 9]


def test_models_of_all_kinds_are_exported(tmp_path: Path) -> None:
    for kind in ("WideDeep", "Attention"):
        model, batch = model_of(kind), batch_of(50)
        save_checkpoint(tmp_path / kind / "c", {"model": model}, step=1)
        part = DensePart(model)
        with Scorer(part, dict(part.collections), part.features) as scorer:
            expected = scorer(batch)
        columns = tuple(SparseColumn(name=t.name, rows=t.rows) for t in TABLES)
        encoder = Encoder(Schema(sparse=columns, labels=("y",)), ids="raw")
        about = Model("m", ("y",), encoder, None, part.collections, part.state_dict(), 2, torch.float32)
        write_model(tmp_path / kind / "out", directory(tmp_path / kind / "c"), about, trace_dense_part(part, 2))
        exported = ExportedModel.open(tmp_path / kind / "out")
        features = {
            n: (f.collection, f.spec(f.table.rpartition(".")[2])) for n, f in exported.manifest.features.items()
        }
        assert features == part.features
        with Scorer(exported.dense(), dict(part.collections), features) as scorer:
            np.testing.assert_array_equal(scorer(batch), expected)
