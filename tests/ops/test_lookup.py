"""Pooled lookup and occurrences of every kind of bag."""

from __future__ import annotations

import pytest
import torch

from hotbed.ops import reference

from .cases import CASES, DIMS, embedding_bag, naive_bags

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_lookup(backend, name, dim):
    case = CASES[name]
    bags = case.layout()
    weight = torch.randn(case.slots, dim, generator=torch.Generator().manual_seed(1))
    out = backend.ops.lookup(backend.put(weight), backend.put(bags))
    assert out.shape == (case.batch, len(case.features), dim) and out.dtype == torch.float32
    torch.testing.assert_close(out.cpu(), reference.lookup(weight, bags), **CLOSE)
    torch.testing.assert_close(out.cpu(), embedding_bag(weight.double(), bags).float(), rtol=1e-5, atol=1e-5)


def test_lookup_twice_gives_the_same_bits(backend):
    bags = backend.put(CASES["weighted"].layout())
    weight = backend.put(torch.randn(CASES["weighted"].slots, 40, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(backend.ops.lookup(weight, bags), backend.ops.lookup(weight, bags))


def test_lookup_reads_slots_beyond_a_table(backend):
    """Two features of one table, and a table that does not start at slot 0, read their own rows."""
    case = CASES["mixed"]
    bags = case.layout()
    weight = torch.arange(case.slots, dtype=torch.float32)[:, None].repeat(1, 4)
    out = backend.ops.lookup(backend.put(weight), backend.put(bags)).cpu()
    for f, of_feature in enumerate(naive_bags(bags)):
        for b, (slots, _, mean) in enumerate(of_feature):
            expected = sum(slots) / max(len(slots), 1) if mean else sum(slots)
            torch.testing.assert_close(out[b, f], torch.full((4,), float(expected)))


def test_one_id_is_copied_bit_for_bit(backend):
    """A one-hot bag is its row: NaN, −0, infinities and denormals included."""
    case = CASES["one_hot"]
    bags = case.layout()
    row = torch.tensor([torch.nan, -0.0, torch.inf, 1e-42])
    out = backend.ops.lookup(backend.put(row.repeat(case.slots, 1)), backend.put(bags)).cpu()
    assert torch.equal(out.view(torch.int32), row.view(torch.int32).expand(case.batch, len(case.features), 4))


@pytest.mark.parametrize("name", CASES)
def test_occurrences(backend, name):
    bags = CASES[name].layout()
    found = backend.ops.occurrences(backend.put(bags))
    slots, owners, scale = [], [], []
    for f, of_feature in enumerate(naive_bags(bags)):
        for b, (bag, weights, mean) in enumerate(of_feature):
            slots += bag
            owners += [b * len(bags.features) + f] * len(bag)
            scale += [w / len(bag) if mean else w for w in weights]
    assert found.slots.dtype == found.bags.dtype == torch.int64
    assert found.slots.tolist() == slots
    assert found.bags.tolist() == owners
    if bags.weights is None and not bags.has_mean:
        assert found.scale is None
    else:
        torch.testing.assert_close(found.scale.cpu(), torch.tensor(scale, dtype=torch.float32), **CLOSE)
