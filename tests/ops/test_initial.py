"""Initial values: the same bits everywhere, for ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch

RECTANGLES = {
    "plain": (12345, range(8), range(16)),
    "strided_rows": (7, range(5, 90, 7), range(16, 33)),
    "beyond_32_bits": (2**32 - 1, range(2**33 - 3, 2**33 + 3), range(5)),
    "one_cell": (1, range(1), range(1)),
    "wide": (0, range(2), range(1000)),
    "no_rows": (3, range(0), range(4)),
}


GOLDEN = [
    ["bc76bd6d", "3ce39a53", "3c4d7b33", "3d20fc42"],
    ["bbd9f867", "bd038ae7", "bc9ee92d", "bce6ecc7"],
    ["3cdce343", "3cc3de33", "3d29bb9d", "bc75271a"],
    ["3d396415", "3c62a827", "3cba302a", "bc41fc07"],
]
"""Seed 20231123, rows 0, 2³⁸, 2 · 2³⁸, 3 · 2³⁸, columns 0, 43, 86, 129, bound 0.05; computed 2026-11."""


def _mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _cell(seed: int, row: int, col: int, bound: float) -> np.float32:
    key = _mix32(_mix32((row & 0xFFFFFFFF) ^ seed) ^ (row >> 32) ^ 0x9E3779B9)
    k = _mix32((key + col * 0x9E3779B9) & 0xFFFFFFFF) >> 8
    return np.float32(k - 2**23) * np.float32(bound / 2**23)


def _filled(backend, seed, rows, cols, bound):
    out = torch.full((len(rows), len(cols)), torch.nan, device=backend.device)
    backend.ops.initial_values_(out, seed=seed, rows=rows, cols=cols, bound=bound)
    return out.cpu()


@pytest.mark.parametrize("name", RECTANGLES)
def test_bits_are_those_of_the_hash_in_plain_python(backend, name):
    seed, rows, cols = RECTANGLES[name]
    expected = np.array([[_cell(seed, r, c, 1 / 3) for c in cols] for r in rows], np.float32).reshape(
        len(rows), len(cols)
    )
    assert _filled(backend, seed, rows, cols, 1 / 3).numpy().tobytes() == expected.tobytes()


def test_zeros_have_no_sign(backend):
    """As rows that are made on their first update have them."""
    assert not _filled(backend, 1, range(40), range(16), 0.0).view(torch.int32).any()
    out = torch.full((3, 5), torch.nan, device=backend.device)
    backend.ops.initial_values_(out, seed=1, rows=torch.tensor([4, 0, 9], device=out.device), cols=range(5), bound=0.0)
    assert not out.cpu().view(torch.int32).any()


def test_golden_bits(backend):
    """Checkpoints hold only what was trained; the rest is made again, so these may never change."""
    out = _filled(backend, 20231123, range(0, 2**40, 2**38), range(0, 130, 43), 0.05)
    assert [[f"{v & 0xFFFFFFFF:08x}" for v in row] for row in out.view(torch.int32).tolist()] == GOLDEN


def test_rectangles_of_a_table_fit_together(backend):
    whole = _filled(backend, 9, range(20), range(32), 0.5)
    assert torch.equal(_filled(backend, 9, range(4, 20, 3), range(16, 32), 0.5), whole[4:20:3, 16:])


def test_writes_into_a_view(backend):
    arena = torch.zeros(6, 20, device=backend.device)
    backend.ops.initial_values_(arena[2:4, 3:11], seed=1, rows=range(2), cols=range(8), bound=1.0)
    assert torch.equal(arena[2:4, 3:11].cpu(), _filled(backend, 1, range(2), range(8), 1.0))
    assert arena.count_nonzero() == arena[2:4, 3:11].count_nonzero()


def test_values_are_uniform(backend):
    x = _filled(backend, 3, range(64), range(128), 2.0)
    assert x.min() >= -2 and x.max() < 2
    counts = torch.histc(x, bins=16, min=-2, max=2)
    expected = x.numel() / 16
    # χ² with 15 degrees of freedom exceeds 45 once in 10,000 seeds.
    assert float(((counts - expected) ** 2 / expected).sum()) < 45
    assert abs(float(x.mean())) < 4 * 2 / (3 * x.numel()) ** 0.5
    # Neighbouring rows and columns are unrelated: |r| of n pairs stays below 4 / √n.
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 4 / a.numel() ** 0.5


def test_seeds_give_other_tables(backend):
    a = _filled(backend, 1, range(8), range(16), 1.0)
    assert not (a == _filled(backend, 2, range(8), range(16), 1.0)).any()
