"""Embedding tables as a module: ids in, pooled vectors out, gradients to the sparse optimizer."""

from hotbed.embed.collection import EmbeddingCollection, tables_on_meta
from hotbed.embed.distribute import Distributed, collections_of, distribute, mean_over_ranks, plan_for, plan_tables
from hotbed.embed.held import Held

__all__ = [
    "Distributed",
    "EmbeddingCollection",
    "Held",
    "collections_of",
    "distribute",
    "mean_over_ranks",
    "plan_for",
    "plan_tables",
    "tables_on_meta",
]
