"""The gradient of each distinct slot on its own, and what is known of slots given back to their occurrences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.ops import Occurrences, cpu, launches

from .arenas import SEGMENTS, Arena, gradient, oracle
from .cases import DIMS, Kernels, naive_sum, occurrences_of
from .naive_rules import RULES

BAGS = 12
UNTOUCHED = 7.5
EDGES = {"none": [], "one": [5], "beyond_32_bits": [2**33, 0, 2**33 + 1, 2**33] * 20, **SEGMENTS}
PLACES = ("none", "permuted", "gaps", "longer")
LONG = [i % 3 for i in range(3 * 18_000)] + list(range(3, 1500)) + [2000] * 33


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Numba cannot compile while hypothesis watches which lines run."""
    found = occurrences_of([0, 0], 1, scaled=False)
    groups = cpu.group(found)
    cpu.segment_sum(found, groups, torch.zeros(1, 1), None, torch.zeros(1, 1))
    cpu.spread(groups, torch.zeros(1, dtype=torch.int64))


def places_of(kind: str, count: int, seed: int = 0) -> tuple[Tensor | None, int]:
    """Where this many groups go, and the number of rows of ``out``."""
    if kind == "none":
        return None, count + 3
    rows = count if kind == "permuted" else 2 * count + 9
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:count]
    if kind == "longer":
        places = torch.cat([places, torch.tensor([2**40, -(2**40)])])  # what is beyond the groups' is not to be read
    return places, rows


def summed(backend: Kernels, occurrences: Occurrences, grad: Tensor, places: Tensor | None, rows: int) -> Tensor:
    """``out [rows, D]``, `UNTOUCHED` before."""
    found, grad, places = backend.put(occurrences), backend.put(grad), backend.put(places)
    out = torch.full((rows, grad.shape[-1]), UNTOUCHED, device=backend.device)
    groups = backend.ops.group(found)
    before = launches.copy()
    backend.ops.segment_sum(found, groups, grad, places, out)
    assert launches - before == {f"{backend.name}.segment_sum": 1}
    return backend.back(out)


def spread(backend: Kernels, occurrences: Occurrences, values: Tensor) -> Tensor:
    groups = backend.ops.group(backend.put(occurrences))
    before = launches.copy()
    out = backend.back(backend.ops.spread(groups, backend.put(values)))
    assert launches - before == {f"{backend.name}.spread": 1}
    assert out.dtype == torch.int64
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(backend: Kernels, occurrences: Occurrences, grad: Tensor, kind: str = "none", seed: int = 0) -> Tensor:
    """``out``, after comparing it with numpy and, bit for bit, with the reference."""
    sums = list(naive_sum(occurrences, grad).values())
    places, rows = places_of(kind, len(sums), seed)
    out = summed(backend, occurrences, grad, places, rows)
    expected = torch.full_like(out, UNTOUCHED)
    for g, total in enumerate(sums):
        expected[g if places is None else int(places[g])] = torch.from_numpy(total)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out == UNTOUCHED, expected == UNTOUCHED), "rows that no group goes to stay as they are"
    assert same_bits(out, summed(oracle, occurrences, grad, places, rows))
    return out


# -- segment sum ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", EDGES)
def test_segments_of_every_length(backend, name, scaled):
    check(backend, occurrences_of(EDGES[name], BAGS, scaled=scaled), gradient(BAGS, 20))


@pytest.mark.parametrize("dim", [*DIMS, 128, 1024])
def test_rows_of_every_width(backend, dim):
    check(backend, occurrences_of(SEGMENTS["few"], BAGS, scaled=True), gradient(BAGS, dim))


@pytest.mark.parametrize("name", ["none", "one_row", "few", "two_runs_each", "random"])
@pytest.mark.parametrize("kind", PLACES)
def test_groups_go_to_their_places(backend, name, kind):
    check(backend, occurrences_of(EDGES[name], BAGS, scaled=False), gradient(BAGS, 17), kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [17, 128])
def test_narrow_gradients_are_summed_in_float32(backend, dim, dtype):
    occurrences, grad = occurrences_of(SEGMENTS["few"], BAGS, scaled=True), gradient(BAGS, dim).to(dtype)
    assert same_bits(check(backend, occurrences, grad), check(backend, occurrences, grad.float()))


def test_gradients_of_samples_are_rows_of_their_bags(backend):
    """``[B, width, D]`` is what backward leaves."""
    occurrences, grad = occurrences_of(SEGMENTS["few"], BAGS, scaled=False), gradient(BAGS, 17)
    flat, nested = (summed(backend, occurrences, g, None, 24) for g in (grad, grad.view(4, 3, 17)))
    assert same_bits(flat, nested)


def test_sums_need_no_more_rows_than_groups(backend):
    """Nothing is written beyond them, though the buffers of groups have room for one per occurrence."""
    occurrences = occurrences_of(SEGMENTS["two_runs_each"], BAGS, scaled=False)
    whole = torch.full((5, 17), UNTOUCHED, device=backend.device)
    found = backend.put(occurrences)
    backend.ops.segment_sum(found, backend.ops.group(found), backend.put(gradient(BAGS, 17)), None, whole[1:4])
    assert (whole[[0, 4]] == UNTOUCHED).all()
    assert same_bits(backend.back(whole[1:4]), summed(oracle, occurrences, gradient(BAGS, 17), None, 3))


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(("name", "dim"), [("few", 3), ("few", 128), ("over_1024", 17)])
def test_sgd_subtracts_the_rate_times_the_sum(backend, name, dim, scaled):
    """To the bit: `update` computes these sums, and the slots of groups can be their places."""
    rates = [0.1, 1.0, 0.03]
    before = Arena.make(RULES["sgd"], dim, options={"lr": rates})
    occurrences, grad = occurrences_of(SEGMENTS[name], BAGS, scaled=scaled), gradient(BAGS, dim)
    after = before.updated(backend, occurrences, grad)
    found = backend.put(occurrences)
    groups = backend.ops.group(found)
    sums = torch.zeros(24, dim, device=backend.device)
    backend.ops.segment_sum(found, groups, backend.put(grad), groups.rows, sums)
    of_row = torch.repeat_interleave(torch.tensor(rates), torch.tensor([4, 5, 15]))[:, None]
    assert torch.equal(after.rows.wide, before.rows.wide - of_row * backend.back(sums))


@settings(max_examples=15)
@given(
    slots=st.lists(st.sampled_from([0, 3, 4, 11, 23, 2**35]), max_size=110),
    kind=st.sampled_from(PLACES),
    scaled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch_has_the_bits_of_the_reference(backend, slots, kind, scaled, seed):
    check(backend, occurrences_of(slots, BAGS, scaled, seed), gradient(BAGS, 20), kind, seed)


# -- spread --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EDGES)
def test_every_occurrence_gets_the_value_of_its_slot(backend, name):
    slots = sorted(set(EDGES[name]))
    values = torch.randint(-(2**62), 2**62, (len(slots),), generator=torch.Generator().manual_seed(1))
    given = dict(zip(slots, values.tolist(), strict=True))
    out = spread(backend, occurrences_of(EDGES[name], BAGS, scaled=False), values)
    assert out.tolist() == [given[slot] for slot in EDGES[name]]


@settings(max_examples=20)
@given(slots=st.lists(st.integers(0, 6) | st.integers(0, 2**40), max_size=150), more=st.integers(0, 5))
def test_spreading_the_slots_of_groups_gives_those_of_occurrences(backend, slots, more):
    values = torch.tensor(sorted(set(slots)) + [-1] * more, dtype=torch.int64)
    assert spread(backend, occurrences_of(slots, BAGS, scaled=False), values).tolist() == slots


def test_groups_bring_their_slots_themselves(backend):
    found = backend.put(occurrences_of(SEGMENTS["random"], BAGS, scaled=False))
    groups = backend.ops.group(found)
    assert torch.equal(backend.ops.spread(groups, groups.rows), found.slots)


# -- slots of many runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_slot_may_have_more_runs_than_a_task(threads):
    """On the CPU, which deals out work by runs: three slots of 563 each, then many of one."""
    occurrences, grad = occurrences_of(LONG, BAGS, scaled=True), gradient(BAGS, 5)
    count = len(set(LONG))
    kernels = Kernels("cpu", torch.device("cpu"), cpu)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = summed(kernels, occurrences, grad, None, count)
        values = spread(kernels, occurrences, torch.arange(count))
    finally:
        torch.set_num_threads(before)
    assert same_bits(out, summed(oracle, occurrences, grad, None, count))
    assert torch.equal(values, torch.unique(occurrences.slots, return_inverse=True)[1])
