"""Protects: metrics are their definitions, whatever the order, ties, weights and labels."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.config import TrainRecipe
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, NonFiniteError
from hotbed.jagged import Jagged
from hotbed.optim import SGD
from hotbed.specs import Feature, Table
from hotbed.train import Trainer
from hotbed.train.metrics import Predictions, auc, evaluate, grouped_auc, move_batch
from hotbed.train.runs.stored_model import bad_ids
from tests.train import planted


def brute_auc(scores: list[float], labels: list[float], weights: list[float]) -> float:
    """Weighted share of (positive, negative) pairs in the right order, ties counting half."""
    won = total = 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        for s2, y2, w2 in zip(scores, labels, weights, strict=True):
            pair = w * y * w2 * (1 - y2)
            total += pair
            won += pair * (1.0 if s > s2 else 0.5 if s == s2 else 0.0)
    return won / total if total else math.nan


def brute_gauc(
    scores: list[float], labels: list[float], groups: list[int], weights: list[float]
) -> tuple[float, int, int]:
    parts: list[tuple[float, float]] = []
    left_out = 0
    for g in sorted(set(groups)):
        at = [i for i, other in enumerate(groups) if other == g]
        value = brute_auc([scores[i] for i in at], [labels[i] for i in at], [weights[i] for i in at])
        if math.isnan(value):
            left_out += 1
        else:
            parts.append((value, sum(weights[i] for i in at)))
    total = sum(w for _, w in parts)
    return (sum(v * w for v, w in parts) / total if parts else math.nan), len(parts), left_out


samples = st.lists(
    st.tuples(
        st.integers(-3, 3).map(float),  # few values, so many ties
        st.integers(0, 1).map(float),
        st.sampled_from([0.25, 1.0, 3.0]),
        st.integers(-2, 2),
    ),
    min_size=1,
    max_size=40,
)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


@settings(deadline=None)
@given(samples)
def test_auc_and_gauc_are_those_of_all_pairs(drawn: list[tuple[float, float, float, int]]) -> None:
    scores, labels, weights, groups = (list(column) for column in zip(*drawn, strict=True))
    s, y, w, g = torch.tensor(scores), torch.tensor(labels), torch.tensor(weights), torch.tensor(groups)
    ones = [1.0] * len(scores)
    assert same(auc(s, y), brute_auc(scores, labels, ones))
    assert same(auc(s, y, w), brute_auc(scores, labels, weights))
    expected = brute_gauc(scores, labels, groups, weights)
    got = grouped_auc(s, y, g, w)
    assert same(got.value, expected[0])
    assert (got.groups, got.left_out) == expected[1:]


def test_auc_of_fractional_labels_counts_parts_of_positives() -> None:
    scores, labels = [0.1, 0.7, 0.7, 0.9], [0.2, 0.5, 1.0, 0.9]
    assert same(auc(torch.tensor(scores), torch.tensor(labels)), brute_auc_32(scores, labels))


def brute_auc_32(scores: list[float], labels: list[float]) -> float:
    return brute_auc(scores, torch.tensor(labels).tolist(), [1.0] * len(scores))


def test_auc_of_nothing_or_one_class_is_nan() -> None:
    assert math.isnan(auc(torch.empty(0), torch.empty(0)))
    assert math.isnan(auc(torch.tensor([1.0, 2.0]), torch.ones(2)))
    assert math.isnan(auc(torch.tensor([1.0]), torch.zeros(1)))


def test_auc_sees_the_order_of_logits_whose_probabilities_are_all_one() -> None:
    logits = torch.tensor([30.0, 31.0, 32.0, 33.0])
    assert len(logits.sigmoid().unique()) == 1
    assert auc(logits, torch.tensor([0.0, 0.0, 1.0, 1.0])) == 1.0


def test_auc_is_exact_for_a_million_samples() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 50_000, (1_000_000,), generator=generator)
    labels = (torch.rand(1_000_000, generator=generator) < 0.3).long()
    # In integers: 2 U = Σ over positives of 2 · (negatives below) + (negatives equal).
    negatives = torch.bincount(scores[labels == 0], minlength=50_000)
    below = negatives.cumsum(0) - negatives
    twice = int((2 * below + negatives)[scores[labels == 1]].sum())
    pairs = int(labels.sum()) * int((1 - labels).sum())
    assert auc(scores.float(), labels.float()) == pytest.approx(twice / (2 * pairs), rel=1e-15)


def predictions_of(logits: Tensor, labels: Tensor, weights: Tensor | None = None, parts: int = 3) -> Predictions:
    predictions = Predictions()
    for i in range(parts):
        predictions.add(logits[i::parts], labels[i::parts], weights=None if weights is None else weights[i::parts])
    return predictions


@settings(deadline=None)
@given(samples)
def test_logloss_entropy_and_calibration_are_their_formulas(drawn: list[tuple[float, float, float, int]]) -> None:
    x, y, w, _ = (torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True))
    got = predictions_of(x[:, None].float(), y[:, None].float(), w.float()).metrics()
    p, total = torch.sigmoid(x), w.sum()
    logloss = -float((w * (y * p.log() + (1 - y) * (1 - p).log())).sum() / total)
    rate = float((w * y).sum() / total)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else 0.0
    assert got.samples == len(x)
    assert got.logloss == pytest.approx(logloss, rel=1e-12)
    assert same(got.normalized_entropy, logloss / entropy if entropy else math.nan) or entropy < 1e-6
    assert same(got.calibration, float((w * p).sum() / (w * y).sum()) if rate else math.nan)


def test_the_base_rate_has_normalized_entropy_and_calibration_of_one() -> None:
    labels = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    got = predictions_of(torch.full((4, 1), math.log(1 / 3)), labels).metrics()
    assert got.normalized_entropy == pytest.approx(1.0, rel=1e-7)
    assert got.calibration == pytest.approx(1.0, rel=1e-7)
    assert got.auc == 0.5


def test_several_tasks_give_their_mean_and_each() -> None:
    predictions = Predictions(["click", "buy"])
    predictions.add(torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    got = predictions.metrics()
    assert {name: task.auc for name, task in got.tasks.items()} == {"click": 1.0, "buy": 0.0}
    assert got.auc == 0.5
    assert got.to_dict()["tasks"]["click"]["auc"] == 1.0


def test_undefined_metrics_are_none_in_plain_values_and_say_why() -> None:
    got = predictions_of(torch.zeros(1200, 1), torch.zeros(1200, 1)).metrics().to_dict()
    assert got["auc"] is None
    assert got["calibration"] is None
    assert "gauc" not in got
    assert got["undefined"] == dict.fromkeys(("auc", "normalized_entropy", "calibration"), "all 1,200 labels are 0")
    got = predictions_of(torch.zeros(3, 1), torch.ones(3, 1)).metrics().to_dict()
    assert got["undefined"] == dict.fromkeys(("auc", "normalized_entropy"), "all 3 labels are 1")
    assert "undefined" not in predictions_of(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).metrics().to_dict()


def test_weights_of_0_and_groups_of_one_class_leave_metrics_undefined() -> None:
    labels, groups = torch.tensor([[0.0], [1.0]]), torch.tensor([1, 2])
    predictions = Predictions()
    predictions.add(torch.zeros(2, 1), labels, weights=torch.tensor([1.0, 0.0]), groups=groups)
    got = predictions.metrics()
    assert got.undefined["auc"] == "all samples of one class have weight 0"
    assert got.undefined["gauc"] == "none of the 2 groups has labels of both classes"
    predictions = Predictions()
    predictions.add(torch.zeros(2, 1), labels, weights=torch.zeros(2))
    assert predictions.metrics().undefined["logloss"] == "the weights of all 2 samples are 0"


def test_the_mean_of_tasks_is_undefined_where_one_is() -> None:
    predictions = Predictions(["click", "buy"])
    predictions.add(torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    got = predictions.metrics()
    assert math.isnan(got.auc)
    assert got.tasks["click"].auc == 1.0
    assert got.undefined["auc"] == "label 'buy': all 2 labels are 0"


@pytest.mark.parametrize("value", [-1.0, 1.25, math.nan])
def test_metrics_refuse_labels_that_they_are_not_defined_for(value: float) -> None:
    labels = torch.tensor([0.0, value, 1.0])
    message = f"the label of sample 1 of 3, column 0, is {value}; labels must be from 0 to 1"
    for score in (
        lambda: auc(torch.zeros(3), labels),
        lambda: grouped_auc(torch.zeros(3), labels, torch.zeros(3, dtype=torch.int64)),
        lambda: predictions_of(torch.zeros(3, 1), labels[:, None], parts=1).metrics(),
    ):
        with pytest.raises(BatchError, match=message):
            score()


def test_a_logit_that_is_not_finite_is_named() -> None:
    with pytest.raises(NonFiniteError, match="logit of sample 1, task 0 is nan"):
        predictions_of(torch.tensor([[0.0], [math.nan]]), torch.zeros(2, 1), parts=1).metrics()


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(BatchError, match="no sample to evaluate"):
        Predictions().metrics()


class Constant(nn.Module):
    """Gives the dense input as logits, and notes in which mode it was called."""

    modes: list[tuple[bool, bool]]

    def __init__(self) -> None:
        super().__init__()
        self.modes = []

    def forward(self, batch: Batch) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        assert batch.dense is not None
        return batch.dense


def batch_of(n: int, labels: Tensor | None, **extra: Tensor) -> Batch:
    ids = Jagged(["a"], torch.zeros(n, dtype=torch.int64), batch_size=n)
    return Batch(sparse=ids, dense=torch.arange(n, dtype=torch.float32)[:, None], labels=labels, extra=extra)


def test_evaluate_neither_trains_nor_leaves_a_mode_behind() -> None:
    model = Constant().train()
    labels = torch.tensor([[0.0], [1.0]])
    got = evaluate(model, [batch_of(2, labels, user=torch.tensor([1, 1]))], group="user")
    assert model.modes == [(False, False)]
    assert model.training
    assert (got.auc, got.gauc, got.groups, got.groups_left_out) == (1.0, 1.0, 1, 0)


@pytest.mark.parametrize(
    ("batch", "group", "message"),
    [
        (batch_of(2, None), None, "no labels"),
        (batch_of(2, torch.zeros(2, 2)), None, r"logits \[2, 1\], expected one per label \[2, 2\]"),
        (batch_of(2, torch.zeros(2, 1)), "user", "no column 'user'"),
    ],
)
def test_batches_that_cannot_be_evaluated(batch: Batch, group: str | None, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        evaluate(Constant(), [batch], group=group)


# -- ids out of range ----------------------------------------------------------------------------------------------


class TwoCollections(nn.Module):
    """Two collections see one feature; the smaller table drops ids that the larger one has rows for."""

    def __init__(self) -> None:
        super().__init__()
        feature = Feature("a", "t", on_bad_id="drop")
        self.small = EmbeddingCollection([Table("t", 3, 2)], [feature])
        self.large = EmbeddingCollection([Table("t", 9, 2)], [feature], seed=1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> Tensor:
        small, large = self.small(batch.sparse)["a"], self.large(batch.sparse)["a"]
        return self.scale * (small + large).sum(1, keepdim=True)


def out_of_range() -> Batch:
    """The ids 5 and 7 are out of range of the smaller table only, 11 of both."""
    return Batch(sparse=Jagged.from_dict({"a": torch.tensor([1, 5, 2, 7, 11])}), labels=torch.zeros(5, 1))


def test_repairs_of_one_collection_do_not_reach_another() -> None:
    model = TwoCollections()
    batch = move_batch(out_of_range(), model, "cpu")
    assert bad_ids(model) == {}
    expected = model(out_of_range())
    assert bad_ids(model) == {"a": 3}, "of the same ids, 3 are out of one table and 1 is out of the other"
    torch.testing.assert_close(model(batch), expected)
    assert expected[3] == model.large.weight("t")[7].sum() * model.scale


def test_training_repairs_and_counts_as_calling_the_model_does() -> None:
    def made() -> Trainer:
        model = TwoCollections()
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(
            model, dense, SGD(model, lr=0.1), recipe=TrainRecipe(batch_size=5, device="cpu", precision="fp32")
        )

    by_hand, trainer = made(), made()
    by_hand.loss(out_of_range()).backward()
    by_hand.dense.step()
    by_hand.sparse.step()
    trainer.fit([out_of_range()])
    assert bad_ids(trainer.model) == bad_ids(by_hand.model) == {"a": 3}
    for name, tensor in by_hand.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], tensor), name


def test_good_ids_are_checked_once_on_the_host() -> None:
    batch = planted.batches(1)[0]
    model = planted.trainer(TrainRecipe(batch_size=64, device="cpu", precision="fp32")).model
    assert move_batch(batch, model, "cpu").sparse.verified == {(name, rows) for name, rows in planted.ROWS.items()}
