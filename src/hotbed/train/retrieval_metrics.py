"""Measure how often a sample's item is found among all items: recall@k and nDCG@k, by exact search.

Each positive sample is a query whose one relevant item is its own, so recall@k is the share of samples whose item is
among the k items with the largest products, and nDCG@k the mean of ``1 ÷ log₂(1 + place)`` of those that are. Items are
searched in blocks, so memory is that of all items' vectors, and of `_USERS` × `_ITEMS` products.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.batch import Batch
from hotbed.data.items import ItemSet, item_ids
from hotbed.data.loader import share_of
from hotbed.errors import BatchError, NonFiniteError
from hotbed.train.metrics import Metrics, evaluating, refuse_unnormalized, to_device
from hotbed.train.parallel import Ranks
from hotbed.train.retrieval import Options, is_positive, refuse_missing

_log = logging.getLogger("hotbed")
_USERS, _ITEMS = 1024, 16_384


@dataclass(frozen=True, kw_only=True)
class FoundMetrics(Metrics):
    """Hold metrics of retrieval, in ``others``: ``recall@k`` and ``ndcg@k``; ``samples`` are the positives."""

    items: int  # among how many items each sample's item was searched for

    @override
    def to_dict(self) -> dict[str, Any]:
        """Give what was measured, as plain values."""
        return {"samples": self.samples, "items": self.items, **self.others}

    @override
    def value(self, monitor: str) -> float:
        """Give recall or ndcg of the last k."""
        of_k = [value for name, value in self.others.items() if name.startswith(f"{monitor}@")]
        return of_k[-1] if monitor in ("recall", "ndcg") else math.nan


def evaluate_found(
    model: nn.Module,
    batches: Iterable[Batch],
    items: ItemSet,
    options: Options,
    *,
    device: torch.device | str = "cpu",
    finished: Callable[[], None] = lambda: None,
) -> FoundMetrics:
    """Measure a model over the positives of batches, in float32; nothing is updated. All ranks must call this."""
    refuse_unnormalized(model, batches)
    ranks = Ranks(model)
    ranks.sync()
    if ranks.is_first and (all_found := [k for k in options.k if k >= len(items)]):
        _log.warning(
            "retrieval.k has %s, and there are %s items, all of which are found: recall is 1 there whatever the model",
            ", ".join(map(str, all_found)),
            f"{len(items):,}",
        )
    count, total, sums = 0, 0.0, torch.zeros(2, len(options.k), dtype=torch.float64)
    of_items: Tensor | None = None
    with evaluating(model):
        for batch in batches:
            if of_items is None:
                of_items = item_vectors(model, items, batch, device=device, finished=finished)
            wanted = is_positive(batch).nonzero()[:, 0]
            own = refuse_missing(items, item_ids(batch.sparse, options.item[0])[wanted], "the split")
            weights = torch.ones(len(batch)) if batch.weights_by_label is None else batch.weights_by_label[:, 0].cpu()
            weights = weights[wanted].double()
            users = _vectors(model, to_device(batch, model, device), "users")[0][wanted.to(of_items.device)]
            places = places_of(users, of_items, own.to(of_items.device), max(options.k)).cpu()
            for i, k in enumerate(options.k):
                found = weights * (places < k)
                sums[:, i] += torch.stack([found.sum(), (found / (places + 2.0).log2()).sum()])
            count, total = count + len(wanted), total + float(weights.sum())
            finished()
    counted, weight, *flat = ranks.add(count, total, *sums.flatten().tolist())
    if not weight:
        raise BatchError(
            "there is no positive sample to find an item for: no label is 1, or all weights are 0; evaluate other data"
        )
    names = [f"{name}@{k}" for name in ("recall", "ndcg") for k in options.k]
    return FoundMetrics(
        samples=int(counted),
        items=len(items),
        auc=math.nan,
        logloss=math.nan,
        normalized_entropy=math.nan,
        calibration=math.nan,
        others=dict(zip(names, (value / weight for value in flat), strict=True)),
    )


def item_vectors(
    model: nn.Module,
    items: ItemSet,
    like: Batch,
    *,
    device: torch.device | str = "cpu",
    finished: Callable[[], None] = lambda: None,
) -> Tensor:
    """Compute the vectors of all items ``[N, D]`` float32 on the device, in evaluation; all ranks must call this.

    ``like`` is any batch of the model's data: of it only the names and kinds of columns count.
    """
    ranks = Ranks(model)
    made: list[Tensor] = []
    for start in range(0, len(items), _ITEMS):
        size = min(_ITEMS, len(items) - start)
        share = share_of(size, ranks.rank, ranks.size)
        batch = batch_of_items(items, torch.arange(start + share.start, start + share.stop), like)
        made.append(ranks.gather(_vectors(model, to_device(batch, model, device), "items")[1]))
        finished()
    return torch.cat(made)


def batch_of_items(items: ItemSet, positions: Tensor, like: Batch) -> Batch:
    """Make items samples without a user."""
    dense = None if like.dense is None else like.dense.new_zeros(len(positions), *like.dense.shape[1:])
    return Batch(sparse=items.rows(positions, like.sparse), dense=dense)


def places_of(users: Tensor, items: Tensor, own: Tensor, most: int) -> Tensor:
    """Find where each user's own item is among all, the best one 0 ``[B]`` int64; ``most`` where it is not found."""
    places = torch.full_like(own, most)
    for rows, best in zip(torch.arange(len(users)).split(_USERS), _best(users, items, most), strict=False):
        hits = best == own[rows.to(own.device)][:, None]
        places[rows.to(own.device)] = torch.where(hits.any(1), hits.long().argmax(1), most)
    return places


def _best(users: Tensor, items: Tensor, most: int) -> Iterator[Tensor]:
    """Yield positions of the items with the largest products ``[b, most]``, of `_USERS` users after the others."""
    for part in users.split(_USERS) if len(users) else ():
        scores = part.new_empty(len(part), 0)
        positions = torch.empty(len(part), 0, dtype=torch.int64, device=part.device)
        for start in range(0, len(items), _ITEMS):
            block = part @ items[start : start + _ITEMS].T
            here = torch.arange(start, start + block.shape[1], device=part.device).expand_as(block)
            scores, positions = torch.cat([scores, block], dim=1), torch.cat([positions, here], dim=1)
            scores, at = scores.topk(min(most, scores.shape[1]), dim=1)
            positions = positions.gather(1, at)
        yield positions


def _vectors(model: nn.Module, batch: Batch, what: str) -> tuple[Tensor, Tensor]:
    found = cast("Sequence[Tensor]", model(batch, vectors=True))
    if not bool(found[what == "items"].isfinite().all()):
        raise NonFiniteError(
            f"evaluation: a vector of {what} is not finite; the model has diverged or an input is not finite"
        )
    users, items = found
    return users.float(), items.float()
