"""Protects: what TorchRec's own tests say of its collections holds for those of the same name here."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.compat import torchrec
from hotbed.compat.torchrec import (
    CombinedOptimizer,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    KeyedTensor,
    PoolingType,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from hotbed.errors import BatchError, OptimizerError, SpecError
from tests.ranks import Ranks


def config(name: str, dim: int, features: list[str], **options: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=10, feature_names=features, **options)


def rows(collection: EmbeddingBagCollection | EmbeddingCollection, table: str) -> Tensor:
    """Read a table where TorchRec has it."""
    views: Any = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    return views[table].weight.detach()


def two_features(keys: tuple[str, ...] = ("f1", "f2"), weights: Tensor | None = None) -> KeyedJaggedTensor:
    """Of three samples: ``f1`` [[0, 1], [], [2]], ``f2`` [[3], [4], [5, 6, 7]]."""
    return KeyedJaggedTensor.from_offsets_sync(
        list(keys), torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8]), weights
    )


def test_unweighted() -> None:
    ebc = EmbeddingBagCollection(
        [
            config("t1", 3, ["f1"], init_fn=partial(nn.init.normal_, mean=0.0, std=1.5)),
            config("t2", 4, ["f2"], init_fn=partial(nn.init.uniform_, a=-0.036, b=0.036), pooling=PoolingType.MEAN),
        ]
    )
    pooled = ebc(two_features())
    assert pooled.values().shape == (3, 7)
    assert pooled.keys() == ["f1", "f2"] and pooled.offset_per_key() == [0, 3, 7]
    t1, t2 = (rows(ebc, name) for name in ("t1", "t2"))
    torch.testing.assert_close(pooled["f1"], torch.stack([t1[0] + t1[1], torch.zeros(3), t1[2]]))
    torch.testing.assert_close(pooled["f2"], torch.stack([t2[3], t2[4], t2[5:8].mean(0)]))
    assert float(t1.abs().max()) > 1.5 > 0.036 >= float(t2.abs().max())
    assert float(rows(EmbeddingBagCollection([config("t", 4, [])]), "t").abs().max()) <= 0.5
    whole = EmbeddingBagCollection(
        [config("t", 4, [], data_type=DataType.INT8, init_fn=partial(nn.init.constant_, val=3.0))]
    )
    assert torch.equal(rows(whole, "t"), torch.full((10, 4), 3.0))
    assert ebc.embedding_bag_configs()[1].num_features() == 1 and not ebc.is_weighted()


def test_shared_tables() -> None:
    ebc = EmbeddingBagCollection([config("t1", 3, ["f1", "f2"])])
    pooled = ebc(two_features())
    assert pooled.values().shape == (3, 6) and pooled.offset_per_key() == [0, 3, 6]
    torch.testing.assert_close(pooled["f2"][0], rows(ebc, "t1")[3])


def test_shared_features() -> None:
    ebc = EmbeddingBagCollection([config("t1", 3, ["f1"]), config("t2", 4, ["f1"])])
    batch = KeyedJaggedTensor.from_offsets_sync(["f1"], torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8]))
    pooled = ebc(batch)
    assert pooled.keys() == ["f1@t1", "f1@t2"] and pooled.values().shape == (6, 7)
    torch.testing.assert_close(pooled["f1@t2"][2], rows(ebc, "t2")[2])


def test_weighted_and_the_order_of_keys() -> None:
    ebc = EmbeddingBagCollection([config("t1", 3, ["f1", "f3"]), config("t2", 4, ["f2"])], is_weighted=True)
    weights = torch.tensor([0.1, 0.2, 0.4, 0.5, 0.4, 0.3, 0.2, 0.9, 0.1, 0.3, 0.4, 0.7])
    values = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 1, 3, 4, 7])
    batch = KeyedJaggedTensor(["f1", "f3", "f2"], values, weights, offsets=torch.arange(0, 14, 2))
    pooled = ebc(batch)
    assert pooled.keys() == ["f1", "f3", "f2"] and pooled.offset_per_key() == [0, 3, 6, 10]
    t1 = rows(ebc, "t1")
    torch.testing.assert_close(pooled["f3"][0], 0.4 * t1[4] + 0.3 * t1[3])
    assert torch.equal(ebc(batch.permute([2, 0, 1])).values(), pooled.values())
    with pytest.raises(BatchError, match="got no weights, expected one per id"):
        ebc(KeyedJaggedTensor(["f1", "f3", "f2"], values, offsets=torch.arange(0, 14, 2)))
    plain = EmbeddingBagCollection([config("t1", 3, ["f1"])])
    torch.testing.assert_close(plain(batch)["f1"][0], rows(plain, "t1")[1:3].sum(0))
    shared = EmbeddingBagCollection([config("t1", 3, ["f1"]), config("t2", 3, ["f1"])], is_weighted=True)
    torch.testing.assert_close(shared(batch)["f1@t2"][0], rows(shared, "t2")[1:3].T @ weights[:2])


def test_weighted_means_are_divided_by_the_sum_of_weights(ranks: Ranks) -> None:
    weights = torch.tensor([1.0, 3.0, 2.0, 0.5, 0.0, 1.0, 1.0, 2.0])
    for found in (weighted_mean(None, weights), *ranks.run(3, weighted_mean, weights)):
        # Rows 0 to 7 are 0 to 7, and the bag of id 4 has the weight 0. TorchRec 1.8, sharded by rows, returns these.
        expected = torch.tensor([[0.75, 3.0], [0.0, 0.0], [2.0, (5 + 6 + 2 * 7) / 4]])
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def weighted_mean(group: ProcessGroup | None, weights: Tensor) -> Tensor:
    """Look up two features of one table, with weights that get a gradient."""
    fill = partial(nn.init.constant_, val=0.0)
    tables = [EmbeddingBagConfig(10, 1, "t", feature_names=["f1", "f2"], pooling=PoolingType.MEAN, init_fn=fill)]
    collection = EmbeddingBagCollection(tables, is_weighted=True)
    collection.load_state_dict({"embedding_bags.t.weight": torch.arange(10.0)[:, None]})
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 1.0})
    model = DistributedModelParallel(collection, plan="row")
    own = weights.clone().requires_grad_()
    found = model(two_features(weights=own)).values()
    found.sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad[:3], torch.tensor([0.0, 0.25, 1.0]), rtol=2e-6, atol=2e-6)
    moved = torch.arange(3.0) - model.state_dict()["embedding_bags.t.weight"][:3, 0]
    torch.testing.assert_close(moved, torch.tensor([0.25, 0.75, 1.0]), rtol=2e-6, atol=2e-6)
    return found.detach()


def test_names_of_tables_are_their_own() -> None:
    with pytest.raises(ValueError, match="Duplicate table name t1"):
        EmbeddingBagCollection([config("t1", 4, ["f1"]), config("t1", 4, ["f2"])])
    with pytest.raises(ValueError, match="Duplicate table name t1"):
        EmbeddingCollection([EmbeddingConfig(10, 4, "t1"), EmbeddingConfig(10, 4, "t1")])
    with pytest.raises(ValueError, match=r"embedding_dim.*got \[3, 4\]"):
        EmbeddingCollection([EmbeddingConfig(10, 3, "t1"), EmbeddingConfig(10, 4, "t2")])


def test_devices() -> None:
    meta = torch.device("meta")
    ebc = EmbeddingBagCollection([config("t1", 3, ["f1"])], device=meta)
    assert ebc.device == meta
    with meta:
        assert EmbeddingBagCollection([config("t1", 3, ["f1"])]).device == meta
    assert EmbeddingBagCollection([config("t1", 3, ["f1"])]).device == torch.device("cpu")
    model = DistributedModelParallel(ebc, device="cpu")
    assert float(rows(ebc, "t1").abs().max()) <= 3**-0.5
    assert model.state_dict().keys() == {"embedding_bags.t1.weight"}


def test_vectors_that_are_not_pooled() -> None:
    tables = [
        EmbeddingConfig(10, 5, "t1", feature_names=["f1", "f2"]),
        EmbeddingConfig(10, 5, "t2", feature_names=["f2"]),
    ]
    ec = EmbeddingCollection(tables, need_indices=True)
    batch = KeyedJaggedTensor.from_offsets_sync(["f1", "f2"], torch.arange(4), torch.tensor([0, 2, 3, 3, 4]))
    found = ec(batch)
    assert list(found) == ["f1", "f2@t1", "f2@t2"] and ec.embedding_names_by_table() == [["f1", "f2@t1"], ["f2@t2"]]
    torch.testing.assert_close(found["f1"].values(), rows(ec, "t1")[:3])
    torch.testing.assert_close(found["f2@t2"].values(), rows(ec, "t2")[3:4])
    assert found["f1"].weights().tolist() == [0, 1, 2] and found["f2@t1"].lengths().tolist() == [0, 1]
    assert EmbeddingCollection(tables)(batch)["f1"].weights_or_none() is None
    assert ec.embedding_dim() == 5 and ec.need_indices() and ec.embedding_configs() == tables


def test_states_have_torchrecs_names_both_ways() -> None:
    first, second = (EmbeddingBagCollection([config("t1", 3, ["f1"]), config("t2", 4, ["f2"])]) for _ in range(2))
    state = {name: torch.randn_like(t) for name, t in first.state_dict().items()}
    assert list(state) == ["embedding_bags.t1.weight", "embedding_bags.t2.weight"]
    second.load_state_dict(state)
    torch.testing.assert_close(dict(second.state_dict()), state)
    copied = copy.deepcopy(second)
    assert torch.equal(copied(two_features()).values(), second(two_features()).values())


def initial(group: ProcessGroup | None, device: str, plan: str, seed: int) -> dict[str, Tensor]:
    """Return the initial tables of a model whose ranks have different seeds."""
    torch.manual_seed(seed + (0 if group is None else group.rank()))
    tables = [config("t1", 32, ["f1"]), config("t2", 32, ["f2"], data_type=DataType.BF16)]
    model = DistributedModelParallel(EmbeddingBagCollection(tables, device=device), device="cpu", plan=plan)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_torchs_seed_decides_initial_tables(ranks: Ranks) -> None:
    first, again, other = (initial(None, "meta", "table", seed) for seed in (1, 1, 2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first["embedding_bags.t1.weight"], other["embedding_bags.t1.weight"])
    torch.testing.assert_close(initial(None, "cpu", "table", 1), first, rtol=0, atol=0)
    for device in ("meta", "cpu"):
        for plan in ("table", "row", "column", "dp"):
            for found in ranks.run(3, initial, device, plan, 1):
                torch.testing.assert_close(found, first, rtol=0, atol=0)


def test_collections_of_equal_names_start_differently() -> None:
    one, two = (EmbeddingBagCollection([config("t", 4, ["f"])]) for _ in range(2))
    assert not torch.equal(rows(one, "t"), rows(two, "t"))
    with torch.device("meta"):
        assert EmbeddingBagCollection([config("t", 4, ["f"])]).rows.seed != one.rows.seed


def test_keys_are_reported_by_torchrecs_names() -> None:
    model = nn.ModuleDict({"e": EmbeddingBagCollection([config("t1", 3, ["f1"]), config("t2", 4, ["f2"])])})
    state = dict(model.state_dict())
    state["e.embedding_bags.t3.weight"] = state.pop("e.embedding_bags.t1.weight")
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["e.embedding_bags.t1.weight"]
    assert found.unexpected_keys == ["e.embedding_bags.t3.weight"]


def test_collections_may_have_no_tables() -> None:
    ebc, ec = EmbeddingBagCollection([], device="cpu"), EmbeddingCollection([])
    assert ebc(two_features()).values().shape == (3, 0) and ec(two_features()) == {}
    assert not ebc.state_dict() and not list(ec.parameters()) and ec.embedding_dim() == -1
    assert ebc.device == torch.device("cpu")
    model = nn.ModuleDict({"empty": ebc, "full": EmbeddingBagCollection([config("t1", 3, ["f1"])], device="meta")})
    assert list(DistributedModelParallel(model).state_dict()) == ["full.embedding_bags.t1.weight"]


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [config("t1", 32, ["f1"]), config("t2", 32, ["f2"], data_type=DataType.FP32)]
        self.ebc = EmbeddingBagCollection(tables, device=device)
        self.over = nn.Linear(64, 1)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat(list(self.ebc(batch).to_dict().values()), dim=1))


def trained(group: ProcessGroup | None, plan: str | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train as TorchRec's users do; row-wise AdaGrad in backward, Adam after it."""
    model = Model()
    apply_optimizer_in_backward(torchrec.RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    parallel = DistributedModelParallel(model, plan=plan)
    dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    assert [name.removeprefix("module.") for name in dense] == ["over.weight", "over.bias"]
    optimizer = CombinedOptimizer(
        [parallel.fused_optimizer, KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.01))]
    )
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = (parallel(two_features(("f2", "f1")[:: 1 if step % 2 else -1])) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, {name: t.clone() for name, t in parallel.state_dict().items()}


def test_tables_are_trained_in_backward() -> None:
    losses, state = trained(None, None)
    assert losses[4] < losses[2] < losses[0]
    model = Model()
    optimizers = [torch.optim.Adam(model.over.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(model, lr=0.1)]
    for step in range(5):
        batch = two_features(("f2", "f1")[:: 1 if step % 2 else -1])
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["row", "column", "table"])
def test_ranks_train_the_model_of_one(ranks: Ranks, plan: str) -> None:
    _, alone = trained(None, None)
    for _, state in ranks.run(4, trained, plan):
        torch.testing.assert_close(state, alone, rtol=1e-5, atol=1e-6)


def test_options_of_fused_optimizers_can_be_scheduled() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.embedding_bags["t1"].parameters(), {"lr": 1.0})
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.embedding_bags["t2"].parameters(), {"lr": 2.0})
    parallel = DistributedModelParallel(model)
    assert [group["lr"] for group in parallel.fused_optimizer.param_groups] == [1.0, 2.0]
    for group in parallel.fused_optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: t.clone() for name, t in model.ebc.state_dict().items()}
    parallel(two_features()).sum().backward()
    torch.testing.assert_close(dict(model.ebc.state_dict()), before, rtol=0, atol=0)
    state = parallel.fused_optimizer.state_dict()
    parallel.fused_optimizer.load_state_dict(state)


def learns(model: Any) -> bool:
    before = rows(model.ebc, "t1").detach().clone()
    model(two_features()).sum().backward()
    return not torch.equal(before, rows(model.ebc, "t1"))


def test_copies_have_the_optimizers_that_were_applied() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 1.0})
    saved = io.BytesIO()
    torch.save(model, saved)
    assert learns(model)
    saved.seek(0)
    assert all(map(learns, [copy.deepcopy(model), torch.load(saved, weights_only=False)]))
    with pytest.raises(OptimizerError, match="'t1': got an optimizer after the first step"):
        apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 1.0})


def test_optimizers_are_torchs_to_a_schedule() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 1.0})
    parallel = DistributedModelParallel(model)
    keyed = KeyedOptimizerWrapper(dict(model.over.named_parameters()), lambda p: torch.optim.SGD(p, lr=2.0))
    optimizer = CombinedOptimizer([("tables", parallel.fused_optimizer), ("rest", keyed)])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    parallel(two_features()).sum().backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]
    assert [group["lr"] for group in (parallel.fused_optimizer.param_groups + keyed.param_groups)] == [0.5, 1.0]


def test_jagged_tensors() -> None:
    jagged = JaggedTensor.from_dense([torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])])
    assert jagged.lengths().tolist() == [2, 0, 1] and jagged.offsets().tolist() == [0, 2, 2, 3]
    assert [t.tolist() for t in jagged.to_dense()] == [[1.0, 2.0], [], [3.0]]
    assert jagged.to_padded_dense(3, -1.0).tolist() == [[1, 2, -1], [-1, -1, -1], [3, -1, -1]]
    assert jagged.to_padded_dense(1).tolist() == [[1], [0], [3]]
    padded = JaggedTensor.from_dense_lengths(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 2]))
    assert padded.values().tolist() == [1, 3, 4] and padded.to("cpu").offsets().tolist() == [0, 1, 3]


def test_keyed_jagged_tensors() -> None:
    keyed = two_features(weights=torch.rand(8))
    assert keyed.stride() == 3 and keyed.length_per_key() == [3, 5] and keyed.offset_per_key() == [0, 3, 8]
    assert (
        keyed["f2"].lengths().tolist() == [1, 1, 3] and keyed["f2"].weights().tolist() == keyed.weights()[3:].tolist()
    )
    first, second = keyed.split([1, 1])
    assert first.keys() == ["f1"] and second.values().tolist() == [3, 4, 5, 6, 7]
    for other in (KeyedJaggedTensor.concat([first, second]), keyed.to("cpu")):
        assert other.keys() == keyed.keys() and torch.equal(other.lengths(), keyed.lengths())
        assert torch.equal(other.weights(), keyed.weights()) and other.device() == torch.device("cpu")
    assert repr(keyed) == "KeyedJaggedTensor(keys=['f1', 'f2'], samples=3, ids=8)"
    weighted = KeyedJaggedTensor.from_jt_dict(
        {"a": first["f1"], "b": JaggedTensor(torch.arange(3), lengths=first.lengths())}
    )
    assert weighted.weights()[-1] == 1.0
    with pytest.raises(BatchError, match="got 'f1' 2 times, expected unique names"):
        KeyedJaggedTensor.concat([first, first])
    with pytest.raises(BatchError, match="got 3 for 2 keys and 1 samples"):
        KeyedJaggedTensor(["f", "g"], torch.arange(2), lengths=torch.tensor([1, 1, 0]))
    for make in (partial(KeyedJaggedTensor, ["f"], torch.arange(2)), partial(JaggedTensor, torch.arange(2))):
        with pytest.raises(BatchError, match="lengths and offsets: got None"):
            make()
    with pytest.raises(BatchError, match="has no weights"):
        two_features().weights()


def test_keyed_tensors() -> None:
    keyed = KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(2, 1), torch.zeros(2, 2)])
    assert keyed.values().tolist() == [[1, 0, 0], [1, 0, 0]] and keyed.length_per_key() == [1, 2]
    whole = KeyedTensor(["a", "b"], [1, 2], keyed.values())
    assert torch.equal(whole["b"], keyed["b"]) and whole.key_dim() == 1 and whole.device() == torch.device("cpu")
    ba, a = KeyedTensor.regroup([keyed], [["b", "a"], ["a"]])
    assert ba.tolist() == [[0, 0, 1], [0, 0, 1]] and a.tolist() == [[1], [1]]


class Virtual(EmbeddingBagConfig):
    use_virtual_table = True


def adam() -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper({"w": nn.Parameter(torch.ones(2))}, torch.optim.Adam)


def no_loss(model: nn.Module, **options: Any) -> object:
    return DistributedModelParallel(model, **options)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: apply_optimizer_in_backward(torch.optim.RMSprop, [], {}),
            SpecError,
            "got 'RMSp",
        ),
        (
            lambda: apply_optimizer_in_backward(torch.optim.SGD, nn.Linear(2, 3).parameters(), {}),
            SpecError,
            r"params: got a parameter \[3, 2\]",
        ),
        (
            lambda: no_loss(Model(), sharders=[1]),
            SpecError,
            "sharders: got a int",
        ),
        (lambda: no_loss(Model(), plan=1), SpecError, "plan: got a int"),
        (
            lambda: EmbeddingBagCollection([Virtual(10, 4, "t")]),
            SpecError,
            "table 't': got use_virtual_table",
        ),
        (
            lambda: EmbeddingBagCollection([config("t", 4, ["f"], pooling=PoolingType.NONE)]),
            SpecError,
            "got 'NONE', expected one of SUM, MEAN",
        ),
        (
            lambda: EmbeddingBagCollection([config("t", 4, ["f"], weight_init_min=0.0)], device="meta"),
            SpecError,
            "'t' on 'meta'",
        ),
        (lambda: CombinedOptimizer([adam(), adam()]), SpecError, "got 'w' 2 times, expected unique names"),
        (lambda: Model()(two_features(("f1", "f3"))), BatchError, "got 'f2', expected one of f1, f3"),
    ],
)
def test_what_cannot_be_says_why(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()
