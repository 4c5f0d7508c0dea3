"""Look one feature up by itself, as modules of one table do: by little more than a launch of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.bags import Bags
from hotbed.embed.collection import VECTOR_DTYPES, EmbeddingCollection
from hotbed.embed.gradients import PooledLookup
from hotbed.embed.local_tables import LocalTables
from hotbed.embed.single_feature import are_valid
from hotbed.jagged import Jagged


def look_up(rows: EmbeddingCollection, feature: str, bags: Bags) -> Tensor:
    """Look up a feature of a collection that has one table.

    Parameters
    ----------
    rows
        The collection; its other features have no ids in this call.
    feature
        Name of the feature.
    bags
        Its ids. They are checked, as those of a batch are.

    Returns
    -------
    Tensor
        ``[B, D]``; ``[N, D]``, a vector per id, where the feature is not pooled. Autocast does not change its dtype.

    Raises
    ------
    BatchError, SpecError
        As `EmbeddingCollection.forward`.
    """
    (group,), (table,) = rows._groups, rows.tables.values()
    if (
        not isinstance(group, LocalTables)
        or torch.compiler.is_dynamo_compiling()
        or table.dynamic is not None
        or rows.dtype not in VECTOR_DTYPES
        or not are_valid(bags, table.rows, group.device)  # what is not, a batch refuses
    ):
        return _look_up_in_batch(rows, feature, bags)
    trained = rows._is_trained((table.name,))
    rows._check_call(None, 0, trained and torch.is_grad_enabled())
    request = group.request(feature, bags, trained)
    count = request.bags.batch_size
    found = group.empty((count, 1, group.dim), rows.dtype)
    anchor = rows._anchor if trained else rows._anchor.detach()
    (vectors,) = PooledLookup.apply(anchor, bags.weights, [request], [found], rows._updaters)
    return vectors.view(count, group.dim)


def _look_up_in_batch(rows: EmbeddingCollection, feature: str, bags: Bags) -> Tensor:
    """Look one feature up as a batch in which the others have no ids."""
    others = [f.name for f in rows.features if f.name != feature]
    ids = Jagged(
        [feature, *others],
        bags.values,
        batch_size=bags.batch_size,
        fixed=[bags.fixed, *(0 for _ in others)],
        offsets=None if bags.offsets is None else bags.offsets[None],
        weights=bags.weights,
    )
    with torch.autocast(bags.values.device.type, enabled=False):
        found = rows(ids)
    is_pooled = next(f.is_pooled for f in rows.features if f.name == feature)
    return found[feature] if is_pooled else found.jagged(feature)[0]
