"""The same model written in plain PyTorch, from the same initial values and on the same batches, trains alike."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.jagged import Jagged
from hotbed.nn import DLRM
from hotbed.optim import SGD, Adagrad, Adam, AdamW, RowWiseAdagrad, SparseOptimizer
from hotbed.specs import Feature, Table

ROWS = (3, 40, 500, 2000)
DIM, DENSE, BATCH = 16, 13, 64
FEATURES = [*(Feature(f"C{i}", table=f"t{i}") for i in range(4)), Feature("list", table="t2", pooling="mean")]


class PlainDLRM(nn.Module):
    """DLRM with one ``nn.EmbeddingBag`` per table; MLPs are copies of hotbed's."""

    def __init__(self, model: DLRM, *, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse
        self.bags = nn.ModuleDict()
        for name in model.embeddings.tables:
            self.bags[name] = nn.EmbeddingBag.from_pretrained(
                model.embeddings.weight(name).clone(), freeze=False, mode="sum"
            )
        self.bottom = _copy(model.bottom)
        self.top = _copy(model.top)
        self.width = model.interaction.width

    def forward(self, batch: Batch) -> Tensor:
        vectors = [self.bottom(batch.dense)]
        for feature in FEATURES:
            bags = batch.sparse[feature.name]
            offsets = nn.functional.pad(bags.lengths().cumsum(0), (1, 0))[:-1]
            weight = self.bags[feature.table].weight
            vectors.append(
                nn.functional.embedding_bag(bags.values, weight, offsets, mode=feature.pooling, sparse=self.sparse)
            )
        stacked = torch.stack(vectors, 1)
        i, j = torch.tril_indices(len(vectors), len(vectors), -1)
        hidden = torch.cat([vectors[0], (stacked @ stacked.mT)[:, i, j]], 1)
        return self.top(nn.functional.pad(hidden, (0, self.width - hidden.shape[1])))


def _copy(mlp: nn.Sequential) -> nn.Sequential:
    copied = nn.Sequential(
        *(nn.Linear(m.in_features, m.out_features) if isinstance(m, nn.Linear) else nn.ReLU() for m in mlp)
    )
    copied.load_state_dict(mlp.state_dict())
    return copied


class ReferenceRowWiseAdagrad:
    """Dense gradients; rows without a gradient stay as they are."""

    def __init__(self, weights, lr):
        self.weights, self.lr = weights, lr
        self.moments = [torch.zeros(len(w)) for w in weights]

    def step(self):
        for w, v in zip(self.weights, self.moments, strict=True):
            v += w.grad.square().mean(1)
            touched = w.grad.any(1)
            w.data[touched] -= self.lr * w.grad[touched] / (v[touched].sqrt() + 1e-8)[:, None]
            w.grad = None


def batches(count: int, rows: Sequence[int] = ROWS):
    """Skewed ids whose values carry signal, so that losses fall and differences would show."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = {f"C{i}": (torch.rand(BATCH, generator=draw).pow(3) * r).long() for i, r in enumerate(rows)}
        ids["list"] = [
            torch.randint(0, rows[2], (int(n),), generator=draw).tolist()
            for n in torch.randint(0, 40, (BATCH,), generator=draw)
        ]
        dense = torch.randn(BATCH, DENSE, generator=draw)
        logit = (ids["C1"] % 3 - 1) + (ids["C3"] % 5 - 2) * 0.5 + dense[:, 0]
        labels = (torch.rand(BATCH, generator=draw) < logit.sigmoid()).float()[:, None]
        yield Batch(sparse=Jagged.from_dict(ids), dense=dense, labels=labels)


def train(model: nn.Module, optimizers, steps: int = 200, rows: Sequence[int] = ROWS) -> list[float]:
    losses = []
    for batch in batches(steps, rows):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def dense_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For the MLPs."""
    parameters = [p for name, p in model.named_parameters() if name.startswith(("bottom", "top"))]
    return torch.optim.SGD(parameters, lr=0.05)


def make(rows: Sequence[int] = ROWS) -> DLRM:
    torch.manual_seed(0)
    tables = [Table(f"t{i}", rows=r, dim=DIM) for i, r in enumerate(rows)]
    return DLRM(tables, FEATURES, DENSE, bottom=(32, DIM), top=(64, 32, 1))


@pytest.mark.parametrize("sparse", ["sgd", "rowwise_adagrad"])
def test_losses_agree_to_1e_5_over_200_steps(sparse):
    model = make()
    plain = PlainDLRM(model)
    weights = [bag.weight for bag in plain.bags.values()]
    if sparse == "sgd":
        ours, theirs = SGD(model, lr=0.5), torch.optim.SGD(weights, lr=0.5)
    else:
        ours, theirs = RowWiseAdagrad(model, lr=0.05), ReferenceRowWiseAdagrad(weights, lr=0.05)
    got = train(model, [dense_sgd(model), ours])
    expected = train(plain, [dense_sgd(plain), theirs])
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= 1e-5
    assert sum(got[-20:]) < sum(got[:20])
    for name, bag in plain.bags.items():
        torch.testing.assert_close(model.embeddings.weight(name), bag.weight.detach(), rtol=1e-3, atol=1e-5)


FEW = (2, 3, 4, 5)
"""Rows of tables that every batch touches wholly."""

EVERYWHERE: dict[str, tuple[Callable[[DLRM], SparseOptimizer], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "adagrad": (lambda m: Adagrad(m, lr=0.05), lambda w: torch.optim.Adagrad(w, lr=0.05)),
    "adagrad_from_0.1": (
        lambda m: Adagrad(m, lr=0.05, initial_accumulator=0.1, eps=1e-3),
        lambda w: torch.optim.Adagrad(w, lr=0.05, initial_accumulator_value=0.1, eps=1e-3),
    ),
    "sgd": (lambda m: SGD(m, lr=0.2), lambda w: torch.optim.SGD(w, lr=0.2)),
}
"""Optimizers that do nothing where the gradient is 0, so that dense PyTorch agrees in any batch."""

LAZY = {
    "momentum": (
        lambda m: SGD(m, lr=0.1, momentum=0.9),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9),
    ),
    "momentum_and_decay": (
        lambda m: SGD(m, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adam": (
        lambda m: Adam(m, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
        lambda w: torch.optim.Adam(w, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    ),
    "adam_with_l2": (
        lambda m: Adam(m, lr=0.01, eps=1e-6, weight_decay=0.1),
        lambda w: torch.optim.Adam(w, lr=0.01, eps=1e-6, weight_decay=0.1),
    ),
    "adamw": (
        lambda m: AdamW(m, lr=0.01, eps=1e-6, weight_decay=0.5),
        lambda w: torch.optim.AdamW(w, lr=0.01, eps=1e-6, weight_decay=0.5),
    ),
}
"""Optimizers that move rows without a gradient, too, unless they are lazy: alike where a batch touches all rows."""


@pytest.mark.parametrize(
    ("rows", "ours", "theirs"),
    [*((ROWS, *pair) for pair in EVERYWHERE.values()), *((FEW, *pair) for pair in LAZY.values())],
    ids=[*EVERYWHERE, *LAZY],
)
def test_optimizers_agree_with_those_of_torch(rows, ours, theirs):
    if rows is FEW:
        ids = [batch.sparse[f"C{i}"].values for batch in batches(12, FEW) for i in range(len(FEW))]
        assert [len(values.unique()) for values in ids] == [*FEW] * 12
    model = make(rows)
    plain = PlainDLRM(model)
    got = train(model, [dense_sgd(model), ours(model)], steps=12, rows=rows)
    expected = train(
        plain, [dense_sgd(plain), theirs([bag.weight for bag in plain.bags.values()])], steps=12, rows=rows
    )
    assert got == pytest.approx(expected, abs=1e-5)
    for name, bag in plain.bags.items():
        weight = model.embeddings.weight(name)
        torch.testing.assert_close(weight, bag.weight.detach(), rtol=1e-4, atol=1e-5)
        assert not torch.equal(weight, make(rows).embeddings.weight(name))


class ReferenceLazyAdam:
    """Sparse gradients, as `torch.optim.SparseAdam`, but ε beside the corrected root, as in `torch.optim.Adam`."""

    def __init__(self, weights, lr, betas, eps):
        self.weights, self.lr, self.betas, self.eps, self.t = weights, lr, betas, eps, 0
        self.moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]

    def step(self):
        self.t += 1
        for w, moments in zip(self.weights, self.moments, strict=True):
            grad = w.grad.coalesce()
            rows, means = grad.indices()[0], []
            for moment, beta, g in zip(moments, self.betas, (grad.values(), grad.values().square()), strict=True):
                moment[rows] = beta * moment[rows] + (1 - beta) * g
                means.append(moment[rows] / (1 - beta**self.t))
            w.data[rows] -= self.lr * means[0] / (means[1].sqrt() + self.eps)
            w.grad = None


def test_adam_is_lazy_where_a_batch_does_not_touch_all_rows():
    model = make()
    plain = PlainDLRM(model, sparse=True)
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3}
    theirs = ReferenceLazyAdam([bag.weight for bag in plain.bags.values()], **options)
    got = train(model, [dense_sgd(model), Adam(model, **options)], steps=12)
    assert got == pytest.approx(train(plain, [dense_sgd(plain), theirs], steps=12), abs=1e-5)
    untouched = 0
    for name, bag in plain.bags.items():
        torch.testing.assert_close(model.embeddings.weight(name), bag.weight.detach(), rtol=1e-4, atol=1e-5)
        untouched += int((model.embeddings.weight(name) == make().embeddings.weight(name)).all(1).sum())
    assert untouched > 1000


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: RowWiseAdagrad(m, lr=0.05),
        lambda m: Adam(m, lr=0.01, eps=1e-6),
        lambda m: SGD(m, lr=0.1, momentum=0.9),
    ],
    ids=["rowwise_adagrad", "adam", "momentum"],
)
def test_micro_batches_add_up_to_one_large_batch(optimizer, parts):
    whole, cut = make(), make()
    optimizers = [[dense_sgd(model), optimizer(model)] for model in (whole, cut)]
    for batch in batches(5):
        for model, pieces in ((whole, [torch.arange(BATCH)]), (cut, torch.arange(BATCH).chunk(parts))):
            for piece in pieces:
                part = batch.take(piece)
                logits = model(part)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, part.labels, reduction="sum") / BATCH
                loss.backward()
        for both in optimizers:
            for one in both:
                one.step()
                one.zero_grad()
    for name in whole.embeddings.tables:
        torch.testing.assert_close(cut.embeddings.weight(name), whole.embeddings.weight(name), rtol=1e-4, atol=1e-5)
    for a, b in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
