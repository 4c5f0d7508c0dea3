"""Float32 rows in records of the host are updated there, others are copied; the bits are those of a dense store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.ops import BackendName, Occurrences
from hotbed.optim import Adam, RowWiseAdagrad
from hotbed.optim.sgd import PLAIN
from hotbed.store import Storage
from hotbed.store.records import InPlace
from tests.store.test_lazy_store import everything, made, step_of

IN_MEMORY = {
    "host": Storage("host"),
    "host-cached": Storage("host", cache_rows=1000),
    "disk-cached": Storage("disk", cache_rows=1000),
}
RULES = [PLAIN, RowWiseAdagrad.rule, Adam.rule]


class Written:
    """Notes how many records are copied to a store's, and how many are changed in place."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[int] = []
        self.in_place: list[int] = []
        write, changed = store.records.write, store.records.changed_in_place

        def noted(slots: Tensor, records: Tensor) -> None:
            self.copied.append(len(slots))
            write(slots, records)

        @contextmanager
        def lent(slots: Tensor) -> Iterator[InPlace | None]:
            with changed(slots) as found:
                yield found
                if found is not None and bool((found.positions >= 0).all()):
                    self.in_place.append(len(slots))

        monkeypatch.setattr(store.records, "write", noted)
        monkeypatch.setattr(store.records, "changed_in_place", lent)


def update(store: Any, rule: Any, slots: list[int], number: int = 1) -> None:
    at, draw = torch.tensor(slots), torch.Generator().manual_seed(number)
    store.update(
        step_of(rule, number), Occurrences(at, torch.arange(len(at)), None), torch.randn(len(at), 16, generator=draw)
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("storage", IN_MEMORY.values(), ids=IN_MEMORY)
def test_rows_that_are_there_are_updated_there(
    storage: Storage, rule: Any, backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = list(rule.moments)
    lazy, dense = made(storage, "fp32", moments, backend), made(None, "fp32", moments, backend)
    first, again = list(range(0, 60, 3)), [59, 57, 3, 57, 33, 0]
    for store in (lazy, dense):
        update(store, rule, first)
        update(store, rule, [*first, 59])  # one row that is new
    written = Written(lazy, monkeypatch)
    for store in (lazy, dense):
        update(store, rule, again, number=2)
    assert (written.copied, written.in_place) == ([], [5])
    for store in (lazy, dense):
        update(store, rule, [*range(0, 60, 3), 1, 2], number=4)  # two new ones of 22
    assert (written.copied, written.in_place) == ([2], [5, 22])
    assert everything(lazy, moments) == everything(dense, moments)


@pytest.mark.parametrize("case", ["options by table", "narrow rows", "in files", "triton"])
def test_other_rows_are_copied(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, moments = RowWiseAdagrad.rule, list(RowWiseAdagrad.rule.moments)
    storage = Storage("disk") if case == "in files" else IN_MEMORY["host"]
    dtype: Any = "bf16" if case == "narrow rows" else "fp32"
    backend: BackendName = "triton" if case == "triton" else "cpu"
    lazy, dense = made(storage, dtype, moments, backend), made(None, dtype, moments)
    written = Written(lazy, monkeypatch)
    for store in (lazy, dense):
        for number in (1, 2):
            step = step_of(rule, number)
            if case == "options by table":
                step = replace(step, hyper=step.hyper + torch.tensor([0.0, 0.1, 0.2])[:, None] * (step.hyper == 0.1))
            grad = torch.full((3, 16), 0.5 * number)
            store.update(step, Occurrences(torch.tensor([1, 10, 40]), torch.arange(3), None), grad)
    assert (written.copied, written.in_place) == ([3, 3], [])
    assert everything(lazy, moments) == everything(dense, moments)
