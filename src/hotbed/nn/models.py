"""Define the common parts of models: dense inputs, first-order weights, and the check that features are pooled."""

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

# Recipes, including recipes in checkpoints, may still use the old import paths of these models.
__getattr__ = lazy(__name__, {"DLRM": "hotbed.nn.dlrm", "WideDeep": "hotbed.nn.wide_deep"})[0]


def linear_tables(model: nn.Module, tables: Sequence[Table], top: Sequence[int]) -> list[Table]:
    """Create a table of first-order weights for each table: a column per label, float32, initially zero.

    Raise `SpecError` if the last width of the model's ``top`` is not a number of labels.
    """
    name = type(model).__name__
    if not top:
        raise SpecError(f"{name}: top: got no widths, expected at least one, the number of labels")
    fix = "The last width is the number of labels and the dim of the wide tables."
    check(f"{name}: last width of top", top[-1], Annotated[int, Range(least=1, most=MAX_DIM)], SpecError, fix)
    return [replace(table, dim=top[-1], init_bound=0.0, dtype="fp32", fp32_rows=0) for table in tables]


def first_order(wide: EmbeddingCollection, ids: Jagged) -> Tensor:
    """Sum the weights of a sample's ids ``[B, T]`` in float32, even with autocast."""
    with torch.autocast(ids.values.device.type, enabled=False):
        logits = wide(ids).stack().sum(dim=1)
    if not torch.compiler.is_compiling():  # the counts of compiled graphs are not added up
        for count in (wide.bad_ids, wide.truncated_ids):
            count.clear()  # because the other collection counts the same ids
    return logits


def refuse_sequences(model: nn.Module, features: Sequence[Feature]) -> None:
    """Raise `SpecError` if a feature is not pooled, for models that do not support sequences."""
    for feature in features:
        if not feature.is_pooled:
            raise SpecError(
                f"{type(model).__name__}: pooling of feature '{feature.name}': got 'none', expected "
                + " or ".join(map(repr, POOLED))
            )


def dense_inputs(model: nn.Module, batch: Batch, expected: int) -> Tensor | None:
    """Return the batch's dense inputs ``[B, I]``, or None without dense inputs."""
    got = 0 if batch.dense is None else batch.dense.shape[1]
    if got != expected:
        raise BatchError(f"{type(model).__name__}: dense inputs of the batch: got {got}, expected {expected}")
    if batch.dense is not None and batch.dense.dtype == torch.float64:
        raise BatchError(
            f"{type(model).__name__}: dense inputs: got float64 (raw numbers), expected float32 (normalized numbers). "
            "Call hotbed.nn.normalize(model, schema), or pass float32"
        )
    return batch.dense if got else None


def dense_inputs_or_one(model: nn.Module, batch: Batch, expected: int) -> Tensor:
    """Return the batch's dense inputs ``[B, I]``, or a constant 1 ``[B, 1]`` without dense inputs."""
    dense = dense_inputs(model, batch, expected)
    return torch.ones(batch.sparse.batch_size, 1, device=batch.sparse.values.device) if dense is None else dense
