"""`hotbed.distribute` logs what changes results and refuses what cannot be, naming the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hotbed as hb
from hotbed import optim
from hotbed.comm import Link
from hotbed.embed import EmbeddingCollection
from hotbed.embed.pooled_exchange import Wire
from hotbed.errors import BatchError, HotbedError, OptimizerError, PlanError, SpecError
from hotbed.jagged import Jagged
from hotbed.plan import Plan, Tile, make_plan
from hotbed.specs import Feature, RowDtype, Table
from tests.ranks import Ranks

from .distributed_cases import SIZE, Model, ids, one_table, said


def warnings_of(group: dist.ProcessGroup) -> list[str]:
    collection = EmbeddingCollection([Table("t", 9, 32)], [Feature("f", "t")])
    with said() as found:
        hb.distribute(collection, make_plan([Table("t", 9, 32)], SIZE, "column", wire="pooled"), group=group)
        assert found == []
        collection = EmbeddingCollection([Table("t", 9, 32)], [Feature("f", "t")])
        plan = make_plan([Table("t", 9, 32)], SIZE, "grid", wire="pooled")
        options = hb.ParallelOptions(
            forward_codec="bf16", backward_codec="int8", per_shard_statistics=True, dense="fsdp"
        )
        hb.distribute(collection, plan, options, group=group)
    return found


def test_what_changes_results_is_said_once(ranks: Ranks):
    first, *others = ranks.run(SIZE, warnings_of)
    assert others == [[]] * (SIZE - 1)
    assert first == [
        "dense='fsdp': gradients of dense parameters are not summed along a tree",
        "forward_codec='bf16' rounds exchanged values: results differ from results of one rank",
        "backward_codec='int8' rounds exchanged values: results differ from results of one rank",
        "per_shard_statistics=True: row-wise rules use the columns of each tile separately",
        "wire='pooled': bags of several ids of t are summed in parts",
    ]


def warnings_of_replicas(group: dist.ProcessGroup) -> list[str]:
    with said() as found:
        for exact in (True, False):
            collection = EmbeddingCollection([Table("t", 9, 32)], [Feature("f", "t")])
            hb.distribute(collection, "table", hb.ParallelOptions(replicas=SIZE, exact=exact), group=group)
    return found


def test_replicas_that_are_averaged_are_said_to_change_results(ranks: Ranks):
    first, *others = ranks.run(SIZE, warnings_of_replicas)
    assert others == [[]] * (SIZE - 1)
    assert first == ["replicas=3 are averaged every 1 steps: results differ from one group's"]


def tiles(*rows: range, table: str = "t", cols: tuple[int, ...] = (0, 256), **options: Any) -> Plan:
    """A plan of these tiles, all of rank 0."""
    between = [range(a, b) for a, b in pairwise(cols)]
    return Plan(SIZE, tuple(Tile(table, r, c, 0, **options) for r in rows for c in between))


def optimized_before(group: dist.ProcessGroup, *, by_hand: bool) -> None:
    collection = one_table()
    optimizer = optim.SGD(collection, lr=0.1)
    if by_hand:
        collection.distribute(make_plan([*collection.tables.values()], SIZE), Wire(Link(group)))
    else:
        hb.distribute(collection, group=group)
    del optimizer


def pooled(group: dist.ProcessGroup, weights: torch.Tensor | None) -> None:
    collection = one_table()
    plan = make_plan([*collection.tables.values()], SIZE, "row", wire="pooled")
    collection.distribute(plan, Wire(Link(group)))
    batch = Jagged.from_dict({"f": [[1, 2], [3]]}, None if weights is None else {"f": weights})
    collection(batch)["f"].sum().backward()


def part_of_the_ranks(group: dist.ProcessGroup) -> None:
    parts = [dist.new_group([rank]) for rank in range(SIZE)]
    hb.distribute(one_table(), group=parts[dist.get_rank(group)])


def replicas_of_dynamic(group: dist.ProcessGroup) -> None:
    table = hb.Table("t", rows="dynamic", dim=16, init_bound=0.1, dynamic=hb.Dynamic(capacity_bytes=1 << 20))
    collection = hb.EmbeddingCollection([table], [hb.Feature("f", table="t")])
    hb.distribute(collection, "table", hb.ParallelOptions(replicas=3), group=group)


def train_in(wrap: Callable[[nn.Module], nn.Module], model: nn.Module | None = None) -> None:
    wrapped = wrap(Model() if model is None else model)
    wrapped(ids(0, 0)).sum().backward()


def in_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


def in_fsdp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model


def no_sync_of_fsdp(group: dist.ProcessGroup) -> None:
    model = hb.distribute(Model(), "table", hb.ParallelOptions(dense="fsdp"), group=group)
    model.no_sync()


Case = tuple[Callable[[dist.ProcessGroup], object], type[HotbedError], str]


def by(plan: Plan, dtype: RowDtype = "fp32") -> Callable[[dist.ProcessGroup], object]:
    return lambda group: hb.distribute(one_table(dtype), plan, group=group)


def with_options(**options: Any) -> Callable[[dist.ProcessGroup], object]:
    return lambda group: hb.distribute(one_table(), "table", hb.ParallelOptions(**options), group=group)


def trained_weights() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


PLANS: Mapping[str, Case] = {
    "a plan for other ranks": (by(Plan(2, tiles(range(9)).tiles)), PlanError, "for 2 ranks, this process group has 3"),
    "a plan without a table": (by(Plan(SIZE, ())), PlanError, "no tile of table 't'"),
    "a plan for other rows": (by(tiles(range(0, 8, 2), range(1, 8, 2))), PlanError, "8 × 256, expected 9 × 256"),
    "a cut that changes sums": (by(tiles(range(9), cols=(0, 40, 256))), PlanError, "0 … 40, expected multiples of 16"),
    "a cut that changes scales": (
        by(tiles(range(9), cols=(0, 64, 256)), "int8"),
        PlanError,
        "columns 0 … 64, expected multiples of 128",
    ),
    "replicas of a dynamic table": (replicas_of_dynamic, PlanError, "table 't' is dynamic"),
}
MODELS: Mapping[str, Case] = {
    "no tables": (lambda group: hb.distribute(nn.Linear(2, 2), group=group), SpecError, "Linear"),
    "a model that is distributed already": (
        lambda group: hb.distribute(hb.distribute(one_table(), group=group), group=group),
        SpecError,
        "",
    ),
    "an optimizer that is there already": (
        lambda group: optimized_before(group, by_hand=False),
        OptimizerError,
        "already have an optimizer",
    ),
    "an optimizer of a collection": (
        lambda group: optimized_before(group, by_hand=True),
        OptimizerError,
        "already have an optimizer",
    ),
    "DDP around tables": (
        lambda group: train_in(lambda model: in_ddp(model, group)),
        SpecError,
        "DistributedDataParallel",
    ),
    "FSDP around tables": (lambda group: train_in(lambda model: in_fsdp(model, group)), SpecError, "dense='fsdp'"),
    "a model in DDP": (lambda group: hb.distribute(in_ddp(Model(), group), group=group), SpecError, "`model.module`"),
}
OPTIONS: Mapping[str, Case] = {
    "an unknown codec": (with_options(forward_codec="fp64"), SpecError, "forward_codec: got 'fp64'"),
    "no_sync without DDP": (no_sync_of_fsdp, SpecError, "dense='ddp'"),
    "a part of the ranks": (part_of_the_ranks, SpecError, "got 1 ranks, expected all 3 ranks"),
}
BATCHES: Mapping[str, Case] = {
    "trained weights of pooled vectors": (lambda group: pooled(group, trained_weights()), BatchError, "rows of t"),
    "weights on some ranks": (
        lambda group: pooled(group, None if dist.get_rank(group) == 1 else torch.ones(3)),
        BatchError,
        "ranks [0, 2]",
    ),
}
REFUSED = {**PLANS, **MODELS, **OPTIONS, **BATCHES}


def refused(group: dist.ProcessGroup, case: str) -> tuple[str, str]:
    try:
        REFUSED[case][0](group)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "was refused"


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_all_ranks(ranks: Ranks, case: str):
    _, kind, value = REFUSED[case]
    found = ranks.run(SIZE, refused, case)
    name, message = found[0]
    assert name == kind.__name__ and value in message
    assert found == [(name, message)] * SIZE


class Teacher(nn.Module):
    """Learns from a model that is no part of it."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of, self.head = [of], nn.Linear(1, 1)

    def forward(self, batch: Jagged) -> torch.Tensor:
        return self.head(self.of[0](batch)[:, None])


def allowed(group: dist.ProcessGroup) -> None:
    """What does not let tables of several ranks become different, or is meant to."""
    alone = [dist.new_group([rank]) for rank in range(SIZE)][dist.get_rank(group)]
    train_in(lambda model: model)
    train_in(lambda model: in_ddp(model, alone))
    train_in(lambda model: in_ddp(model, group), Teacher(Model()))
    for wrap in (in_ddp, in_fsdp):
        model = wrap(Model(), group)
        with torch.no_grad():
            model(ids(0, 0))
        model.eval()(ids(0, 0)).sum().backward()
        frozen = Model()
        frozen.left.freeze()
        frozen.right.freeze()
        train_in(lambda model, wrap=wrap: wrap(model, group), frozen)
    with said():
        for dense in ("ddp", "fsdp"):
            options = hb.ParallelOptions(dense=dense)
            train_in(lambda model, options=options: hb.distribute(model, "table", options, group=group))


def test_tables_in_data_parallelism_that_changes_nothing_are_allowed(ranks: Ranks):
    ranks.run(SIZE, allowed)


def changed_in_place(group: dist.ProcessGroup) -> list[str]:
    """The errors of a step after offsets or weights of its batch were changed."""
    model = hb.distribute(one_table(), "row", group=group)
    optimizer = optim.SGD(model, lr=1.0)
    messages = []
    for what in ("offsets", "weights"):
        ids = {"f": (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))}
        batch = Jagged.from_dict(ids, {"f": torch.ones(3)})
        value = model(batch)["f"].sum()
        getattr(batch, what).view(-1)[1].sub_(1)
        with pytest.raises(HotbedError) as caught:
            value.backward()
            optimizer.step()
        optimizer.zero_grad()
        messages.append(str(caught.value))
    return messages


def test_bags_changed_between_lookup_and_backward_are_refused(ranks: Ranks):
    for messages in ranks.run(SIZE, changed_in_place):
        for message in messages:
            assert message.startswith("ids, offsets or per-id weights were changed in place between the lookup and the")


def test_a_mistake_is_found_in_one_process_too():
    """Which would otherwise show when the program is first started with several."""
    with pytest.raises(PlanError, match=r"scheme: got 'tabel', .*did you mean 'table'"):
        hb.distribute(one_table(), "tabel")
    with pytest.raises(SpecError, match="dense: got 'dpp', expected one of ddp, fsdp; did you mean 'ddp'"):
        hb.distribute(one_table(), "table", hb.ParallelOptions(dense="dpp"))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="table in the plan: got 'tt', expected one of t"):
        hb.distribute(one_table(), Plan(1, (Tile("tt", range(9), range(256), 0),)))
    with pytest.raises(PlanError, match=r"the plan is for 3 ranks, but torch\.distributed is not initialized"):
        hb.distribute(one_table(), tiles(range(9)))
    model = one_table()
    assert hb.distribute(model, "row") is model
