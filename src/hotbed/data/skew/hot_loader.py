"""Alternate all-hot and all-cold batches, at an adjustable rate: `HotColdLoader`.

*Theory of operation.* An epoch is a number of rounds (Adnan et al. 2021, arXiv 2103.00686). A round at rate r is r % of
the epoch's cold batches, then r % of its hot ones, at least one of each as long as there are any; the rounds go on
until every batch was given once. Each kind comes from a `Loader` of its own, in that loader's order.

The rate of a round may depend on an evaluation after the round before, and a trainer fetches a batch ahead of that.
Which batch comes first in a round does not depend on its rate. So a round's end is set when its *second* batch is asked
for, or when somebody asks whether it is over: the consumer may be one batch ahead of its evaluations, not more.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any, cast

from hotbed.batch import Batch
from hotbed.data.loader import Loader
from hotbed.errors import SpecError

HOT, COLD = "hot", "cold"
"""Ends of the names of the splits that `pack` makes."""

_NONE = {"cold": 0, "hot": 0}
_STATE = ("cold", "hot", "given", "begin", "end")


class HotColdLoader:
    """Iterate over hot and cold batches; one iteration is one epoch.

    As with a `Loader`, an epoch that is left early counts as over, unless `load_state_dict` goes on with it.

    Parameters
    ----------
    hot, cold
        Batches of each kind; None where there is no sample of it.
    rate
        Percent of each kind's batches in a round.

    Attributes
    ----------
    rate
        As above; may be set at any time, and counts from the next round on. It is no part of the position.
    queue_depth
        That of the loader whose batch was given last.

    Raises
    ------
    SpecError
        If there is no batch, or the rate is out of range.
    """

    def __init__(self, hot: Loader | None, cold: Loader | None, *, rate: float = 50) -> None:
        if hot is None and cold is None:
            raise SpecError("there is neither a hot nor a cold sample; pack a split that has samples")
        if not 0 < rate <= 100:
            raise SpecError(f"rate is {rate}, must be above 0 and at most 100 percent")
        self.rate = rate
        self.queue_depth = 0
        self._loaders = {kind: loader for kind, loader in (("cold", cold), ("hot", hot)) if loader is not None}
        self._sizes = _NONE | {kind: len(loader) for kind, loader in self._loaders.items()}
        # Of this epoch, by kind: batches given, and those given when the round begins and ends, if that is set.
        self._given, self._begin, self._end = dict(_NONE), dict(_NONE), dict[str, int]()
        self._fresh = True  # whether the next iteration starts at the position, rather than at the next epoch

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return sum(self._sizes.values())

    def __iter__(self) -> Iterator[Batch]:
        if not self._fresh:
            self._given, self._begin, self._end = dict(_NONE), dict(_NONE), {}
        self._fresh = False
        with ExitStack() as stack:
            batches = {
                kind: stack.enter_context(closing(cast("Generator[Batch]", iter(loader))))
                for kind, loader in self._loaders.items()
                if self._is_left(kind)
            }
            while self._given != self._sizes:
                kind = self._next_kind()
                batch = next(batches[kind])
                self.queue_depth = self._loaders[kind].queue_depth
                self._given[kind] += 1
                yield batch

    def round_is_over(self, batches: int) -> bool:
        """Whether a round ends with so many batches of the epoch, of which at most one more was given."""
        if batches in (sum(self._begin.values()), len(self)):
            return batches > 0
        return batches == sum(self._end_of_round().values())

    def _next_kind(self) -> str:
        if self._given != self._begin:
            for kind, end in self._end_of_round().items():
                if self._given[kind] < end:
                    return kind
            self._begin, self._end = dict(self._given), {}
        return next(filter(self._is_left, self._sizes))

    def _end_of_round(self) -> Mapping[str, int]:
        """Set at the first call in a round, by the rate as it is then."""
        if not self._end:
            self._end = {
                kind: min(self._begin[kind] + math.ceil(size * self.rate / 100), size)
                for kind, size in self._sizes.items()
            }
        return self._end

    def _is_left(self, kind: str) -> bool:
        return self._given[kind] < self._sizes[kind]

    # -- position --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, as plain values: that of each loader, and in the round."""
        places = (self._given, self._begin, self._end) if self._given != self._sizes else (_NONE, _NONE, {})
        loaders = {kind: self._loaders[kind].state_dict() if kind in self._loaders else None for kind in _NONE}
        return {**loaders, **dict(zip(("given", "begin", "end"), map(dict, places), strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position: the next iteration gives exactly the batches that were left, at equal rates.

        Raises
        ------
        SpecError
            If the position is not one of such a loader, or of other hot and cold samples.
        """
        if set(state) != set(_STATE):
            raise SpecError(
                f"the position has {', '.join(state) or 'nothing'}, must have {', '.join(_STATE)}: it is not one of "
                f"hot and cold batches; resume with hot.batches as it was"
            )
        for kind in _NONE:
            if (state[kind] is None) != (kind not in self._loaders):
                has, had = ("are", "were not") if kind in self._loaders else ("are no", "were")
                raise SpecError(
                    f"there {has} {kind} samples, and there {had} when the position was saved; pack as before"
                )
        for kind, loader in self._loaders.items():
            loader.load_state_dict(state[kind])
        self._given, self._begin, self._end = (dict(state[key]) for key in ("given", "begin", "end"))
        self._fresh = True
