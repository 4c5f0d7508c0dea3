"""`hotbed.distribute` as users meet it: whatever the plan, the model is the one that is not distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hotbed as hb
from hotbed import ops, optim
from hotbed.comm import Link, hierarchical
from hotbed.comm.hierarchical import NodeLink, make_hierarchical, messages_per_sum
from hotbed.embed import plan_for, plan_tables
from hotbed.embed.dense_parallel import mean_over_ranks_
from hotbed.errors import PlanError
from hotbed.jagged import Jagged
from hotbed.plan import Cut, make_plan
from hotbed.virtual_ranks import hop_sizes
from tests.equivalence.sharding import TABLES, Job, trained
from tests.ranks import Ranks

from .distributed_cases import (
    PLANS,
    SAMPLES,
    SIZE,
    Model,
    Optimizers,
    both,
    distributed,
    finished,
    ids,
    loss,
    one_table,
    said,
    step_all,
)

# -- training ------------------------------------------------------------------------------------------------------


def accumulated(model: nn.Module, here: list[int]) -> Optimizers:
    """Two micro-batches per step; dense gradients are summed once."""
    optimizers = both(model)
    for step in range(3):
        with getattr(model, "no_sync", nullcontext)():
            loss(model, step, here).backward()
        loss(model, step + 10, here).backward()
        step_all(optimizers)
    return optimizers


def dropped(model: nn.Module, here: list[int]) -> Optimizers:
    """Gradients that are on their way are forgotten, before the first step and between others."""
    optimizers = both(model)
    for step in range(3):
        for forgotten in (step + 10, step + 20):
            loss(model, forgotten, here).backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, step, here).backward()
        step_all(optimizers)
    return optimizers


def frozen(model: nn.Module, here: list[int]) -> Optimizers:
    """One table is frozen for two of four steps, then others, one of them beside one that is trained."""
    model.left.freeze("t")
    optimizers = both(model)
    before = model.left.weight("t").clone()
    for step in range(4):
        if step == 2:
            assert torch.equal(model.left.weight("t"), before)
            model.left.unfreeze("t").freeze("u")
            model.right.freeze("t")
            right = model.right.weight("t").clone()
        loss(model, step, here).backward()
        step_all(optimizers)
    assert not torch.equal(model.left.weight("t"), before)
    assert torch.equal(model.right.weight("t"), right)
    return optimizers


def of_their_own(model: nn.Module, here: list[int]) -> Optimizers:
    """Each collection has an optimizer, and one of them steps half as often."""
    dense = torch.optim.SGD(model.parameters(), lr=0.05)
    left, right = optim.Adam(model.left, lr=0.01, eps=1e-3), optim.LAMB(model.right, lr=0.01, max_norm=1.0)
    for step in range(4):
        loss(model, step, here).backward()
        step_all([dense, left, *([right] if step % 2 else [])])
    return [dense, left, right]


def in_bf16(model: nn.Module, here: list[int]) -> Optimizers:
    optimizers = both(model)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert model.right(ids(step, here[0]))["pair"].dtype == torch.bfloat16
            value = loss(model, step, here)
        value.backward()
        step_all(optimizers)
    return optimizers


def scaled(model: nn.Module, here: list[int], overflows: tuple[int, ...] = (0, 3)) -> Optimizers:
    """Rank 1 alone has gradients that are not finite; then no rank changes a row or counts a step."""
    optimizers = both(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    tables = [(c, t) for c in (model.left, model.right) for t in c.tables]
    for step in range(5):
        before = [c.weight(t).clone() for c, t in tables]
        each = [loss(model, step, [r]) * (torch.inf if r == 1 and step in overflows else 1) for r in here]
        scaler.scale(torch.stack(each).mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for (collection, table), rows in zip(tables, before, strict=True):
            assert torch.equal(collection.weight(table), rows) == (step in overflows), (step, table)
    assert scaler.get_scale() < 2.0**10
    assert {int(s["step"]) for s in optimizers[1].state_dict()["state"].values()} == {5 - len(overflows)}
    return optimizers


RECIPES = {f.__name__: f for f in (accumulated, dropped, frozen, of_their_own, in_bf16, scaled)}


def by_plan(group: dist.ProcessGroup, recipe: str) -> dict[str, dict[str, torch.Tensor]]:
    """What a recipe gives under each plan."""
    found = {}
    for plan in PLANS:
        model = distributed(group, plan)
        found[plan] = finished(model, RECIPES[recipe](model, [dist.get_rank(group)]))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_usual_ways_to_train_give_the_same_bits_under_any_plan(ranks: Ranks, recipe: str):
    alone = Model()
    expected = finished(alone, RECIPES[recipe](alone, list(range(SIZE))))
    first, *others = [found[plan] for found in ranks.run(SIZE, by_plan, recipe) for plan in PLANS]
    for name, value in first.items():
        assert all(torch.equal(other[name], value) for other in others), name
    assert first.keys() == expected.keys()
    bound = 2e-2 if recipe == "in_bf16" else 1e-5
    for name, value in expected.items():
        if not name.startswith("left.u"):  # of a narrow dtype: its rounding makes large differences of small ones
            assert (first[name] - value).abs().max() <= bound * value.abs().max(), name


def overflowed(group: dist.ProcessGroup) -> tuple[bool, float]:
    """Gradients of 131,072: float32 holds them, fp16 does not."""
    with said():
        model = hb.distribute(one_table(), "row", hb.ParallelOptions(backward_codec="fp16"), group=group)
    optimizer, scaler = optim.SGD(model, lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**17)
    for _ in range(2):
        scaler.scale(model(Jagged.from_dict({"f": [[1, 2], [3]]}))["f"].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return bool(torch.isfinite(model.weight("t")).all()), scaler.get_scale()


def test_an_overflow_of_a_codec_is_one_for_the_scaler(ranks: Ranks):
    assert ranks.run(SIZE, overflowed) == [(True, 2.0**16)] * SIZE


# -- lookups -------------------------------------------------------------------------------------------------------


def lookups_need_no_optimizer_and_leave_nothing_in_eval_mode(group: dist.ProcessGroup) -> None:
    """Without an optimizer, in training or not: the vectors of a model that is not distributed."""
    batch = ids(0, dist.get_rank(group))
    expected = Model().left(batch)
    for plan in PLANS:
        model = distributed(group, plan)
        assert model(batch).requires_grad  # the head trains without the tables
        model(batch).sum().backward()
        for kind in (torch.int64, torch.int32):
            found = model.left(ids(0, dist.get_rank(group), kind))
            assert torch.equal(found["bag"], expected["bag"]) and torch.equal(found["user"], expected["user"])
            assert torch.equal(found["walk"].values(), expected["walk"].values())
        with torch.no_grad():
            assert not model.left(batch)["bag"].requires_grad
        model.eval()
        assert not model.left.training and not model.left(batch)["bag"].requires_grad
        optimizer = optim.SGD(model, lr=1.0)
        before = model.left.weight("t").clone()
        assert torch.equal(model.left(batch)["bag"], expected["bag"])
        model(batch).sum().backward()
        optimizer.step()
        assert torch.equal(model.left.weight("t"), before)


def per_id_weights_get_the_gradient_of_a_model_that_is_not_distributed(group: dist.ProcessGroup) -> None:
    plain = ids(0, dist.get_rank(group))

    def of(model: nn.Module) -> torch.Tensor:
        weights = torch.rand(len(plain.values), generator=torch.Generator().manual_seed(5)).requires_grad_()
        e = model.left(
            Jagged(
                plain.names, plain.values, batch_size=SAMPLES, fixed=plain.fixed, offsets=plain.offsets, weights=weights
            )
        )
        parts = [e["bag"], e["user"], e["walk"].values()]
        sum((p * torch.linspace(-1, 1, p.numel()).view_as(p)).sum() for p in parts).backward()
        return weights.grad

    expected = of(Model())
    assert expected.any()
    for plan in PLANS:
        model = distributed(group, plan)
        assert torch.equal(of(model), expected)
        model.eval()
        assert torch.equal(of(model), expected)


def launched(group: dist.ProcessGroup, backend: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    ops.launches.clear()
    mixed = {"big": "grid", "small": "dp", "items": Cut(cols=3), "words": "row"}
    plan = make_plan(TABLES, SIZE, mixed, wire={"items": "pooled"})
    found = trained(
        group, Job(plan, steps=2, optimizer="RowWiseAdagrad", kind="ragged", world_size=SIZE, backend=backend)
    )
    return found, dict(ops.launches)


def test_backends_give_the_same_bits_and_the_one_that_was_asked_for_runs(ranks: Ranks):
    of_cpu, of_reference = ranks.run(SIZE, launched, "cpu"), ranks.run(SIZE, launched, "reference")
    for (found, names), (expected, others) in zip(of_cpu, of_reference, strict=True):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        for name in ("lookup", "spread", "segment_sum", "update"):
            assert names[f"cpu.{name}"] and others[f"reference.{name}"], name
        assert {name.split(".")[0] for name in names} == {"cpu"}
        assert {name.split(".")[0] for name in others} == {"reference"}


# -- names and state -----------------------------------------------------------------------------------------------


def test_plans_name_tables_by_their_collection_where_a_name_occurs_twice():
    assert [t.name for t in plan_tables(Model())] == ["left.t", "u", "right.t", "v"]
    assert [t.name for t in plan_tables(Model().left)] == ["t", "u"]
    with pytest.raises(PlanError, match=r"table in schemes: got 't', expected one of left.t"):
        plan_for(Model(), 2, {"t": "row"})


def test_a_model_may_have_schemes_of_its_own_for_collections():
    model = Model()
    model.schemes = {"right": "dp"}
    own = plan_for(model, 2, "row").by_table
    assert all(len(tile.ranks) == 2 for tile in own["right.t"])
    assert [len(own[name]) for name in ("left.t", "u")] == [2, 2] and not any(t.readers for t in own["u"])
    named = plan_for(model, 2, {"right.t": "row"}).by_table
    assert len(named["right.t"]) == 2 and not any(tile.readers for tile in named["right.t"])
    assert all(len(tile.ranks) == 2 for tile in named["v"])  # what is not named keeps the model's own


def test_a_table_that_several_features_share_has_as_much_work():
    tables = [hb.Table(name, rows=10, dim=16) for name in "abcd"]
    features = [hb.Feature(f"{name}{i}", name) for name in "abcd" for i in range(3 if name == "a" else 1)]
    plan = plan_for(hb.EmbeddingCollection(tables, features), 2, "table")
    (alone,) = [t.owner for t in plan.by_table["a"]]
    assert [plan.by_table[name][0].owner for name in "bcd"] == [1 - alone] * 3


def a_distributed_model_has_the_names_and_attributes_of_the_model(group: dist.ProcessGroup) -> None:
    plain, model = Model(), distributed(group, "a")
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    assert [n for n, _ in model.named_buffers()] == ["scale"]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.left is model.module.left and model.note == "an attribute"
    assert not hasattr(model, "absent")
    assert {t.table for t in model.plan.tiles} == {"left.t", "u", "right.t", "v"}
    assert len([*model.parameters()]) == 2
    assert model.eval() is model and not model.module.left.training
    model.train()
    assert model.module.left.training
    outer = nn.Sequential(model)
    outer.load_state_dict(outer.state_dict())
    with hb.distribute(one_table(), group=group).no_sync():  # a model without dense parameters has it, too
        pass


def state_goes_from_plan_to_plan_by_a_model_that_is_not_distributed(group: dist.ProcessGroup) -> None:
    """Trained under one plan, then whole, then under another, and trained on under both."""
    here = [dist.get_rank(group)]
    first, whole, second = distributed(group, "a"), Model(), distributed(group, "b")
    models = (first, whole, second)
    of_first, of_whole, of_second = ([optim.Adam(m, lr=0.05), torch.optim.SGD(m.parameters(), lr=0.1)] for m in models)
    for step in range(2):
        loss(first, step, here).backward()
        step_all(of_first)
    for source, target, optimizers in ((first, whole, (of_first, of_whole)), (whole, second, (of_whole, of_second))):
        assert not target.load_state_dict(source.state_dict()).missing_keys
        optimizers[1][0].load_state_dict(optimizers[0][0].state_dict())
        expected, found = finished(source, optimizers[0]), finished(target, optimizers[1])
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
    for step in range(2, 4):
        for model, optimizers in ((first, of_first), (second, of_second)):
            loss(model, step, here).backward()
            step_all(optimizers)
    expected, found = finished(first, of_first), finished(second, of_second)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def a_model_is_distributed_with_the_values_it_has(group: dist.ProcessGroup) -> None:
    """Values that a model has when it is distributed are kept, and so is what is frozen."""
    plain = Model()
    with torch.no_grad():
        plain.left.weight("t").mul_(3)
        plain.head.bias.fill_(7)
    plain.right.freeze()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    size = plain.left.nbytes
    model = hb.distribute(plain, PLANS["b"], group=group)
    assert not model.right.handles["t"].requires_grad and model.left.handles["t"].requires_grad
    assert model.left.nbytes < size
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


PROMISES = [
    lookups_need_no_optimizer_and_leave_nothing_in_eval_mode,
    per_id_weights_get_the_gradient_of_a_model_that_is_not_distributed,
    a_distributed_model_has_the_names_and_attributes_of_the_model,
    state_goes_from_plan_to_plan_by_a_model_that_is_not_distributed,
    a_model_is_distributed_with_the_values_it_has,
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_on_every_rank(ranks: Ranks, promise: Callable[[dist.ProcessGroup], None]):
    ranks.run(SIZE, promise)


def mean_of_ranks(
    group: dist.ProcessGroup, values: list[torch.Tensor], per_node: int | None, sizes: tuple[int, ...] | None
) -> tuple[list[torch.Tensor], list[dict[int, int]], int]:
    """The means, what this rank sends to each other rank for each of them, and the messages of a sum.

    With ``sizes``, ranks without nodes take these hops.
    """
    link = make_hierarchical(Link(group), per_node)
    sent: dict[int, int] = {}
    parts = [link, link.whole, link.inside, link.between] if isinstance(link, NodeLink) else [link]
    for part in parts:
        original = part._pairs.start

        def noted(outgoing: Any, incoming: Any, others: Any, part: Link = part, original: Any = original) -> Any:
            for r in others:
                sent[part._names[r]] = sent.get(part._names[r], 0) + outgoing[r].nbytes
            return original(outgoing, incoming, others)

        part._pairs.start = noted  # pyright: ignore[reportAttributeAccessIssue]
    planned = hierarchical.hop_sizes
    hierarchical.hop_sizes = lambda ranks, node=None: planned(ranks, node) if sizes is None else sizes
    means, nbytes = [each[link.rank].clone() for each in values], list[dict[int, int]]()
    try:
        for mean in means:
            sent.clear()
            link.sent_bytes.clear()
            mean_over_ranks_(mean, link)
            nbytes.append({rank: count for rank, count in sent.items() if count})
            # No sizes are sent, and nothing is counted twice.
            assert dict(link.sent_bytes) == {"gradients of dense parameters": sum(sent.values())}
        return means, nbytes, messages_per_sum(link)
    finally:
        hierarchical.hop_sizes = planned


def mean_along_the_tree(values: torch.Tensor) -> torch.Tensor:
    """Of rows, each of a rank: halves of the tree are added first."""
    total, count = values, len(values)
    while len(total) > 1:
        pairs = total[: len(total) // 2 * 2]
        total = torch.cat([pairs[::2] + pairs[1::2], total[len(pairs) :]])
    return total[0] / count


@pytest.mark.parametrize(
    ("size", "per_node", "sizes", "messages"),
    [
        (3, None, None, 2),
        (4, None, None, 3),
        (4, 2, None, 2),
        (4, None, (2, 2), 2),  # as ranks whose nodes are unknown, if they are more
        (4, 1, None, 3),
        (4, 4, None, 3),
        (6, 2, None, 3),
        (6, 3, None, 5),  # nodes that are none of the tree
    ],
)
def test_dense_gradients_are_added_along_the_tree(
    ranks: Ranks, size: int, per_node: int | None, sizes: tuple[int, ...] | None, messages: int
):
    """Whatever share of them a rank adds up, the last one's shorter or empty, and in whichever hops."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(count, dtype) for count in (0, 1, 7, 1000) for dtype in (torch.float32, torch.bfloat16)]
    values = [torch.randn(size, count, generator=draw).to(dtype) for count, dtype in shapes]
    expected = [mean_along_the_tree(each) for each in values]
    if size > 3:
        assert not torch.equal(expected[-1], sum(values[-1][1:], start=values[-1][0]) / size)  # another order
    found = ranks.run(size, mean_of_ranks, values, per_node, sizes)
    for rank, (means, sent, count) in enumerate(found):
        assert all(map(torch.equal, means, expected))
        assert count == messages
        local = 2 if sizes is not None else per_node
        if local == 2:
            for each, to in zip(values, sent, strict=True):
                across = sum(count for other, count in to.items() if other // local != rank // local)
                nodes, share = size // local, -(-each.shape[1] // local)
                assert across <= 2 * (nodes - 1) * -(-share // nodes) * each.element_size()
                assert {other // local == rank // local or (other - rank) % local == 0 for other in to} <= {True}


def test_hops_of_sums_are_of_blocks_of_the_tree():
    """However many ranks there are: the blocks of all but the last hop are powers of two, of no more ranks than 8."""
    for size in (*range(1, 100), 128, 1000, 1024, 4096):
        for node in (None, *(n for n in range(1, size + 1) if size % n == 0)):
            sizes = hop_sizes(size, node)
            assert math.prod(sizes) == size and all(count.bit_count() == 1 for count in sizes[:-1]) and 1 not in sizes
            if node is not None and 1 < node < size and node.bit_count() == 1:
                assert sizes[0] == node
            elif size > 8 and size % 8 == 0:
                assert math.prod(sizes[:2]) == 8 and sizes[0] == 4
    assert hop_sizes(4096, 8) == (8, 8, 8, 8)
    assert hop_sizes(31 * 8, 8) == (8, 31)
