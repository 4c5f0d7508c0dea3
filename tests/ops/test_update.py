"""The canonical sum and the rules: what a step does to the rows it touches, and to no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.ops import Occurrences
from hotbed.ops.layout import OWN
from hotbed.ops.reference import block_sum

from .arenas import OPTIONS, SEGMENTS, Arena, assert_same, gradient, oracle, others
from .cases import (
    CASES,
    Kernels,
    embedding_bag,
    naive_block_sum,
    occurrences_of,
    places_of,
)
from .formats import DTYPES
from .naive_rules import RULES

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
SGD, ROWWISE, LAMB = RULES["sgd"], RULES["rowwise_adagrad"], RULES["lamb"]
FIRST, SECOND, THIRD = np.arange(4), np.arange(4, 9), np.arange(9, 24)
"""Slots of the tables."""

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def check(backend: Kernels, before: Arena, occurrences: Occurrences, grad: Tensor, inv_scale: float = 1.0) -> Arena:
    """The float32 arena after the step, after comparing it with numpy."""
    after = before.updated(backend, occurrences, grad, inv_scale=inv_scale)
    values, moments = before.updated_naively(occurrences, grad, inv_scale=inv_scale)
    assert np.isfinite(values).all()
    torch.testing.assert_close(after.rows.wide, torch.from_numpy(values), **CLOSE)
    for name, moment in after.moments.items():
        torch.testing.assert_close(moment, torch.from_numpy(moments[name]), **CLOSE)
    assert_same(after, before.updated(oracle, occurrences, grad, inv_scale=inv_scale))
    return after


@every_rule
@pytest.mark.parametrize("dim", [1, 17, 200])
def test_rules(backend, dim, rule):
    before = Arena.make(rule, dim, active=(1, 0, 1))
    check(backend, before, occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, dim), 0.3)


@pytest.mark.parametrize("rule", [SGD, LAMB], ids=["sgd", "lamb"])
@pytest.mark.parametrize("dim", [3, 16, 40, 128, 1024])
def test_rows_of_other_widths(backend, dim, rule):
    check(backend, Arena.make(rule, dim), occurrences_of(SEGMENTS["few"], 12, scaled=False), gradient(12, dim))


@pytest.mark.parametrize("rule", [SGD, ROWWISE], ids=["sgd", "rowwise"])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_of_every_length(backend, name, rule):
    before = Arena.make(rule, 20, active=(1, 0, 1))
    check(backend, before, occurrences_of(SEGMENTS[name], 12, scaled=name == "random"), gradient(12, 20), 0.3)


def test_a_table_may_divide_by_the_moment_of_before_the_step(backend):
    occurrences, grad = occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 17)
    plain = Arena.make(ROWWISE, 17)
    hyper = plain.hyper.clone()
    hyper[1:, OWN + ROWWISE.hyper.index("delayed")] = 1
    after = check(backend, replace(plain, hyper=hyper), occurrences, grad)
    usual = check(backend, plain, occurrences, grad)
    changed = (after.bits()[0] != usual.bits()[0]).any(axis=1)
    assert not changed[FIRST].any() and changed[SECOND].any() and changed[THIRD].any()
    assert np.array_equal(after.bits()[1], usual.bits()[1])


@every_rule
def test_options_of_tables(backend, rule):
    before = Arena.make(rule, 17, options=OPTIONS["mixed"])
    check(backend, before, occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 17))


@pytest.mark.parametrize("rule", [SGD, LAMB, RULES["ftrl"]], ids=["sgd", "lamb", "ftrl"])
@pytest.mark.parametrize("name", [name for name in OPTIONS if len(OPTIONS[name]) == 1])
def test_an_option_changes_the_tables_that_have_it_and_no_bit_of_the_others(backend, name, rule):
    occurrences, grad = occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 17)
    without = Arena.make(rule, 17).updated(backend, occurrences, grad)
    after = check(backend, Arena.make(rule, 17, options=OPTIONS[name]), occurrences, grad)
    changed = (after.bits()[0] != without.bits()[0]).any(axis=1)
    for slots, value in zip((FIRST, SECOND, THIRD), OPTIONS[name][name], strict=True):
        if value in (0.0, torch.inf):
            assert_same(after, without, slots)
        else:
            assert changed[slots].any()


@pytest.mark.parametrize("name", ["max_norm", "max_grad_norm"])
def test_a_row_within_a_limit_stays_as_it_is(backend, name):
    occurrences, grad = occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 40)
    far = Arena.make(SGD, 40, options={name: [1e6, 1e6, 1e6]})
    assert_same(far.updated(backend, occurrences, grad), Arena.make(SGD, 40).updated(backend, occurrences, grad))


def test_max_norm_is_the_norm_of_the_longest_row(backend):
    before = Arena.make(SGD, 40, options={"max_norm": [0.5, 0.5, 0.5]})
    after = before.updated(backend, occurrences_of(SEGMENTS["few"], 12, scaled=True), gradient(12, 40))
    norms = after.rows.wide.double().norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("rule", [SGD, LAMB], ids=["sgd", "lamb"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients_are_summed_in_float32(backend, dtype, rule):
    before = Arena.make(rule, 17)
    occurrences = occurrences_of(SEGMENTS["few"], 12, scaled=True)
    grad = gradient(12, 17).to(dtype)
    after = check(backend, before, occurrences, grad)
    assert_same(after, before.updated(backend, occurrences, grad.float()))


@every_rule
def test_update_twice_gives_the_same_bits(backend, rule):
    before, occurrences = (
        Arena.make(rule, 40, options=OPTIONS["mixed"]),
        occurrences_of(SEGMENTS["few"], 12, scaled=True),
    )
    first, second = (before.updated(backend, occurrences, gradient(12, 40)) for _ in range(2))
    assert_same(first, second)


@every_rule
@every_dtype
def test_update_touches_only_rows_that_occur_in_active_tables(backend, dtype, rule):
    before = Arena.make(rule, 17, dtype, active=(1, 0, 1), options={"lr": [2.0, 2.0, 2.0]})
    after = before.updated(backend, occurrences_of([0, 2, 2, 5, 8, 23], 4, scaled=False), gradient(4, 17))
    assert_same(after, before, others([0, 2, 23]))
    for x, y in zip(after.bits(), before.bits(), strict=True):
        changed = (x != y).reshape(len(x), -1).any(axis=1)
        assert changed[[0, 2, 23]].all()


@every_rule
@pytest.mark.parametrize(
    ("dtype", "gate"), [(torch.float32, False), (torch.float32, 0.0), (torch.int8, False)], ids=str
)
def test_closed_gate_touches_nothing(backend, dtype, gate, rule):
    before = Arena.make(rule, 16, dtype)
    grad = torch.full((4, 16), torch.nan)
    assert_same(before.updated(backend, occurrences_of([1] * 40 + [3], 4, scaled=False), grad, gate=gate), before)


@every_rule
def test_no_occurrences(backend, rule):
    before = Arena.make(rule, 16)
    assert_same(before.updated(backend, occurrences_of([], 4, scaled=False), gradient(4, 16)), before)


def test_every_row_has_the_hyperparameters_of_its_table(backend):
    tables = [1, 2, 1, 3, 1] * 9
    options = {"lr": torch.arange(45.0).tolist()}
    before = Arena.make(SGD, 1, tables=tables, wide=tables, active=(1,) * 45, options=options)
    slots = list(range(sum(tables)))
    after = before.updated(backend, occurrences_of(slots, 1, scaled=False), torch.ones(1, 1))
    steps = torch.repeat_interleave(torch.arange(45.0), torch.tensor(tables))
    torch.testing.assert_close((before.rows.wide - after.rows.wide)[:, 0], steps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.batch])
def test_update_is_the_gradient_of_lookup(backend, name):
    """SGD with lr 1 subtracts what autograd finds for embedding_bag; gradients of other arenas lie between."""
    case = CASES[name]
    bags = case.layout()
    weight = torch.zeros(case.slots, 3, dtype=torch.float64, requires_grad=True)
    grad = gradient(case.batch * case.width, 3).view(case.batch, case.width, 3)
    embedding_bag(weight, bags).backward(grad.double()[:, places_of(bags)])
    grad[:, [i for i in range(case.width) if i not in places_of(bags)]] = torch.nan
    tables = len(case.tables)
    before = Arena.make(SGD, 3, tables=case.tables, active=(1,) * tables, options={"lr": [1.0] * tables})
    found = backend.ops.occurrences(backend.put(bags))
    after = before.with_values(torch.zeros(case.slots, 3)).updated(backend, found, grad.flatten(0, 1))
    torch.testing.assert_close(-after.rows.wide, weight.grad.float(), rtol=1e-5, atol=1e-5)


@settings(max_examples=10)
@given(
    rule=st.sampled_from(list(RULES.values())),
    dtype=st.sampled_from(list(DTYPES.values())),
    slots=st.lists(st.sampled_from([0, 3, 4, 11, 23]), min_size=1, max_size=70),
    extra=st.lists(st.sampled_from([1, 5, 12, 22]), max_size=30),
    seed=st.integers(0, 1000),
)
def test_a_row_does_not_depend_on_the_other_rows_of_the_batch(backend, rule, dtype, slots, extra, seed):
    """The canonical sum of a slot is a function of its own occurrences: others between them change no bit."""
    before = Arena.make(rule, 20, dtype, options=OPTIONS["mixed"])
    alone = occurrences_of(slots, 12, scaled=True, seed=seed)
    rest = occurrences_of(extra, 12, scaled=True, seed=seed + 1)
    mixed = torch.randperm(len(slots) + len(extra), generator=torch.Generator().manual_seed(seed))
    # Keep the order of `slots` among themselves: only where the others fall between them is random.
    mixed[mixed < len(slots)] = torch.arange(len(slots))
    together = Occurrences(
        torch.cat([alone.slots, rest.slots])[mixed],
        torch.cat([alone.bags, rest.bags])[mixed],
        torch.cat([alone.scale, rest.scale])[mixed],
    )
    grad = gradient(12, 20)
    after = before.updated(backend, together, grad)
    assert_same(after, before.updated(backend, alone, grad), np.unique(slots))
    assert_same(after, before, others([*slots, *extra]))


@pytest.mark.parametrize(("dim", "cut"), [(40, 16), (40, 32), (80, 32)])
def test_columns_cut_at_multiples_of_16_give_the_same_bits(backend, dim, cut):
    """SGD of two column tiles is SGD of the whole; a tile's Σg² is the whole's partials, added in column order."""
    occurrences = occurrences_of(SEGMENTS["few"], 12, scaled=True)
    grad = gradient(12, dim)
    halves = (slice(0, cut), slice(cut, dim))
    whole = Arena.make(SGD, dim)
    parts = [whole.with_values(whole.rows.wide[:, c].contiguous()) for c in halves]
    after = [part.updated(backend, occurrences, grad[:, c].contiguous()) for part, c in zip(parts, halves, strict=True)]
    joined = torch.cat([a.rows.wide for a in after], dim=1)
    assert torch.equal(joined, whole.updated(backend, occurrences, grad).rows.wide)

    # With v₀ = 0 and 16 columns, 16 v is exactly the tile's block partial (a power of two rounds nothing).
    start = {"moments": {"sum_of_squares": torch.zeros(24)}}
    whole = replace(Arena.make(ROWWISE, dim), **start)
    total = torch.zeros(24)
    for c in range(0, dim, 16):
        tile = replace(Arena.make(ROWWISE, 16), **start)
        block = torch.zeros(12, 16)
        block[:, : min(16, dim - c)] = grad[:, c : c + 16]
        total = total + tile.updated(backend, occurrences, block).moments["sum_of_squares"] * 16
    v = whole.updated(backend, occurrences, grad).moments["sum_of_squares"]
    torch.testing.assert_close(v, total / dim, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dim", [17, 40, 200])
def test_squares_of_a_row_are_added_in_blocks(backend, dim):
    """To the bit: a plan that cuts columns has the same partial sums."""
    before, occurrences = Arena.make(ROWWISE, dim), occurrences_of(SEGMENTS["few"], 12, scaled=False)
    after = before.updated(backend, occurrences, gradient(12, dim))
    _, moments = before.updated_naively(occurrences, gradient(12, dim))
    assert np.array_equal(after.moments["sum_of_squares"].numpy(), moments["sum_of_squares"])


@given(dim=st.integers(1, 200), seed=st.integers(0, 100))
def test_block_sum_of_a_column_tile_is_a_partial_of_the_whole(dim, seed):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    partials = [block_sum(x[:, c : c + 16]) for c in range(0, dim, 16)]
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    assert torch.equal(block_sum(x), total)
    assert block_sum(x).tolist() == [float(naive_block_sum(row)) for row in x.numpy()]


@every_rule
@pytest.mark.parametrize("dim", [1, 16, 40])
def test_rows_and_moments_may_be_parts_of_records(backend, rule, dim):
    """Where a backend says so; what lies between them stays."""
    before, occurrences, grad = (
        Arena.make(rule, dim),
        occurrences_of(SEGMENTS["few"], 12, scaled=True),
        gradient(12, dim),
    )
    after = before.updated(backend, occurrences, grad)
    assert (backend.name != "triton") == backend.ops.TAKES_STRIDED_ROWS
    if not backend.ops.TAKES_STRIDED_ROWS:
        return
    columns = {name: m.view(24, -1) for name, m in before.moments.items()}
    records = torch.cat([before.rows.wide, *columns.values(), torch.full((24, 2), 7.0)], dim=1)
    fields = records.split([dim, *(m.shape[1] for m in columns.values()), 2], dim=1)
    moments = {n: f[:, 0] if before.moments[n].dim() == 1 else f for n, f in zip(columns, fields[1:], strict=False)}
    step = before.step(before.seeds, torch.tensor(1.0), torch.tensor(True))
    rows = replace(before.rows, wide=fields[0])
    backend.ops.update(step, rows, moments, occurrences, backend.ops.group(occurrences), grad)
    assert_same(replace(before, rows=replace(rows, wide=fields[0].contiguous()), moments=moments), after)
    assert (fields[-1] == 7).all()
