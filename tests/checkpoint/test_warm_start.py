"""Protects: a warm start takes exactly what fits of a checkpoint, reinitializes the rest, and reports both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbed.checkpoint import init_from, load_checkpoint, save_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.jagged import Jagged
from hotbed.optim import LAMB, Adam, RowWiseAdagrad, SparseOptimizer
from hotbed.specs import Feature, Table


class Model(nn.Module):
    """Tables and a layer."""

    def __init__(self, tables: Mapping[str, Any], *, width: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = [Table(name, **spec) for name, spec in tables.items()]
        self.embeddings = EmbeddingCollection(made, [Feature(name, table=name) for name in tables], seed=seed)
        self.layer = nn.Linear(width, 2)

    def train_on(self, ids: Mapping[str, list[int]], *optimizers: torch.optim.Optimizer) -> None:
        found = self.embeddings(Jagged.from_dict({name: torch.tensor(i) for name, i in ids.items()}))
        loss = sum((found[name] - 1).square().sum() for name in ids) + self.layer(torch.ones(1, 3)).square().sum()
        assert isinstance(loss, torch.Tensor)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


OLD = {"user": {"rows": 10, "dim": 4}, "item": {"rows": 6, "dim": 4}, "page": {"rows": 3, "dim": 4}}


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, Model, SparseOptimizer]:
    model = Model(OLD)
    sparse, dense = Adam(model, lr=0.1), torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(3):
        model.train_on({"user": [step, 9], "item": [step, 5], "page": [0, 2]}, sparse, dense)
    save_checkpoint(tmp_path / "old", {"model": model, "sparse": sparse, "dense": dense}, step=3)
    return tmp_path / "old", model, sparse


def rows(model: Model, table: str) -> torch.Tensor:
    return model.embeddings.weight(table)


def moments(model: Model, optimizer: SparseOptimizer, table: str) -> dict[str, torch.Tensor]:
    index = list(model.embeddings.tables).index(table)
    return optimizer.state_dict()["state"][index]


def test_tables_grow_shrink_come_go_and_are_renamed(old: tuple[Path, Model, SparseOptimizer]) -> None:
    path, before, before_sparse = old
    new = {
        "user": {"rows": 14, "dim": 4},
        "thing": {"rows": 6, "dim": 4},
        "page": {"rows": 2, "dim": 4},
        "day": {"rows": 7, "dim": 4},
    }
    model = Model(new, seed=5)
    fresh = Model(new, seed=5)
    sparse, dense = Adam(model, lr=0.2), torch.optim.Adam(model.parameters(), lr=0.2)
    report = init_from(path, {"model": model, "sparse": sparse, "dense": dense}, rename={"thing": "item"})
    assert torch.equal(rows(model, "user")[:10], rows(before, "user"))
    assert torch.equal(rows(model, "thing"), rows(before, "item"))
    assert torch.equal(rows(model, "page"), rows(before, "page")[:2])
    assert torch.equal(rows(model, "day"), rows(fresh, "day"))
    # New rows begin as the old table's would have.
    spec = before.embeddings.tables["user"]
    larger = Table("user", 14, 4, init_bound=spec.bound)
    alone = EmbeddingCollection([larger], [Feature("user", table="user")], seed=0)
    assert torch.equal(rows(model, "user")[10:], alone.weight("user")[10:])
    for name, old_name, count in (("user", "user", 10), ("thing", "item", 6), ("page", "page", 2)):
        here, there = moments(model, sparse, name), moments(before, before_sparse, old_name)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(here[moment][:count], there[moment][:count])
            assert (here[moment][count:] == 0).all()
        assert int(here["step"]) == 3
    assert int(moments(model, sparse, "day")["step"]) == 0
    assert torch.equal(model.layer.weight, before.layer.weight)
    assert dense.param_groups[0]["lr"] == sparse.param_groups[0]["lr"] == 0.2
    assert float(dense.state[model.layer.weight]["step"]) == 3
    assert [(t.what, t.name, t.taken, t.note) for t in report] == [
        ("table", "embeddings.user", True, "10 rows, 4 new rows, moments exp_avg, exp_avg_sq"),
        ("table", "embeddings.thing", True, "6 rows of 'embeddings.item', moments exp_avg, exp_avg_sq"),
        ("table", "embeddings.page", True, "2 rows, 1 more rows in the checkpoint, moments exp_avg, exp_avg_sq"),
        ("table", "embeddings.day", False, "7 rows, reinitialized"),
        ("parameter", "layer.weight", True, "[2, 3]"),
        ("parameter", "layer.bias", True, "[2]"),
        ("optimizer", "dense", True, "moments of 2 parameters"),
    ]


def test_what_does_not_fit_begins_anew_and_is_reported(old: tuple[Path, Model, SparseOptimizer]) -> None:
    path, before, _ = old
    new = {"user": {"rows": 10, "dim": 8}, "item": {"rows": 6, "dim": 4}, "page": {"rows": 3, "dim": 4}}
    model, fresh = Model(new, width=5, seed=5), Model(new, width=5, seed=5)
    sparse, dense = RowWiseAdagrad(model, lr=0.2), torch.optim.Adam(model.parameters())
    report = init_from(path, {"model": model, "sparse": sparse, "dense": dense}, leave=["page"])
    for name in ("user", "page"):
        assert torch.equal(rows(model, name), rows(fresh, name))
    assert torch.equal(rows(model, "item"), rows(before, "item"))
    assert not dense.state
    assert torch.equal(model.layer.weight, fresh.layer.weight)
    notes = {t.name: t.note for t in report if not t.taken}
    assert notes == {
        "embeddings.user": "reinitialized: dim 4 in the checkpoint, 8 in this model",
        "embeddings.page": "3 rows, reinitialized",
        "layer.weight": "reinitialized: [2, 3] in the checkpoint, [2, 5] in this model",
        "dense": "reinitialized: its parameters or options differ",
    }
    assert {t.name: t.note for t in report if t.taken}["embeddings.item"] == "6 rows, moments reinitialized"


def test_moments_of_another_rule_begin_anew_even_if_they_are_called_alike(
    old: tuple[Path, Model, SparseOptimizer],
) -> None:
    path, _, _ = old
    model = Model(OLD)
    lamb = LAMB(model, lr=0.1)
    with pytest.raises(CheckpointError, match=r"exp_avg per element of adam.*expected exp_avg per element of lamb"):
        load_checkpoint(path, {"model": model, "sparse": lamb})
    report = init_from(path, {"model": model, "sparse": lamb})
    assert {t.note for t in report if t.what == "table"} == {
        f"{spec['rows']} rows, moments reinitialized" for spec in OLD.values()
    }
    assert moments(model, lamb, "user")["exp_avg"].count_nonzero() == 0


def test_steps_go_on_whatever_the_optimizer_is_called(old: tuple[Path, Model, SparseOptimizer]) -> None:
    path, before, sparse = old
    model = Model(OLD, seed=5)
    adam = Adam(model, lr=0.1)
    init_from(path, {"model": model, "optimizer": adam})
    for name in ("user", "item", "page"):
        found, expected = moments(model, adam, name), moments(before, sparse, name)
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])) for key in expected)
        assert int(found["step"]) == 3


def test_the_best_of_a_run_is_begun_with(old: tuple[Path, Model, SparseOptimizer], tmp_path: Path) -> None:
    _, before, _ = old
    other = Model(OLD, seed=9)
    save_checkpoint(tmp_path / "run" / "best-00000002", {"model": before})
    save_checkpoint(tmp_path / "run" / "last-00000004", {"model": other})
    model = Model(OLD, seed=5)
    init_from(tmp_path / "run", {"model": model})
    assert torch.equal(rows(model, "user"), rows(before, "user"))


def test_tables_that_are_not_here_are_reported_and_moments_can_be_left(
    old: tuple[Path, Model, SparseOptimizer],
) -> None:
    path, _, _ = old
    model = Model({"user": {"rows": 10, "dim": 4, "dtype": "bf16"}})
    sparse = Adam(model, lr=0.1)
    report = init_from(path, {"model": model, "sparse": sparse}, optimizers=False)
    assert [t.note for t in report if t.what == "table"] == [
        "10 rows, fp32 as bf16, rounded to nearest if of lower precision, moments reinitialized",
        "is not in this model",
        "is not in this model",
    ]
    assert int(moments(model, sparse, "user")["step"]) == 0


def test_a_table_that_grew_is_saved_and_loaded_with_its_first_bound(
    old: tuple[Path, Model, SparseOptimizer], tmp_path: Path
) -> None:
    path, before, _ = old
    tables = {"user": {"rows": 20, "dim": 4}}
    model, other = Model(tables), Model(tables, seed=1)
    init_from(path, {"model": model})
    manifest = save_and_read(tmp_path / "new", model)
    first = before.embeddings.tables["user"]
    spec = manifest.tables["embeddings.user"].spec
    assert (spec.bound, spec.init_seed) == (first.bound, first.seed(0))
    load_checkpoint(tmp_path / "new", {"model": other})
    again = save_and_read(tmp_path / "again", other).tables["embeddings.user"].spec
    assert (again.bound, again.init_seed) == (first.bound, first.seed(0))


def save_and_read(path: Path, model: Model) -> Any:
    from hotbed.checkpoint import read_manifest

    save_checkpoint(path, {"model": model})
    return read_manifest(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"usr": "item"}}, r"table 'usr' does not exist in this model. Tables are .*did you mean"),
        ({"rename": {"user": "itme"}}, r"table 'itme' does not exist in .*old. Tables are"),
        ({"leave": ["nothing"]}, "table 'nothing' does not exist in this model"),
    ],
)
def test_names_that_do_not_exist(
    old: tuple[Path, Model, SparseOptimizer], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        init_from(old[0], {"model": Model(OLD)}, **options)
