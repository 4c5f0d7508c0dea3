"""Protects: collections that share an arena are trained as each by itself, to the bit, and by one update."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.embed.local_tables import LocalTables
from hotbed.ops.backend import launches
from hotbed.optim.table_groups import TableSelection

ROWS, DIM, TABLES = 40, 32, 5


class Net(nn.Module):
    """Bags of one dtype, and what is looked up otherwise: a sequence, another dim, a frozen table, one of max_norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList([nn.EmbeddingBag(ROWS + i, DIM, mode="sum", dtype=dtype) for i in range(TABLES)])
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", dtype=dtype)
        self.short = nn.EmbeddingBag(ROWS, DIM, mode="sum", max_norm=1.0, dtype=dtype)
        self.history = nn.Embedding(ROWS, DIM, padding_idx=0, dtype=dtype)
        self.frozen = nn.Embedding(ROWS, DIM, dtype=dtype)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.narrow = nn.EmbeddingBag(ROWS, 16, mode="sum", dtype=dtype)

    def forward(self, x: dict[str, Tensor], how: str) -> Tensor:
        found = [bag(x["ids"][:, i : i + 1]) for i, bag in enumerate(self.bags)]
        if how == "twice":
            found.append(self.bags[0](x["ids"][:, 1:3]))
        if how == "part":
            found = found[1:3]
        found += [self.mean(x["values"], x["offsets"]), self.short(x["ids"])]
        found.append(self.bags[3](x["values"], x["offsets"], per_sample_weights=x["weights"]))
        found += [self.history(x["ids"]).sum(1), self.frozen(x["ids"][:, 0])]
        rest = self.narrow(x["ids"]).float().square().sum()
        whole = torch.stack(found, 1).flatten(1) if how == "stack" else torch.cat(found, 1)
        return (whole.float().square().mean() + rest) * self.scale


def batch(seed: int, samples: int = 9) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (samples,), generator=g)
    count = int(lengths.sum())
    return {
        "ids": torch.randint(0, 7, (samples, TABLES), generator=g, dtype=torch.int32 if seed % 2 else torch.int64),
        "values": torch.randint(0, ROWS, (count,), generator=g),
        "offsets": lengths.cumsum(0) - lengths,
        "weights": torch.rand(count, generator=g),
    }


def swapped(dtype: torch.dtype = torch.float32) -> Any:
    return hb.swap_embeddings(Net(dtype))


def group_of(module: Any) -> LocalTables:
    (group,) = module.rows._groups
    assert isinstance(group, LocalTables)
    return group


def train(model: Any, optimizer: Any, hows: list[str]) -> list[Tensor]:
    losses = []
    for seed, how in enumerate(hows):
        optimizer.zero_grad()
        loss = model(batch(seed), how)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda m: hb.optim.SGD(m, lr=0.5),
    "RowWiseAdagrad": lambda m: hb.optim.RowWiseAdagrad(m, lr=0.1, max_grad_norm=0.01),
    "Adam": lambda m: hb.optim.Adam(m, lr=0.1, groups=[{"tables": ["bags.1", "mean"], "lr": 0.01}]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_tables_by_themselves(name: str, dtype: torch.dtype) -> None:
    model = swapped(dtype)
    alone = copy.deepcopy(model)
    assert group_of(model.bags[0]).is_shared and group_of(model.bags[0]).arenas == group_of(model.history).arenas
    assert not any(group_of(bag).is_shared for bag in alone.bags)
    hows = ["cat", "stack", "twice", "part", "stack", "cat"]
    of_shared, of_alone = OPTIMIZERS[name](model), OPTIMIZERS[name](alone)
    assert len(set(of_shared._updaters.values())) == 2 and len(set(of_alone._updaters.values())) == TABLES + 5
    before = {key: value.clone() for key, value in model.state_dict().items()}
    losses = train(model, of_shared, hows)
    assert losses == train(alone, of_alone, hows)
    for key, value in model.state_dict().items():
        assert torch.equal(value, alone.state_dict()[key]), key
        assert torch.equal(value, before[key]) == (key in ("frozen.weight", "scale")), key
    saved, other = of_shared.state_dict(), of_alone.state_dict()
    for i, state in saved["state"].items():
        assert all(torch.equal(state[key], other["state"][i][key]) for key in state)
    again = copy.deepcopy(alone)
    loaded = OPTIMIZERS[name](again)
    loaded.load_state_dict(saved)
    more = [train(m, o, ["cat"]) for m, o in ((model, of_shared), (again, loaded))]
    assert more[0] == more[1]


def test_a_step_is_one_update_of_each_arena() -> None:
    model = swapped()
    optimizer = hb.optim.RowWiseAdagrad(model, lr=0.1)
    x = batch(0)
    loss = torch.stack([bag(x["ids"][:, :1]) for bag in model.bags], 1).square().sum() + model.narrow(x["ids"]).sum()
    loss.backward()
    before = launches.copy()
    optimizer.step()
    done = {name: launches[name] - before[name] for name in ("cpu.occurrences", "cpu.group", "cpu.update")}
    assert done == {"cpu.occurrences": 2, "cpu.group": 2, "cpu.update": 2}


def test_a_module_that_is_copied_pickled_or_moved_takes_its_own_rows() -> None:
    model = swapped()
    optimizer = hb.optim.Adam(model, lr=0.1)
    train(model, optimizer, ["cat", "stack"])
    assert group_of(model.mean).arenas[0].store.slots > 5 * ROWS
    for other in (copy.deepcopy(model.mean), pickle.loads(pickle.dumps(model.mean))):
        assert group_of(other).arenas[0].store.slots == ROWS and not group_of(other).is_shared
        assert torch.equal(other.weight, model.mean.weight)
    unmoved = swapped()
    unmoved.load_state_dict(model.state_dict())
    of_unmoved = hb.optim.Adam(unmoved, lr=0.1)
    of_unmoved.load_state_dict(optimizer.state_dict())
    group_of(model.mean).to(torch.device("cpu"))  # as to another device
    assert group_of(model.mean).arenas[0].store.slots == ROWS and group_of(model.bags[0]).is_shared
    hows = ["stack", "twice"]
    assert train(model, optimizer, hows) == train(unmoved, of_unmoved, hows)
    torch.testing.assert_close(model.state_dict(), unmoved.state_dict(), rtol=0, atol=0)


def test_bytes_are_a_tables_own() -> None:
    model = swapped()
    assert model.mean.rows.nbytes == ROWS * DIM * 4
    hb.optim.RowWiseAdagrad(model, lr=0.1)
    assert model.mean.rows.nbytes == ROWS * (DIM + 1) * 4


def test_optimizers_over_some_tables() -> None:
    model = swapped()
    first = hb.optim.SGD(TableSelection(model, ["bags.0.rows.bags.0", "mean.rows.mean"]), lr=1.0)
    second = hb.optim.Adam(model.bags[1], lr=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(batch(1), "cat").backward()
    for optimizer, names in ((first, {"bags.0", "mean"}), (second, {"bags.0", "mean", "bags.1"})):
        optimizer.step()
        moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
        assert moved == {f"{name}.weight" for name in names}


def test_steps_of_other_tables_do_not_disturb_gradients_of_weights() -> None:
    model = swapped()
    first, second = hb.optim.SGD(model.bags[0], lr=1.0), hb.optim.SGD(model.bags[1], lr=1.0)
    ids = torch.tensor([[1, 2]])
    weights = torch.ones(1, 2, requires_grad=True)
    looked_up = model.bags[0](ids, per_sample_weights=weights).sum()
    model.bags[1](ids).sum().backward()
    second.step()
    looked_up.backward()
    expected = model.bags[0].weight.detach()[[1, 2]].sum(1)[None]
    torch.testing.assert_close(weights.grad, expected)
    looked_up = model.bags[0](ids, per_sample_weights=weights).sum()
    model.bags[0](ids).sum().backward()
    first.step()
    with pytest.raises(hb.errors.OptimizerError, match="rows were updated between a lookup and its backward"):
        looked_up.backward()


def test_checkpoints_of_a_part(tmp_path: Any) -> None:
    model = swapped()
    optimizer = hb.optim.Adam(model.bags[2], lr=0.1)
    train(model, optimizer, ["cat", "cat"])
    hb.save_checkpoint(tmp_path / "c", {"part": model.bags[2], "tables": optimizer})
    other = swapped()
    again = hb.optim.Adam(other.bags[2], lr=0.1)
    hb.load_checkpoint(tmp_path / "c", {"part": other.bags[2], "tables": again})
    assert torch.equal(other.bags[2].weight, model.bags[2].weight)
    assert torch.equal(other.bags[1].weight, Net().bags[1].weight)
    own = [o.state_dict()["state"][0] for o in (optimizer, again)]
    assert all(torch.equal(own[0][key], own[1][key]) for key in own[0])


def test_tables_of_one_optimizer_step_in_backward_together() -> None:
    model, later = swapped(), swapped()
    hb.optim.SGD(model, lr=0.5).in_backward()
    optimizer = hb.optim.SGD(later, lr=0.5)
    before = launches["cpu.update"]
    model(batch(0), "stack").backward()
    assert launches["cpu.update"] - before == 2
    train(later, optimizer, ["stack"])
    torch.testing.assert_close(model.state_dict(), later.state_dict(), rtol=0, atol=0)


def test_a_loss_scale_that_overflows_skips_the_step_of_all() -> None:
    model = swapped()
    alone = copy.deepcopy(model)
    scales = []
    for each in (model, alone):
        optimizer = hb.optim.Adam(each, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(each(batch(step), "stack") * (1e38 if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)
    assert not any(torch.isnan(t).any() for t in model.state_dict().values())
