"""Protects: a distributed model inside torch's data parallelism, as other tools wrap it, trains the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hotbed as hb
from hotbed.errors import SpecError
from tests.ranks import Ranks

from .distributed_cases import PLANS, SIZE, Model, both, finished, loss, step_all


class Around(nn.Module):
    """What has a distributed model as a part, like a LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any) -> Tensor:
        return self.net(*args)


class Apart(Model):
    """A model of which only the tables are distributed, and the head is not."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.left = hb.distribute(self.left, {"t": "grid", "u": "row"}, group=group)
        self.right = hb.distribute(self.right, {"t": "dp", "v": "row"}, group=group)


def whole(group: dist.ProcessGroup) -> nn.Module:
    return hb.distribute(Model(), PLANS["a"], group=group)


def in_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


WRAPPED: Mapping[str, Callable[[dist.ProcessGroup], nn.Module]] = {
    "itself": lambda group: in_ddp(whole(group), group),
    "as a part": lambda group: in_ddp(Around(whole(group)), group),
    "its tables": lambda group: in_ddp(Apart(group), group),
}


def train(group: dist.ProcessGroup, wrapped: str | None) -> list[Tensor]:
    """Losses, parameters, tables and moments after five steps."""
    model = whole(group) if wrapped is None else WRAPPED[wrapped](group)
    inner: nn.Module = model if wrapped is None else model.module.net if wrapped == "as a part" else model.module
    optimizers = both(inner)
    losses: list[Tensor] = []
    for step in range(5):
        losses.append(loss(model, step, [dist.get_rank(group)]))
        losses[-1].backward()
        step_all(optimizers)
    return [torch.stack(losses).detach(), *finished(inner, optimizers).values()]


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_distributed_model_in_ddp_is_averaged_once(ranks: Ranks, wrapped: str) -> None:
    for expected, found in zip(ranks.run(SIZE, train, None), ranks.run(SIZE, train, wrapped), strict=True):
        assert len(found) == len(expected)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def sharded_later(group: dist.ProcessGroup) -> str:
    model = whole(group)
    fully_shard(model.module, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(SpecError) as caught:
        loss(model, 0, [dist.get_rank(group)])
    return str(caught.value)


def sharded_before(group: dist.ProcessGroup) -> str:
    model = Model()
    fully_shard(model.head, mesh=DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(SpecError) as caught:
        hb.distribute(model, group=group)
    return str(caught.value)


@pytest.mark.parametrize("when", [sharded_later, sharded_before])
def test_fsdp_beside_ddp_says_how_dense_parameters_are_sharded(ranks: Ranks, when: Callable[..., str]) -> None:
    for message in ranks.run(SIZE, when):
        assert "are sharded by FSDP" in message
        assert "hotbed.distribute(model, parallel=hotbed.ParallelOptions(dense='fsdp'))" in message
