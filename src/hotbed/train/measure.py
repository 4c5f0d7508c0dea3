"""Measure a model's numericals before training: on the first rank, while the others wait, and only what is not known.

After a resume or a warm start nothing is measured that the checkpoint had.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

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
    ranks, columns = trainer.ranks, ", ".join(normalization.unmeasured)
    error: Exception | None = None
    if ranks.is_first:
        try:
            _measure(normalization, source, splits, ranks, console)
        except Exception as raised:
            error = raised
        ranks.add(1.0)
    else:
        while not ranks.add(0.0)[0]:
            pass
    with ranks.together(f"measure the columns {columns}"):
        if error is not None:
            raise error
    for statistics in normalization.state_dict().values():
        statistics.copy_(ranks.gather(statistics if ranks.is_first else statistics[:0]))


def _measure(
    normalization: Normalization, source: Source, splits: Sequence[str], ranks: Ranks, console: Console
) -> None:
    beat = time.monotonic()

    def shown(done: int, total: int) -> None:
        nonlocal beat
        progress("measure", done, total)
        if time.monotonic() - beat > _BEAT_S:
            ranks.add(0.0)
            beat = time.monotonic()

    with StageProgress(console) as progress, torch.no_grad():
        normalization.measure(source, splits, progress=shown)
