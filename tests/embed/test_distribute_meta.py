"""Models on ``meta`` get their values when they are distributed, or are refused, never left without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hotbed as hb
from hotbed.embed import EmbeddingCollection, tables_on_meta
from hotbed.errors import SpecError
from hotbed.specs import Feature, Table
from tests.matrix import full
from tests.ranks import Ranks

from .distributed_cases import SIZE, one_table


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


PARTS: dict[str, Callable[[], dict[str, nn.Module]]] = {
    "float32": lambda: {"part": Forgetful(torch.zeros(2))},
    "int64": lambda: {"part": Forgetful(torch.zeros(2, dtype=torch.int64))},
    "tied": lambda: dict(zip("ab", tied(), strict=True)),
    "odd": lambda: {"part": nn.ParameterDict({"weight": nn.Parameter(torch.empty(3))})},
}
FORGETFUL = (
    "part (Forgetful) is on meta and its reset_parameters() does not initialize 'buffer'. Change the method, "
    "or create the model on a device"
)
TIED = "'b.weight' and 'a.weight' are one parameter on meta, which would become two. Create the model on a device"


def tied() -> tuple[nn.Module, nn.Module]:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    return a, b


def refused(group: dist.ProcessGroup, case: str) -> str:
    with torch.device("meta"):
        model = nn.ModuleDict({"embeddings": one_table(), **PARTS[case]()})
    with pytest.raises(SpecError) as caught:
        hb.distribute(model, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [("float32", FORGETFUL), full("int64", FORGETFUL), ("tied", TIED), ("odd", "part (ParameterDict) is on meta")],
)
def test_a_tensor_that_nobody_fills_is_refused(ranks: Ranks, case: str, message: str) -> None:
    for said in ranks.run(SIZE, refused, case):
        assert said.startswith(message)
