"""Values of equal slots are added along the tree over virtual ranks, as a recursive definition says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from hotbed.ops import Occurrences, launches, select
from hotbed.ops.backend import BackendName
from hotbed.ops.layout import RUN
from hotbed.virtual_ranks import tree_additions

from .cases import Kernels


@pytest.fixture(scope="module")
def backend(backend: Kernels) -> Kernels:
    """A backend with this operation: others sum by virtual rank in their sums of groups."""
    if backend.name == "cpu":
        pytest.skip("has no such operation")
    return backend


ODD = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e38, -3e38, 1e-40, 16777216.0, 1.0)
Values = NDArray[np.float32]


def added(values: dict[int, Values], node: range) -> Values | None:
    """The value of a node of the tree: of its halves, those that have one."""
    if len(node) == 1:
        return values.get(node.start)
    middle = node.start + len(node) // 2
    left, right = added(values, range(node.start, middle)), added(values, range(middle, node.stop))
    if left is None or right is None:
        return right if left is None else left
    with np.errstate(all="ignore"):
        return left + right


def same(found: Tensor, expected: Values) -> bool:
    """Whether values are equal, −0.0 and 0.0 being different, and NaN equal to NaN."""
    x, y = found.numpy(), expected
    nan = np.isnan(x) & np.isnan(y)
    return bool(np.all(nan | (x.view(np.int32) == y.view(np.int32))))


def check(
    backend: Kernels, slots: dict[int, list[int]], leaves: int, dim: int, *, spare: int = 0, seed: int = 0
) -> None:
    """Add the values of slots, given by their virtual ranks, with a backend and by the definition."""
    entries = [(slot, rank) for slot in sorted(slots) for rank in sorted(slots[slot])]
    total, rng = len(entries), np.random.default_rng(seed)
    values = rng.standard_normal((total + spare + 3, dim)).astype(np.float32)
    odd = rng.random(values.shape) < 0.3
    values[odd] = rng.choice(np.array(ODD, np.float32), int(odd.sum()))
    places = rng.permutation(len(values))[: total + spare]
    keys = [slot * leaves + rank for slot, rank in entries] + [3] * spare
    expected = values.copy()
    row_of = dict(zip(entries, places.tolist(), strict=False))
    for slot, ranks in slots.items():
        expected[row_of[slot, min(ranks)]] = added({r: values[row_of[slot, r]] for r in ranks}, range(leaves))
    undefined = {row for (slot, rank), row in row_of.items() if rank != min(slots[slot])}
    out = backend.put(torch.from_numpy(values))
    before = launches.copy()
    with np.errstate(all="ignore"):  # NumPy runs kernels in Triton's interpreter
        backend.ops.add_along_tree(
            backend.put(torch.tensor(keys, dtype=torch.int64)),
            backend.put(torch.from_numpy(places)),
            backend.put(torch.tensor(total)),
            leaves,
            out,
        )
    assert launches - before == {f"{backend.name}.add_along_tree": 1}
    defined = [row for row in range(len(values)) if row not in undefined]
    assert same(backend.back(out)[defined], expected[defined])


@settings(max_examples=40)
@given(st.data())
def test_any_virtual_ranks_of_any_slots(backend: Kernels, data: st.DataObject):
    leaves = 1 << data.draw(st.integers(0, 5))
    ranks = st.sets(st.integers(0, leaves - 1), min_size=1).map(sorted)
    slots = data.draw(st.dictionaries(st.integers(0, 2**40), ranks, max_size=12))
    dim, spare, seed = (data.draw(of) for of in (st.integers(1, 17), st.integers(0, 3), st.integers(0, 2**32)))
    check(backend, slots, leaves, dim, spare=spare, seed=seed)


@pytest.mark.parametrize("dim", [1, 5, 16, 129])
@pytest.mark.parametrize("leaves", [1, 2, 8, 64])
def test_all_leaves_next_to_slots_of_one_entry(backend: Kernels, leaves: int, dim: int):
    check(backend, {0: [leaves - 1], 4: list(range(leaves)), 5: [0], 2**40: list(range(leaves))}, leaves, dim)


@pytest.mark.parametrize("dim", [1, 16])
def test_no_entries(backend: Kernels, dim: int):
    check(backend, {}, 8, dim)
    check(backend, {}, 8, dim, spare=5)


def test_slots_of_several_tasks(backend: Kernels):
    """The first entry of a slot decides which task or program adds it."""
    check(backend, {slot: [r for r in range(8) if (slot * 37 + r * 11) % 3] for slot in range(250)}, 8, 2)


def test_a_slot_of_several_tasks():
    reference = Kernels("reference", torch.device("cpu"), select("cpu", "reference"))
    check(reference, {0: [7], 1: list(range(2500)), 2: [1, 2, 4095]}, 4096, 2)


@pytest.mark.parametrize("ranks", [(0, 1), (3, 4), (0, 7)])
def test_two_entries_are_added_as_two_rows(backend: Kernels, ranks: tuple[int, int]):
    values = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    out = backend.put(values)
    keys, places, count = (backend.put(torch.tensor(of)) for of in ([8 + ranks[0], 8 + ranks[1]], [1, 0], 2))
    backend.ops.add_along_tree(keys, places, count, 8, out)
    assert torch.equal(backend.back(out)[1], values[1] + values[0])


@pytest.mark.parametrize("leaves", [list(range(8)), [0, 1, 2], [1, 2, 3, 6], [5], [0, 2, 4, 5, 6]], ids=str)
def test_the_definition_adds_as_tree_additions(leaves: list[int]):
    values = np.random.default_rng(1).standard_normal((len(leaves), 5)).astype(np.float32)
    expected = added(dict(zip(leaves, values.copy(), strict=True)), range(8))
    for i, j in tree_additions(leaves):
        values[i] += values[j]
    assert expected is not None and np.array_equal(values[0], expected)


# -- sums of groups by virtual rank --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=40)
@given(data=st.data())
def test_sums_of_groups_are_added_along_the_tree(name: BackendName, data: st.DataObject):
    """Of up to three runs per virtual rank, with factors, in any order of virtual ranks."""
    ops, leaves = select("cpu", name), 1 << data.draw(st.integers(0, 4))
    count, dim = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 33))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    slots = torch.randint(0, data.draw(st.integers(1, 40)), (count,), generator=draw)
    leaf = torch.randint(0, leaves, (count,), generator=draw)
    grad = torch.randn(50, dim, generator=draw)
    occurrences = Occurrences(
        slots,
        torch.randint(0, 50, (count,), generator=draw),
        torch.rand(count, generator=draw),
        leaf=leaf,
        leaves=leaves,
    )
    groups = ops.group(occurrences)
    found = torch.empty(count, dim)
    ops.segment_sum(occurrences, groups, grad, None, found)
    distinct = slots.unique().tolist()
    assert groups.rows[: int(groups.counts[0])].tolist() == distinct
    for row, slot in enumerate(distinct):
        by_leaf: dict[int, Values] = {}
        for rank in leaf[slots == slot].unique().tolist():
            each = ((slots == slot) & (leaf == rank)).nonzero()[:, 0]
            values = grad[occurrences.bags[each]] * occurrences.scale[each, None]
            runs = [left_to_right(run) for run in values.split(RUN)]
            by_leaf[rank] = left_to_right(torch.stack(runs)).numpy()
        expected = added(by_leaf, range(leaves))
        assert expected is not None and same(found[row], expected)


def left_to_right(rows: Tensor) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total
