"""Protects that DIN and its layers compute the published formulas, of the newest ids of each history alone."""

import pytest
import torch
from torch import Tensor

import hotbed as hb
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import DIN, AttentionPooling, Dice

from .history_cases import FEATURES, TABLES, batch, linear, vectors
from .parity import Weights, assert_parity, pooled

HISTORIES = {"history": "item", "visited": "shop"}
OPTIONS = {"histories": HISTORIES, "max_len": 4, "attention": (6, 5), "top": (7, 1)}


def dice(s: Tensor, alpha: Tensor) -> Tensor:
    """Equation 9, over all rows ``[n, C]``."""
    p = 1 / (1 + torch.exp(-(s - s.mean(0)) / torch.sqrt(s.var(0, unbiased=False) + 1e-8)))
    return p * s + (1 - p) * alpha * s


def attended(weights: Weights, name: str, candidate: Tensor, histories: list[Tensor]) -> Tensor:
    """Equation 3 without any padding: all ids of all samples in one list."""
    lengths = [len(h) for h in histories]
    v, e = candidate.repeat_interleave(torch.tensor(lengths), dim=0), torch.cat(histories)
    a = torch.cat([v, e, v - e, v * e], dim=1)
    for i in (0, 2):
        a = dice(linear(a, weights, f"{name}.unit.{i}"), weights[f"{name}.unit.{i + 1}.alpha"])
    weighted = linear(a, weights, f"{name}.unit.4") * e
    return torch.stack([part.sum(0) for part in weighted.split(lengths)])


def plain(weights: Weights, of: hb.Batch) -> Tensor:
    user, item, shop = (
        pooled(of, name, weights[f"embeddings.{table}"])
        for name, table in (("user", "users"), ("item", "items"), ("shop", "shops"))
    )
    history = attended(weights, "attention.0", item, vectors(weights, of, "history", "items"))
    visited = attended(weights, "attention.1", shop, vectors(weights, of, "visited", "shops"))
    x = torch.cat([user, item, shop, history, visited, *([] if of.dense is None else [of.dense.double()])], dim=1)
    return linear(dice(linear(x, weights, "top.0"), weights["top.1.alpha"]), weights, "top.2")


@pytest.mark.parametrize("dense", [0, 3])
def test_logits_and_gradients_are_those_of_the_formula(dense: int) -> None:
    assert_parity(DIN(TABLES, FEATURES, dense, **OPTIONS), plain, batch(12, dense=dense))


def test_a_candidate_changes_what_a_history_says() -> None:
    model = DIN(TABLES, FEATURES, **OPTIONS).eval()
    torch.manual_seed(0)
    history, mask = torch.randn(1, 3, 8).expand(2, 3, 8), torch.ones(2, 3, dtype=torch.bool)
    pooling = model.attention[0]
    one, other = pooling(torch.randn(2, 8), history, mask)
    assert not torch.allclose(one, other)


def test_the_newest_ids_are_looked_at() -> None:
    model = DIN(TABLES, FEATURES, **OPTIONS | {"max_len": 2}).eval()
    long = batch(longest=4)
    ids = {f.name: long.sparse[f.name] for f in FEATURES}
    short = {name: [bag[-2:] for bag in of.values.split(of.lengths().tolist())] for name, of in ids.items()}
    assert torch.equal(model(long), model(hb.Batch(sparse=Jagged.from_dict(short))))
    assert model.embeddings.truncated_ids["history"] > 0


def test_dice_of_a_mask_is_that_of_the_rows_where_it_is_set() -> None:
    s = torch.randn(5, 3, 4)
    mask = torch.arange(15).view(5, 3) % 4 != 1
    whole, few = Dice(4), Dice(4)
    for layer in (whole, few):
        torch.nn.init.constant_(layer.alpha, 0.3)
    torch.testing.assert_close(whole(s, mask)[mask], few(s[mask]))
    torch.testing.assert_close((whole.mean, whole.variance), (few.mean, few.variance))
    rows = s[mask]
    torch.testing.assert_close(whole.mean, 0.1 * rows.mean(0))
    torch.testing.assert_close(whole.variance, 0.9 + 0.1 * rows.var(0, unbiased=False))


def test_dice_without_a_row_keeps_its_statistics() -> None:
    layer = Dice(4)
    assert layer(torch.empty(0, 4)).shape == (0, 4)
    layer(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool))
    assert not layer.mean.any()
    assert torch.equal(layer.variance, torch.ones(4))


def test_in_evaluation_a_sample_has_one_score_whatever_is_beside_it() -> None:
    model = DIN(TABLES, FEATURES, **OPTIONS)
    model(batch(12))
    model.eval()
    whole = batch(12)
    alone = torch.cat([model(whole.take(torch.tensor([i]))) for i in range(12)])
    torch.testing.assert_close(alone, model(whole), rtol=1e-5, atol=1e-6)


def test_attention_has_no_gradient_where_there_is_no_id() -> None:
    pooling = AttentionPooling(4, (3,))
    history = torch.randn(2, 3, 4, requires_grad=True)
    pooling(torch.randn(2, 4), history, torch.tensor([[True, False, False], [False, False, False]])).sum().backward()
    assert history.grad is not None
    assert history.grad[0, 0].any()
    assert not history.grad[0, 1:].any() and not history.grad[1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"histories": {}}, r"got none, expected a history and its candidate, e\.g\. \{history: item\}"),
        ({"histories": {"histroy": "item"}}, "the history: got 'histroy', .*did you mean 'history'"),
        ({"histories": {"history": "itm"}}, "the candidate: got 'itm', .*did you mean 'item'"),
        ({"histories": {"history": "shop"}}, "got 'items', expected 'shops' as in its candidate 'shop', so that"),
        ({"histories": {"history": "item", "item": "history"}}, "got a sequence, expected one vector per sample"),
        ({"max_len": 0}, "DIN: max_len: got 0, expected at least 1"),
    ],
)
def test_what_histories_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        DIN(TABLES, FEATURES, **OPTIONS | options)  # pyright: ignore[reportArgumentType]


def test_other_sequences_and_batches_are_refused() -> None:
    with pytest.raises(SpecError, match="got 'none', expected 'sum' or 'mean'"):
        DIN(TABLES, [hb.Feature("user", "users", pooling="none"), *FEATURES[1:]], **OPTIONS)
    with pytest.raises(BatchError, match="DIN: dense inputs of the batch: got 0, expected 2"):
        DIN(TABLES, FEATURES, 2, **OPTIONS)(batch())
    limited = [hb.Feature("history", "items", max_len=3) if f.name == "history" else f for f in FEATURES]
    with pytest.raises(BatchError, match="got 4 ids at sample 4, expected at most max_len 3"):
        DIN(TABLES, limited, **OPTIONS)(batch())
