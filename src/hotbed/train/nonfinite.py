"""What to say when a loss is NaN or infinite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.errors import NonFiniteError

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer


def refuse_non_finite(loss: float, own: Tensor, batch: Batch, what: str, trainer: Trainer) -> None:
    """Raise `NonFiniteError` unless the loss is finite: where it happened, the likely cause and what to try.

    ``loss`` is that of all ranks, ``own`` is finite where this rank had no part in it; ``what`` names the batch.
    """
    if math.isfinite(loss):
        return
    cause = "The samples of another rank did this, whose own message says how"
    if not math.isfinite(own.item()) or trainer.ranks.size == 1:
        cause = _cause(batch, what, trainer.model)
    raise NonFiniteError(
        f"the loss is {loss} in step {trainer.step + 1:,} (epoch {trainer.epoch}, batch {trainer.position:,} of it); "
        f"training stopped before the batch touched any parameter or table. {cause}"
    )


def _cause(batch: Batch, batch_is: str, model: nn.Module) -> str:
    for what, tensor in (("dense", batch.dense), ("weights", batch.weights)):
        place = _first_bad(tensor)
        if tensor is not None and place is not None:
            column = f", column {place[1]}" if len(place) > 1 else ""
            return (
                f"The cause is in the input: {what} of sample {place[0]:,} of {batch_is}{column} is "
                f"{float(tensor[tuple(place)])}. Mend the data or fill such values in the source"
            )
    for name, parameter in model.named_parameters():
        if _first_bad(parameter) is not None:
            return (
                f"The input is finite but parameter '{name}' is not: an earlier step diverged. Try a lower lr, or a "
                f"longer schedule.warmup_steps"
            )
    return (
        "The input and the dense parameters are finite, so values inside the model overflow. Try a lower lr of the "
        "sparse or dense optimizer, a longer schedule.warmup_steps, or train.precision fp32"
    )


def _first_bad(tensor: Tensor | None) -> list[int] | None:
    """Index of the first entry that is not finite."""
    if tensor is None or bool(tensor.isfinite().all()):
        return None
    return (~tensor.detach().isfinite()).nonzero()[0].tolist()
