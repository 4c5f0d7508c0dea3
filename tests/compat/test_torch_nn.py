"""Protects: a model whose embeddings are swapped computes, trains, saves and loads what torch's own do."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.compat import Embedding, EmbeddingBag
from hotbed.errors import BatchError, OptimizerError, SpecError
from tests.ranks import Ranks

ROWS, DIM = 30, 32


class Net(nn.Module):
    """Two embeddings that share a weight, bags of every kind, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.friend = nn.Embedding(ROWS, DIM)
        self.friend.weight = self.user.weight
        self.bags = nn.ModuleDict(
            {
                "sum": nn.EmbeddingBag(ROWS, DIM, mode="sum"),
                "mean": nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True, padding_idx=-1),
                "max": nn.EmbeddingBag(ROWS, DIM, mode="max", padding_idx=2),
            }
        )
        self.short = nn.Embedding(ROWS, DIM, max_norm=1.0)
        self.top = nn.Linear(DIM, 1)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        vectors = self.user(x["user"]).sum(1) + self.friend(x["friend"]) + self.short(x["short"])
        vectors = vectors + self.bags["sum"](x["ids"], x["offsets"][:-1], per_sample_weights=x["weights"])
        vectors = vectors + self.bags["mean"](x["ids"], x["offsets"]) + self.bags["max"](x["fixed"])
        return self.top(vectors)


def net() -> Any:
    return Net()


def batch(seed: int, samples: int = 7, dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, ROWS, shape, generator=g, dtype=dtype)

    lengths = torch.randint(0, 4, (samples,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    count = int(lengths.sum())
    return {
        "user": ids(samples, 3) % 5,
        "friend": ids(samples),
        "short": ids(samples),
        "ids": ids(count),
        "offsets": offsets,
        "weights": torch.rand(count, generator=g),
        "fixed": ids(samples, 3) % 4,
    }


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], batches: list[dict[str, Tensor]]) -> list[Tensor]:
    found = []
    for x in batches:
        logits = model(x)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (logits - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(logits.detach())
    return found


def optimizers_of(model: nn.Module, lr: float = 0.005) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=lr), hb.optim.SGD(model, lr=lr)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_trains_as_torch_does(dtype: torch.dtype) -> None:
    torchs, ours = net(), net()
    assert hb.swap_embeddings(ours) is ours
    assert isinstance(ours.user, Embedding) and isinstance(ours.bags["sum"], EmbeddingBag)
    assert not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in ours.modules())
    assert [name for name, _ in ours.named_parameters()] == ["top.weight", "top.bias"]
    batches = [batch(seed, dtype=dtype) for seed in range(12)]
    batches.insert(3, batch(99, samples=0, dtype=dtype) if dtype == torch.int64 else batch(99, 1, dtype))
    theirs = train(torchs, [torch.optim.SGD(torchs.parameters(), lr=0.005)], batches[:3] + batches[4:])
    found = train(ours, optimizers_of(ours), batches[:3] + batches[4:])
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    kept = {
        k: v for k, v in torchs.state_dict().items() if not k.startswith("short")
    }  # torch's is scaled when looked up
    torch.testing.assert_close({k: ours.state_dict()[k] for k in kept}, kept, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(["sum", "mean", "max"]),
    bags=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5),
    padding=st.sampled_from([None, 0, 3, -1]),
    last=st.booleans(),
    frozen=st.booleans(),
)
def test_bags_of_any_ids(mode: Any, bags: list[list[int]], padding: int | None, last: bool, frozen: bool) -> None:
    torch.manual_seed(1)
    theirs = nn.EmbeddingBag(6, 4, mode=mode, padding_idx=padding, include_last_offset=last)
    theirs.weight.requires_grad_(not frozen)
    before = theirs.weight.detach().clone()
    ours = hb.swap_embeddings(copy.deepcopy(theirs))
    ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
    starts = torch.tensor([0, *map(len, bags)]).cumsum(0)
    offsets = starts if last else starts[:-1]
    expected, found = theirs(ids, offsets), ours(ids, offsets)
    torch.testing.assert_close(found, expected)
    if frozen:
        assert not found.requires_grad
        return
    factor = torch.randn_like(expected)
    (expected * factor).sum().backward()
    optimizer = hb.optim.SGD(ours, lr=1.0)
    (found * factor).sum().backward()
    optimizer.step()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(ours.weight, before - theirs.weight.grad)


def test_weights_of_ids_get_gradients() -> None:
    theirs = nn.EmbeddingBag(6, 4, mode="sum")
    ours = hb.swap_embeddings(copy.deepcopy(theirs))
    ids, grads = torch.tensor([[1, 2], [5, 5]]), []
    for module in (theirs, ours):
        weights = torch.full((2, 2), 0.5, requires_grad=True)
        module(ids, per_sample_weights=weights).square().sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_states_are_torchs_both_ways() -> None:
    torchs, ours, back = net(), net(), net()
    hb.swap_embeddings(ours)
    train(torchs, [torch.optim.SGD(torchs.parameters(), lr=0.005)], [batch(1)])
    ours.load_state_dict(torchs.state_dict())
    assert list(ours.state_dict()) == list(torchs.state_dict())
    back.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(batch(2)), ours.eval()(batch(2)))
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    copies = [copy.deepcopy(ours), torch.load(saved, weights_only=False)]
    for other in copies:
        assert torch.equal(other(batch(2)), ours(batch(2)))
        train(other.train(), optimizers_of(other), [batch(3)])
        assert not torch.equal(other.user.weight, ours.user.weight)


def test_lookups_have_the_dtype_of_the_weight_also_under_autocast() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = nn.Embedding(6, 4, dtype=dtype)
        ours = hb.swap_embeddings(copy.deepcopy(theirs))
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(torch.tensor([[1], [2]])).dtype == dtype
        assert torch.equal(ours(torch.tensor([3, 1])), theirs(torch.tensor([3, 1])))


def test_shapes_of_ids() -> None:
    theirs = nn.Embedding(6, 4)
    ours = hb.swap_embeddings(copy.deepcopy(theirs))
    for ids in (torch.tensor(3), torch.zeros(0, 5, dtype=torch.int64), torch.ones(2, 1, 3, dtype=torch.int32)):
        assert torch.equal(ours(ids), theirs(ids))


def test_rows_longer_than_max_norm_are_scaled_down_when_swapped_loaded_and_updated() -> None:
    model: Any = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5))
    hb.swap_embeddings(model)
    assert float(model[0].weight.detach().norm(dim=1).max()) <= 0.5 + 1e-6
    model.load_state_dict({"0.weight": torch.full((6, 4), 3.0)})
    assert float(model[0].weight.detach().norm(dim=1).max()) <= 0.5 + 1e-6
    optimizer = hb.optim.SGD(model, lr=10.0, max_norm=0.7)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert float(model[0].weight.detach()[1].norm()) == pytest.approx(0.5)


def test_a_module_at_two_places_stays_one() -> None:
    shared = nn.Embedding(6, 4)
    model: Any = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    hb.swap_embeddings(model)
    assert model["a"] is model["b"][0] and isinstance(model["a"], Embedding)


def test_what_is_skipped_stays() -> None:
    model: Any = nn.ModuleDict(
        {"big": nn.Embedding(6, 4), "small_a": nn.Embedding(6, 4), "small_b": nn.Embedding(6, 4)}
    )
    hb.swap_embeddings(model, skip=["small_*"])
    assert isinstance(model["big"], Embedding) and isinstance(model["small_a"], nn.Embedding)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_of_torch_alone_is_refused_before_its_first_step(closure: bool) -> None:
    model = hb.swap_embeddings(net())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss() -> Any:
        found = model(batch(1)).square().mean()
        found.backward()
        return found

    with pytest.raises(
        OptimizerError, match=r"got Adam(?s:.*)tables = hotbed.optim.Adam\(model, lr=0.01\)\n    tables.s"
    ):
        optimizer.step(loss) if closure else optimizer.step(loss() and None)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    hb.optim.Adam(model, lr=0.01).in_backward()
    optimizer.step(loss)
    assert not torch.equal(model.state_dict()["user.weight"], before["user.weight"])


def moved(model: Any, backward: Callable[[Tensor], Tensor] = torch.sum) -> bool:
    """Say whether a backward pass trains a table."""
    before = model.weight.detach().clone()
    backward(model(torch.tensor([1, 2]))).backward()
    return not torch.equal(before, model.weight)


def test_tables_keep_an_optimizer_that_steps_in_backward() -> None:
    model = hb.swap_embeddings(nn.Embedding(6, 4))
    hb.optim.SGD(model, lr=0.1).in_backward()
    gc.collect()
    assert moved(model)
    copied = copy.deepcopy(model)
    assert not moved(copied) and moved(model)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("out of memory")


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    """The rows that it reached are not trained by what it left, and the next one steps."""
    model: Any = hb.swap_embeddings(nn.Embedding(6, 4))
    hb.optim.SGD(model, lr=1.0).in_backward()
    before = model.weight.detach().clone()
    factor = Fails.apply(torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="out of memory"):
        (model(torch.tensor([3])) * factor).sum().backward()
    model(torch.tensor([1])).sum().backward()
    torch.testing.assert_close(before - model.weight, torch.tensor([0.0, 1, 0, 0, 0, 0])[:, None].expand(6, 4))


def test_rows_as_an_output_layer_are_refused_in_backward() -> None:
    model: Any = hb.swap_embeddings(nn.ModuleDict({"film": nn.Embedding(6, 4)}))
    scores = model["film"](torch.tensor([1])) @ model["film"].weight.T
    with pytest.raises(SpecError, match=r"'film'.*backward.*skip=\['film'\]"):
        scores.sum().backward()
    with torch.no_grad():
        assert not model["film"].weight.requires_grad


def test_rows_that_distribute_makes_are_within_max_norm() -> None:
    model: Any = hb.swap_embeddings(nn.ModuleList([nn.Embedding(50, 16, max_norm=1.0, device="meta")]))
    assert float(cast(Any, hb.distribute(model)).module[0].weight.detach().norm(dim=1).max()) <= 1.0


class Doubled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def tied() -> nn.Module:
    model: Any = nn.ModuleDict({"in": nn.Embedding(6, 4), "out": nn.Linear(4, 6)})
    model["out"].weight = model["in"].weight
    return model


class Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.scale = nn.Parameter(torch.ones(()))


class Named(nn.Embedding):
    def names(self) -> list[str]:
        return []


def hooked_weight() -> nn.Module:
    model = nn.Embedding(6, 4)
    model.weight.register_hook(torch.zeros_like)
    return model


def hooked() -> nn.Module:
    model: Any = nn.Embedding(6, 4)
    model.register_forward_hook(print)
    return model


def limits_differ() -> nn.Module:
    model: Any = nn.ModuleList([nn.Embedding(6, 4, max_norm=1.0), nn.Embedding(6, 4)])
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no nn.Embedding or nn.EmbeddingBag to replace$"),
        (tied, r"the weight of 'in' is also 'out.weight', .*skip=\['in'\]"),
        (lambda: Doubled(6, 4), r"Doubled '' has its own forward.*skip=\[''\]"),
        (hooked, "Embedding '' has hooks, which would be lost"),
        (hooked_weight, "Embedding '' has hooks, which would be lost"),
        (Scaled, "Scaled '' has its own scale"),
        (lambda: Named(6, 4), "Named '' has its own names"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Embedding(6, 4)), "has a parametrization or no weight"),
        (lambda: nn.Embedding(6, 4, scale_grad_by_freq=True), "has scale_grad_by_freq"),
        (lambda: nn.Embedding(6, 4, max_norm=1.0, norm_type=1.0), "norm_type 1.0, expected 2"),
        (lambda: nn.Embedding(6, 4, dtype=torch.float64), "float64, expected float32"),
        (lambda: nn.Embedding(6, 2000), "2,000 columns, expected at most 1,024"),
        (limits_differ, "'0', '1': got"),
    ],
)
def test_what_cannot_be_swapped_says_why_and_changes_nothing(make: Callable[[], nn.Module], message: str) -> None:
    model: Any = nn.Sequential(nn.Embedding(5, 4), make()) if message.startswith("the weight") else make()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(SpecError, match=message.replace("'in'", "'1.in'").replace("'out.", "'1.out.")):
        hb.swap_embeddings(model)
    assert [type(m) for m in model.modules()] == kinds


def test_a_name_to_skip_that_does_not_exist() -> None:
    with pytest.raises(SpecError, match=r"'usr'.*did you mean 'user'\?"):
        hb.swap_embeddings(net(), skip=["usr"])
    with pytest.raises(SpecError, match=r"to replace.*skip.*: user"):
        hb.swap_embeddings(nn.ModuleDict({"user": nn.Embedding(6, 4)}), skip=["user"])


IDS = torch.tensor([[1, 2]])


@pytest.mark.parametrize(
    ("mode", "args", "message"),
    [
        ("sum", (IDS[0],), r"ids: got int64 \[2\].*expected \[B, k\]"),
        ("sum", (IDS, torch.tensor([0])), r"ids \[1, 2\]"),
        ("sum", (IDS, None, torch.ones(2)), r"got shape \[2\], expected the ids' shape \[1, 2\]"),
        ("mean", (IDS, None, torch.ones(1, 2)), "got mode 'mean', expected 'sum'"),
        ("sum", (torch.tensor([[1, 6]]),), "6"),
        ("sum", (torch.tensor([[1.0]]),), "int32 or int64"),
    ],
)
def test_calls_that_cannot_be(mode: Any, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        hb.swap_embeddings(nn.EmbeddingBag(6, 4, mode=mode))(*args)


def trained_on_ranks(group: ProcessGroup | None, scheme: str, meta: bool) -> dict[str, Tensor]:
    """Train a swapped model on a rank's samples; the loss of ranks together is the mean over the batch."""
    with torch.device("meta" if meta else "cpu"):
        model = net()
    model = hb.swap_embeddings(model)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    model = hb.distribute(model, scheme, device="cpu")
    if meta:
        whole = net()
        model.load_state_dict(whole.state_dict())
    batches = []
    for seed in range(4):
        x = batch(seed, samples=8)
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        lengths = x["offsets"].diff()
        owner = torch.arange(8).repeat_interleave(lengths)
        here = (owner >= mine.start) & (owner < mine.stop)
        part = {name: x[name][mine] for name in ("user", "friend", "short", "fixed")}
        part |= {"ids": x["ids"][here], "weights": x["weights"][here]}
        part["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[mine].cumsum(0)])
        batches.append(part)
    train(model, optimizers_of(model), batches)
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize(("scheme", "meta"), [("row", False), ("table", True), ("column", False)])
def test_ranks_train_the_model_of_one(ranks: Ranks, scheme: str, meta: bool) -> None:
    alone = trained_on_ranks(None, scheme, False)
    for state in ranks.run(4, trained_on_ranks, scheme, meta):
        torch.testing.assert_close(state, alone, rtol=1e-5, atol=1e-5)


def test_saves_and_goes_on(tmp_path: Any) -> None:
    first = hb.swap_embeddings(net())
    optimizers = optimizers_of(first)
    train(first, optimizers, [batch(1), batch(2)])
    hb.save_checkpoint(tmp_path / "c", {"model": first, "tables": optimizers[1]})
    second = hb.swap_embeddings(net())
    again = optimizers_of(second)
    hb.load_checkpoint(tmp_path / "c", {"model": second, "tables": again[1]})
    for model, own in ((first, optimizers), (second, again)):
        train(model, own, [batch(3)])
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
