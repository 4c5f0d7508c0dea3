"""Virtual ranks: how they are divided among processes, and the tree along which their values are summed."""

from __future__ import annotations

from itertools import chain

import hypothesis.strategies as st
import torch
from hypothesis import given

from hotbed.train.ranks.parallel import sum_virtual_ranks
from hotbed.virtual_ranks import VirtualRanks, subtrees, tree_additions, tree_size


def sum_of_node(values: dict[int, str], first: int, size: int) -> str | None:
    """Return the sum of a node of the tree as text, or None if it has no values: the definition, by recursion."""
    if size == 1:
        return values.get(first)
    left, right = (sum_of_node(values, first + i * size // 2, size // 2) for i in range(2))
    return left if right is None else right if left is None else f"({left} + {right})"


@given(levels=st.integers(0, 6), data=st.data())
def test_additions_are_those_of_the_tree(levels: int, data: st.DataObject) -> None:
    leaves = sorted(data.draw(st.sets(st.integers(0, 2**levels - 1), min_size=1)))
    sums = [str(leaf) for leaf in leaves]
    for i, j in tree_additions(leaves):
        sums[i] = f"({sums[i]} + {sums[j]})"
    assert sums[0] == sum_of_node({leaf: str(leaf) for leaf in leaves}, 0, 2**levels)


@given(size=st.integers(1, 9), levels=st.integers(0, 5), samples=st.integers(0, 50))
def test_processes_add_parts_of_the_tree(size: int, levels: int, samples: int) -> None:
    """Each adds its nodes, and somebody adds the sums of these: the sum of all, whoever computes which part."""
    total = 2**levels
    processes = [VirtualRanks(rank, size, total) for rank in range(size)]
    assert list(chain.from_iterable(process.own for process in processes)) == list(range(total))
    shares = [process.share(samples) for process in processes]
    assert [share.stop - share.start for share in shares] == [sum(process.sizes(samples)) for process in processes]
    assert list(chain.from_iterable(range(samples)[share] for share in shares)) == list(range(samples))
    nodes = [node for process in processes for node in subtrees(process.own)]
    sums = {v: str(v) for v in range(total)}
    of_nodes = {node.start: sum_of_node(sums, node.start, len(node)) or "" for node in nodes}
    assert all(node.start % len(node) == 0 for node in nodes)
    assert sum_of_node(of_nodes, 0, total) == sum_of_node(sums, 0, total)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_values_of_all_virtual_ranks_are_summed_along_the_tree(values: list[float]) -> None:
    expected = list(values)
    for i, j in tree_additions(range(len(values))):
        expected[i] += expected[j]
    found = sum_virtual_ranks(torch.tensor(values, dtype=torch.float64))
    assert torch.equal(found.isnan(), torch.tensor(expected[0]).isnan())
    assert found.isnan() or float(found).hex() == expected[0].hex()


def test_trees_have_a_power_of_two_of_leaves() -> None:
    assert [tree_size(total) for total in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    assert subtrees(range(2, 5)) == [range(2, 4), range(4, 5)] and subtrees(range(3, 3)) == []
