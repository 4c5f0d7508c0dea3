"""The same model written in plain PyTorch, from the same initial values and on the same batches, trains alike."""

import pytest
import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.jagged import Jagged
from hotbed.nn import DLRM
from hotbed.optim import SGD, RowWiseAdagrad
from hotbed.specs import Feature, Table

ROWS = (3, 40, 500, 2000)
DIM, DENSE, BATCH = 16, 13, 64
FEATURES = [*(Feature(f"C{i}", table=f"t{i}") for i in range(4)), Feature("list", table="t2", pooling="mean")]


class PlainDLRM(nn.Module):
    """DLRM with one ``nn.EmbeddingBag`` per table; MLPs are copies of hotbed's."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
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
            vectors.append(nn.functional.embedding_bag(bags.values, weight, offsets, mode=feature.pooling))
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


def batches(count: int):
    """Skewed ids whose values carry signal, so that losses fall and differences would show."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        ids = {f"C{i}": (torch.rand(BATCH, generator=draw).pow(3) * rows).long() for i, rows in enumerate(ROWS)}
        ids["list"] = [
            torch.randint(0, 500, (int(n),), generator=draw).tolist()
            for n in torch.randint(0, 40, (BATCH,), generator=draw)
        ]
        dense = torch.randn(BATCH, DENSE, generator=draw)
        logit = (ids["C1"] % 3 - 1) + (ids["C3"] % 5 - 2) * 0.5 + dense[:, 0]
        labels = (torch.rand(BATCH, generator=draw) < logit.sigmoid()).float()[:, None]
        yield Batch(sparse=Jagged.from_dict(ids), dense=dense, labels=labels)


def train(model: nn.Module, optimizers) -> list[float]:
    losses = []
    for batch in batches(200):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sparse", ["sgd", "rowwise_adagrad"])
def test_losses_agree_to_1e_5_over_200_steps(sparse):
    torch.manual_seed(0)
    tables = [Table(f"t{i}", rows=rows, dim=DIM) for i, rows in enumerate(ROWS)]
    model = DLRM(tables, FEATURES, DENSE, bottom=(32, DIM), top=(64, 32, 1))
    plain = PlainDLRM(model)
    weights = [bag.weight for bag in plain.bags.values()]
    dense_lr = 0.05
    if sparse == "sgd":
        ours, theirs = SGD(model, lr=0.5), torch.optim.SGD(weights, lr=0.5)
    else:
        ours, theirs = RowWiseAdagrad(model, lr=0.05), ReferenceRowWiseAdagrad(weights, lr=0.05)
    mlps = [*plain.bottom.parameters(), *plain.top.parameters()]
    got = train(model, [torch.optim.SGD(model.parameters(), lr=dense_lr), ours])
    expected = train(plain, [torch.optim.SGD(mlps, lr=dense_lr), theirs])
    assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= 1e-5
    assert sum(got[-20:]) < sum(got[:20])
    for name, bag in plain.bags.items():
        torch.testing.assert_close(model.embeddings.weight(name), bag.weight.detach(), rtol=1e-3, atol=1e-5)
