"""Group the ids of a step's updates in a second CUDA stream, beside its forward pass.

An update needs its ids sorted by row, and that is known as soon as the batch is. In a step that is captured in a CUDA
graph a second stream costs nothing, so who captures a forward pass offers one (`grouping_beside`), and tables on the
device group there (`grouped_beside`). Elsewhere the host queues every kernel, for which it takes longer than the
device, so ids are grouped when rows are updated.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch

from hotbed import ops
from hotbed.embed.arena import Arena
from hotbed.ops import BagLayout


class Beside:
    """A stream beside that of a forward pass.

    It reads what the forward pass has made, so that is kept until both streams have met. What is made here is read by
    the update and dropped by it: torch gives its memory to this stream again, whose next work waits for the update.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._reads = stream, list[BagLayout]()

    def grouped(self, arena: Arena, bags: BagLayout) -> BagLayout:
        """Group the occurrences of bags in this stream, after what the current one has been given."""
        self._reads.append(bags)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            groups = ops.select(arena.store.device, arena.backend).group(arena.store.occurrences(bags))
        return replace(bags, groups=groups)

    def join(self) -> None:
        """Let what the current stream is given from now on begin after all work here, if there is any."""
        if self._reads:  # a stream without work is not captured, and one that is may not wait for it
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._reads.clear()


_offered = ContextVar[Beside | None]("_offered", default=None)


@contextmanager
def grouping_beside(stream: torch.cuda.Stream) -> Generator[None]:
    """Let lookups inside group their ids in this stream; at the end the current stream waits for it."""
    beside = Beside(stream)
    token = _offered.set(beside)
    try:
        yield
    finally:
        _offered.reset(token)
        beside.join()


def grouped_beside(arena: Arena, bags: BagLayout) -> BagLayout:
    """Group the occurrences of bags whose rows are trained, if a stream is offered and a gradient is to be expected."""
    beside = _offered.get() if torch.is_grad_enabled() else None
    return bags if beside is None else beside.grouped(arena, bags)
