"""Embedding tables as a module: ids in, pooled vectors out, gradients to the sparse optimizer."""

from hotbed.embed.arena import LocalTile
from hotbed.embed.collection import EmbeddingCollection, collections_of, plan_for, plan_tables
from hotbed.embed.distribute import Distributed, distribute, mean_over_ranks
from hotbed.embed.tables import tables_on_meta

__all__ = [
    "Distributed",
    "EmbeddingCollection",
    "LocalTile",
    "collections_of",
    "distribute",
    "mean_over_ranks",
    "plan_for",
    "plan_tables",
    "tables_on_meta",
]
