"""Pooled lookup and occurrences of every kind of bag and row."""

from __future__ import annotations

import platform
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from numba import from_dtype, njit, types
from torch import Tensor

from hotbed import large_tensors
from hotbed.ops import BagLayout, Rows, cpu_lookup
from hotbed.ops.cpu_instructions import stream_row, streams_end
from hotbed.specs import POOLED, POOLING_CODE, divisors

from .cases import (
    CASES,
    Kernels,
    embedding_bag,
    naive_bags,
    naive_lookup,
    places_of,
    random_rows,
    values_of,
    without_narrow,
)
from .formats import DTYPES, NARROW, VALUES

OUT_DTYPES = {"to_fp32": torch.float32, "to_bf16": torch.bfloat16, "to_fp16": torch.float16}
SENTINEL = 7.25

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def looked_up(backend: Kernels, rows: Rows, bags: BagLayout, out: torch.dtype = torch.float32) -> Tensor:
    """The vectors of the features ``[B, F, D]``, after checking that no other was written."""
    whole = torch.full((bags.batch_size, bags.width, rows.dim), SENTINEL, dtype=out, device=backend.device)
    assert backend.ops.lookup(backend.put(rows), backend.put(bags), whole) is None
    places = places_of(bags)
    others = [i for i in range(bags.width) if i not in places]
    assert (whole[:, others] == SENTINEL).all()
    return whole[:, places].cpu()


def check(backend: Kernels, rows: Rows, bags: BagLayout, out: torch.dtype = torch.float32) -> None:
    found = looked_up(backend, rows, bags, out)
    exact = naive_lookup(values_of(rows), bags)
    assert torch.equal(found, torch.from_numpy(exact).to(out))
    expected = embedding_bag(torch.from_numpy(values_of(rows)).double(), bags).float()
    torch.testing.assert_close(torch.from_numpy(exact), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 17, 200])
@pytest.mark.parametrize("name", CASES)
def test_lookup(backend, name, dim):
    case = CASES[name]
    check(backend, case.rows(dim), case.layout())


@pytest.mark.parametrize("dim", [3, 16, 40, 1024])
def test_rows_of_other_widths(backend, dim):
    case = CASES["multi_hot"]
    check(backend, case.rows(dim), case.layout())


@pytest.mark.parametrize("dim", [3, 40, 200])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_narrow_rows_behind_wide_ones(backend, dtype, dim):
    """Bags of several ids hold rows of both kinds, added in bag order."""
    case = CASES["weighted"]
    check(backend, case.rows(dim, dtype), case.layout())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_narrow_rows_of_every_case(backend, name, dtype):
    case = CASES[name]
    check(backend, case.rows(17, dtype), case.layout())


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_narrow_rows_alone(backend, dtype):
    case = replace(CASES["multi_hot"], wide=[0, 0])
    check(backend, case.rows(40, dtype), case.layout())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_wide_rows_alone(backend, dtype):
    """A table of a narrow dtype may be all prefix."""
    case = CASES["multi_hot"]
    check(backend, without_narrow(case.rows(17), dtype), case.layout())


def test_the_widest_narrow_rows(backend):
    case = CASES["multi_hot"]
    check(backend, case.rows(1024, torch.int8), case.layout())


@every_dtype
@pytest.mark.parametrize("out", OUT_DTYPES.values(), ids=OUT_DTYPES)
def test_vectors_are_rounded_to_the_nearest_of_their_dtype(backend, out, dtype):
    case = CASES["multi_hot"]
    check(backend, case.rows(17, dtype), case.layout(), out)


def test_one_hot_vectors_are_rounded_too(backend):
    case = CASES["one_hot"]
    check(backend, case.rows(17), case.layout(), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_lookup_twice_gives_the_same_bits(backend, dtype):
    case = CASES["weighted"]
    first, second = (looked_up(backend, case.rows(40, dtype), case.layout()) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", CASES)
def test_lookup_in_several_tasks(monkeypatch, name):
    """As of many samples, by the CPU's kernels: each task begins somewhere among a feature's samples."""
    case = CASES[name]
    monkeypatch.setattr(cpu_lookup, "samples_per_task", lambda samples: 2)
    for dtype in (torch.float32, torch.int8):
        rows, bags = case.rows(24, dtype), case.layout()
        whole = torch.full((bags.batch_size, bags.width, 24), SENTINEL)
        cpu_lookup.lookup(rows, bags, whole)
        assert torch.equal(whole[:, places_of(bags)], torch.from_numpy(naive_lookup(values_of(rows), bags)))


def test_lookup_reads_slots_beyond_a_table(backend):
    """Two features of one table, and a table that does not start at slot 0, read their own rows."""
    case = CASES["mixed"]
    bags = case.layout()
    rows = replace(case.rows(4), wide=torch.arange(case.slots, dtype=torch.float32)[:, None].repeat(1, 4))
    out = looked_up(backend, rows, bags)
    for f, of_feature in enumerate(naive_bags(bags)):
        for b, (slots, _, mean) in enumerate(of_feature):
            expected = sum(slots) / max(len(slots), 1) if mean else sum(slots)
            torch.testing.assert_close(out[b, f], torch.full((4,), float(expected)))


def test_one_id_is_copied_bit_for_bit(backend):
    """A one-hot bag is its row: NaN, −0, infinities and denormals included."""
    case = CASES["one_hot"]
    row = torch.tensor([torch.nan, -0.0, torch.inf, 1e-42])
    out = looked_up(backend, replace(case.rows(4), wide=row.repeat(case.slots, 1)), case.layout())
    assert torch.equal(out.view(torch.int32), row.view(torch.int32).expand(case.batch, len(case.features), 4))


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_every_bit_pattern_is_read_right(backend, dtype):
    """All 2⁸ patterns of fp8; every sign, exponent, first and last mantissa of the others."""
    patterns = np.arange(len(VALUES[dtype]))
    if len(patterns) > 256:
        patterns = patterns[np.isin(patterns % 2**7, (0, 1, 2**7 - 1))]
    patterns = np.resize(patterns, (-(-len(patterns) // 64), 64))
    narrow = torch.from_numpy(patterns.astype(np.uint8 if dtype.itemsize == 1 else np.uint16)).view(dtype)
    check_one_hot(backend, narrow, torch.empty(len(narrow), 0, dtype=torch.int8), VALUES[dtype][patterns])


def test_every_int8_value_times_a_power_of_two(backend):
    exponents = np.array([-120, -119, -9, -1, 0, 1, 30, 121])
    q = np.tile(np.arange(-128, 128), (8, 1))
    expected = np.where(q == -128, np.nan, q * 2.0 ** exponents[:, None])
    both = torch.from_numpy(np.stack([exponents, exponents], axis=1).astype(np.int8))
    check_one_hot(backend, torch.from_numpy(q.astype(np.int8)), both, expected)


def check_one_hot(backend: Kernels, narrow: Tensor, exponents: Tensor, expected: np.ndarray) -> None:
    """Looking up each row by itself gives these values."""
    n = len(narrow)
    rows = Rows(torch.empty(0, narrow.shape[1]), narrow, exponents, torch.tensor([[0, 0, 0, 0, 0, 1, 0]]))
    features = torch.tensor([[0, 1, 0, 0, 0, 0, 0]])
    offsets = torch.empty(0, n + 1, dtype=torch.int64)
    out = looked_up(backend, rows, BagLayout(torch.arange(n), features, offsets, None, n, n, False, 1))
    assert np.array_equal(out[:, 0].numpy(), expected.astype(np.float32), equal_nan=True)
    zero = expected == 0
    assert np.array_equal(np.signbit(out[:, 0].numpy()[zero]), np.signbit(expected[zero]))


DIVIDED_BY = {"sum": lambda ids: 1, "mean": lambda ids: max(ids, 1)}
"""By pooling, what the sum of a bag of so many ids is divided by; a new pooling is a row here."""


@pytest.mark.parametrize("dim", [1, 17, 40, 200])
@pytest.mark.parametrize("wide", [[0, 0, 0, 0], [1, 5, 0, 4]], ids=["narrow", "mixed"])
@every_dtype
def test_rows_of_any_tables_are_gathered(backend, dtype, wide, dim):
    rows = random_rows([4, 5, 0, 200], wide, dim, dtype)
    draw = torch.Generator().manual_seed(1)
    for slots in (
        torch.randint(0, 209, (300,), generator=draw),
        torch.arange(209),
        torch.tensor([208]),
        torch.empty(0),
    ):
        out = torch.full((len(slots), dim), SENTINEL, device=backend.device)
        assert backend.ops.gather(backend.put(rows), backend.put(slots.long()), out) is None
        assert np.array_equal(out.cpu().numpy(), values_of(rows)[slots.long().numpy()])


def test_gathered_rows_may_be_written_past_the_caches(monkeypatch):
    monkeypatch.setattr(cpu_lookup, "STREAM_BYTES", 1)
    for dtype in (torch.float32, torch.int8):
        rows, slots = random_rows([40, 50], [3, 20], 32, dtype), torch.arange(89, -1, -1)
        out = large_tensors.empty((1 << 14, 32))[:90]
        assert cpu_lookup.should_stream(out[:, None])
        cpu_lookup.gather(rows, slots, out)
        assert np.array_equal(out.numpy(), values_of(rows)[::-1])


@pytest.mark.parametrize("pooling", POOLED)
def test_poolings_divide_vectors_and_gradients_alike(backend, pooling):
    lengths = [0, 1, 2, 7, 33]
    expected = np.float32([n / DIVIDED_BY[pooling](n) for n in lengths])
    code, total = POOLING_CODE[pooling], sum(lengths)
    offsets = torch.tensor([[0, *accumulate(lengths)]])
    features = torch.tensor([[0, -1, 0, 0, code, 0, 0]])
    bags = BagLayout(torch.zeros(total, dtype=torch.int64), features, offsets, None, len(lengths), total, code != 0, 1)
    rows = Rows(
        torch.ones(1, 16),
        torch.empty(0, 16),
        torch.empty(0, 0, dtype=torch.int8),
        torch.tensor([[0, 1, 0, 0, 0, 1, 0]]),
    )
    assert looked_up(backend, rows, bags)[:, 0, 0].tolist() == expected.tolist()
    factor = np.repeat(np.float32([1 / DIVIDED_BY[pooling](n) for n in lengths]), lengths)
    scale = backend.ops.occurrences(backend.put(bags)).scale
    assert scale is None if code == 0 else scale.tolist() == factor.tolist()
    out = torch.empty(total, device=backend.device)
    backend.ops.weight_gradient(backend.put(rows), backend.put(bags), backend.put(torch.ones(5, 16)), out)
    assert out.tolist() == (16 * factor).tolist()
    divided_by = divisors(code, torch.tensor(lengths))
    assert divided_by.tolist() == divisors(torch.full((5,), code), torch.tensor(lengths)).tolist()
    assert divided_by.tolist() == [DIVIDED_BY[pooling](n) for n in lengths]


@pytest.mark.parametrize("name", CASES)
def test_occurrences(backend, name):
    bags = CASES[name].layout()
    found = backend.ops.occurrences(backend.put(bags))
    slots, owners, scale = [], [], []
    for place, of_feature in zip(places_of(bags), naive_bags(bags), strict=True):
        for b, (bag, weights, mean) in enumerate(of_feature):
            slots += bag
            owners += [b * bags.width + place] * len(bag)
            scale += [np.float32(w) / np.float32(len(bag)) if mean else np.float32(w) for w in weights]
    assert found.slots.dtype == found.bags.dtype == torch.int64
    assert found.slots.tolist() == slots
    assert found.bags.tolist() == owners
    if bags.weights is None and not bags.has_divisors:
        assert found.scale is None
    else:
        assert found.scale.dtype == torch.float32
        assert found.scale.tolist() == [float(s) for s in scale]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=["to_fp32", "to_bf16"])
@pytest.mark.parametrize("name", ["one_hot", "weighted", "empty_bags"])
def test_vectors_written_past_the_caches(monkeypatch, name, out, dtype):
    """The CPU streams large results; here everything of whole cache lines counts as large."""
    case = CASES[name]
    rows, bags = case.rows(64, dtype), case.layout()
    values = torch.from_numpy(naive_lookup(values_of(rows), bags)).to(out)
    for elements, streamed in ((0, True), (1, False)):  # from a whole line on, and from elsewhere
        memory = torch.full((64 + bags.batch_size * bags.width * 64,), SENTINEL, dtype=out)
        skip = -memory.data_ptr() % cpu_lookup.LINE_BYTES // memory.element_size() + elements
        whole = memory[skip : skip + bags.batch_size * bags.width * 64].view(bags.batch_size, bags.width, 64)
        assert not cpu_lookup.should_stream(whole)  # it is not large
        with monkeypatch.context() as patched:
            patched.setattr(cpu_lookup, "STREAM_BYTES", 0)
            assert cpu_lookup.should_stream(whole) == streamed
            cpu_lookup.lookup(rows, bags, whole)
        assert torch.equal(whole[:, places_of(bags)], values)
        others = [i for i in range(bags.width) if i not in places_of(bags)]
        assert (whole[:, others] == SENTINEL).all()


@pytest.mark.parametrize("dim, whole_lines", [(16, True), (8, False), (24, False), (32, True)])
def test_only_whole_lines_are_written_past_the_caches(dim, whole_lines):
    assert cpu_lookup.should_stream(large_tensors.empty((1 << 17, 2, dim))) == whole_lines


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for instructions of x86")
@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_streamed_lines_are_non_temporal_stores(kind):
    """LLVM may lose the hint on the way, as it did for bfloat16 with AVX-512."""

    @njit
    def copy(out, values):
        stream_row(out, 0, values, 0, out.shape[0])
        streams_end()

    copy.compile((types.Array(from_dtype(np.dtype(kind)), 1, "C"), types.Array(types.float32, 1, "C")))
    assert any("movnt" in code for code in copy.inspect_asm().values())
