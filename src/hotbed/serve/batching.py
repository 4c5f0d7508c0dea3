"""Merge requests into batches. One thread per model scores the batches.

Requests wait in a queue with a limited number of rows. The thread starts a batch when the batch is full, or when its
first request has waited long enough. Requests that arrive meanwhile form the next batch. So a single version of the
model scores all rows of a request, and the event loop never waits for a model.

If a batch fails, its halves are scored separately, and so on. So only the faulty requests get an error.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.errors import BatchError, DataError, NonFiniteError, RequestError, SpecError, StoreError
from hotbed.serve.requests import RETRY
from hotbed.serve.served_model import ServedModel

LOG = logging.getLogger("hotbed.serve")


class Scored(NamedTuple):
    """Probabilities ``[B, T]`` of the rows of a request, and the step of the version that scored the rows."""

    scores: NDArray[np.float64]
    step: int


@dataclass(eq=False)
class _Waiting:
    columns: pa.RecordBatch
    arrived: float
    answer: asyncio.Future[Scored]

    @property
    def rows(self) -> int:
        return self.columns.num_rows


class Batcher:
    """A queue of requests for one model, and a thread that scores the requests. Limits are as in `ServeOptions`."""

    def __init__(
        self,
        model: ServedModel,
        *,
        max_batch_rows: int,
        max_wait_ms: float,
        max_queue_rows: int,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,  # the thread calls it after each batch
    ) -> None:
        self.model = model
        self._batch_rows, self._wait, self._queue_rows = max_batch_rows, max_wait_ms / 1000, max_queue_rows
        self._observe = observe
        self._queue = deque[_Waiting]()
        self._queued, self._closing = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hotbed-score", daemon=True)
        self._thread.start()

    @property
    def queued_rows(self) -> int:
        """Number of rows in the queue."""
        return self._queued

    def submit(self, columns: pa.RecordBatch) -> asyncio.Future[Scored]:
        """Queue the rows of a request, and return a future of the event loop. Cancel the future to remove the rows.

        Raise `RequestError` with status 503 if too many rows are queued, or if the server is shutting down.
        """
        entry = _Waiting(columns, time.monotonic(), asyncio.get_running_loop().create_future())
        with self._changed:
            if self._closing:
                raise RequestError("the server is shutting down. Send the request to another server", 503, "draining")
            if self._queued and self._queued + entry.rows > self._queue_rows:
                raise RequestError(
                    f"the queue is full: got {self._queued:,} waiting rows, expected at most {self._queue_rows:,}. "
                    "Try again later, or start another server",
                    503,
                    "busy",
                    RETRY,
                )
            self._queued += entry.rows
            self._queue.append(entry)
            self._changed.notify()
        return entry.answer

    def close(self, wait_s: float) -> None:
        """Score the queued requests, and end the thread. Wait at most ``wait_s`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            try:
                start = time.perf_counter()
                answers = self._score_or_halve(batch)
                self._observe(sum(entry.rows for entry in batch), time.perf_counter() - start)
                loop = batch[0].answer.get_loop()
                loop.call_soon_threadsafe(_deliver, list(zip(batch, answers, strict=True)))
            except RuntimeError:  # the loop is closed, so no client waits
                LOG.debug("scores could not be delivered", exc_info=True)

    def _next(self) -> list[_Waiting] | None:
        """Wait for a batch of whole requests with equal column types. Return None after the last batch."""
        with self._changed:
            while True:
                while not self._queue:
                    if self._closing:
                        return None
                    self._changed.wait()
                rest = self._queue[0].arrived + self._wait - time.monotonic()
                if rest > 0 and self._queued < self._batch_rows and not self._closing:
                    self._changed.wait(rest)
                elif batch := self._take():
                    return batch

    def _take(self) -> list[_Waiting]:
        """Take a batch from the queue. Cancelled requests are dropped."""
        batch, rows = list[_Waiting](), 0
        while self._queue:
            entry = self._queue[0]
            if not entry.answer.cancelled():
                if batch and (
                    rows + entry.rows > self._batch_rows or not entry.columns.schema.equals(batch[0].columns.schema)
                ):
                    break
                batch.append(entry)
                rows += entry.rows
            self._queue.popleft()
            self._queued -= entry.rows
        return batch

    def _score_or_halve(self, batch: Sequence[_Waiting]) -> list[Scored | Exception]:
        try:
            scores, step = self._score([entry.columns for entry in batch])
        except Exception as error:
            if len(batch) == 1:
                return [error]
            half = len(batch) // 2
            return [answer for part in (batch[:half], batch[half:]) for answer in self._score_part(part)]
        answers, row = list[Scored | Exception](), 0
        for entry in batch:
            part = scores[row : row + entry.rows]
            row += entry.rows
            wrong = np.flatnonzero(~np.isfinite(part).all(1))
            answers.append(
                NonFiniteError(
                    f"the score of row {wrong[0]:,} is not a number, because a numerical of this row is not finite or "
                    "far outside the training data"
                )
                if len(wrong)
                else Scored(part, step)
            )
        return answers

    def _score_part(self, batch: Sequence[_Waiting]) -> list[Scored | Exception]:
        """Score a part of a failed batch. Return one entry per request; a cancelled request gets a `TimeoutError`."""
        wanted = [entry for entry in batch if not entry.answer.cancelled()]
        answers = dict(zip(wanted, self._score_or_halve(wanted), strict=True)) if wanted else {}
        return [answers.get(entry, TimeoutError()) for entry in batch]

    def _score(self, parts: Sequence[pa.RecordBatch]) -> Scored:
        columns = parts[0]
        if len(parts) > 1:
            (columns,) = pa.Table.from_batches(parts).combine_chunks().to_batches()
        scores, step = self.model.score(columns)
        wanted = (columns.num_rows, len(self.model.labels))
        if scores.shape != wanted:
            raise BatchError(f"the model returned scores {scores.shape}, expected {wanted}")
        return Scored(scores, step)


def _deliver(answers: Sequence[tuple[_Waiting, Scored | Exception]]) -> None:
    for entry, answer in answers:
        if entry.answer.done():  # the request was cancelled, and the client got status 504
            continue
        if isinstance(answer, Exception):
            entry.answer.set_exception(answer)
        else:
            entry.answer.set_result(answer)


def explain_error(error: Exception) -> RequestError:
    """Return the error for the client: a `RequestError` itself, status 400 for wrong rows, otherwise 503 or 500."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DataError | SpecError | BatchError | NonFiniteError):
        # The last sentence of the message is cut off, because it is advice for training.
        what = re.match(r"(.*)(?:; |\. (?=[A-Z]))", str(error), re.DOTALL)
        return RequestError(f"{what[1] if what else error}. Send different values, or omit such rows", 400, "rows")
    details: dict[str, Any] = {"error_type": type(error).__name__}
    LOG.error("score_failed", extra={"details": details}, exc_info=error)
    if isinstance(error, StoreError):
        return RequestError(
            "the server cannot read the model's rows at the moment. Try again later", 503, "store", RETRY
        )
    return RequestError("the server failed to score these rows. See the log of the server", 500, "internal")
