"""Arenas of more than 2³¹ elements or bytes, mapped but for the few pages that a step touches."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hotbed.ops import BagLayout, Occurrences, Rows, RuleStep, cpu
from hotbed.optim import Rule

from .formats import decode
from .naive_rules import RULES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs MAP_NORESERVE and /proc/self/pagemap")

MAP_NORESERVE = 0x4000


@contextmanager
def mapped(rows: int, dim: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Zeros ``[rows, dim]`` that take no memory until they are written."""
    size = rows * dim * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"{size:,} bytes of address space were refused: {error}")
    yield torch.frombuffer(memory, dtype=dtype).view(rows, dim)


def resident_bytes(tensor: Tensor) -> int:
    """Memory behind a tensor's own pages.

    Read page by page: the sizes of whole mappings count what lies beside the tensor, since Linux joins neighbours.
    """
    page = mmap.PAGESIZE
    first, end = tensor.data_ptr() // page, -(-(tensor.data_ptr() + tensor.nbytes) // page)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (end - first)), np.uint64)
    assert entries.size == end - first
    return int(np.count_nonzero(entries >> np.uint64(62))) * page  # in memory or swapped out


def bag(ids: list[int]) -> BagLayout:
    """One-hot bags of one feature."""
    n = len(ids)
    features, offsets = torch.tensor([[0, 1, 0, 0, 0, 0, 0]]), torch.empty(0, n + 1, dtype=torch.int64)
    return BagLayout(torch.tensor(ids), features, offsets, None, n, n, False, 1)


def sgd_step() -> RuleStep:
    one = torch.ones(())
    hyper = torch.tensor([[1.0, 1.0, torch.inf, torch.inf, 0.0, 0.0]])
    return RuleStep(rule=RULES["sgd"], hyper=hyper, seeds=torch.tensor([1]), uses=frozenset(), inv_scale=one, gate=one)


def update_and_look_up(rows: Rows, ids: list[int], grad: Tensor, step: RuleStep, state: dict[str, Tensor]) -> Tensor:
    found = cpu.occurrences(bag(ids))
    cpu.update(step, rows, state, found, cpu.group(found), grad)
    out = torch.empty(len(ids), 1, rows.dim)
    cpu.lookup(rows, bag(ids), out)
    return out[:, 0]


def wrapped(slots: list[int], dim: int) -> list[int]:
    """Slots that a 32-bit position, signed or not, would reach instead of these."""
    return [(slot * dim - k * 2**31) // dim for slot in slots for k in (1, 2) if slot * dim >= k * 2**31]


@pytest.mark.parametrize(("count", "dim"), [(2**24 + 50, 128), (2**31 + 50, 1)], ids=["elements", "slots"])
def test_float32_beyond_31_bits(count, dim):
    ids = [count - 1, 3, count - 20, count - 1]
    with mapped(count, dim, torch.float32) as wide:
        rows = Rows(
            wide, torch.empty(0, dim), torch.empty(0, 0, dtype=torch.int8), torch.tensor([[0, count, 0, 0, 0, 1, 0]])
        )
        out = update_and_look_up(rows, ids, -torch.arange(1.0, 5.0)[:, None].repeat(1, dim), sgd_step(), {})
        assert out[:, 0].tolist() == [5.0, 2.0, 3.0, 5.0] and (out == out[:, :1]).all()
        assert not wide[wrapped(ids, dim)].any()
        assert wide[count - 60 :].count_nonzero() == 2 * dim
        assert resident_bytes(wide) < 2**25, "no other page was touched"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_narrow_rows_beyond_31_bits(dtype):
    dim = 128
    count = 2**25 + 50 if dtype.itemsize == 1 else 2**24 + 50  # 2³² bytes
    ids = [count - 1, 3, count - 20]
    with mapped(count, dim, dtype) as narrow, mapped(count, 1, torch.int8) as exponents:
        tables = torch.tensor([[0, 0, 0, 0, 0, 1, 0]])
        rows = Rows(torch.empty(0, dim), narrow, exponents if dtype == torch.int8 else exponents[:, :0], tables)
        out = update_and_look_up(rows, ids, -torch.tensor([[1.0], [2.0], [4.0]]).repeat(1, dim), sgd_step(), {})
        assert out[:, 0].tolist() == [1.0, 2.0, 4.0] and (out == out[:, :1]).all()
        near = narrow[count - 60 :]
        assert np.count_nonzero(decode(near, exponents[count - 60 :])) == 2 * dim
        assert not narrow.view(torch.uint8)[wrapped(ids, dim)].any()
        assert resident_bytes(narrow) + resident_bytes(exponents) < 2**25


@pytest.mark.parametrize("rule", [RULES["momentum"], RULES["rowwise_adagrad"]], ids=["momentum", "rowwise_adagrad"])
def test_moments_beyond_31_bits(rule: Rule):
    dim, count = 128, 2**24 + 50
    ids = [count - 1, 3, count - 20]
    row = rule.moments[0].per == "row"
    with mapped(count, dim, torch.float32) as wide, mapped(count, 1 if row else dim, torch.float32) as moment:
        state = {rule.moments[0].name: moment[:, 0] if row else moment}
        rows = Rows(
            wide, torch.empty(0, dim), torch.empty(0, 0, dtype=torch.int8), torch.tensor([[0, count, 0, 0, 0, 1, 0]])
        )
        step = sgd_step()
        hyper = torch.cat([step.hyper, torch.tensor([[1.0]])], dim=1)
        step = RuleStep(**{**vars(step), "rule": rule, "hyper": hyper})
        update_and_look_up(rows, ids, torch.tensor([[1.0], [2.0], [4.0]]).repeat(1, dim), step, state)
        expected = [1.0, 4.0, 16.0] if row else [1.0, 2.0, 4.0]
        assert moment[ids, 0].tolist() == expected
        assert moment[count - 60 :].count_nonzero() == 2 * moment.shape[1]
        assert not moment[wrapped(ids, dim)].any()
        assert resident_bytes(moment) < 2**25


def test_sums_go_to_places_beyond_31_bits():
    dim, count = 128, 2**24 + 50
    places = [3, count - 1, count - 20]
    with mapped(count, dim, torch.float32) as out:
        found = Occurrences(torch.tensor([7, 8, 9, 8]), torch.arange(4), None)
        grad = torch.arange(1.0, 5.0)[:, None].repeat(1, dim)
        cpu.segment_sum(found, cpu.group(found), grad, torch.tensor(places), out)
        assert out[places, 0].tolist() == [1.0, 6.0, 3.0]
        assert out[count - 60 :].count_nonzero() == 2 * dim
        assert not out[wrapped(places, dim)].any()
        assert resident_bytes(out) < 2**25


def test_occurrences_of_slots_beyond_31_bits():
    """A table behind 2³³ slots of others, with 32-bit ids."""
    bags = bag([1, 0, 5])
    bags.features[0, 3] = 2**33
    assert cpu.occurrences(bags).slots.tolist() == [2**33 + 1, 2**33, 2**33 + 5]
    narrow_ids = BagLayout(**{**vars(bags), "ids": bags.ids.int()})
    found = cpu.occurrences(narrow_ids)
    assert isinstance(found, Occurrences) and found.slots.tolist() == [2**33 + 1, 2**33, 2**33 + 5]
