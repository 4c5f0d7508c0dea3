"""Steps of rows narrower than float32: what is kept of the float32 result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hotbed.ops import Occurrences

from .arenas import ALL, OPTIONS, SEGMENTS, WIDE, Arena, assert_same, gradient, oracle, others
from .cases import DIMS, Kernels, is_narrow, occurrences_of, random_rows, values_of, without_narrow
from .formats import NARROW, SCALE_BLOCK, decode, neighbours, smallest_exponents
from .naive_rules import RULES

SGD = RULES["sgd"]
TOLERANCE = 1e-5
"""Of the float32 result, relative to 1 and to itself; that of SGD is exact."""

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_dtype = pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)


def narrow_slots(arena: Arena) -> np.ndarray:
    """Slots in the order of ``narrow``, given that its tables lie in slot order."""
    return ALL[is_narrow(arena.rows)]


def check_rounded(before: Arena, after: Arena, values: np.ndarray, tolerance: float) -> None:
    """The rows after a step hold these float32 values, rounded; exponents have grown as far as needed."""
    slots = narrow_slots(before)
    exact, found = values[slots].astype(np.float64), values_of(after.rows)[slots]
    if before.dtype == torch.int8:
        grown = np.maximum(before.rows.exponents.numpy(), smallest_exponents(exact))
        touched = (after.bits()[0] != before.bits()[0]).any(axis=1)[slots]
        expected = np.where(touched[:, None], grown, before.rows.exponents.numpy())
        assert np.array_equal(after.rows.exponents.numpy(), expected)
    slack = tolerance * (1 + np.abs(exact))
    low = neighbours(exact - slack, before.dtype, after.rows.exponents)[0]
    high = neighbours(exact + slack, before.dtype, after.rows.exponents)[1]
    assert (low <= found).all() and (found <= high).all()
    wide = ~is_narrow(before.rows)
    np.testing.assert_allclose(values_of(after.rows)[wide], values[wide], rtol=tolerance, atol=tolerance)


def check(backend: Kernels, before: Arena, occurrences: Occurrences, grad: Tensor, inv_scale: float = 1.0) -> Arena:
    after = before.updated(backend, occurrences, grad, inv_scale=inv_scale)
    values, moments = before.updated_naively(occurrences, grad, inv_scale=inv_scale)
    check_rounded(before, after, values, 0.0 if before.rule is SGD else TOLERANCE)
    for name, moment in after.moments.items():
        np.testing.assert_allclose(moment.numpy(), moments[name], rtol=1e-5, atol=2e-6)
    assert_same(after, before.updated(oracle, occurrences, grad, inv_scale=inv_scale))
    return after


@every_rule
@every_dtype
def test_every_rule_writes_neighbours_of_its_result(backend, dtype, rule):
    before = Arena.make(rule, 20, dtype, active=(1, 0, 1), options=OPTIONS["mixed"])
    check(backend, before, occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 20), 0.3)


@every_dtype
@pytest.mark.parametrize("dim", [*DIMS, 1024])
def test_rows_of_every_width_have_the_bits_of_the_definition(backend, dim, dtype):
    """The operations of SGD are the same everywhere, and so are random bits and rounding."""
    before = Arena.make(SGD, dim, dtype)
    step = occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, dim)
    after = check(backend, before, *step)
    assert_same(after, before.updated(oracle, *step))


@every_dtype
def test_decay_and_long_segments_have_the_bits_of_the_definition(backend, dtype):
    before = Arena.make(SGD, 17, dtype, options={name: OPTIONS["mixed"][name] for name in ("l2", "decay")})
    step = occurrences_of(SEGMENTS["at_run_length"], 12, scaled=False), gradient(12, 17)
    after = check(backend, before, *step)
    assert_same(after, before.updated(oracle, *step))


@every_dtype
def test_values_that_can_be_represented_are_exact(backend, dtype):
    """A step of 0 moves nothing, and one of a whole quantum arrives whole, whatever the random bits."""
    before = Arena.make(SGD, 40, dtype, options={"lr": [0.0, 0.0, 0.0]})
    occurrences = occurrences_of(ALL.tolist(), 1, scaled=False)
    assert_same(before.updated(backend, occurrences, torch.randn(1, 40)), before)
    ones = random_rows([4, 5, 15], WIDE, 40, dtype)
    narrow = torch.full((len(ones.narrow), 40), 64 if dtype == torch.int8 else 1.0).to(dtype)
    ones = replace(ones, narrow=narrow, exponents=torch.full_like(ones.exponents, -6))
    quantum = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3, torch.int8: 2**-6}[dtype]
    step = replace(Arena.make(SGD, 40, dtype, options={"lr": [1.0, 1.0, 1.0]}), rows=ones)
    after = step.updated(backend, occurrences, torch.full((1, 40), -quantum))
    assert (decode(after.rows.narrow, after.rows.exponents) == 1 + quantum).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_wide_rows_alone(backend, dtype):
    """A table of a narrow dtype may be all prefix: the bits of a float32 one."""
    plain = Arena.make(SGD, 17)
    prefix = replace(plain, rows=without_narrow(plain.rows, dtype))
    step = occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 17)
    assert_same(prefix.updated(backend, *step), plain.updated(backend, *step))


@every_dtype
def test_update_twice_gives_the_same_bits(backend, dtype):
    before, occurrences = Arena.make(RULES["lamb"], 40, dtype), occurrences_of(SEGMENTS["few"], 12, scaled=True)
    first, second = (before.updated(backend, occurrences, gradient(12, 40)) for _ in range(2))
    assert_same(first, second)


@every_dtype
def test_other_seeds_round_another_way(backend, dtype):
    before, occurrences = Arena.make(SGD, 40, dtype), occurrences_of(SEGMENTS["few"], 12, scaled=True)
    other = replace(before, seeds=before.seeds ^ torch.tensor([1, 0, 0]))
    first, second = (arena.updated(backend, occurrences, gradient(12, 40)).bits()[0] for arena in (before, other))
    changed = (first != second).any(axis=1)
    assert changed[1:4].all() and not changed[4:].any()


@every_dtype
def test_a_table_is_rounded_the_same_wherever_it_lies_and_however_many_of_its_rows_are_wide(backend, dtype):
    """Random bits belong to (seed, row, column) of the table, not to a slot."""
    third = np.arange(9, 24)
    arena = Arena.make(SGD, 40, dtype, wide=[0, 0, 0])
    step = occurrences_of(list(range(9, 24)), 12, scaled=True)
    together = arena.updated(backend, step, gradient(12, 40)).bits()[0][third]
    alone = Arena.make(SGD, 40, dtype, tables=[15], wide=[0], active=(1,))
    rows = replace(alone.rows, narrow=arena.rows.narrow[9:], exponents=arena.rows.exponents[9:])
    alone = replace(alone, rows=rows, hyper=arena.hyper[2:], seeds=arena.seeds[2:])
    moved = replace(step, slots=step.slots - 9)
    assert np.array_equal(alone.updated(backend, moved, gradient(12, 40)).bits()[0], together)
    behind = replace(
        alone.rows,
        wide=torch.from_numpy(values_of(alone.rows)[:6]),
        narrow=rows.narrow[6:].clone(),
        exponents=rows.exponents[6:].clone(),
        tables=torch.tensor([[0, 6, 0, 0, 0, 1, 0]]),
    )
    found = replace(alone, rows=behind).updated(backend, moved, gradient(12, 40))
    assert np.array_equal(found.bits()[0][6:], together[6:])


@pytest.mark.parametrize("dim", [40, 200])
def test_int8_exponents_grow_to_the_smallest_that_holds_the_row(backend, dim):
    """Each block by itself; and stay where the row shrinks."""
    before = Arena.make(SGD, dim, torch.int8, wide=[0, 0, 0], options={"lr": [-1.0, -1.0, -1.0]})
    blocks = -(-dim // SCALE_BLOCK)
    grad = torch.zeros(24, dim)
    grad[:, -1] = torch.tensor([0.0, 1e-30, 1.0, 1e3, 1e15, 127.0, 127.0001, -127.0] * 3)
    same_place = Occurrences(torch.arange(24), torch.arange(24), None)
    after = before.updated(backend, same_place, grad)
    old, new = before.rows.exponents.numpy(), after.rows.exponents.numpy()
    values, _ = before.updated_naively(same_place, grad)
    assert np.array_equal(new, np.maximum(old, smallest_exponents(values)))
    assert (new[:, -1] > old[:, -1]).any()
    assert np.array_equal(new[:, : blocks - 1], old[:, : blocks - 1])
    shrunk = replace(after, hyper=Arena.make(SGD, dim, options={"decay": [1.0, 1.0, 1.0]}).hyper, uses={"decay"})
    empty = shrunk.updated(backend, same_place, torch.zeros(24, dim))
    assert (empty.rows.narrow == 0).all()
    assert torch.equal(empty.rows.exponents, after.rows.exponents)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dim", [40, 200])
def test_what_is_not_finite_is_nan_in_int8(backend, dim, bad):
    """In its own columns and for good; the others are rounded as ever, and no exponent follows it."""
    before = Arena.make(SGD, dim, torch.int8)
    grad = gradient(12, dim)
    grad[:, 3] = bad
    step = occurrences_of([14, 14, 22], 12, scaled=False)
    after = before.updated(backend, step, grad)
    slots = narrow_slots(before)
    touched = np.isin(slots, (14, 22))
    assert ((after.rows.narrow == -128).numpy() == (touched[:, None] & (np.arange(dim) == 3))).all()
    zeroed = after.rows.narrow.where(after.rows.narrow != -128, 0)
    values, _ = before.updated_naively(step, grad)
    check_rounded(
        before, replace(after, rows=replace(after.rows, narrow=zeroed)), np.where(np.isfinite(values), values, 0), 0.0
    )
    assert_same(after, before, others([14, 22]))
    again = after.updated(backend, step, gradient(12, dim))
    assert torch.equal(again.rows.narrow == -128, after.rows.narrow == -128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_what_is_not_finite_stays_so_in_floats(backend, dtype):
    before = Arena.make(SGD, 40, dtype)
    grad = torch.zeros(1, 40)
    grad[0, :3] = torch.tensor([torch.nan, -torch.inf, torch.inf])
    after = before.updated(backend, occurrences_of([9 + 4], 1, scaled=False), grad)
    found = values_of(after.rows)[13]
    infinite = np.nan if dtype == torch.float8_e4m3fn else np.inf
    assert np.array_equal(found[:3], [np.nan, infinite, -infinite], equal_nan=True)
    assert np.array_equal(found[3:], values_of(before.rows)[13, 3:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_what_is_too_large_for_floats_is_infinite(backend, dtype):
    """fp8 has no infinity: NaN."""
    before = Arena.make(SGD, 40, dtype)
    after = before.updated(backend, occurrences_of([13], 1, scaled=False), torch.full((1, 40), -1e9))
    found = values_of(after.rows)[13]
    assert np.isnan(found).all() if dtype == torch.float8_e4m3fn else (found == np.inf).all()


STEPS = {"reference": 300, "cpu": 10_000, "triton": 10_000 if torch.cuda.is_available() else 20}
"""As many as can be had in seconds: the reference takes 3 ms each, the interpreter 100."""


@every_dtype
def test_tiny_updates_arrive_in_the_mean(backend, dtype):
    """Each is 1/128 of a quantum: rounding to the nearest would lose them all."""
    start, quantum = {
        torch.bfloat16: (1.25, 2**-7),
        torch.float16: (1.25, 2**-10),
        torch.float8_e4m3fn: (0.25, 2**-5),
        torch.int8: (40 * 2**-8, 2**-8),
    }[dtype]
    n, dim, steps = 64, 32, STEPS[backend.name]
    arena = Arena.make(SGD, dim, dtype, tables=[n], wide=[0], active=(1,), options={"lr": [quantum / 128]})
    narrow = torch.full((n, dim), 40) if dtype == torch.int8 else torch.full((n, dim), start)
    rows = replace(arena.rows, narrow=narrow.to(dtype), exponents=torch.full_like(arena.rows.exponents, -8))
    arena = backend.put(replace(arena, rows=rows))
    found = backend.put(Occurrences(torch.arange(n), torch.zeros(n, dtype=torch.int64), None))
    groups = backend.ops.group(found)
    grad = backend.put(torch.full((1, dim), -1.0))
    seeds = torch.randint(0, 2**32, (steps, 1), generator=torch.Generator().manual_seed(5)).to(backend.device)
    one = torch.ones((), device=backend.device)
    for seed in seeds:
        step = arena.step(seed, one, one)
        backend.ops.update(step, arena.rows, {}, found, groups, grad)
    moved = (values_of(backend.back(arena).rows).astype(np.float64) - start).flatten() / quantum
    error = moved.std() / len(moved) ** 0.5
    assert abs(moved.mean() - steps / 128) < 5 * error
    assert error < steps / 128 / 10, "the bound above says something"
