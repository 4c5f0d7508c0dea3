"""Rows of which two arenas have some columns each become, bit for bit, what whole rows become."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hotbed.ops import Occurrences, launches
from hotbed.ops.layout import FIRST_COL
from hotbed.ops.reference import sum_of_blocks

from .arenas import SEGMENTS, Arena, gradient, oracle
from .cases import Kernels, occurrences_of, values_of
from .formats import DTYPES
from .naive_rules import RULES

ROWWISE = RULES["rowwise_adagrad"]
UNTOUCHED = 7.5


def blocks_of_squares(backend: Kernels, occurrences: Occurrences, grad: Tensor, inv_scale: float, rows: int) -> Tensor:
    """``[rows, blocks]``, `UNTOUCHED` before."""
    found = backend.put(occurrences)
    out = torch.full((rows, -(-grad.shape[-1] // 16)), UNTOUCHED, device=backend.device)
    groups = backend.ops.group(found)
    before = launches.copy()
    backend.ops.square_blocks(found, groups, backend.put(grad), backend.put(torch.tensor(inv_scale)), out)
    assert launches - before == {f"{backend.name}.square_blocks": 1}
    return backend.back(out)


@pytest.mark.parametrize("name", ["one_row", *SEGMENTS])
@pytest.mark.parametrize("dim", [1, 16, 17, 128])
def test_squares_are_summed_by_blocks(backend, name, dim):
    occurrences = occurrences_of(SEGMENTS.get(name, [0]), 12, scaled=name == "random")
    grad, count = gradient(12, dim), len(occurrences.slots.unique())
    out = blocks_of_squares(backend, occurrences, grad, 0.3, count + 2)
    assert torch.equal(out[count:], torch.full_like(out[count:], UNTOUCHED))
    sums = torch.empty(count, dim)
    oracle.ops.segment_sum(occurrences, oracle.ops.group(occurrences), grad, None, sums)
    squares = torch.nn.functional.pad((sums.double() * 0.3) ** 2, (0, -dim % 16)).view(count, -1, 16).sum(2)
    torch.testing.assert_close(out[:count].double(), squares, rtol=1e-5, atol=1e-8)
    assert torch.equal(out, blocks_of_squares(oracle, occurrences, grad, 0.3, count + 2))


def columns_of(whole: Arena, cols: range) -> Arena:
    """The arena of these columns of the rows."""
    tables = whole.rows.tables.clone()
    tables[:, FIRST_COL] = cols.start
    wide, narrow = whole.rows.wide[:, cols].contiguous(), whole.rows.narrow[:, cols].contiguous()
    return replace(whole, rows=replace(whole.rows, wide=wide, narrow=narrow, tables=tables))


@pytest.mark.parametrize("options", [None, {"decay": [0.1, 0.0, 0.2]}], ids=["plain", "decay"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_parts_of_rows_with_the_mean_squares_of_whole_ones(backend, name, dtype, options):
    occurrences, grad, dim = occurrences_of(SEGMENTS[name], 12, scaled=name == "random"), gradient(12, 80), 80
    whole = Arena.make(ROWWISE, dim, DTYPES[dtype], active=(1, 0, 1), options=options)
    expected = whole.updated(backend, occurrences, grad, inv_scale=0.3)
    count = len(occurrences.slots.unique())
    parts = [range(48), range(48, 80)]
    grads = [grad[:, cols].contiguous() for cols in parts]
    blocks = [blocks_of_squares(backend, occurrences, g, 0.3, count) for g in grads]
    mean = sum_of_blocks(torch.cat(blocks, dim=1)) / dim
    for cols, g in zip(parts, grads, strict=True):
        found = columns_of(whole, cols).updated(backend, occurrences, g, inv_scale=0.3, mean_squares=mean)
        assert torch.equal(torch.from_numpy(values_of(found.rows)), torch.from_numpy(values_of(expected.rows))[:, cols])
        for moment, value in expected.moments.items():
            assert torch.equal(found.moments[moment], value)
