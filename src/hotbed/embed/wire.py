"""Connect the tables of all ranks: links, codecs, load counters, and gradients in flight.

`Wire` is what all tables of a model share. `LoadCounters` counts lookups and seconds of this rank, by which a run
reports whether ranks have equal loads. `SentGradient` is a gradient between backward and step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.config.parallel_memory import ParallelOptions
from hotbed.embed.arena import Arena
from hotbed.embed.replicas import Replicas, gather_gradients
from hotbed.ops import Occurrences

_DEFAULTS = ParallelOptions()


class LoadCounters:
    """Lookups and seconds of one rank's tables.

    Seconds are time of the host in which rows were read and updated, without exchanges; a GPU may do it later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.lookups = 0
        self.seconds = 0.0

    @contextmanager
    def counted(self, lookups: int = 0) -> Generator[None]:
        """Count the lookups and the time of the body."""
        start = time.perf_counter()
        yield
        with self._lock:  # another thread may exchange rows of the next batch
            self.seconds += time.perf_counter() - start
            self.lookups += lookups


@dataclass(frozen=True)
class Wire:
    """Links, options and counters of a distributed model's tables.

    ``link`` is of its own, because gradients travel while others compute; ``replicas`` are other groups that hold
    copies of the tables, if there are any.
    """

    link: Link
    options: ParallelOptions = _DEFAULTS
    replicas: Replicas | None = None
    load: LoadCounters = field(default_factory=LoadCounters)

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: copies of a model share links, and count their loads together."""
        return self

    @property
    def links(self) -> list[Link]:
        """List the links of the own group, and where there are replicas, of the ranks that hold the same tiles."""
        return [self.link] if self.replicas is None else [self.link, self.replicas.link]

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank, and nothing that its rows or gradients pass through."""
        codecs = self.options.forward_codec, self.options.backward_codec
        return self.link.size == 1 and self.replicas is None and codecs == ("fp32", "fp32")

    @property
    def summed_ranks(self) -> int:
        """Count the ranks whose gradients a row is updated by."""
        exact = self.replicas is not None and self.replicas.exact
        return math.prod(link.size for link in (self.links if exact else [self.link]))


class SentGradient:
    """A gradient on its way to the owners of its rows; a `Contribution`.

    ``arrived`` waits for what the ranks sent to this one, and returns it by arena, in rank order.
    """

    is_summed = True

    def __init__(
        self,
        tables: set[str],
        wire: Wire,
        arenas: Sequence[Arena],
        device: torch.device,
        arrived: Callable[[], Sequence[tuple[Arena, Occurrences, Tensor]]],
    ) -> None:
        self.tables = tables
        self._wire, self._arenas, self._device, self._arrived = wire, arenas, device, arrived
        self._gradients: Sequence[tuple[Arena, Occurrences, Tensor]] | None = None
        self._agreed: Tensor | None = None

    def changed(self) -> bool:
        """Return False: the gradient was summed in backward."""
        return False

    def finite(self) -> Tensor:
        """Return, as 0-d bool, whether all that arrived on any rank is finite; all ranks must call this."""
        if self._agreed is None:
            finite = torch.ones((), dtype=torch.bool, device=self._device)
            for _, _, grad in self.gradients():
                finite = finite & torch.isfinite(grad).all()
            for link in self._wire.links:
                flags = link.all_gather("whether gradients are finite", finite.to(torch.uint8)[None])
                finite = flags.wait().bool().all()
            self._agreed = finite
        return self._agreed

    def drop(self) -> None:
        """Receive and forget it: the other ranks wait until it has arrived."""
        self.gradients()

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return by arena: slots, and the rows of the gradient that they receive."""
        if self._gradients is None:  # several optimizers may call this
            self._gradients = self._arrived()
            if self._wire.replicas is not None and self._wire.replicas.exact:
                self._gradients = gather_gradients(self._gradients, self._arenas, self._wire.replicas.link)
        return self._gradients
