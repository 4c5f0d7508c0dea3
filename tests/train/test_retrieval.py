"""Tests of two-tower training, recall@k and nDCG@k, and refused recipes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hotbed as hb
from hotbed.cli.main import main
from hotbed.comm import Link
from hotbed.config import Component, Recipe
from hotbed.config.validation import monitored
from hotbed.data.items import ItemDraws
from hotbed.errors import BatchError, DataError, NonFiniteError, RecipeError, SpecError
from hotbed.nn import InBatchSoftmax, ItemFrequencies, TwoTower
from hotbed.train import retrieval as retrieval_module
from hotbed.train.ranks.parallel import Ranks as TrainerRanks
from hotbed.train.retrieval import (
    CANDIDATE,
    LOG_DRAWN,
    Retrieval,
    RetrievalBatch,
    RetrievalMetrics,
    RetrievalOptions,
    evaluate_retrieval,
    hit_positions,
    source_of_items,
)
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.callbacks import BestSoFar
from hotbed.train.runs.loaders import evaluation_loader, training_loader
from hotbed.virtual_ranks import VirtualRanks
from tests.ranks import Ranks
from tests.train.planted import Losses
from tests.train.retrieval_cases import MODEL, catalogue, learned, log, recipe_for

# -- Protects that retrieval has the negatives that a recipe asks for, corrected as published, on any number of ranks.

# -- the softmax -------------------------------------------------------------------------------------------------------


def test_the_softmax_over_more_candidates_is_the_formula() -> None:
    torch.manual_seed(0)
    users, items = torch.randn(3, 4), torch.randn(7, 4)
    ids, log_q = torch.tensor([8, 8, 1, 2, 8, 4, 5]), torch.randn(7)
    own, negative_of = torch.tensor([1, 2, 3]), torch.tensor([-1, -1, -1, -1, -1, 2, 3])
    losses = InBatchSoftmax(0.5)(users, items, ids, log_q, own=own, negative_of=negative_of)
    for i, mine in enumerate(own.tolist()):
        scores = users[i].double() @ items.double().T / 0.5 - log_q.double()
        among = [j for j in range(7) if j == mine or (ids[j] != ids[mine] and negative_of[j] in (-1, mine))]
        expected = scores[among].logsumexp(0) - scores[mine]
        torch.testing.assert_close(losses[i].double(), expected, rtol=1e-6, atol=1e-6)


def test_only_the_hardest_negatives_count() -> None:
    torch.manual_seed(0)
    users, items, ids = torch.randn(4, 3), torch.randn(9, 3), torch.arange(9)
    losses, scores = InBatchSoftmax(0.5, hardest=2)(users, items, ids), users @ items.T / 0.5
    for i in range(4):
        hardest = torch.cat([scores[i, :i], scores[i, i + 1 :]]).topk(2).values
        expected = torch.cat([scores[i, i : i + 1], hardest]).logsumexp(0) - scores[i, i]
        torch.testing.assert_close(losses[i], expected)
    assert torch.equal(InBatchSoftmax(0.5, hardest=99)(users, items, ids), InBatchSoftmax(0.5)(users, items, ids))


@pytest.mark.parametrize(("temperature", "hardest"), [(0.0, None), (0.1, 0)])
def test_what_a_softmax_cannot_be(temperature: float, hardest: int | None) -> None:
    with pytest.raises(SpecError, match="expected a temperature above 0"):
        InBatchSoftmax(temperature, hardest)


# -- candidates --------------------------------------------------------------------------------------------------------


def retrieval(options: RetrievalOptions, *, corrected: bool = True, loss: nn.Module | None = None) -> Retrieval:
    correction = ItemFrequencies(1 << 10, first=4.0) if corrected else None
    return Retrieval(options, loss or InBatchSoftmax(), correction, catalogue, TrainerRanks(nn.Linear(1, 1)))


BATCH = hb.Batch(
    sparse=hb.Jagged.from_dict(
        {"user": [4, 1, 2], "item": [7, 2, 7], "genre": [[0, 2], [1], [0]], "refused": [[5], [], [2, 7]]}
    ),
    dense=torch.randn(3, 1),
    labels=torch.tensor([[1.0], [0.0], [1.0]]),
)


def test_candidates_are_samples_without_a_user() -> None:
    made = retrieval(RetrievalOptions(("item", "genre"), sampled=2, negatives="refused"))
    found = made.prepare(BATCH, 3)
    drawn = catalogue().ids[ItemDraws(catalogue(), 0, by_popularity=False)(3, 2)].tolist()
    assert found.extra[CANDIDATE].tolist() == [
        [7, -1, 1],
        [2, -1, 0],
        [7, -1, 1],
        *([item, -1, 0] for item in drawn),
        [5, 0, 0],
        [2, 2, 0],
        [7, 2, 0],
    ]
    assert (found.rows, found.positives, len(found)) == (3, 2, 8)
    assert found.sparse["user"].lengths().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert found.sparse["item"].values.tolist() == found.extra[CANDIDATE][:, 0].tolist()
    assert found.sparse["genre"].lengths().tolist()[-3:] == [0, 1, 2]
    # Items 2 and 7 were counted, so each is drawn with probability 1/2: once per step.
    torch.testing.assert_close(found.extra[LOG_DRAWN].exp(), torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1]))


def test_a_batch_whose_items_are_the_only_candidates_stays_as_it_is() -> None:
    without_labels = replace(BATCH, labels=None)
    found = retrieval(RetrievalOptions(("item",))).prepare(without_labels, 1)
    assert found.sparse is without_labels.sparse
    assert (found.rows, found.positives) == (3, 3)


def test_a_negative_that_is_no_item() -> None:
    bad = replace(BATCH, sparse=hb.Jagged.from_dict({**BATCH.sparse.to_dict(), "refused": [[], [3], []]}))
    made = retrieval(RetrievalOptions(("item", "genre"), negatives="refused"))
    with pytest.raises(BatchError, match=r"'refused' .* sample 1 .*got row 3"):
        made.prepare(bad, 1)


class _Kept(nn.Module):
    """Keeps what it is called with."""

    def forward(self, users: Tensor, items: Tensor, ids: Tensor, log_q: Tensor | None, **others: Any) -> Tensor:
        self.log_q, self.others = log_q, others
        return users.sum(1)


def loss_of_ones(made: Retrieval, batch: hb.Batch, step: int) -> float:
    """The loss of a batch whose vectors are all ones."""
    prepared = made.prepare(batch, step)
    (loss,) = made([(torch.ones(prepared.rows, 2), torch.ones(len(prepared), 2))], [prepared])
    return loss.item()


def test_the_correction_is_of_the_mixture() -> None:
    """Yang et al. 2020: how often an item is in a batch or drawn; batches so far are one, of items 7 and 2."""
    loss = _Kept()
    made = retrieval(RetrievalOptions(("item", "genre"), sampled=2), loss=loss)
    assert loss_of_ones(made, BATCH, 3) == 2 * 2  # samples with label 1
    assert loss.log_q is not None
    of_batches = 1 / (4.0 + 0.01 * (1 - 0 - 4.0))
    torch.testing.assert_close(loss.log_q.exp(), torch.full((5,), of_batches + 1.0))
    plain = retrieval(RetrievalOptions(("item", "genre"), sampled=2), loss=loss, corrected=False)
    assert loss_of_ones(plain, BATCH, 3) == 4
    assert loss.log_q is None


def test_weights_of_samples_count() -> None:
    made = retrieval(RetrievalOptions(("item", "genre"), sampled=1), loss=_Kept())
    weighted = replace(BATCH, weights=torch.tensor([3.0, 5.0, 0.5]))
    assert loss_of_ones(made, weighted, 1) == 2 * 3.5


def test_a_batch_that_is_not_divided_among_the_virtual_ranks() -> None:
    made = retrieval(RetrievalOptions(("item", "genre")))
    made._ranks.virtual = VirtualRanks(0, 1, 2)
    with pytest.raises(BatchError, match=r"Batch.slices: got None, expected the numbers of samples of 2"):
        made.prepare(BATCH, 1)


def test_each_virtual_rank_has_its_own_candidates() -> None:
    """Negatives of a sample are counted from the virtual rank's first sample."""
    made = retrieval(RetrievalOptions(("item", "genre"), sampled=3, negatives="refused"))
    made._ranks.virtual = VirtualRanks(0, 1, 2)
    drawn = catalogue().ids[ItemDraws(catalogue(), 0, by_popularity=False)(1, 3)].tolist()
    found = made.prepare(replace(BATCH, slices=(1, 2)), 1)
    assert (found.slices, found.by_slice, found.rows, found.positives) == ((3, 6), ((1, 1), (2, 1)), 3, 2)
    assert found.extra[CANDIDATE].tolist() == [
        *([7, -1, 1], [drawn[0], -1, 0], [5, 0, 0]),
        *([2, -1, 0], [7, -1, 1], [drawn[1], -1, 0], [drawn[2], -1, 0], [2, 1, 0], [7, 1, 0]),
    ]
    first, second = found.divide(VirtualRanks(0, 1, 2))
    assert isinstance(first, RetrievalBatch) and isinstance(second, RetrievalBatch)
    assert [(len(of), of.rows, of.positives) for of in (first, second)] == [(3, 1, 1), (6, 2, 1)]


# -- training ----------------------------------------------------------------------------------------------------------


def sent_by_one(group: dist.ProcessGroup | None, values: dict[str, Any]) -> list[float]:
    """Losses where one rank reads, and devices have links of their own, as over NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "overlaps", property(lambda _: False))
        recipe = Recipe.from_dict(values)
        trainer = build(recipe, source := open_source(recipe.data))
        losses = Losses()
        trainer.callbacks.append(losses)
        trainer.fit(training_loader(recipe, source, trainer.ranks, trainer.model))
        return losses.losses


ALL = {"sampled": 7, "sampled_by": "popularity", "negatives": "refused"}


@pytest.mark.parametrize("asked", [{}, {"sampled": 6, "correction": None}, ALL], ids=["batch", "drawn", "all"])
def test_three_ranks_train_the_model_of_one(asked: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    """All candidates of all virtual ranks are negatives."""
    values = recipe_for(tmp_path, **asked)
    values["parallel"] = {"virtual_ranks": 4}
    ((losses, alone),) = ranks.run(1, learned, values)
    for of_rank, state in ranks.run(3, learned, values):
        assert of_rank == losses
        for name, value in alone.items():
            assert torch.equal(state[name], value), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("total", "changes"),
    [
        (32, {}),
        (4, {"data": {"frozen": ["item"]}}),
        (4, {"train": {"precision": "bf16"}}),
    ],
    ids=["virtual ranks without samples", "frozen items", "bf16"],
)
def test_one_and_three_ranks_have_the_same_bits(
    ranks: Ranks, tmp_path: Path, total: int, changes: dict[str, dict[str, Any]]
) -> None:
    values = recipe_for(tmp_path, **ALL)
    for section, changed in changes.items():
        values[section] |= changed
    values["parallel"] = {"virtual_ranks": total}
    ((losses, alone),) = ranks.run(1, learned, values)
    for of_rank, state in ranks.run(3, learned, values):
        assert of_rank == losses
        assert all(torch.equal(state[name], value) for name, value in alone.items())


def asked_loss(_: dist.ProcessGroup | None, values: dict[str, Any]) -> tuple[float, bool]:
    recipe = Recipe.from_dict(values)
    trainer = build(recipe, source := open_source(recipe.data))
    (batch,) = list(training_loader(recipe, source, trainer.ranks, trainer.model))[:1]
    loss = trainer.loss(batch)
    return loss.item(), loss.requires_grad


def test_the_loss_of_several_virtual_ranks_has_no_gradient(ranks: Ranks, tmp_path: Path) -> None:
    """3 processes compute 1, 1 and 2 virtual ranks, and make the same exchanges."""
    values = recipe_for(tmp_path)
    values["parallel"] = {"virtual_ranks": 4}
    for loss, has_gradient in ranks.run(3, asked_loss, values):
        assert math.isfinite(loss) and not has_gradient


def test_one_rank_can_read_for_all(ranks: Ranks, tmp_path: Path) -> None:
    values = recipe_for(tmp_path, **ALL)
    values["data"]["shuffle"] = False
    values["parallel"] = {"virtual_ranks": 4}
    ((losses, _),) = ranks.run(1, learned, values)
    values["parallel"]["reader"] = "first"
    for of_rank in ranks.run(3, sent_by_one, values):
        assert of_rank == losses


def test_asking_for_the_loss_changes_nothing(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_for(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    correction: Any = trainer.parts()["retrieval"].state_dict()["correction"]
    before = {name: value.clone() for name, value in correction.items()}
    batch = source.read("train", 0)
    first = trainer.loss(batch).item()
    assert trainer.loss(batch).item() == first
    assert all(torch.equal(correction[name], value) for name, value in before.items())
    losses, _ = learned(None, recipe.to_dict())
    assert losses[0] == pytest.approx(first, rel=1e-6)


def test_the_loss_is_the_mean_over_positives_of_the_formula(tmp_path: Path) -> None:
    values = recipe_for(tmp_path, correction=None)
    recipe = Recipe.from_dict(values)
    source = open_source(recipe.data)
    model = build(recipe, source).model
    batch = source.read("train", 0)
    users, items = model(batch, vectors=True)
    ids, scores = batch.sparse["item"].values, (users @ items.T).double() / 0.05
    assert batch.labels is not None
    expected: list[Tensor] = []
    for i in batch.labels[:, 0].nonzero()[:, 0].tolist():
        among = [j for j in range(len(ids)) if j == i or ids[j] != ids[i]]
        expected.append(scores[i, among].logsumexp(0) - scores[i, i])
    losses, _ = learned(None, values)
    assert losses[0] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    torch.testing.assert_close(
        build(recipe, source).loss(batch).double(), torch.stack(expected).mean(), rtol=1e-5, atol=1e-6
    )


def test_the_loss_has_the_models_temperature_unless_it_says_another(tmp_path: Path) -> None:
    values = recipe_for(tmp_path)
    values["model"] = {**MODEL, "init_args": {**MODEL["init_args"], "temperature": 0.2}}
    own = {"class_path": "hotbed.nn.InBatchSoftmax", "init_args": {"temperature": 0.7, "hardest": 3}}
    for asked, temperature in (({}, 0.2), ({"loss": own}, 0.7)):
        recipe = Recipe.from_dict({**values, "retrieval": asked})
        made: Any = build(recipe).other_parts["retrieval"]
        assert made._loss.temperature == temperature


def test_items_of_a_file_of_their_own_are_drawn(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item": [41, 42], "genre": [[1], [2, 3]]}), tmp_path / "items.parquet")
    recipe = Recipe.from_dict(recipe_for(tmp_path, sampled=5, items=str(tmp_path / "items.parquet")))
    made: Any = build(recipe, source := open_source(recipe.data)).other_parts["retrieval"]
    found = made.prepare(source.read("train", 0), 1)
    assert set(found.extra[CANDIDATE][20:, 0].tolist()) <= {41, 42}


def test_the_model_is_called_with_fewer_users() -> None:
    tables = [hb.Table("users", 9, 4), hb.Table("items", 12, 4)]
    model = TwoTower(tables, [hb.Feature("user", "users"), hb.Feature("item", "items")], item=["item"], widths=(3,))
    batch = hb.Batch(sparse=hb.Jagged.from_dict({"user": [1, 2, 3], "item": [4, 5, 6]}))
    users, items = model(batch, vectors=True, users=2)
    torch.testing.assert_close((users, items), (model(batch, vectors=True)[0][:2], model(batch, vectors=True)[1]))


# -- Protects that what does not go with retrieval is refused by a message that says what to change.


def _labels(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        schema = values["data"]["source"]["init_args"]["schema"]
        schema |= {"labels": list(names), "dense": [name for name in schema["dense"] if name not in names]}

    return change


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        *folders, last = path.split(".")
        for folder in folders:
            values = values.setdefault(folder, {})
        values[last] = value

    return change


REFUSED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_labels("click", "age"), "got click, age, expected at most one"),
    (_set("tasks", {"click": {"weight": 2}}), "tasks is set, but retrieval"),
    (_set("metrics", {"f1": {"class_path": "torchmetrics.F1"}}), "metrics is set, but retrieval"),
    (_set("hot", {"batches": "split", "rows": "hot_rows.json"}), "hot.batches is 'split', but retrieval"),
    (_set("retrieval.negatives", "refusd"), r"retrieval.negatives: got 'refusd', .*did you mean"),
    (_set("retrieval.negatives", "genre"), "with table 'genre', expected table"),
    (_set("retrieval.sampled", -1), "retrieval.sampled: got -1, expected at least 0"),
    (_set("retrieval.sampled_by", "rank"), "retrieval.sampled_by: got 'rank', expected one of uniform, pop"),
    (_set("retrieval.k", []), r"retrieval.k: got \[\], expected a list of numbers of items"),
    (_set("retrieval.k", [0]), "retrieval.k: got 0, expected at least 1"),
    (_set("retrieval.k", [5, 5]), r"retrieval.k: got \[5, 5\], expected unique"),
    (
        _set("retrieval", {"items": "items.parquet", "sampled": 4, "sampled_by": "popularity"}),
        "retrieval.items items.parquet has no counts",
    ),
    (_set("retrieval.loss.class_path", "torch.nn.Nothing"), "retrieval.loss: module 'torch.nn' has no"),
    (_set("retrieval.loss.class_path", "hotbed.data.Schema"), "retrieval.loss: hotbed.data.Schema"),
    (
        _set(
            "retrieval.correction",
            {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}},
        ),
        "retrieval.correction: torch.nn.Linear has parameters",
    ),
    (
        _set("model", {"class_path": "hotbed.nn.DeepFM", "init_args": {"top": [1]}}),
        "retrieval is set, but .*DeepFM",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_does_not_go_with_retrieval(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    values = recipe_for(tmp_path)
    change(values)
    with pytest.raises(RecipeError, match=message):
        build(Recipe.from_dict(values))


def labelled(table: Any, label: float) -> Any:
    """The log with one label for all samples."""
    labels = pa.array(np.full(len(table), label, np.float32))
    return table.set_column(table.column_names.index("click"), "click", labels)


def test_labels_that_are_all_0(tmp_path: Path) -> None:
    values = recipe_for(tmp_path)
    pq.write_table(labelled(log(), 0), values["data"]["path"])
    recipe = Recipe.from_dict(values)
    with pytest.raises(DataError, match="no label 'click' of the train split is 1"):
        build(recipe)


def test_labels_that_are_all_1_and_none_are_trained_on(tmp_path: Path) -> None:
    values = recipe_for(tmp_path)
    pq.write_table(labelled(log(), 1), values["data"]["path"], row_group_size=20)
    of_ones = learned(None, values)
    _labels()(values)
    without = learned(None, values)
    assert of_ones[0] == without[0]


def test_components_of_strangers_are_not_trusted(tmp_path: Path) -> None:
    from hotbed.config import check_trust

    values = recipe_for(tmp_path, loss=Component(class_path="theirs.Loss").__dict__)
    with pytest.raises(RecipeError, match=r"got theirs\.Loss, expected a class of hotbed or torch\.optim"):
        check_trust(Recipe.from_dict(values), "here", trusted=False)


# -- recall@k and nDCG@k -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Search in several blocks of users and items, although there are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval_module, "_USERS", 3)
        patch.setattr(retrieval_module, "_ITEMS", 7)
        yield


@given(st.integers(0, 9), st.integers(1, 30), st.integers(1, 35), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_places_are_those_of_a_sort(users: int, items: int, most: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    u, v = torch.randn(users, 4, generator=draw), torch.randn(items, 4, generator=draw)
    own = torch.randint(0, items, (users,), generator=draw)
    found = hit_positions(u, v, own, most)
    order = np.argsort(-(u.double().numpy() @ v.double().numpy().T), axis=1)
    expected = [list(row).index(mine) for row, mine in zip(order, own.tolist(), strict=True)]
    assert found.tolist() == [place if place < most else most for place in expected]


def by_hand(recipe: Recipe, trainer: Any, weights: np.ndarray[Any, Any]) -> dict[str, float]:
    """All of it in numpy: vectors of all samples, each distinct item as its last sample is."""
    table = {name: np.array(column) for name, column in log().to_pydict().items() if name in ("item", "click")}
    model = trainer.model.eval()
    batches = [open_source(recipe.data).read("train", i) for i in range(3)]
    with torch.no_grad():
        pairs = [model(batch, vectors=True) for batch in batches]
    users, items = (np.concatenate([pair[i].double().numpy() for pair in pairs]) for i in (0, 1))
    last = {item: row for row, item in enumerate(table["item"])}
    names = list(last)
    scores = users @ items[[last[name] for name in names]].T
    wanted = table["click"] == 1
    weights = weights[wanted]
    found: dict[str, float] = {}
    for k in (3, 10):
        places = [
            list(np.argsort(-scores[row])).index(names.index(table["item"][row])) for row in np.flatnonzero(wanted)
        ]
        hits = np.array([place < k for place in places])
        gains = hits / np.log2(np.array(places) + 2)
        found[f"recall@{k}"] = float((weights * hits).sum() / weights.sum())
        found[f"ndcg@{k}"] = float((weights * gains).sum() / weights.sum())
    return found


def measured(_: dist.ProcessGroup | None, values: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a model that is not trained, over all samples."""
    recipe = Recipe.from_dict(values)
    trainer = build(recipe, source := open_source(recipe.data))
    batches = evaluation_loader(recipe, source, "train", trainer.ranks)
    assert batches is not None
    return trainer.evaluate(batches).to_dict()


def trained_run(folder: Path, values: dict[str, Any], *options: str) -> Path:
    """The directory of a run of the command."""
    (folder / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "runs"), *options]) == 0
    return next((folder / "runs" / "retrieval").iterdir())


def recipe_of(folder: Path, **retrieval: Any) -> dict[str, Any]:
    values = recipe_for(folder, k=[3, 10], **retrieval)
    values["train"] |= {"eval_batch_size": 16}
    return values


@pytest.mark.parametrize("is_weighted", [False, True])
def test_metrics_are_those_of_a_search_by_hand(tmp_path: Path, is_weighted: bool) -> None:
    values = recipe_of(tmp_path)
    weights = np.ones(60, np.float32)
    if is_weighted:
        weights = np.random.default_rng(3).random(60).astype(np.float32)
        pq.write_table(log().append_column("weight", pa.array(weights)), values["data"]["path"], row_group_size=20)
        values["data"]["source"]["init_args"]["schema"]["weight"] = "weight"
    recipe = Recipe.from_dict(values)
    found = measured(None, values)
    expected = by_hand(recipe, build(recipe), weights.astype(np.float64))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["samples"] == int((log()["click"].to_numpy() == 1).sum())
    assert found["items"] == len(set(log()["item"].to_pylist()))
    assert set(found) == {"samples", "items", *expected}


def test_three_ranks_measure_what_one_does(ranks: Ranks, tmp_path: Path) -> None:
    values = recipe_of(tmp_path)
    values["parallel"] = {"virtual_ranks": 4}
    (alone,) = ranks.run(1, measured, values)
    assert ranks.run(3, measured, values) == [alone] * 3


def test_items_of_a_file_of_their_own_are_searched(tmp_path: Path) -> None:
    table = log()
    items = sorted(set(table["item"].to_pylist()))
    more = pa.table({"item": [*items, 44, 45], "genre": [[i % 8] for i in [*items, 44, 45]]})
    pq.write_table(more, tmp_path / "items.parquet")
    assert measured(None, recipe_of(tmp_path, items=str(tmp_path / "items.parquet")))["items"] == len(items) + 2
    pq.write_table(more.slice(1), tmp_path / "fewer.parquet")
    with pytest.raises(DataError, match=r"samples have an item that is not among the .* of retrieval\.items"):
        measured(None, recipe_of(tmp_path, items=str(tmp_path / "fewer.parquet")))


def test_items_of_a_file_need_parquet(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    source = open_source(recipe.data)
    other = replace(recipe, data=replace(recipe.data, source=Component(class_path="hotbed.data.SplitBinarySource")))
    with pytest.raises(RecipeError, match=r"retrieval\.items is i\.parquet, but data\.source is"):
        source_of_items(other, source, "i.parquet", ["item"])


def test_more_are_found_than_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hotbed"):
        found = measured(None, recipe_for(tmp_path, k=[2, 500]))
    assert "retrieval.k is 500, but there are" in caplog.text
    assert found["recall@500"] == 1


def test_without_a_positive_there_is_nothing_to_measure(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    batch = source.read("train", 0)
    assert batch.labels is not None
    batch.labels.zero_()
    with pytest.raises(BatchError, match="no sample is positive"):
        trainer.evaluate([batch])


@pytest.mark.parametrize("what", ["user", "item"])
def test_a_vector_that_is_not_finite(what: str, tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    with torch.no_grad():
        next(iter(getattr(trainer.model, what).parameters())).fill_(math.nan)
    with pytest.raises(NonFiniteError, match=f"evaluation: a vector of {what}s is not finite"):
        trainer.evaluate([source.read("train", 0)])


def test_recall_tells_the_best_evaluation(tmp_path: Path) -> None:
    values = recipe_of(tmp_path)
    assert monitored(Recipe.from_dict(values)) == "recall"
    values["train"]["monitor"] = "ndcg"
    assert monitored(Recipe.from_dict(values)) == "ndcg"
    with pytest.raises(RecipeError, match=r"train\.monitor is 'ndcg', a metric of retrieval, but retrieval"):
        Recipe.from_dict({**values, "retrieval": None})
    best = BestSoFar("recall")
    nothing: Any = {"auc": math.nan, "logloss": math.nan, "normalized_entropy": math.nan, "calibration": math.nan}

    def found(small: float, large: float) -> RetrievalMetrics:
        others = {"recall@1": small, "recall@5": large, "ndcg@5": 0.9}
        return RetrievalMetrics(samples=9, items=9, **nothing, others=others)

    assert [best.improved(found(*pair)) for pair in ((0.1, 0.3), (0.9, 0.2), (0.0, 0.4))] == [True, False, True]
    assert found(0.1, 0.3).curves("valid") == {"valid/recall@1": 0.1, "valid/recall@5": 0.3, "valid/ndcg@5": 0.9}


def test_the_commands_train_and_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a label: all samples are positives."""
    values = recipe_of(tmp_path)
    values["data"] |= {"valid_split": "valid", "test_split": "test"}
    given = values["data"]["source"]["init_args"]
    given |= {"valid_fraction": 0.3, "test_fraction": 0.3}
    given["schema"]["labels"] = []
    values["train"] |= {"steps": None, "epochs": 2}
    run = trained_run(tmp_path, values, "--retrieval.k", "[2, 10]")
    shown = capsys.readouterr()
    assert "valid recall@2" in shown.err
    assert "recall@10" in shown.out
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert main(["eval", "--checkpoint", str(run), "--json", str(tmp_path / "eval.json")]) == 0
    assert "recall@10" in capsys.readouterr().out
    found = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert found["test"] == pytest.approx(summary["test"])


def test_other_data_are_searched_among_all_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of few rows alone would make recall look better than it is."""
    values = recipe_of(tmp_path)
    values["train"]["checkpoint"] = "last"
    run = trained_run(tmp_path, values)
    few = log().slice(0, 20)
    new = pa.array([49, *few["item"].to_pylist()[1:]])
    few = few.set_column(few.column_names.index("item"), "item", new)
    pq.write_table(labelled(few, 1), tmp_path / "few.parquet")
    asked = ["eval", "--checkpoint", str(run), "--data", str(tmp_path / "few.parquet")]
    assert main([*asked, "--json", str(tmp_path / "eval.json")]) == 0
    found = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))["all"]
    assert (found["samples"], found["items"]) == (20, len({49, *log()["item"].to_pylist()}))
    (tmp_path / "log.parquet").rename(tmp_path / "elsewhere.parquet")
    capsys.readouterr()
    assert main(asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "items of the training data, which cannot be read" in said


def test_new_rows_need_no_negatives(tmp_path: Path) -> None:
    values = recipe_of(tmp_path, negatives="refused")
    values["train"]["checkpoint"] = "last"
    run = trained_run(tmp_path, values)
    scores: list[Any] = []
    for left_out in (["click"], ["click", "refused"]):
        pq.write_table(log().drop_columns(left_out), tmp_path / "new.parquet")
        out = tmp_path / f"{len(left_out)}.parquet"
        assert main(["predict", str(run), str(tmp_path / "new.parquet"), "--out", str(out)]) == 0
        scores.append(pq.read_table(out)["score"].to_pylist())
    assert scores[0] == scores[1]


def test_evaluate_retrieval_calls_back_after_each_batch(tmp_path: Path) -> None:
    recipe = Recipe.from_dict(recipe_of(tmp_path))
    trainer = build(recipe, source := open_source(recipe.data))
    made: Any = trainer.other_parts["retrieval"]
    calls: list[Tensor | None] = []
    evaluate_retrieval(
        trainer.model, [source.read("train", 0)] * 2, made.items, made.options, finished=lambda: calls.append(None)
    )
    assert len(calls) == 2 + 4  # batches, and blocks of items
