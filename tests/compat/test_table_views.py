"""Protects: tables of a model that is not sharded are trained as TorchRec trains them, whatever optimizer is used."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.compat.torchrec import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from hotbed.errors import OptimizerError, SpecError
from tests.ranks import Ranks

with warnings.catch_warnings():  # torch.jit.script, which torch itself calls there, is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward as apply_by_torch

IDS = KeyedJaggedTensor(["f1", "f2"], torch.tensor([0, 1, 2, 3, 4, 5, 6, 1]), lengths=torch.tensor([2, 0, 1, 1, 1, 3]))


def config(name: str, feature: str, **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=10, feature_names=[feature], **options)


def collection(device: str = "cpu", **options: Any) -> EmbeddingBagCollection:
    tables = [config("t1", "f1"), config("t2", "f2", pooling=PoolingType.MEAN, **options)]
    return EmbeddingBagCollection(tables, device=torch.device(device))


class Model(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection | None = None) -> None:
        super().__init__()
        self.ebc = collection() if tables is None else tables
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values())


class Plain(nn.Module):
    """What TorchRec's collection is made of: an ``nn.EmbeddingBag`` per table."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=True) for mode in ("sum", "mean")]
        self.ebc = nn.ModuleDict({"embedding_bags": nn.ModuleDict({"t1": bags[0], "t2": bags[1]})})
        self.over = nn.Linear(8, 1)
        self.load_state_dict(model.state_dict())

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        bags: Any = self.ebc["embedding_bags"]
        parts = [features.to_dict()[name] for name in ("f1", "f2")]
        found = [bag(p.values(), p.offsets()) for bag, p in zip(bags.values(), parts, strict=True)]
        return self.over(torch.cat(found, dim=1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 3) -> dict[str, Tensor]:
    for _ in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        (model(IDS) - 1).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.Adam(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adagrad(params, lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_of_torch_train_tables(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = Model()
    plain = Plain(model)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    state, expected = train(model, make(model.parameters())), train(plain, make(plain.parameters()))
    torch.testing.assert_close(state, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(state["ebc.embedding_bags.t1.weight"], Plain(Model()).state_dict()["over.weight"])


def test_gradients_are_those_of_parameters() -> None:
    model = Model()
    plain = Plain(model)
    for each in (model, plain):
        each(IDS).sum().backward()
        nn.utils.clip_grad_norm_(each.parameters(), 0.01)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    (store,) = model.ebc.rows.stores()
    store.track("a checkpoint")
    model.ebc(IDS)
    assert store.changes is not None and store.changes.since is None  # so a difference to it is not saved
    with torch.no_grad():
        model.ebc.table_views()[0].weight.fill_(2.0)
    assert float(model.ebc(IDS)["f1"].detach()[0, 0]) == 4.0


def test_vectors_that_are_not_pooled_are_trained() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "t1", feature_names=["f1", "f2"])])
    (weight,) = ec.parameters()
    before = weight.detach().clone()
    optimizer = torch.optim.SGD(ec.parameters(), lr=1.0)
    found = ec(IDS)
    (found["f1"].values().sum() + found["f2"].values().sum()).backward()
    optimizer.step()
    counts = torch.tensor([1.0, 2, 1, 1, 1, 1, 1, 0, 0, 0])
    torch.testing.assert_close(ec.state_dict()["embeddings.t1.weight"], before - counts[:, None])


def test_frozen_parameters_freeze_their_tables() -> None:
    model = Model()
    model.ebc.table_views()[0].weight.requires_grad_(False)
    before = train(model, steps=0)
    state = train(model, torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1))
    assert torch.equal(state["ebc.embedding_bags.t1.weight"], before["ebc.embedding_bags.t1.weight"])
    assert not torch.equal(state["ebc.embedding_bags.t2.weight"], before["ebc.embedding_bags.t2.weight"])
    other = Model()
    apply_optimizer_in_backward(torch.optim.SGD, other.ebc.parameters(), {"lr": 0.1})
    other.ebc.table_views()[0].parameter.requires_grad = False
    before = train(other, steps=0)
    changed = {name for name, value in train(other).items() if not torch.equal(value, before[name])}
    assert changed == {"ebc.embedding_bags.t2.weight"}


def test_optimizers_of_hotbed_and_torch_share_a_collection() -> None:
    model = Model()
    plain = Plain(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.embedding_bags["t1"].parameters(), {"lr": 0.1})
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert list(rest) == ["ebc.embedding_bags.t2.weight", "over.weight", "over.bias"]
    assert list(dict(in_backward_optimizer_filter(model.named_parameters(), True))) == ["ebc.embedding_bags.t1.weight"]
    state = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(state, train(plain, torch.optim.SGD(plain.parameters(), lr=0.1)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [RowWiseAdagrad, torch.optim.Adagrad, torch.optim.Adam])
def test_torchs_function_applies_optimizers_in_backward(kind: Any) -> None:
    model = Model()
    plain = Plain(model)
    for each in (model.ebc, plain.ebc):
        apply_by_torch(kind, each.parameters(), {"lr": 0.1})
    assert [name for name, _ in in_backward_optimizer_filter(model.named_parameters())] == ["over.weight", "over.bias"]
    torch.testing.assert_close(train(model), train(plain), rtol=1e-6, atol=1e-7)


def test_torchs_function_chooses_for_a_distributed_model() -> None:
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    apply_by_torch(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(RowWiseAdagrad, other.ebc.parameters(), {"lr": 0.1})
    model, other = DistributedModelParallel(model), DistributedModelParallel(other)
    assert [g["lr"] for g in model.fused_optimizer.param_groups] == [0.1]
    torch.testing.assert_close(train(model), train(other), rtol=0, atol=0)


def test_row_wise_adagrad_has_a_rate_per_row() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 1.0], [1.0, 1.0]]))
    optimizer = RowWiseAdagrad([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.tensor([[3.0, 1.0], [0.0, 0.0]])
        optimizer.step()
    expected = 1 - 0.1 * torch.tensor([3.0, 1.0]) / 5**0.5 - 0.1 * torch.tensor([3.0, 1.0]) / 10**0.5
    torch.testing.assert_close(weight.detach(), torch.stack([expected, torch.ones(2)]))
    assert isinstance(RowWiseAdagrad(Model(), lr=0.1), hb.optim.RowWiseAdagrad)
    with pytest.raises(OptimizerError, match=r"got shape \[1\], expected \[rows, columns\]"):
        RowWiseAdagrad(Model().parameters())


def default_rate(group: ProcessGroup | None) -> tuple[bool, list[float]]:
    model = Model()
    for value in (*model.ebc.parameters(), *model.over.parameters()):
        value.data.fill_(1.0)
    expected = Plain(model)
    parallel = DistributedModelParallel(model)
    assert [n for n, _ in in_backward_optimizer_filter(parallel.named_parameters())] == ["over.weight", "over.bias"]
    state = train(parallel, steps=2)
    wanted = train(expected, torch.optim.SGD(expected.ebc.parameters(), lr=0.01), steps=2)
    return all(torch.allclose(state[n], wanted[n]) for n in wanted), [
        g["lr"] for g in parallel.fused_optimizer.param_groups
    ]


def test_distributed_tables_without_an_optimizer_are_trained_by_sgd(ranks: Ranks) -> None:
    assert default_rate(None) == (True, [0.01])
    assert ranks.run(3, default_rate) == [(True, [0.01])] * 3


def test_tables_that_torch_cannot_train_are_refused_before_the_first_step() -> None:
    model = Model(collection(data_type=DataType.BF16))
    optimizer = torch.optim.Adam(model.parameters())
    before = train(model, steps=0)
    with pytest.raises(OptimizerError, match=r"table 't2': got a bf16 table(.|\n)*apply_optimizer_in_backward\("):
        train(model, optimizer)
    torch.testing.assert_close(train(model, steps=0), before, rtol=0, atol=0)
    meta = Model(collection("meta"))
    parallel = hb.distribute(meta, device="cpu")
    with pytest.raises(OptimizerError, match=r"table 't\d', which is distributed(.|\n)*hotbed.optim.RowWiseAdagrad"):
        train(parallel)


def test_parameters_follow_their_tables() -> None:
    model = Model()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        before = other.state_dict()["ebc.embedding_bags.t1.weight"].clone()
        train(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert not torch.equal(other.state_dict()["ebc.embedding_bags.t1.weight"], before)
        assert torch.equal(model.state_dict()["ebc.embedding_bags.t1.weight"], before)
    shared = nn.ModuleDict({"a": Model(collection("meta"))})
    shared["b"] = shared["a"]
    assert all(p.numel() for name, p in hb.distribute(shared, device="cpu").named_parameters() if "over" in name)
    half = Model().half()
    assert half.ebc(IDS).values().dtype == torch.float16
    replaced = collection()
    replaced.embedding_bags["t1"]._parameters["weight"] = nn.Parameter(torch.zeros(10, 4))
    with pytest.raises(SpecError, match="'t1': got a new Parameter"):
        replaced(IDS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch, after a graph break
def test_compiled_models_train_their_tables() -> None:
    model = Model()
    plain = Plain(model)
    compiled: Any = torch.compile(model, backend="eager")
    state = train(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for name, value in expected.items():
        torch.testing.assert_close(state[f"_orig_mod.{name}"], value, rtol=1e-6, atol=1e-7)
