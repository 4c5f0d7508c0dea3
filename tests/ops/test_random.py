"""Random bits by counter: the same everywhere, for ever."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.ops.rows import random_bits, step_seeds

GOLDEN_BITS = [
    [0x597267A9, 0xFAC6B3F0, 0x1E57432C],
    [0xB643BC18, 0x2DFE54CE, 0xF06379F7],
    [0x65BB20A7, 0x8DAC458D, 0xBE574399],
]
"""Seed 20231123; rows 0, 5, 2³³ + 1; columns 0, 1, 1023; computed 2026-11."""

GOLDEN_SEEDS = [0x92CA2F0E, 0x92CA2F0E, 0xD0414744, 0x9B106D5D]
"""Of table seeds 0, 1, 20231123, 2³² − 1 in steps 0, 1, 5, 2³³ + 1."""

ROWS, COLS = [0, 5, 2**33 + 1], [0, 1, 1023]
SEEDS, STEPS = [0, 1, 20231123, 2**32 - 1], [0, 1, 5, 2**33 + 1]


def mix32(x: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def mix64(seed: int, x: int) -> int:
    return mix32(mix32((x % 2**32) ^ seed) ^ (x >> 32) ^ 0x9E3779B9)


def bits_of_cell(seed: int, row: int, col: int) -> int:
    return mix32((mix64(seed, row) + col * 0x9E3779B9) % 2**32)


def bits(seed: int, rows: list[int], cols: list[int]) -> list[list[int]]:
    return random_bits(torch.tensor(seed), torch.tensor(rows), torch.tensor(cols)).tolist()


def seeds(tables: list[int], steps: list[int]) -> list[int]:
    return step_seeds(torch.tensor(tables), torch.tensor(steps)).tolist()


def test_golden_bits():
    assert bits(20231123, ROWS, COLS) == GOLDEN_BITS
    assert seeds(SEEDS, STEPS) == GOLDEN_SEEDS


@given(seed=st.integers(0, 2**32 - 1), row=st.integers(0, 2**40), col=st.integers(0, 1023))
def test_bits_are_those_of_plain_python(seed, row, col):
    assert bits(seed, [row], [col]) == [[bits_of_cell(seed, row, col)]]
    assert seeds([seed], [row]) == [mix64(seed, row)]


def test_rows_may_have_seeds_of_their_own():
    found = random_bits(torch.tensor([3, 2**32 - 1]), torch.tensor([7, 7]), torch.tensor([0, 1]))
    assert found.tolist() == [[bits_of_cell(s, 7, c) for c in (0, 1)] for s in (3, 2**32 - 1)]


def test_triton_computes_the_seeds_of_a_step_in_one_kernel():
    triton_dense = pytest.importorskip("hotbed.ops.triton_dense")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables, steps = torch.tensor(SEEDS), torch.tensor(STEPS)
    assert triton_dense.step_seeds(tables.to(device), steps.to(device)).tolist() == GOLDEN_SEEDS
    many = torch.arange(300)
    found = triton_dense.step_seeds(many.to(device), (many * 2**29).to(device))
    assert found.cpu().equal(step_seeds(many, many * 2**29))


@pytest.mark.parametrize("gate", [torch.tensor(True), torch.tensor(1.0), torch.tensor(0.0), torch.tensor(math.nan)])
def test_triton_counts_a_step_of_trained_tables_unless_the_gate_is_closed(gate):
    triton_dense = pytest.importorskip("hotbed.ops.triton_dense")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts, trained = torch.arange(300), torch.arange(300) % 2
    found = counts.clone().to(device)
    triton_dense.count_steps_(found, trained.to(device), gate.to(device))
    assert found.cpu().equal(counts + trained if gate != 0 else counts)


def test_every_step_and_every_table_has_seeds_of_its_own():
    """Seeds of tables are hashes, so 32 random bits."""
    tables = torch.randint(0, 2**32, (100,), generator=torch.Generator().manual_seed(1))
    found = step_seeds(tables.repeat_interleave(1000), torch.arange(1000).repeat(100)).view(100, 1000)
    assert ((found >= 0) & (found < 2**32)).all()
    assert all(len(of_table.unique()) == 1000 for of_table in found)
    # Of 100,000 random 32-bit numbers about one pair is equal.
    assert len(found.unique()) >= 100_000 - 10


@pytest.mark.parametrize("shift", [0, 8, 16])
def test_bits_are_uniform_and_cells_unrelated(shift):
    u = (random_bits(torch.tensor(5), torch.arange(500), torch.arange(200)) >> shift & 0xFFFF).double() / 2**16
    n = u.numel()
    assert abs(float(u.mean()) - 0.5) < 4 / (12 * n) ** 0.5
    assert abs(float(u.var()) - 1 / 12) < 4 / (180 * n) ** 0.5
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 4 / a.numel() ** 0.5
