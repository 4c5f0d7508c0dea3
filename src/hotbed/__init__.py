"""Train recommendation models whose embedding tables outgrow the memory next to the compute."""

from hotbed import nn, optim
from hotbed.batch import Batch, Embeddings
from hotbed.config import Recipe
from hotbed.data import Loader, ParquetSource, Schema, Source, SplitBinarySource, prepare
from hotbed.embed import EmbeddingCollection
from hotbed.errors import HotbedError
from hotbed.jagged import Jagged
from hotbed.specs import Feature, Table
from hotbed.train import Callback, Trainer, evaluate, load_checkpoint, save_checkpoint

__all__ = [
    "Batch",
    "Callback",
    "EmbeddingCollection",
    "Embeddings",
    "Feature",
    "HotbedError",
    "Jagged",
    "Loader",
    "ParquetSource",
    "Recipe",
    "Schema",
    "Source",
    "SplitBinarySource",
    "Table",
    "Trainer",
    "evaluate",
    "load_checkpoint",
    "nn",
    "optim",
    "prepare",
    "save_checkpoint",
]
