"""Rounding into narrow formats, against formats decoded by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.ops.rows import block_count, exponents_of, power_of_two, random_bits, round_nearest, round_stochastic, widen

from .formats import FLOATS, LARGEST, NARROW, SCALE_BLOCK, VALUES, bits, decode, neighbours, smallest_exponents

every_dtype = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
every_float = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)

NONE = torch.empty(0, 0, dtype=torch.int8)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
lists = st.lists(finite | st.floats(-4, 4, width=32), min_size=1, max_size=300)
random_words = st.integers(0, 2**32 - 1)


def exponents_for(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest that hold the values, where the dtype has exponents."""
    return torch.from_numpy(smallest_exponents(values.numpy())).to(torch.int8) if dtype == torch.int8 else NONE


def in_range(values: list[float], dtype: torch.dtype) -> Tensor:
    """One row of those values that the format reaches."""
    limit = LARGEST.get(dtype, 2.0**126)
    return torch.tensor([[v for v in values if abs(v) <= limit] or [0.0]])


def words(values: Tensor, word: int) -> Tensor:
    return torch.full(values.shape, word, dtype=torch.int64)


@every_dtype
@settings(max_examples=300)
@given(values=lists, word=random_words)
def test_stochastic_rounding_picks_one_of_the_two_neighbours(dtype, values, word):
    x = in_range(values, dtype)
    exponents = exponents_for(x, dtype)
    found = decode(round_stochastic(x, dtype, exponents, words(x, word)), exponents)
    low, high = neighbours(x.numpy(), dtype, exponents)
    assert ((found == low) | (found == high)).all()
    assert np.isfinite(found).all(), "what is in range stays finite"


@every_dtype
@given(values=lists, word=random_words)
def test_stochastic_rounding_is_symmetric_and_monotonic_in_its_bits(dtype, values, word):
    x = in_range(values, dtype)
    exponents = exponents_for(x, dtype)
    found = decode(round_stochastic(x, dtype, exponents, words(x, word)), exponents)
    mirrored = decode(round_stochastic(-x, dtype, exponents, words(x, word)), exponents)
    assert np.array_equal(found, -mirrored)
    ends = [abs(decode(round_stochastic(x, dtype, exponents, words(x, w)), exponents)) for w in (0, 2**32 - 1)]
    assert ((np.minimum(*ends) <= abs(found)) & (abs(found) <= np.maximum(*ends))).all()


@every_float
@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 1])
def test_every_value_of_a_format_stays_as_it_is(dtype, word):
    """To the bit; of NaN only that it is one."""
    values = VALUES[dtype]
    x = torch.from_numpy(values.astype(np.float32))[None]
    for rounded in (round_stochastic(x, dtype, NONE, words(x, word)), round_nearest(x, dtype, NONE)):
        same = bits(rounded)[0] == np.arange(len(values))
        assert (same | np.isnan(values)).all()
        assert np.array_equal(decode(rounded)[0], values, equal_nan=True)


@pytest.mark.parametrize("exponent", [-120, -8, 0, 100])
@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_every_int8_value_stays_as_it_is(exponent, word):
    q = torch.arange(-127, 128)[None].to(torch.int8)
    exponents = torch.full((1, block_count(255)), exponent, dtype=torch.int8)
    x = widen(q, exponents)
    assert np.array_equal(x.numpy(), np.arange(-127, 128)[None] * 2.0**exponent)
    assert torch.equal(round_stochastic(x, torch.int8, exponents, words(x, word)), q)
    assert torch.equal(round_nearest(x, torch.int8, exponents), q)


@every_float
def test_widen_reads_every_bit_pattern(dtype):
    unsigned = np.arange(len(VALUES[dtype])).astype(np.uint8 if dtype.itemsize == 1 else np.uint16)
    found = widen(torch.from_numpy(unsigned).view(dtype)[None], NONE)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy()[0], VALUES[dtype], equal_nan=True)


@every_dtype
@given(values=lists)
def test_round_nearest_is_nearest_with_ties_to_even(dtype, values):
    x = in_range(values, dtype)
    exponents = exponents_for(x, dtype)
    rounded = round_nearest(x, dtype, exponents)
    found, exact = decode(rounded, exponents), x.double().numpy()
    low, high = neighbours(exact, dtype, exponents)
    assert ((found == low) | (found == high)).all()
    distance, other = abs(found - exact), np.maximum(high - exact, exact - low)
    assert (distance <= other).all() and (distance <= np.minimum(high - exact, exact - low)).all()
    tie = (high - exact == exact - low) & (low != high)
    assert (bits(rounded)[tie] % 2 == 0).all()


@every_dtype
@pytest.mark.parametrize("fraction", [2**-12, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_stochastic_rounding_is_unbiased(dtype, fraction, sign):
    """The mean over many cells is within five standard errors of the value."""
    n = 200_000
    x = torch.full((1, n), 1.25 + fraction / 2**10 if dtype == torch.float16 else 1.25 + fraction / 2**7)
    exponents = torch.full((1, block_count(n)), -6, dtype=torch.int8)
    x *= sign
    rounded = round_stochastic(x, dtype, exponents, random_bits(torch.tensor(1), torch.tensor([2]), torch.arange(n)))
    found = decode(rounded, exponents)[0]
    low, high = (float(side[0, 0]) for side in neighbours(x[:, :1].numpy(), dtype, exponents[:, :1]))
    assert {*np.unique(found)} == {low, high}
    up = (float(x[0, 0]) - low) / (high - low)
    error = (high - low) * (up * (1 - up) / n) ** 0.5
    assert abs(found.mean() - float(x[0, 0])) < 5 * error


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_values_below_the_smallest_normal_are_unbiased_too(dtype):
    smallest = float(np.min(VALUES[dtype][VALUES[dtype] > 0]))
    n = 200_000
    x = torch.full((1, n), 0.3 * smallest)
    rounded = round_stochastic(x, dtype, NONE, random_bits(torch.tensor(1), torch.tensor([2]), torch.arange(n)))
    share = float((decode(rounded) == smallest).mean())
    assert set(np.unique(decode(rounded))) == {0.0, smallest}
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5


@every_dtype
@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_what_is_not_finite(dtype, word):
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    exponents = torch.full((1, 1), -6, dtype=torch.int8)
    infinite = torch.inf if dtype in (torch.bfloat16, torch.float16) else torch.nan
    for rounded in (round_stochastic(x, dtype, exponents, words(x, word)), round_nearest(x, dtype, exponents)):
        found = decode(rounded, exponents)[0]
        assert np.array_equal(found, [np.nan, infinite, -infinite, 1.0], equal_nan=True)


@every_float
def test_what_is_out_of_range(dtype):
    """Far above the largest value lies infinity, in fp8 NaN; just above it stochastic rounding may still reach it."""
    beyond = {torch.bfloat16: 3.4e38, torch.float16: 7e4, torch.float8_e4m3fn: 1e4}[dtype]
    x = torch.tensor([[beyond, -beyond]])
    expected = [np.nan, np.nan] if dtype == torch.float8_e4m3fn else [np.inf, -np.inf]
    found = decode(round_stochastic(x, dtype, NONE, words(x, 2**32 - 1 if dtype == torch.bfloat16 else 0)))
    assert np.array_equal(found[0], expected, equal_nan=True)


def test_nan_stays_nan_whatever_its_payload():
    x = torch.tensor([[0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF]], dtype=torch.int32).view(torch.float32)
    for dtype in NARROW.values():
        rounded = round_stochastic(x, dtype, torch.zeros(1, 1, dtype=torch.int8), words(x, 2**32 - 1))
        assert np.isnan(decode(rounded, torch.zeros(1, 1, dtype=torch.int8))).all()


# -- exponents of int8 rows ----------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(values=lists)
def test_exponents_are_the_smallest_that_hold_the_row(values):
    x = torch.tensor([values, [v / 3 for v in values]])
    found = exponents_of(x)
    assert found.dtype == torch.int8 and found.shape == (2, block_count(len(values)))
    assert np.array_equal(found.numpy(), smallest_exponents(x.numpy()))


@given(exponent=st.integers(-119, 120))
def test_exponents_at_the_border(exponent):
    """127 quanta fit, a hair more does not: the largest value of MXINT8, but for the size of a block."""
    x = torch.tensor([[127 * 2.0**exponent]])
    assert exponents_of(x).item() == exponent
    assert exponents_of(torch.nextafter(x, torch.tensor(torch.inf))).item() == exponent + 1


def test_exponents_of_blocks_zeros_and_what_is_not_finite():
    x = torch.zeros(3, 200)
    x[0, 0], x[0, SCALE_BLOCK] = 127.0, -254.0
    x[1, 5], x[1, 6] = torch.inf, 1.0
    x[2, 199] = torch.nan
    assert exponents_of(x).tolist() == [[0, 1], [-6, -120], [-120, -120]]


def test_an_int8_row_is_whole_multiples_of_a_power_of_two():
    """A block of 128 columns has one scale; −128 is NaN."""
    q = torch.full((1, 130), 3, dtype=torch.int8)
    q[0, 1] = -128
    found = widen(q, torch.tensor([[-2, 4]], dtype=torch.int8))[0]
    assert found[0] == 0.75 and found[1].isnan() and found[127] == 0.75 and found[128] == found[129] == 48.0


def test_power_of_two_is_exact():
    exponents = torch.arange(-126, 128)
    assert power_of_two(exponents).tolist() == [2.0**e for e in range(-126, 128)]
