"""Define what models share: dense inputs, first-order weights beside tables, and the refusal of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checks import Range, check
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.lazy import lazy
from hotbed.specs import MAX_DIM, POOLED, Feature, Table

# Recipes, also those in checkpoints, may name these models by where they were.
__getattr__ = lazy(__name__, {"DLRM": "hotbed.nn.dlrm", "WideDeep": "hotbed.nn.wide_deep"})[0]


def linear_tables(model: nn.Module, tables: Sequence[Table], top: Sequence[int]) -> list[Table]:
    """Create tables of first-order weights for other tables: a column per label, float32, initially zero.

    Raise `SpecError` if the last width of the model's ``top`` is no number of labels.
    """
    name = type(model).__name__
    if not top:
        raise SpecError(f"{name}: top is empty; it needs at least one width, the number of labels")
    fix = "End it with the number of labels, the dim of the wide tables."
    check(f"{name}: last width of top", top[-1], Annotated[int, Range(least=1, most=MAX_DIM)], SpecError, fix)
    return [replace(table, dim=top[-1], init_bound=0.0, dtype="fp32", fp32_rows=0) for table in tables]


def first_order(wide: EmbeddingCollection, ids: Jagged) -> Tensor:
    """Sum the weights of a sample's ids ``[B, T]``, float32 also under autocast; not counted as ids of their own."""
    with torch.autocast(ids.values.device.type, enabled=False):
        logits = wide(ids).stack().sum(dim=1)
    if not torch.compiler.is_compiling():  # a graph leaves them; nobody adds the counts of collections up
        for count in (wide.bad_ids, wide.truncated_ids):
            count.clear()  # the other collection counts the same ids
    return logits


def refuse_sequences(model: nn.Module, features: Sequence[Feature]) -> None:
    """Raise `SpecError` for a feature that is not pooled, of a model that cannot take such."""
    for feature in features:
        if not feature.is_pooled:
            raise SpecError(
                f"{type(model).__name__}: feature '{feature.name}' is not pooled; give it pooling="
                + " or ".join(map(repr, POOLED))
            )


def dense_inputs(model: nn.Module, batch: Batch, expected: int) -> Tensor | None:
    """The batch's dense inputs ``[B, I]``; None where there are none."""
    got = 0 if batch.dense is None else batch.dense.shape[1]
    if got != expected:
        raise BatchError(f"{type(model).__name__} was built for {expected} dense inputs, the batch has {got}")
    if batch.dense is not None and batch.dense.dtype == torch.float64:
        raise BatchError(
            f"{type(model).__name__} got raw numbers (float64), which are not normalized; call "
            "hotbed.nn.normalize(model, schema), which takes them, or give float32"
        )
    return batch.dense if got else None


def dense_inputs_or_one(model: nn.Module, batch: Batch, expected: int) -> Tensor:
    """The batch's dense inputs ``[B, I]``; where there are none, a constant 1 ``[B, 1]``."""
    dense = dense_inputs(model, batch, expected)
    return torch.ones(batch.sparse.batch_size, 1, device=batch.sparse.values.device) if dense is None else dense
