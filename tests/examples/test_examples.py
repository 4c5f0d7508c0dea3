"""Protects that the examples run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.main import main

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str, *needed: str) -> ModuleType:
    """Import an example; skip the test if a library that it needs is not installed."""
    for library in needed:
        pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_short() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem for file in files] == ["faiss_index", "tune_with_optuna"]
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 100 for file in files)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of 30 users, each of whom watches films of one genre."""
    rng = np.random.default_rng(0)
    user, film = rng.integers(0, 30, 3_000), rng.integers(0, 20, 3_000)
    film = film - film % 2 + user % 2
    click = rng.random(3_000) < np.where(film % 4 == user % 4, 0.8, 0.2)
    table = pa.table({"user": user, "film": film, "price": np.exp(rng.normal(8, 2, 3_000)), "click": click})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=300)
    return tmp_path / "log.parquet"


def recipe_of(log: Path, schema: dict[str, Any], **sections: Any) -> Path:
    source = {"schema": schema, "valid_fraction": 0.2, "test_fraction": 0.2}
    recipe = {
        "name": "small",
        "data": {
            "path": str(log),
            "dim": 8,
            "valid_split": "valid",
            "source": {"class_path": "hotbed.data.ParquetSource", "init_args": source},
        },
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 50, "device": "cpu"},
        **sections,
    }
    file = log.parent / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


SPARSE = [{"name": "user", "rows": 64}, {"name": "film", "rows": 1024}]


def test_tune_with_optuna(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune = example("tune_with_optuna", "optuna")
    schema = {"labels": ["click"], "dense": [{"name": "price", "rule": "log"}], "sparse": SPARSE}
    model = {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1], "dropout": 0.0}}
    recipe, out = recipe_of(log, schema, model=model), tmp_path / "search"
    trained, train = list[dict[str, Any]](), tune.train
    tune.train = lambda trial, values: (trained.append(values), train(trial, values))[1]
    given = tune.hb.Recipe.from_dict(yaml.safe_load(recipe.read_text(encoding="utf-8"))).to_dict()
    tune.main([str(recipe), "--trials", "2", "--out", str(out)])
    assert len(trained) == 2
    assert trained[0] == given  # the recipe as it is
    tune.main([str(recipe), "--trials", "3", "--out", str(out)])  # resumes
    assert len(trained) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial ")]
    values = [float(line.split("logloss ")[1].split()[0]) for line in lines]
    assert values[1] <= values[0] < 0.69  # of a constant
    best = yaml.safe_load((out / "best.yaml").read_text(encoding="utf-8"))
    assert best in trained
    assert best["data"]["test_split"] == "test"
    assert best["model"]["init_args"]["bottom"][-1] == best["data"]["dim"]
    assert main(["train", str(out / "best.yaml"), "--out", str(tmp_path / "runs")]) == 0


def test_an_interrupted_first_trial_is_repeated(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's own values are tried again if their trial never ended. Buckets by quantiles are measured."""
    tune = example("tune_with_optuna", "optuna")
    derived = [{"name": "of_price", "bucket": "price", "quantiles": 4}]
    schema = {"labels": ["click"], "dense": [{"name": "price", "rule": "log"}], "sparse": SPARSE, "features": derived}
    model = {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}}
    recipe, trained, train = recipe_of(log, schema, model=model), list[dict[str, Any]](), tune.train
    arguments = [str(recipe), "--trials", "1", "--out", str(tmp_path / "search")]

    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune.main(arguments)
    monkeypatch.setattr(tune, "train", lambda trial, values: (trained.append(values), train(trial, values))[1])
    tune.main(arguments)
    assert trained == [tune.hb.Recipe.from_dict(yaml.safe_load(recipe.read_text(encoding="utf-8"))).to_dict()]


def test_trials_that_diverge_are_pruned(log: Path, tmp_path: Path) -> None:
    tune = example("tune_with_optuna", "optuna")
    schema = {"labels": ["click"], "sparse": SPARSE}
    model = {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}}
    sparse = {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 1e38}}
    recipe = recipe_of(log, schema, model=model, sparse_optimizer=sparse)
    with pytest.raises(SystemExit, match="no trial finished; lower the learning rates"):
        tune.main([str(recipe), "--trials", "1", "--out", str(tmp_path / "search")])


def test_faiss_index(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faiss_index = example("faiss_index", "faiss")
    model = {"class_path": "hotbed.nn.TwoTower", "init_args": {"item": ["film"], "widths": [16, 8]}}
    train = {"batch_size": 50, "epochs": 5, "device": "cpu", "checkpoint": "last"}
    recipe = recipe_of(log, {"labels": [], "sparse": SPARSE}, model=model, retrieval={"k": [5]}, train=train)
    assert main(["train", str(recipe), "--out", str(tmp_path / "runs")]) == 0
    towers, out = tmp_path / "towers", tmp_path / "found.parquet"
    assert main(["export", str(tmp_path / "runs/small"), str(towers), "--towers"]) == 0
    pq.write_table(pa.table({"user": np.arange(30), "age": np.arange(30)}), tmp_path / "users.parquet")
    arguments = [str(towers), str(tmp_path / "users.parquet"), "--out", str(out), "--k", "5"]
    faiss_index.main(arguments)
    found = pq.read_table(out)
    assert found.column_names == ["film", "score"] and len(found) == 30
    films = np.array(found["film"].to_pylist())
    assert np.mean(films % 2 == np.arange(30)[:, None] % 2) > 0.8  # those of the genre that a user watches
    assert all(np.diff(scores).max() <= 0 for scores in found["score"].to_pylist())
    assert (towers / "items.faiss").is_file()
    monkeypatch.setattr(faiss_index, "USERS", 7)
    searches, search = list[int](), faiss_index.search
    monkeypatch.setattr(faiss_index, "search", lambda index, of, k: (searches.append(len(of)), search(index, of, k))[1])
    faiss_index.main(arguments)
    assert searches == [7, 7, 7, 7, 2]  # users are searched in parts
    assert pq.read_table(out)["film"].to_pylist() == found["film"].to_pylist()
    monkeypatch.setattr(faiss_index, "USERS", 30)
    monkeypatch.setattr(faiss_index, "GRAPH_FROM", 1)
    faiss_index.main(arguments)
    graph = np.array(pq.read_table(out)["film"].to_pylist())
    assert np.mean([len(set(a) & set(b)) for a, b in zip(films.tolist(), graph.tolist(), strict=True)]) > 4.5
    fewer = np.array([[0.5, 0.1]] * 30, np.float32), np.array([[1, -1]] * 30)
    monkeypatch.setattr(faiss_index, "search", lambda *_: fewer)
    faiss_index.main(arguments)
    assert {len(of) for of in pq.read_table(out)["score"].to_pylist()} == {1}
