"""A part of a table has the bits of the whole: stochastic rounding goes by row and column of the whole table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotbed.ops import Occurrences, Rows
from hotbed.store import DenseStore, Span

from .arenas import Arena, assert_same, gradient, oracle
from .cases import Kernels, occurrences_of, random_rows
from .formats import NARROW, bits
from .naive_rules import RULES

ROWS, DIM = 11, 256
EVERY_SECOND = range(1, ROWS, 2)


def arena_of(rows: Rows) -> Arena:
    made = Arena.make(RULES["adagrad"], DIM, tables=[ROWS], wide=[0], active=(1,))
    return replace(made, rows=rows, seeds=torch.tensor([77]))


def part(whole: Arena, rows: range, cols: range) -> Arena:
    """The arena of a rank that has only these cells."""
    at, of_row = slice(rows.start, rows.stop, rows.step), slice(cols.start, cols.stop)
    narrow = whole.rows.narrow.view(torch.uint8).view(ROWS, DIM, -1)[at, of_row].clone()
    cut = replace(
        whole.rows,
        wide=whole.rows.wide[:0, of_row],
        narrow=narrow.view(whole.dtype).view(len(rows), len(cols)),
        exponents=whole.rows.exponents[at, cols.start // 128 : cols.stop // 128].clone(),
        tables=torch.tensor([[0, 0, 0, 0, rows.start, rows.step, cols.start]]),
    )
    return replace(whole, rows=cut, moments={name: m[at, of_row].clone() for name, m in whole.moments.items()})


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("cols", [range(128), range(128, 256)])
@pytest.mark.parametrize("rows", [range(ROWS), EVERY_SECOND])
def test_a_part_is_rounded_as_the_whole(backend: Kernels, dtype: torch.dtype, rows: range, cols: range):
    whole = arena_of(random_rows([ROWS], [0], DIM, dtype))
    grad = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    everything = whole.updated(backend, Occurrences(torch.arange(ROWS), torch.arange(ROWS), None), grad)
    own = slice(rows.start, rows.stop, rows.step), slice(cols.start, cols.stop)
    count = torch.arange(len(rows))
    found = part(whole, rows, cols).updated(backend, Occurrences(count, count, None), grad[own].contiguous())
    expected = part(everything, rows, cols)
    assert (bits(found.rows.narrow) == bits(expected.rows.narrow)).all()
    assert torch.equal(found.rows.exponents, expected.rows.exponents)
    assert (bits(expected.rows.narrow) != bits(part(whole, rows, cols).rows.narrow)).any(axis=1).all(), (
        "all rows changed"
    )


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_parts_of_several_tables_share_an_arena(backend: Kernels, dtype: torch.dtype):
    """Each has its own first row, step and column, and a prefix of float32 rows."""
    origins = [(2, 3, 16), (0, 1, 128), (5, 2, 0)]
    here, there = (
        replace(
            Arena.make(RULES["adagrad"], 40, tables=[4, 5, 15], wide=[1, 0, 6]),
            rows=random_rows([4, 5, 15], [1, 0, 6], 40, dtype, origins=o),
        )
        for o in (origins, None)
    )
    found = occurrences_of(list(range(24)), 12, scaled=True)
    after = here.updated(backend, found, gradient(12, 40))
    assert_same(after, here.updated(oracle, found, gradient(12, 40)))
    assert not torch.equal(
        after.rows.narrow.view(torch.uint8),
        there.updated(oracle, found, gradient(12, 40)).rows.narrow.view(torch.uint8),
    )


def test_a_store_tells_the_kernels_where_its_parts_begin():
    spans = [Span(4, 1, first_row=2, row_step=3, first_col=16), Span(5)]
    assert DenseStore(spans, 32, dtype="bf16").rows.tables.tolist() == [[0, 1, 0, 0, 2, 3, 16], [4, 0, 1, 3, 0, 1, 0]]
    assert DenseStore(spans, 32).rows.tables.tolist() == [[0, 4, 0, 0, 2, 3, 16], [4, 5, 4, 0, 0, 1, 0]]
