"""Protects: dense parameters under FSDP2 are saved whole, and gone on with by any number of ranks, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hotbed as hb
from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.embed.dense_parallel import gather_shards
from hotbed.nn import DLRM
from tests.ranks import Ranks
from tests.train import planted

from .parallel_cases import Group, make_trainer, shares

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, STOPPED = 8, 4

Parts = dict[str, Any]


def made(group: Group, dense: str) -> Parts:
    """A model and its optimizers, as a loop of one's own has them."""
    trainer = make_trainer(group, "row", **({} if group is None else {"dense": dense}))
    return {"model": trainer.model, **trainer.optimizers}


def train(parts: Parts, group: Group, steps: range) -> None:
    batches = planted.batches(STEPS, 24)
    for batch in shares([batches[step] for step in steps], group):
        loss = F.binary_cross_entropy_with_logits(parts["model"](batch), batch.labels)
        loss.backward()
        for optimizer in (parts["dense"], parts["sparse"]):
            optimizer.step()
            optimizer.zero_grad()


def state_of(parts: Parts) -> dict[str, Tensor]:
    """Parameters, tables and moments, whole."""
    found = {f"model.{name}": value.clone() for name, value in parts["model"].state_dict().items()}
    for part in ("dense", "sparse"):
        for i, state in gather_shards(parts[part].state_dict())["state"].items():
            found |= {f"{part}.{i}.{name}": value.clone() for name, value in state.items()}
    assert not any(isinstance(value, DTensor) for value in found.values())
    return found


def first_half(group: Group, dense: str, path: Path, background: bool) -> dict[str, Tensor]:
    parts = made(group, dense)
    train(parts, group, range(STOPPED))
    assert any(isinstance(p, DTensor) for p in parts["model"].parameters()) == (dense == "fsdp")
    saving = save_checkpoint(path, parts, background=background)
    state = state_of(parts)
    saving.wait()
    return state


def second_half(group: Group, dense: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parts = made(group, dense)
    load_checkpoint(path, parts)
    loaded = state_of(parts)
    train(parts, group, range(STOPPED, STEPS))
    return loaded, state_of(parts)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, of=name: f"{of}: {text}")


@pytest.fixture(name="alone", scope="module")
def _alone() -> dict[str, Tensor]:
    parts = made(None, "ddp")
    train(parts, None, range(STEPS))
    return state_of(parts)


@pytest.mark.parametrize(
    ("saved_by", "dense", "background"), [(2, "fsdp", False), (3, "fsdp", True), (3, "ddp", False)], ids=str
)
def test_what_is_sharded_goes_on_at_any_world_size(
    ranks: Ranks, alone: dict[str, Tensor], tmp_path: Path, saved_by: int, dense: str, background: bool
) -> None:
    saved = ranks.run(saved_by, first_half, dense, tmp_path / "saved", background)[0]
    loaded, went_on = second_half(None, "ddp", tmp_path / "saved")
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert_close(went_on, alone)
    for loaded, went_on in ranks.run(3, second_half, "fsdp", tmp_path / "saved"):
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        assert_close(went_on, alone)


def parts_by_hand(group: Group, path: Path | None) -> tuple[list[str], dict[str, Tensor]]:
    """`fully_shard` of a part by the user's own call, and of the rest by `distribute`."""
    torch.manual_seed(0)
    model: nn.Module = DLRM([hb.Table("a", 9, 32)], [hb.Feature("a", "a")], 3, bottom=(16, 32), top=(16, 1), seed=0)
    assert group is not None
    fully_shard(model.top, mesh=DeviceMesh.from_group(group, "cpu"))
    model = hb.distribute(model, "row", hb.ParallelOptions(dense="fsdp"), group=group)
    if path is not None:
        load_checkpoint(path, {"model": model})
    sharded = [type(m).__name__ for m in model.module.modules() if type(m).__name__.startswith("FSDP")]
    return sharded, dict(model.state_dict())


def save_plain(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = DLRM([hb.Table("a", 9, 32)], [hb.Feature("a", "a")], 3, bottom=(16, 32), top=(16, 1), seed=1)
    save_checkpoint(path, {"model": model})
    return model.state_dict()


def test_units_that_a_user_has_sharded_stay_units_and_are_loaded(ranks: Ranks, tmp_path: Path) -> None:
    expected = save_plain(tmp_path / "plain")
    for sharded, found in ranks.run(3, parts_by_hand, tmp_path / "plain"):
        assert sharded == ["FSDPDLRM", "FSDPMLP"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def around(group: Group) -> None:
    """A module around the model, as other tools have it, saves and loads whole values."""
    models = [made(group, dense)["model"] for dense in ("fsdp", "ddp")]
    states: list[dict[str, Tensor]] = []
    for value, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        states.append({name: t.clone() for name, t in nn.ModuleDict({"net": model}).state_dict().items()})
    assert states[0].keys() == states[1].keys()
    for model, state in zip(models, reversed(states), strict=True):
        nn.ModuleDict({"net": model}).load_state_dict(state)
        found = nn.ModuleDict({"net": model}).state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_the_state_of_a_module_around_it_is_whole(ranks: Ranks) -> None:
    ranks.run(3, around)
