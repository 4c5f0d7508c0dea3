"""Let a run go on with other data than it began with, as each day of ``hotbed daily`` does.

At the end of an epoch the state of a run (rows, moments, parameters, schedules, random numbers, counters) is that of a
model, and the next epoch may be of any samples. Within an epoch the samples must stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hotbed.data import Loader, Source
from hotbed.train.trainer import Trainer


class Positioned(Protocol):
    """A loader with a position."""

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of samples depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a run does besides, because its data are not those that it began with.

    Attributes
    ----------
    before
        Called by all ranks once the model is loaded, before the first step, with the trainer, the source, and batches
        of its train split to evaluate on.
    kept
        Steps of which checkpoints are not removed.
    """

    before: Callable[[Trainer, Source, Loader], None]
    kept: Collection[int] = ()


class OtherData:
    """Give a loader the position of one that had other samples: at the start of an epoch that is its number alone."""

    def __init__(self, loader: Positioned) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The loader's position."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; within an epoch, only of the same samples."""
        if not state["consumed"]:
            state = {**self._loader.state_dict(), "epoch": state["epoch"], "consumed": 0}
        self._loader.load_state_dict(state)
