"""Protects: ids of dynamic tables have one row each, in their set, through any evictions and reassignments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.embed.dynamic import DynamicVocabulary
from hotbed.errors import DamagedError
from hotbed.ops import cpu_cache
from hotbed.serve.served_tables import ServedIds
from hotbed.specs import Dynamic, Table
from tests.matrix import examples

TABLE = Table("users", rows="dynamic", dim=1, init_bound=0.1, dynamic=Dynamic(512 * 4))


def ids_of(rows: Tensor, wanted: Tensor) -> list[int]:
    return wanted[rows >= 0].tolist()


@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_the_ids_of_training_are_found_after_each_change(data: st.DataObject) -> None:
    trained = DynamicVocabulary(TABLE, 0, 1)
    seen = torch.tensor(data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=600)))
    trained.rows_of(seen, None, train=True)
    before = trained.state(None)["ids"]
    served = ServedIds("users", before.numpy())
    everything = torch.arange(3001)
    rows = served.rows_of(everything)
    assert torch.equal(rows, trained.rows_of(everything, None, train=False)[0])
    for _ in range(3):
        trained.stepped()
        low = data.draw(st.integers(0, 2500))
        trained.rows_of(torch.arange(low, low + data.draw(st.integers(1, 500))), None, train=True)
        after = trained.state(None)["ids"]
        gone = before[(before >= 0) & ~torch.isin(before, after)]
        changed = after[(after >= 0) & (~torch.isin(after, before) | (after % 7 == 0))]
        served.stage(gone, changed)
        assert torch.equal(served.rows_of(everything), rows)  # nothing is swapped yet
        staged = served.staged_rows(changed)
        if data.draw(st.booleans()):
            served.discard()
            served.stage(gone, changed)
        served.swap()
        rows = served.rows_of(everything)
        assert torch.equal(rows[changed], staged)
        assert ids_of(rows, everything) == sorted(after[after >= 0].tolist())
        used = rows[rows >= 0]
        assert len(used.unique()) == len(used)
        sets = torch.empty_like(everything)
        cpu_cache.sets_of(everything.numpy(), TABLE.rows // 128, sets.numpy())
        assert torch.equal(used // 128, sets[rows >= 0])
        before = after


def test_more_ids_than_a_set_has_room_for_are_refused() -> None:
    served = ServedIds("users", torch.full((128,), -1).numpy())
    served.stage(torch.empty(0, dtype=torch.int64), torch.arange(128))
    served.swap()
    with pytest.raises(DamagedError, match=r"more ids to a set of table 'users' than the 128"):
        served.stage(torch.tensor([5, 6]), torch.tensor([300, 301, 302]))
