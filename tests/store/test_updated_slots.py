"""Protects: whatever changes rows of any store is noted, row by row, or as a change of nobody knows which rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.optim import Moment, RowWiseAdagrad
from hotbed.specs import RowDtype
from hotbed.store import LazyStore, Span, Storage
from hotbed.store.slot_lists import UpdatedMask, UpdatedSlotList
from hotbed.testing.store_contract import StoreContract
from tests.matrix import examples

STORAGES = {"dense": Storage(), "host": Storage("host"), "disk-lru": Storage("disk", cache_rows=7)}
ROWS, DIM = 40, 4


class Steps(StoreContract):
    """The steps of the contract, without its tests."""

    __test__ = False
    dim = DIM


def made(storage: Storage, dtype: RowDtype) -> Any:
    spans = [Span(15, 5), Span(25, 0)]
    store: Any = storage.make(spans, DIM, dtype=dtype, device=torch.device("cpu"), backend="auto")
    for moment in RowWiseAdagrad.rule.moments:
        store.add_moment(moment)
    store.write(torch.arange(ROWS), torch.randn(ROWS, DIM))
    return store


def stored(store: Any) -> list[str]:
    """All that is stored of each row."""
    found = [""] * ROWS
    for slot in range(ROWS):
        span = 0 if slot < 15 else 1
        for name in store.stored_names(span):
            if (name == "fp32_weight" and slot >= 5) or (name in ("weight", "exponents") and slot < 5):
                continue
            found[slot] += str(store.stored_array(name, torch.tensor([slot])).tolist())
    return found


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
def test_rows_whose_bits_change_are_noted(storage: Storage, data: st.DataObject) -> None:
    store = made(storage, data.draw(st.sampled_from(["bf16", "int8", "fp8"])))
    before = stored(store)
    store.track("c")
    for _ in range(data.draw(st.integers(1, 4))):
        slots = torch.tensor(sorted(data.draw(st.sets(st.integers(0, ROWS - 1), min_size=1))))
        how = data.draw(st.sampled_from(["step", "write", "moment", "put"]))
        values = torch.randn(len(slots), DIM)
        if how == "step":
            ids = [slots[slots < 20].tolist()]
            Steps().step(store, RowWiseAdagrad.rule, ids, torch.ones(1, DIM), active=data.draw(ACTIVE))
        elif how == "write":
            store.write(slots, values)
        elif how == "moment":
            store.write(slots, values[:, 0], "sum_of_squares")
        else:
            store.put(slots, store.values(slots)._replace(rows=values))
    after = stored(store)
    changed = {slot for slot in range(ROWS) if before[slot] != after[slot]}
    assert store.changes.since == "c"
    assert changed <= set(store.changed()[:].tolist())


ACTIVE = st.sampled_from([(1.0, 1.0), (0.0, 1.0)])


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_what_names_no_rows_ends_the_notes(storage: Storage) -> None:
    actions = {
        "fill": lambda store: store.fill(0, "sum_of_squares", 2.0),
        "initialize": lambda store: store.initialize(0, seed=1, rows=range(15), cols=range(DIM), bound=1.0),
        "add_moment": lambda store: store.add_moment(Moment("other", "row")),
    }
    if storage is STORAGES["dense"]:
        actions["load_raw"] = lambda store: store.load_raw(0, store.raw(0))
        actions["load_moment"] = lambda store: store.load_moment(0, "sum_of_squares", torch.ones(15))
    for name, act in actions.items():
        store = made(storage, "bf16")
        store.track("c")
        act(store)
        assert store.changes.since is None, name
        store.write(torch.tensor([1]), torch.ones(1, DIM))  # goes on unnoted
        store.track("d")
        store.write(torch.tensor([3, 2]), torch.ones(2, DIM))
        assert (store.changes.since, store.changed()[:].tolist()) == ("d", [2, 3]), name


def test_lazy_stores_note_what_is_loaded_row_by_row() -> None:
    store = made(STORAGES["host"], "bf16")
    assert isinstance(store, LazyStore)
    store.track("c")
    raw = {name: t.clone() for name, t in store.raw(1).items()}
    raw["weight"][4] += 1
    store.load_raw(1, raw)
    assert (store.changes.since, store.changed()[:].tolist()) == ("c", [19])


@given(st.lists(st.lists(st.integers(0, 99), max_size=20), max_size=8))
def test_masks_and_lists_collect_the_same(batches: list[list[int]]) -> None:
    cpu = torch.device("cpu")
    mask, slots = UpdatedMask(100, cpu), UpdatedSlotList()
    for batch in batches:
        mask.add(torch.tensor(batch, dtype=torch.int64))
        slots.add(torch.tensor(batch, dtype=torch.int64))
    expected = sorted({slot for batch in batches for slot in batch})
    assert mask.slots()[:].tolist() == slots.slots()[:].tolist() == expected
    assert slots.take(cpu).tolist() == expected
    assert slots.slots()[:].tolist() == []
