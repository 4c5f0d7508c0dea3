"""Room for more ids behind those of ragged features changes no vector and no row, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotbed.ops.layout import FIXED, START, BagLayout

from .arenas import Arena, gradient
from .cases import CASES
from .naive_rules import RULES

ROOM = (0, 5, 70)
DIM = 17


def padded(bags: BagLayout, room: int) -> BagLayout:
    """The same bags with room for so many ids behind each ragged feature; what is there would be out of range."""
    features, values, weights = bags.features.clone(), [], []
    first, used = 0, 0
    for number, (start, fixed) in enumerate(bags.features[:, [START, FIXED]].tolist()):
        end = int(bags.features[number + 1, START]) - 3 if number + 1 < len(bags.features) else len(bags.ids)
        more = room if fixed < 0 else 0
        used += more
        features[number, START] = start + first
        values += [bags.ids[start - 3 : end], torch.zeros(more, dtype=bags.ids.dtype)]
        if bags.weights is not None:
            weights += [bags.weights[start - 3 : end], torch.ones(more)]
        first += more
    return replace(
        bags,
        ids=torch.cat(values),
        features=features,
        total=bags.total + used,
        weights=torch.cat(weights) if weights else None,
        limit=sum(CASES["mixed"].tables),
    )


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("name", ["mixed", "weighted", "mixed_int32"])
def test_vectors_and_rows_are_the_same(backend, name, room):
    case = CASES[name]
    bags = replace(case.layout(), limit=case.slots)
    results = []
    for layout in (bags, padded(bags, room)):
        arena = Arena.make(RULES["adam"], DIM, tables=case.tables, wide=case.wide)
        vectors = backend.put(torch.zeros(case.batch, case.width, DIM))
        backend.ops.lookup(backend.put(arena.rows), backend.put(layout), vectors)
        found = backend.ops.occurrences(backend.put(layout))
        grad = gradient(case.batch * case.width, DIM)
        after = arena.updated(backend, found, grad)
        results.append((vectors.cpu(), after.rows.wide, *after.moments.values()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("room", ROOM)
def test_occurrences_of_padding_come_last(backend, room):
    case = CASES["mixed"]
    bags = replace(case.layout(), limit=case.slots)
    found, wanted = (backend.ops.occurrences(backend.put(b)) for b in (padded(bags, room), bags))
    count = len(wanted.slots)
    assert found.slots[:count].tolist() == wanted.slots.tolist()
    assert found.bags[:count].tolist() == wanted.bags.tolist()
    assert set(found.slots[count:].tolist()) <= {case.slots}
    assert set(found.bags[count:].tolist()) <= {0}
