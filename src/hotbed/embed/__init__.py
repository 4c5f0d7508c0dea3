"""Embedding tables as a module: ids in, pooled vectors out, gradients to the sparse optimizer."""

from hotbed.embed.collection import EmbeddingCollection

__all__ = ["EmbeddingCollection"]
