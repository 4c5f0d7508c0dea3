"""Protects that exported towers and vectors rank items as the model itself does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.checkpoint import load_checkpoint
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.errors import CheckpointError, DataError
from hotbed.train.runs.build import build_model, open_source
from hotbed.train.workflows import towers
from hotbed.train.workflows.towers import UserTower, export_towers

WORDS = ["alpha", "beta", "gamma", "delta", "it's", "zeta", "eta", "theta"]


def watched(rows: int = 300, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    films = rng.zipf(1.4, rows) % 40
    return pa.table(
        {
            "User Nr.": [f"u{i}" for i in rng.integers(0, 30, rows)],
            "Its age": rng.normal(30, 9, rows),
            "Film (title)": [f"{WORDS[f % 8]} {f}" for f in films],
            "genre/en": [[WORDS[f % 3], WORDS[f % 5]] for f in films],
        }
    )


def trained_run(folder: Path, schema: dict[str, Any], init_args: dict[str, Any], dim: int, batch_size: int) -> Path:
    """The directory of a run on the log in a folder, where its recipe is, too."""
    source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": {"labels": [], **schema}}}
    recipe = {
        "name": "films",
        "data": {"path": str(folder / "log.parquet"), "dim": dim, "test_split": None, "source": source},
        "model": {"class_path": "hotbed.nn.TwoTower", "init_args": init_args},
        "retrieval": {"k": [5]},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": batch_size, "device": "cpu", "precision": "fp32", "checkpoint": "last"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "runs")]) == 0
    return next((folder / "runs" / "films").iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers")
    pq.write_table(watched(), folder / "log.parquet", row_group_size=100)
    schema = {
        "dense": [{"name": "Its age", "rule": "standard"}],
        "sparse": [
            {"name": "User Nr.", "rows": 100},
            {"name": "Film (title)", "rows": 400},
            {"name": "genre/en", "rows": 50, "ids": None, "pooling": "mean"},
        ],
    }
    init_args = {"item": ["Film (title)", "genre/en"], "widths": [16, 8]}
    return trained_run(folder, schema, init_args, dim=16, batch_size=50)


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    target = run.parent / "exported"
    found = export_towers(run, target)
    assert found.items == len(set(watched()["Film (title)"].to_pylist()))
    return target


def model_and_source(run: Path) -> tuple[Any, Any]:
    recipe = Recipe.from_dict(json.loads((run.parents[2] / "recipe.yaml").read_text(encoding="utf-8")))
    source = open_source(recipe.data)
    model = build_model(recipe, source, torch.device("cpu"))
    load_checkpoint(next((run / "checkpoints").glob("last-*")), {"model": model})
    return model.eval(), source


def by_hand(run: Path) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Distinct films, and their products with the user of each row, by the checkpoint's model."""
    model, source = model_and_source(run)
    with torch.no_grad():
        pairs = [model(source.read("train", i), vectors=True) for i in range(len(source.chunks("train")))]
    users, items = (torch.cat([pair[i] for pair in pairs]).numpy() for i in (0, 1))
    films = watched()["Film (title)"].to_pylist()
    last = {film: row for row, film in enumerate(films)}
    return list(last), users @ items[list(last.values())].T


def test_products_of_exported_vectors_are_those_of_the_model(run: Path, exported: Path) -> None:
    tower, items = UserTower(exported), pq.read_table(exported / towers.VECTORS)
    assert tower.columns == ["User Nr.", "Its age"]
    assert tower.item == "Film (title)"
    films, products = by_hand(run)
    found = tower.vectors(watched().select(tower.columns)) @ np.array(items["vector"].to_pylist()).T
    order = [films.index(film) for film in items[tower.item].to_pylist()]
    np.testing.assert_allclose(found, products[:, order], rtol=1e-4, atol=1e-5)


def test_users_with_lists_weights_and_looked_up_columns(tmp_path: Path) -> None:
    """Vectors of the exported tower are the model's, also when the file that was looked up in is gone."""
    rng, rows = np.random.default_rng(3), 60
    tags = [rng.integers(0, 20, n).tolist() for n in rng.integers(0, 4, rows)]
    table = pa.table(
        {
            "town": [f"t{i}" for i in rng.integers(0, 9, rows)],
            "tags": tags,
            "times": [rng.random(len(of_row)).astype(np.float32).tolist() for of_row in tags],
            "two": rng.integers(0, 9, (rows, 2)).tolist(),
            "share": rng.random((rows, 2)).tolist(),
            "old": [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 3, rows)],
            "film": rng.integers(0, 17, rows),
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    towns = tmp_path / "towns.csv"
    towns.write_text("town,land\n" + "".join(f"t{i},l{i % 3}\n" for i in range(9)), encoding="utf-8")
    schema = {
        "features": [
            {"name": "land", "lookup": "town", "file": str(towns), "key": "town", "value": "land", "rows": 10}
        ],
        "sparse": [
            {"name": "tags", "rows": 50, "ids": None, "pooling": "mean", "weights": "times"},
            {"name": "two", "rows": 20, "ids": 2, "weights": "share"},
            {"name": "old", "rows": 20, "ids": None},
            {"name": "film", "rows": 50},
        ],
    }
    run = trained_run(tmp_path, schema, {"item": ["film"], "widths": [4]}, dim=4, batch_size=30)
    model, source = model_and_source(run)
    with torch.no_grad():
        users, _ = model(source.read("train", 0), vectors=True)
    export_towers(run, tmp_path / "towers")
    towns.unlink()
    tower = UserTower(tmp_path / "towers")
    assert set(tower.columns) == {"tags", "times", "two", "share", "old", "town"}
    found = tower.vectors(table.select(tower.columns))
    np.testing.assert_allclose(found, users.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tower.vectors(table.slice(7, 1)), users[7:8].numpy(), rtol=1e-4, atol=1e-5)


def test_the_file_of_items_has_them_as_they_are_stored(exported: Path) -> None:
    items = pq.read_table(exported / towers.VECTORS)
    genres = dict(zip(*watched().select(["Film (title)", "genre/en"]).to_pydict().values(), strict=True))
    assert dict(zip(items["Film (title)"].to_pylist(), items["genre/en"].to_pylist(), strict=True)) == genres
    np.testing.assert_allclose(np.linalg.norm(np.array(items["vector"].to_pylist()), axis=1), 1, rtol=1e-5)


def test_the_program_of_items_gives_their_vectors(exported: Path) -> None:
    program = torch.export.load(exported / towers.ITEM).module()
    found = program(
        None, {"Film (title)": torch.tensor([[3], [9]]), "genre/en": (torch.tensor([1]), torch.tensor([1, 0]))}
    )
    assert found.shape == (2, 8)


def test_the_command_exports_towers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "towers"), "--towers"]) == 0
    assert "items, vectors of 8 columns" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "x"), "--towers", "--since", "3"]) == 2
    assert "--towers always exports both towers" in capsys.readouterr().err


def test_rows_are_scored_without_a_label(run: Path, tmp_path: Path) -> None:
    assert main(["predict", str(run), str(run.parents[2] / "log.parquet"), "--out", str(tmp_path / "s.parquet")]) == 0
    products = by_hand(run)[1]
    films = list(dict.fromkeys(watched()["Film (title)"].to_pylist()))
    own = [products[row, films.index(film)] for row, film in enumerate(watched()["Film (title)"].to_pylist())]
    found = pq.read_table(tmp_path / "s.parquet")["score"].to_numpy()
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(own) / 0.05)), rtol=1e-3, atol=1e-5)
    assert main(["export", str(run), str(tmp_path / "model")]) == 0


def test_items_are_the_same_where_their_rows_are_merged(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(towers, "_FEWEST", 0)  # rows of one item are merged after each row group
    export_towers(run, tmp_path / "towers")
    assert pq.read_table(tmp_path / "towers" / towers.VECTORS).equals(pq.read_table(exported / towers.VECTORS))


def test_a_directory_without_towers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no towers\.json"):
        UserTower(tmp_path)


def test_a_model_without_towers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hotbed.testing.model_contract import contract_recipe, run_of
    from tests.train.test_models import TestDeepFM

    run = run_of(contract_recipe(TestDeepFM, tmp_path), tmp_path / "runs")
    with pytest.raises(CheckpointError, match=r"has a DeepFM, expected a hotbed\.nn\.TwoTower"):
        export_towers(run, tmp_path / "towers")
