"""Measure what inputs need before training: on the first rank, while the others wait, and only what is not known.

That is statistics of a model's numericals, and boundaries of buckets that a schema gives by quantiles. After a resume
or a warm start nothing is measured that the checkpoint had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

from hotbed.data import Source
from hotbed.nn.normalization import normalization_of
from hotbed.train.process_group import on_first
from hotbed.train.report import StageProgress
from hotbed.train.trainer import Trainer


def measure_numericals(trainer: Trainer, source: Source, splits: Sequence[str], console: Console) -> None:
    """Measure the columns that the trainer's model normalizes and does not know yet; all ranks must call this."""
    normalization = normalization_of(trainer.model)
    if normalization is None or not normalization.unmeasured:
        return
    ranks = trainer.ranks

    def measure() -> None:
        with StageProgress(console) as progress, torch.no_grad():
            normalization.measure(source, splits, progress=partial(progress, "measure"))

    on_first(measure)
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
            source.measure(splits, progress=partial(progress, "quantiles"))

    on_first(measure)
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
        """Whether there are derived columns, which need the measured values."""
        return bool(self._source.schema.derived)

    def state_dict(self) -> dict[str, Any]:
        """See `Encoder.state`."""
        return {} if self._source.encoder is None else self._source.encoder.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was measured."""
        if self._source.encoder is not None:
            self._source.encoder.load_state(state, other_tables=True)
