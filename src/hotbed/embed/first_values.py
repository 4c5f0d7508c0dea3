"""Give all ranks the initial values of the first rank, as ``DistributedDataParallel`` does with parameters.

Tables that torch's generator has filled differ between ranks whose generators do. Without this, copies of a row would
differ from their owner's, and the model would depend on the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from hotbed.comm import Link
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.plan_names import agreed_seeds

_log = logging.getLogger("hotbed")
_BLOCK = 1 << 26
"""Bytes that are summed, or sent, at once."""


def agree_on_values(collections: Iterable[EmbeddingCollection], link: Link) -> None:
    """Give all ranks the seeds and rows of the first one, before tables are distributed; all ranks must call this.

    Only tables that differ on some rank are sent, as a whole. Seeds matter for tables on ``meta``, whose rows are made
    later.
    """
    if link.size == 1:
        return
    collections = list(collections)
    seeds = agreed_seeds(link, [collection.seed for collection in collections])
    if seeds is not None:
        _log.info("seeds of initial values differ between ranks: all ranks use those of rank 0")
        for collection, seed in zip(collections, seeds, strict=True):
            collection.seed = seed
    stored = [
        tensor
        for collection in collections
        for table in collection.tables.values()
        if collection.device.type != "meta" and table.dynamic is None
        for tensor in collection._group_of(table.name).raw(table.name).values()
    ]
    if not stored:
        return
    sums = torch.stack([_checksum(tensor).to(link.device) for tensor in stored])
    everyones = link.all_gather("checksums of tables", sums).wait()
    for tensor, differs in zip(stored, (everyones != everyones[0]).any(0).tolist(), strict=True):
        for block in _blocks(tensor) if differs else ():
            block.copy_(link.broadcast("initial rows of tables", block.to(link.device), 0).wait())


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(torch.uint8).flatten().split(_BLOCK)


def _checksum(tensor: Tensor) -> Tensor:
    """Sum the bytes of a tensor, 8 at a time, each times an odd number of its own: 0-d int64, which wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, block in enumerate(_blocks(tensor)):
        numbers = pad(block, (0, -len(block) % 8)).view(torch.int64)
        total += (numbers * torch.arange(i + 1, i + 1 + 2 * len(numbers), 2, device=block.device)).sum()
    return total
