"""Whoever computes a virtual rank, tables and dense parameters get the same bits: sums along one binary tree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.comm.hierarchical import hops_of_rows
from hotbed.embed import Distributed
from hotbed.embed.slices import Slicer
from hotbed.errors import BatchError, SpecError
from hotbed.ops import launches
from hotbed.ops.backend import BackendName
from hotbed.plan import Cut, make_plan
from hotbed.virtual_ranks import VirtualRanks, tree_additions
from tests.matrix import full
from tests.ranks import Ranks

Group = dist.ProcessGroup | None
ROWS, DIM, LR = {"a": 12, "b": 40}, 32, 0.5
TABLES = [hb.Table(name, rows=rows, dim=DIM) for name, rows in ROWS.items()]
FEATURES = [hb.Feature("bag", "a"), hb.Feature("one", "b"), hb.Feature("two", "a")]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan]


class Weighted(nn.Module):
    """Pooled vectors times a parameter; the loss of a sample is the sum, times the sample's number."""

    def __init__(self, backend: BackendName = "auto") -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(TABLES, FEATURES, backend=backend)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 3 * DIM))

    def forward(self, batch: Batch) -> Tensor:
        assert batch.dense is not None
        return (self.embeddings(batch.sparse).concatenate() * self.scale * batch.dense).sum()


def batch_of(samples: int, seed: int, special: Sequence[float] = ()) -> Batch:
    """Draw a batch; its numbers, the gradients of the vectors, include special values."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (samples,), generator=draw)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = {
        "bag": (torch.randint(0, ROWS["a"], (int(offsets[-1]),), generator=draw), offsets),
        "one": torch.randint(0, ROWS["b"], (samples,), generator=draw),
        "two": torch.randint(0, 3, (samples, 2), generator=draw),
    }
    numbers = torch.randn(samples, 1, generator=draw)
    for value in special:
        numbers[int(torch.randint(0, samples, (1,), generator=draw))] = value
    return Batch(sparse=hb.Jagged.from_dict(ids), dense=numbers)


def own_part(batch: Batch, virtual: VirtualRanks) -> Batch:
    part = batch.take(torch.arange(len(batch))[virtual.share(len(batch))])
    return replace(part, slices=virtual.sizes(len(batch)))


def trained(
    group: Group,
    total: int,
    scheme: str,
    batches: Sequence[Batch],
    wire: str = "rows",
    backend: BackendName = "auto",
    **options: Any,
) -> dict[str, Tensor]:
    """Train with SGD, whose updates are sums of gradients; all ranks must call this."""
    size = 1 if group is None else dist.get_world_size(group)
    plan = make_plan(TABLES, size, Cut(rows=0, tier="disk", cache_rows=8) if scheme == "disk" else scheme)
    plan = replace(plan, wire=dict.fromkeys(ROWS, wire))
    parallel = hb.ParallelOptions(virtual_ranks=total, **options)
    model = hb.distribute(Weighted(backend), plan, parallel, group=group)
    sparse, dense = hb.optim.SGD(model, lr=LR), torch.optim.SGD(model.parameters(), lr=LR)
    slicer = None if not isinstance(model, Distributed) or model.virtual.are_processes else Slicer(model)
    for whole in batches:
        virtual = VirtualRanks(0, 1) if not isinstance(model, Distributed) else model.virtual
        part = own_part(whole, virtual)
        dense.zero_grad()
        if slicer is None:
            model(replace(part, slices=None)).backward()
        else:
            with slicer.divide(part, last=True) as divided:
                losses = [model(own) for own in divided]
                for number, loss in enumerate(losses):
                    with divided.gradients_of(number):
                        loss.backward()
                divided.end()
        sparse.step()
        dense.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_definition(total: int, batch: Batch) -> dict[str, Tensor]:
    """Return the tables and the parameter after a step, summed row by row and value by value in Python's order."""
    model = Weighted()
    model.embeddings.freeze()  # there is no optimizer
    names = {name: f"embeddings.{name}.weight" for name in ROWS}
    found = {name: value.clone() for name, value in model.state_dict().items()}
    of_rows: list[dict[tuple[str, int], Tensor]] = []
    of_scale: list[Tensor] = []
    for v in range(total):
        share = slice(len(batch) * v // total, len(batch) * (v + 1) // total)
        part = batch.take(torch.arange(len(batch))[share])
        assert part.dense is not None
        sums: dict[tuple[str, int], Tensor] = {}
        gradient = model.scale.detach() * part.dense
        for i, feature in enumerate(FEATURES):
            bags = part.sparse[feature.name]
            sample = torch.repeat_interleave(torch.arange(len(part)), bags.lengths()).tolist()
            for row, b in zip(bags.values.tolist(), sample, strict=True):
                key, value = (feature.table, row), gradient[b, i * DIM : (i + 1) * DIM]
                sums[key] = sums[key] + value if key in sums else value
        of_rows.append(sums)
        model.zero_grad()
        model(part).backward()
        assert model.scale.grad is not None
        of_scale.append(model.scale.grad.clone())
    for table, row in {key for sums in of_rows for key in sums}:
        leaves = [v for v in range(total) if (table, row) in of_rows[v]]
        mean = tree_sum(leaves, [of_rows[v][table, row] for v in leaves]) / total
        found[names[table]][row] -= LR * mean
    found["scale"] -= LR * (tree_sum(range(total), of_scale) / total)
    return found


def tree_sum(leaves: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    sums = list(values)
    for i, j in tree_additions(leaves):
        sums[i] = sums[i] + sums[j]
    return sums[0]


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        both_nan = found[name].isnan() & value.isnan()
        same = found[name].view(torch.int32) == value.view(torch.int32)  # −0 is not 0
        assert bool((same | both_nan).all()), name


@settings(max_examples=15)
@given(
    levels=st.integers(0, 4),
    samples=st.integers(1, 20),
    seed=st.integers(0, 99),
    special=st.lists(st.sampled_from(SPECIAL)),
)
def test_one_process_sums_as_defined(levels: int, samples: int, seed: int, special: list[float]) -> None:
    batch = batch_of(samples, seed, special)
    assert_same_bits(trained(None, 2**levels, "table", [batch]), by_definition(2**levels, batch))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends_sum_as_defined(backend: BackendName) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    launches.clear()
    batch = batch_of(20, 1, SPECIAL)
    with np.errstate(all="ignore"):  # NumPy runs kernels in Triton's interpreter
        found = trained(None, 8, "table", [batch], backend=backend)
    assert_same_bits(found, by_definition(8, batch))
    assert launches[f"{backend}.update"] and launches[f"{backend}.add_along_tree"] and not launches["cpu.update"]


CASES = [
    (3, 8, "row", "rows", None),
    (3, 4, "column", "rows", None),
    (4, 8, "row", "rows", 2),
    (4, 4, "grid", "rows", None),
    (3, 8, "table", "pooled", None),
    full(4, 8, "column", "pooled", 2),
    full(3, 16, "grid", "rows", None),
    full(3, 8, "disk", "rows", None),
    full(4, 64, "row", "rows", None),
    full(4, 16, "dp", "rows", 2),
    full(8, 8, "grid", "rows", 4),
    full(8, 16, "row", "rows", 2),
    full(6, 8, "row", "rows", 2),  # nodes are not nodes of the tree, so they forward rows
]


@pytest.mark.parametrize(("size", "total", "scheme", "wire", "hops"), CASES)
def test_processes_get_the_bits_of_one(
    ranks: Ranks, size: int, total: int, scheme: str, wire: str, hops: int | None
) -> None:
    """Also with fewer samples than virtual ranks, none at all, NaN and infinities."""
    batches = [batch_of(37, 1), batch_of(3, 2), batch_of(0, 3), batch_of(29, 4, SPECIAL)]
    expected = trained(None, total, "table", batches)
    for found in ranks.run(size, trained_on_rank, total, scheme, batches, wire, hops):
        assert_same_bits(found, expected)


def trained_on_rank(
    group: Group, total: int, scheme: str, batches: Sequence[Batch], wire: str, hops: int | None
) -> dict[str, Tensor]:
    return trained(group, total, scheme, batches, wire, ranks_per_node=hops)


@pytest.mark.parametrize("hops", [None, 2])
def test_triton_pads_sums_but_copies_of_rows_get_the_updated_rows_only(ranks: Ranks, hops: int | None) -> None:
    """Each process has copies of all rows. Sums along the tree are padded with a slot behind the last row."""
    pytest.importorskip("triton")
    batches = [batch_of(13, 1), batch_of(6, 2)]
    expected = trained(None, 4, "table", batches)
    of_ranks = ranks.run(4, trained_by_triton, batches, hops)
    for found, _ in of_ranks:
        assert_same_bits(found, expected)
    assert any(counted["triton.add_along_tree"] for _, counted in of_ranks)
    assert not any(counted["cpu.update"] for _, counted in of_ranks)


def trained_by_triton(
    group: Group, batches: Sequence[Batch], hops: int | None
) -> tuple[dict[str, Tensor], Counter[str]]:
    launches.clear()
    with np.errstate(all="ignore"):
        found = trained(group, 4, "dp", batches, backend="triton", ranks_per_node=hops)
    return found, launches.copy()


@pytest.mark.parametrize("hops", [None, 2])
def test_rows_cross_the_network_once_per_node(ranks: Ranks, hops: int | None) -> None:
    """All four processes look up the same 12 rows, of which each owns 3.

    Each sends 6 rows inside its node, and 3 rows, or their sums, to the other node. Without nodes, it sends 9.
    """
    expected = [9] if hops is None else [6, 3]
    for of_hops in ranks.run(4, sent_by_each, hops):
        assert of_hops == [{"rows": rows * DIM * 4, "gradients": rows * DIM * 4} for rows in expected]


def sent_by_each(group: Group, hops: int | None) -> list[dict[str, int]]:
    """Return the bytes that a process sends in each hop of a step."""
    parallel = hb.ParallelOptions(ranks_per_node=hops)
    model = hb.distribute(Weighted(), make_plan(TABLES, 4, "row"), parallel, group=group)
    assert isinstance(model, Distributed)
    of_hops = hops_of_rows(model.wire.link)
    for link in of_hops:
        link.sent_bytes = Counter()
    every = torch.arange(ROWS["a"])[:, None]
    ids = {"bag": every, "one": torch.zeros(12, 0, dtype=torch.int64), "two": every[:, :0]}
    sparse = hb.optim.SGD(model, lr=LR)
    model.module.embeddings(hb.Jagged.from_dict(ids)).concatenate().sum().backward()
    sparse.step()
    return [{what: link.sent_bytes[what] for what in ("rows", "gradients")} for link in of_hops]


@pytest.mark.parametrize("scheme", ["dp", "row"])
def test_nodes_combine_rows_of_evaluations(ranks: Ranks, scheme: str) -> None:
    """No gradients follow, so slots of copied rows are not exchanged."""
    batch = batch_of(9, 5)
    expected = evaluated(None, "table", batch)
    for found in ranks.run(4, evaluated, scheme, batch, 2):
        assert torch.equal(found, expected)


def evaluated(group: Group, scheme: str, batch: Batch, hops: int | None = None) -> Tensor:
    """Return the vectors of a batch that all processes look up."""
    size = 1 if group is None else dist.get_world_size(group)
    parallel = hb.ParallelOptions(ranks_per_node=hops)
    model = hb.distribute(Weighted(), make_plan(TABLES, size, scheme), parallel, group=group).eval()
    with torch.no_grad():
        return getattr(model, "module", model).embeddings(batch.sparse).concatenate()


# -- errors --------------------------------------------------------------------------------------------------------


def test_an_own_loop_computes_one_virtual_rank_per_process() -> None:
    model = hb.distribute(Weighted(), parallel=hb.ParallelOptions(virtual_ranks=4))
    with pytest.raises(SpecError, match="got 4 for 1 processes"):
        model(batch_of(4, 0))


@pytest.mark.parametrize("slices", [None, (1, 1, 2)])
def test_batches_that_are_not_divided(slices: tuple[int, ...] | None) -> None:
    model = hb.distribute(Weighted(), parallel=hb.ParallelOptions(virtual_ranks=2))
    assert isinstance(model, Distributed)
    batch = replace(batch_of(4, 0), slices=slices)
    with pytest.raises(BatchError, match=r"Batch.slices: got .*, expected the numbers of samples of 2"):
        Slicer(model).divide(batch, last=True).__enter__()


def test_numbers_of_virtual_ranks_that_are_no_trees() -> None:
    with pytest.raises(SpecError, match="got 6, expected a power of two"):
        hb.distribute(Weighted(), parallel=hb.ParallelOptions(virtual_ranks=6))


def test_tables_that_cannot_be_divided() -> None:
    model = hb.swap_embeddings(nn.Sequential(nn.EmbeddingBag(10, 16)))
    model = hb.distribute(model, parallel=hb.ParallelOptions(virtual_ranks=2))
    assert isinstance(model, Distributed)
    with pytest.raises(SpecError, match="got 2, expected 1"):
        Slicer(model)


def test_lookups_of_other_ids_than_those_of_the_batch() -> None:
    model = hb.distribute(Weighted(), parallel=hb.ParallelOptions(virtual_ranks=2))
    assert isinstance(model, Distributed)
    batch = replace(batch_of(4, 0), slices=(2, 2))
    with Slicer(model).divide(batch, last=True), pytest.raises(BatchError, match="other ids"):
        model(batch_of(2, 1))
    with Slicer(model).divide(replace(batch_of(4, 0), slices=(2, 2)), last=True) as divided:
        own = divided.batches[0]
        model(own)
        with pytest.raises(BatchError, match="twice"):
            model(own)


def gradient_of(slicer: Slicer, batch: Batch, model: nn.Module, *, parts: int = 1, fails: bool = False) -> Tensor:
    """Return the gradient of the parameter after a batch in equal parts; with ``fails``, the last part fails."""
    for number, part in enumerate(torch.arange(len(batch)).chunk(parts)):
        last = number == parts - 1
        own = replace(batch.take(part), slices=VirtualRanks(0, 1, 2).sizes(len(part)))
        with slicer.divide(own, last=last) as divided:
            for k, loss in enumerate([model(of_rank) for of_rank in divided]):
                with divided.gradients_of(k):
                    loss.backward()
                if fails and last:
                    raise RuntimeError("the step fails")
            divided.end()
    found = model.scale.grad
    assert isinstance(found, Tensor)
    return found


def test_parts_of_a_batch_are_added_and_a_failed_step_leaves_nothing() -> None:
    model = hb.distribute(Weighted(), parallel=hb.ParallelOptions(virtual_ranks=2))
    assert isinstance(model, Distributed)
    model.module.embeddings.freeze()
    slicer, batch = Slicer(model), batch_of(8, 0)
    halves = torch.arange(8).chunk(2)
    expected = gradient_of(Slicer(model), batch.take(halves[0]), model)
    expected = expected + gradient_of(Slicer(model), batch.take(halves[1]), model)
    for parts in (1, 2):
        with pytest.raises(RuntimeError, match="the step fails"):
            gradient_of(slicer, batch, model, parts=parts, fails=True)
    torch.testing.assert_close(gradient_of(slicer, batch, model, parts=2), expected)
