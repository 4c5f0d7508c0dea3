"""Measure what inputs need before training: on the first rank, while the others wait, and only what is not known.

That is statistics of a model's numericals, and boundaries of buckets that a schema gives by quantiles. After a resume
or a warm start nothing is measured that the checkpoint had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

from hotbed.data import Source
from hotbed.nn.normalization import Normalization, normalization_of
from hotbed.train.parallel import Ranks
from hotbed.train.report import StageProgress
from hotbed.train.trainer import Trainer

_BEAT_S = 10.0
"""After so many seconds the first rank lets the others know that it still reads: they would take it for lost."""


def measure_numericals(trainer: Trainer, source: Source, splits: Sequence[str], console: Console) -> None:
    """Measure the columns that the trainer's model normalizes and does not know yet; all ranks must call this.

    Raises
    ------
    DataError
        If the data cannot be read, or the values are too large for their rule.
    CommError
        If that is so on the first rank, and this is another.
    """
    normalization = normalization_of(trainer.model)
    if normalization is None or not normalization.unmeasured:
        return
    ranks = trainer.ranks
    columns = ", ".join(normalization.unmeasured)
    measure = partial(_measure, normalization, source, splits, ranks, console)
    _on_first(ranks, f"measure the columns {columns}", measure)
    for statistics in normalization.state_dict().values():
        statistics.copy_(ranks.gather(statistics if ranks.is_first else statistics[:0]))


def measure_buckets(trainer: Trainer, source: Source, splits: Sequence[str], console: Console) -> None:
    """Measure the boundaries of buckets that are not known yet; all ranks must call this. See `measure_numericals`."""
    ranks, encoder = trainer.ranks, source.encoder
    wanted = [] if encoder is None else encoder.unmeasured
    if encoder is None or not wanted:
        return

    def measure() -> None:
        with StageProgress(console) as progress:
            source.measure(splits, progress=_beating(ranks, progress, "quantiles"))

    _on_first(ranks, f"measure quantiles for {', '.join(bucket.name for bucket in wanted)}", measure)
    for bucket in wanted:
        own = [*encoder.boundaries[bucket.name], 0.0] if ranks.is_first else []  # one more, for there may be none
        found = ranks.gather(torch.tensor(own, dtype=torch.float64, device=trainer.device))
        encoder.boundaries[bucket.name] = found[:-1].tolist()


class FeaturesState:
    """What is known of a source's derived columns, as a part of checkpoints.

    Tables of lookups are compared by `take_features`, which says more than that a part cannot be loaded.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def has_derived(self) -> bool:
        """Whether there are derived columns, which cannot be made without what was measured."""
        return bool(self._source.schema.derived)

    def state_dict(self) -> dict[str, Any]:
        """See `Encoder.state`."""
        return {} if self._source.encoder is None else self._source.encoder.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was measured."""
        if self._source.encoder is not None:
            self._source.encoder.load_state(state, other_tables=True)


def _on_first(ranks: Ranks, what: str, work: Callable[[], None]) -> None:
    """Do it on the first rank, while the others wait for it."""
    error: Exception | None = None
    if ranks.is_first:
        try:
            work()
        except Exception as raised:
            error = raised
        ranks.add(1.0)
    else:
        while not ranks.add(0.0)[0]:
            pass
    with ranks.together(what):
        if error is not None:
            raise error


def _measure(
    normalization: Normalization, source: Source, splits: Sequence[str], ranks: Ranks, console: Console
) -> None:
    with StageProgress(console) as progress, torch.no_grad():
        normalization.measure(source, splits, progress=_beating(ranks, progress, "measure"))


def _beating(ranks: Ranks, progress: StageProgress, stage: str) -> Callable[[int, int], None]:
    """Show progress, and let the other ranks know now and then that the first still reads."""
    beat = time.monotonic()

    def shown(done: int, total: int) -> None:
        nonlocal beat
        progress(stage, done, total)
        if time.monotonic() - beat > _BEAT_S:
            ranks.add(0.0)
            beat = time.monotonic()

    return shown
