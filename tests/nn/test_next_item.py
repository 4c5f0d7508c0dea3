"""Protects that SASRec and HSTU compute the published formulas, and look at nothing that comes later."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hotbed as hb
from hotbed.errors import SpecError
from hotbed.nn import HSTU, CausalAttention, NextItem, SASRec, SequentialTransduction

from .history_cases import HISTORY, ITEM, TABLES, batch, layer_norm, linear, vectors
from .parity import Weights, assert_parity

ITEMS = [TABLES[1]]
FEATURES = [HISTORY, ITEM]
LENGTH = 5
NAMES = {"history": "history", "item": "item"}


def softmax_attention(x: Tensor, weights: Weights, block: int) -> Tensor:
    """Equations 2 to 4, head by head, place by place."""
    name = f"blocks.{block}"
    q, k, v = (layer_norm(x, weights, f"{name}.attention_norm") @ weights[f"{name}.projections.weight"].T).chunk(3, 1)
    heads: list[Tensor] = []
    for columns in (slice(4), slice(4, 8)):
        rows: list[Tensor] = []
        for t in range(len(x)):
            scores = (k[: t + 1, columns] @ q[t, columns]) / 4**0.5
            rows.append(scores.softmax(0) @ v[: t + 1, columns])
        heads.append(torch.stack(rows))
    x = x + torch.cat(heads, dim=1)
    inner = linear(layer_norm(x, weights, f"{name}.forward_norm"), weights, f"{name}.inner").relu()
    return x + linear(inner, weights, f"{name}.outer")


def sasrec(x: Tensor, weights: Weights) -> Tensor:
    for block in range(2):
        x = softmax_attention(x, weights, block)
    return layer_norm(x, weights, "norm")


def hstu(x: Tensor, weights: Weights) -> Tensor:
    """Equations 1 to 3, head by head, place by place."""
    for layer in range(2):
        name = f"layers.{layer}"
        made = linear(x, weights, f"{name}.inputs")
        u, v, q, k = (made * made.sigmoid()).chunk(4, dim=1)
        heads: list[Tensor] = []
        for columns in (slice(4), slice(4, 8)):
            rows: list[Tensor] = []
            for t in range(len(x)):
                bias = torch.stack([weights[f"{name}.bias.weight"][t - s, 0] for s in range(t + 1)])
                scores = k[: t + 1, columns] @ q[t, columns] + bias
                rows.append((scores * scores.sigmoid() / LENGTH) @ v[: t + 1, columns])
            heads.append(torch.stack(rows))
        x = x + linear(layer_norm(torch.cat(heads, dim=1), weights, f"{name}.norm") * u, weights, f"{name}.outputs")
    return x


def formula(encode: Callable[[Tensor, Weights], Tensor]) -> Callable[[Weights, hb.Batch], Tensor]:
    """A candidate's product with the last vector of each history, which is encoded alone, without padding."""

    def plain(weights: Weights, of: hb.Batch) -> Tensor:
        logits: list[Tensor] = []
        pairs = zip(vectors(weights, of, "history", "items"), vectors(weights, of, "item", "items"), strict=True)
        for history, candidate in pairs:
            if not len(history):
                logits.append(candidate.sum() * 0)
                continue
            places = weights["positions.weight"][torch.arange(len(history)).flip(0)]
            logits.append(encode(history + places, weights)[-1] @ candidate[0])
        return torch.stack(logits)[:, None]

    return plain


def make(model: type[NextItem], **options: int) -> NextItem:
    torch.manual_seed(0)
    kind = {"heads": 2, "dropout": 0.0, "max_len": LENGTH, **NAMES, **options}
    return model(ITEMS, FEATURES, **kind)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize(("model", "encode"), [(SASRec, sasrec), (HSTU, hstu)])
def test_logits_and_gradients_are_those_of_the_formula(model: type[NextItem], encode: Callable[..., Tensor]) -> None:
    assert_parity(make(model), formula(encode), batch(12, longest=LENGTH))


@pytest.mark.parametrize("layer", [CausalAttention(8, 2), SequentialTransduction(8, 4, 2)])
def test_no_place_sees_later_ones(layer: torch.nn.Module) -> None:
    x = torch.randn(2, 4, 8)
    later = x.clone()
    later[:, 2:] = 9
    assert torch.equal(layer(later)[:, :2], layer(x)[:, :2])
    assert not torch.allclose(layer(later)[:, 2:], layer(x)[:, 2:])


@pytest.mark.parametrize("model", [SASRec, HSTU])
def test_the_order_of_a_history_matters(model: type[NextItem]) -> None:
    made = make(model, max_len=2).eval()
    ids = hb.Jagged.from_dict({"history": [[1, 2], [2, 1], [], [7, 1, 2]], "item": torch.tensor([3, 3, 3, 3])})
    one, other, nothing, longer = made(hb.Batch(sparse=ids))
    assert not torch.allclose(one, other)
    assert nothing == 0
    assert torch.equal(one, longer)


@pytest.mark.parametrize("model", [SASRec, HSTU])
def test_no_sample_at_all(model: type[NextItem]) -> None:
    ids = hb.Jagged.from_dict({"history": [], "item": torch.empty(0, dtype=torch.int64)})
    logits = make(model)(hb.Batch(sparse=ids))
    assert logits.shape == (0, 1)
    logits.sum().backward()


def test_what_they_cannot_be_made_of() -> None:
    with pytest.raises(SpecError, match="got user, expected none, because it scores 'item' by 'history' only"):
        SASRec(TABLES[:2], [*FEATURES, hb.Feature("user", "users")], **NAMES)
    with pytest.raises(SpecError, match="got 2 dense inputs, expected none, because it scores 'item' by"):
        HSTU(ITEMS, FEATURES, 2, **NAMES)
    with pytest.raises(SpecError, match="CausalAttention: heads: got 3, expected a divisor of the 8"):
        make(SASRec, heads=3)
    with pytest.raises(SpecError, match="SequentialTransduction: heads: got 0, expected a divisor of the 8"):
        make(HSTU, heads=0)
    with pytest.raises(SpecError, match="SASRec: dropout: got 1, expected a finite number at least 0 and below 1"):
        make(SASRec, dropout=1)
    with pytest.raises(SpecError, match="SASRec: the history: got 'past', expected one of history, item"):
        SASRec(ITEMS, FEATURES, history="past", item="item")
