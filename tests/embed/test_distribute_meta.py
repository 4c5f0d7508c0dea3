"""Models on ``meta`` get their values when they are distributed, or are refused, never left without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hotbed as hb
from hotbed.embed import EmbeddingCollection, tables_on_meta
from hotbed.errors import SpecError
from hotbed.specs import Feature, Table
from tests.ranks import Ranks

from .distributed_cases import SIZE, one_table


class OfTheUser(nn.Module):
    """Weights that a constructor makes its own way, tied ones, and a tensor that nobody resets."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([Table("t", 40, 32)], [Feature("f", "t")], seed=3)
        self.head = nn.Linear(32, 32)
        nn.init.normal_(self.head.weight, std=0.01)
        self.twin = nn.Linear(32, 32)
        self.twin.weight = self.head.weight
        self.attention = nn.MultiheadAttention(32, 2)
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("mask", torch.ones(3))


def made(group: dist.ProcessGroup) -> tuple[bool, bool, int, dict[str, torch.Tensor]]:
    """What was on meta, whether weights are tied, bytes of tables here, and the state."""
    torch.manual_seed(5)
    with tables_on_meta():
        model = OfTheUser()
    on_meta = model.embeddings.device.type == "meta" and not model.head.weight.is_meta
    model = hb.distribute(model, "row", group=group)
    tied = model.head.weight is model.twin.weight
    return on_meta, tied, model.embeddings.nbytes, dict(model.state_dict())


def test_only_tables_wait_for_the_plan(ranks: Ranks) -> None:
    torch.manual_seed(5)
    expected = OfTheUser()
    assert expected.embeddings.device.type == "cpu"
    for on_meta, tied, nbytes, state in ranks.run(SIZE, made):
        assert on_meta
        assert tied
        assert nbytes < expected.embeddings.nbytes / 2
        assert state.keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            assert torch.equal(state[name], value), name


def test_a_collection_that_is_told_where_to_be_is_there() -> None:
    with tables_on_meta():
        assert EmbeddingCollection([Table("t", 4, 8)], [Feature("f", "t")], device="cpu").device.type == "cpu"


class Forgetful(nn.Module):
    """Resets its weight and not its buffers."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("buffer", buffer)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def refused(group: dist.ProcessGroup, case: str) -> str:
    with torch.device("meta"):
        model = nn.Module()
        model.embeddings = one_table()
        if case == "tied":
            model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2)
            model.b.weight = model.a.weight
        else:
            model.part = Forgetful(torch.zeros(2, dtype=getattr(torch, case)))
    with pytest.raises(SpecError) as caught:
        hb.distribute(model, group=group)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_tensor_that_nobody_fills_is_refused(ranks: Ranks, dtype: str) -> None:
    for said in ranks.run(SIZE, refused, dtype):
        assert said == (
            "part (Forgetful) is on meta and its reset_parameters() does not initialize 'buffer'. Change the method, "
            "or create the model on a device"
        )


def test_tied_parameters_on_meta_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(SIZE, refused, "tied"):
        assert said == (
            "'b.weight' and 'a.weight' are one parameter on meta, which would become two. Create the model on a device"
        )
