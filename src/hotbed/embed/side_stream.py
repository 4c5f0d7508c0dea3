"""Group the ids of a step's updates in a second CUDA stream, overlapped with the forward pass.

An update needs ids sorted by row, and the ids are known before the forward pass. In a captured CUDA graph, a second
stream has no launch cost. So the code that captures a graph provides a stream (`use_side_stream`), and tables on the
device use it (`group_on_side_stream`). Without a graph, launches take longer than these kernels, so ids are grouped in
the update.
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


class GroupingStream:
    """A stream next to the stream of the forward pass.

    Its inputs are kept alive until both streams have synchronized. The update reads and releases its results. Torch
    reuses their memory for later work in this stream, which waits for the update.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._reads = stream, list[BagLayout]()

    def group(self, arena: Arena, bags: BagLayout) -> BagLayout:
        """Group the occurrences of bags in this stream, after the queued work of the current stream."""
        self._reads.append(bags)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            groups = ops.select(arena.store.device, arena.backend).group(arena.store.occurrences(bags))
        return replace(bags, groups=groups)

    def join(self) -> None:
        """Make the current stream wait for all work in this stream, if there is any."""
        if self._reads:  # without work, this stream is not captured, and the captured stream must not wait for it
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._reads.clear()


_offered = ContextVar[GroupingStream | None]("_offered", default=None)


@contextmanager
def use_side_stream(stream: torch.cuda.Stream) -> Generator[None]:
    """Make lookups inside group their ids in this stream. At the end, the current stream waits for it."""
    side_stream = GroupingStream(stream)
    token = _offered.set(side_stream)
    try:
        yield
    finally:
        _offered.reset(token)
        side_stream.join()


def group_on_side_stream(arena: Arena, bags: BagLayout) -> BagLayout:
    """Group the occurrences of trained rows if a side stream is provided and gradients are enabled."""
    side_stream = _offered.get() if torch.is_grad_enabled() else None
    return bags if side_stream is None else side_stream.group(arena, bags)
