"""Group the ids of a step's updates in a second CUDA stream, beside its forward pass.

An update needs its ids sorted by row, and that is known as soon as the batch is. In a step that is captured in a CUDA
graph a second stream costs nothing, so who captures one offers it (`grouping_beside`), and tables on the device group
there (`grouped_beside`); the step's stream must wait for it before the capture ends (`Beside.join`). Elsewhere the host
queues every kernel, for which it takes longer than the device, so ids are grouped when rows are updated.
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
    """A CUDA stream beside that of a step.

    What is made in it is read by the step, and dropped by it. Its memory is given out again to this stream only, and
    all work here begins after what the step was given until then: nothing is overwritten too early.

    Parameters
    ----------
    stream
        The stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._has_work = stream, False

    def grouped(self, arena: Arena, bags: BagLayout) -> BagLayout:
        """Group the occurrences of bags in this stream, after what the current one has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._has_work = True
        with torch.cuda.stream(self._stream):
            groups = ops.select(arena.store.device, arena.backend).group(arena.store.occurrences(bags))
        return replace(bags, groups=groups)

    def join(self) -> None:
        """Let what the current stream is given from now on begin after all work here, if there is any."""
        if self._has_work:  # a stream without any is not part of a capture, and may not be waited for in one
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._has_work = False


_offered = ContextVar[Beside | None]("_offered", default=None)


@contextmanager
def grouping_beside(stream: torch.cuda.Stream) -> Generator[Beside]:
    """Offer a stream to the lookups inside, which group their ids in it; who does so calls `Beside.join`."""
    beside = Beside(stream)
    token = _offered.set(beside)
    try:
        yield beside
    finally:
        _offered.reset(token)


def grouped_beside(arena: Arena, bags: BagLayout) -> BagLayout:
    """Group the occurrences of bags that are looked up and will be updated, if a stream is offered."""
    beside = _offered.get()
    return bags if beside is None else beside.grouped(arena, bags)
