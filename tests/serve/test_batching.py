"""Protects batches in which some requests are wrong: who gets the error, what it says, and what the others wait for."""

from __future__ import annotations

import asyncio
from typing import cast

import pyarrow as pa
import pytest

from hotbed.errors import BatchError, DataError
from hotbed.serve.batching import Batcher, Scored, explain_error
from hotbed.serve.served_model import ServedModel
from tests.serve.clients import LONG_S, ROW
from tests.serve.fake_model import COLUMNS, KINDS, FakeModel, score_of


def columns_of(item: str) -> pa.RecordBatch:
    row = {**ROW, "item": item}
    types = {c.name: pa.large_list(KINDS[c.kind][1]) if c.is_list else KINDS[c.kind][1] for c in COLUMNS}
    return pa.record_batch({name: pa.array([row[name]], kind) for name, kind in types.items()})


def answers(model: FakeModel, items: list[str], withdrawn: int | None = None) -> list[Scored | BaseException]:
    """What requests get that are one batch."""
    served, rows = cast(ServedModel, model), len(items)
    batcher = Batcher(served, max_batch_rows=rows, max_wait_ms=LONG_S * 1000, max_queue_rows=rows)

    async def ask() -> list[Scored | BaseException]:
        model.go.clear()
        futures = [batcher.submit(columns_of(item)) for item in items]
        assert await asyncio.to_thread(model.entered.acquire, timeout=LONG_S)
        if withdrawn is not None:
            futures[withdrawn].cancel()
        model.go.set()
        return await asyncio.gather(*futures, return_exceptions=True)

    try:
        return asyncio.run(ask())
    finally:
        batcher.close(LONG_S)


@pytest.mark.parametrize("wrong", [{0}, {255}, {100, 101}])
def test_wrong_requests_of_a_large_batch_are_found_by_halves(wrong: set[int]) -> None:
    model = FakeModel()
    found = answers(model, ["fail" if i in wrong else "pen" for i in range(256)])
    assert {i for i, answer in enumerate(found) if isinstance(answer, DataError)} == wrong
    right = [answer for answer in found if isinstance(answer, Scored)]
    assert [answer.scores.tolist() for answer in right] == [[[score_of(ROW, 100)]]] * (256 - len(wrong))
    assert len(model.batches) <= 1 + 2 * 8 * len(wrong)
    assert sum(model.batches) <= 256 * (1 + 2 * len(wrong))


def test_what_was_given_up_is_not_scored_again() -> None:
    model = FakeModel()
    found = answers(model, ["fail", "fail", "pen", "pen"], withdrawn=1)
    assert isinstance(found[0], DataError)
    assert isinstance(found[1], asyncio.CancelledError)
    assert model.batches == [4, 1, 2]


def test_clients_are_told_what_is_wrong_without_advice_to_trainers() -> None:
    for error, said in (
        (
            BatchError(
                "feature 'a': got id 9 at sample 0, expected 0 to 2. Increase `rows`, or set on_bad_id='drop' or 'hash'"
            ),
            "feature 'a': got id 9 at sample 0, expected 0 to 2. Send different values, or omit such rows",
        ),
        (DataError("the rows: no"), "the rows: no. Send different values, or omit such rows"),
    ):
        told = explain_error(error)
        assert (str(told), told.status, told.reason) == (said, 400, "rows")
