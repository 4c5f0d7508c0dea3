"""Protects: torch's AveragedModel averages tables like parameters, and copies of a model are models of their own."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import hotbed as hb
from hotbed.errors import SpecError
from hotbed.specs import Tier
from tests.ranks import Ranks

from .distributed_cases import PLANS, SIZE, both, loss, step_all
from .distributed_cases import Model as TwoCollections


class Scorer(nn.Module):
    """Tables of two dims, and a norm with statistics."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        tables = [hb.Table("user", 10, 4, **options), hb.Table("item", 7, 8), hb.Table("page", 5, 8)]
        self.embeddings = hb.EmbeddingCollection(tables, [hb.Feature(t.name, table=t.name) for t in tables])
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(20), nn.Linear(20, 1)

    def forward(self, ids: hb.Jagged) -> Tensor:
        return self.out(self.norm(self.embeddings(ids).concatenate()))


def ids(step: int) -> hb.Jagged:
    draw = torch.Generator().manual_seed(step)
    rows = {"user": 10, "item": 7, "page": 5}
    return hb.Jagged.from_dict({name: torch.randint(0, n, (6,), generator=draw) for name, n in rows.items()})


class Rows(nn.Module):
    """The rows of a model as parameters, which torch averages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tables = {name: t.clone() for name, t in model.state_dict().items() if t.dim() == 2}
        self.rows = nn.ParameterDict({name.replace(".", "/"): t for name, t in tables.items()})


def averaged_of(model: nn.Module) -> dict[str, Tensor]:
    return {f"rows.{name.replace('.', '/')}": t for name, t in model.state_dict().items() if t.dim() == 2}


AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "a function": {"avg_fn": lambda mean, value, count: (mean * count + value) / (count + 1)},
    "buffers, too": {"use_buffers": True},
}


@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
def test_rows_are_averaged_like_parameters(options: dict[str, Any]) -> None:
    model = Scorer()
    averaged, expected = AveragedModel(model, **options), AveragedModel(Rows(model), **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.SGD(model, lr=0.5)]
    for step in range(4):
        model(ids(step)).square().sum().backward()
        step_all(optimizers)
        averaged.update_parameters(model)
        expected.update_parameters(Rows(model))
    found = averaged_of(averaged.module)
    for name, value in expected.module.named_parameters():
        assert torch.equal(found[name], value), name
        assert not torch.equal(averaged_of(model)[name], value)
    vectors = averaged.eval().module.embeddings(ids(9))
    assert torch.equal(vectors["user"], averaged.module.embeddings.weight("user")[ids(9)["user"].values])


class Counted(AveragedModel):
    """A subclass of a user's own, as Lightning's callbacks have."""

    updates = 0

    def update_parameters(self, model: nn.Module) -> None:
        self.updates += 1
        super().update_parameters(model)


def test_a_subclass_of_ones_own_averages_tables() -> None:
    model = Scorer()
    averaged = Counted(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    assert isinstance(averaged, Counted)
    before = model.embeddings.weight("item").clone()
    for _ in range(2):
        averaged.update_parameters(model)
        model.embeddings.weight("item").add_(1)
    averaged.update_parameters(model)
    assert averaged.updates == 3
    torch.testing.assert_close(averaged.module.embeddings.weight("item"), before + 1.25)


def test_an_averaged_model_is_saved_and_loaded() -> None:
    averaged = AveragedModel(Scorer())
    averaged.module.embeddings.weight("item").fill_(3)
    other = AveragedModel(Scorer())
    other.load_state_dict(averaged.state_dict())
    assert other.module.embeddings.weight("item").eq(3).all()
    assert pickle.loads(pickle.dumps(averaged)).module.embeddings.weight("item").eq(3).all()


def test_statistics_of_batch_norm_are_those_of_averaged_rows() -> None:
    averaged = AveragedModel(Scorer())
    averaged.module.embeddings.weight("user").fill_(2)
    before = averaged.module.embeddings.weight("item").clone()
    update_bn([ids(0), ids(1)], averaged)
    assert averaged.module.norm.running_mean[:4].eq(2).all() and averaged.module.norm.running_var[:4].eq(0).all()
    assert torch.equal(averaged.module.embeddings.weight("item"), before)


def test_models_without_tables_are_left_alone() -> None:
    assert type(AveragedModel(nn.Linear(2, 2))) is AveragedModel


def test_rows_that_cannot_be_averaged_are_refused_and_the_rest_is_not() -> None:
    with pytest.raises(SpecError, match=r"got bf16 rows, expected fp32, because rounding loses small changes of"):
        AveragedModel(Scorer(dtype="bf16"))
    table = hb.Table("t", "dynamic", 4, init_bound=0.1, dynamic=hb.Dynamic(capacity_bytes=1 << 20))
    with pytest.raises(SpecError, match=r"are dynamic cannot be copied. .* AveragedModel\(model.PART\) averages"):
        AveragedModel(hb.EmbeddingCollection([table], [hb.Feature("f", table="t")]))
    model = Scorer(dtype="bf16")
    model.embeddings.freeze("user")
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    assert torch.equal(averaged.module.embeddings.weight("user"), model.embeddings.weight("user"))
    AveragedModel(Scorer(dtype="bf16").out)


def test_another_model_is_refused() -> None:
    other = nn.ModuleDict({"embeddings": hb.EmbeddingCollection([hb.Table("t", 3, 4)], [hb.Feature("f", table="t")])})
    with pytest.raises(SpecError, match="got t, expected user, item, page as in the averaged model"):
        AveragedModel(Scorer()).update_parameters(other)


def copied_over_ranks(group: dist.ProcessGroup) -> None:
    """A copy is averaged over the ranks by itself, and trains by itself."""
    model = hb.distribute(TwoCollections(), PLANS["a"], group=group)
    twin = deepcopy(model)
    for each in (model, twin):
        optimizers = both(each)
        for step in range(2):
            loss(each, step, [dist.get_rank(group)]).backward()
            step_all(optimizers)
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name
    replicated = hb.distribute(TwoCollections(), "table", hb.ParallelOptions(replicas=SIZE), group=group)
    with pytest.raises(SpecError, match="tables that have replicas cannot be copied"):
        deepcopy(replicated)


def test_a_copy_of_a_distributed_model_trains_like_it(ranks: Ranks) -> None:
    ranks.run(SIZE, copied_over_ranks)


def test_a_copy_has_rows_of_its_own() -> None:
    model = Scorer()
    optimizer = hb.optim.SGD(model, lr=0.5)
    twin = deepcopy(model)
    before = {name: t.clone() for name, t in twin.state_dict().items()}
    model(ids(0)).square().sum().backward()
    optimizer.step()
    assert all(torch.equal(twin.state_dict()[name], t) for name, t in before.items())
    again = hb.optim.SGD(twin, lr=0.5)
    twin(ids(0)).square().sum().backward()
    again.step()
    assert torch.equal(twin.embeddings.weight("item"), model.embeddings.weight("item"))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_rows_behind_a_cache_are_not_copied(tier: Tier, tmp_path: Any) -> None:
    table = hb.Table("t", 9, 4)
    plan = hb.Plan(1, (hb.Tile("t", range(9), range(4), 0, tier=tier, cache_rows=2),))
    collection = hb.EmbeddingCollection([table], [hb.Feature("f", table="t")])
    model = hb.distribute(collection, plan, memory=hb.MemoryOptions(directory=str(tmp_path)))
    with pytest.raises(SpecError, match=r"tables that are in files, or behind a cache cannot be copied"):
        deepcopy(model)
