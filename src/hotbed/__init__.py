"""Train recommendation models whose embedding tables outgrow the memory next to the compute."""

from typing import TYPE_CHECKING

from hotbed import machine as machine  # before anything loads torch, and torch its OpenMP runtime

# isort: split
from hotbed import nn, optim
from hotbed.batch import Batch, Embeddings
from hotbed.checkpoint import init_from, load_checkpoint, save_checkpoint
from hotbed.config import MemoryOptions, ParallelOptions, Recipe
from hotbed.data import Loader, Schema, Source, SplitBinarySource
from hotbed.embed import EmbeddingCollection, distribute, mean_over_ranks
from hotbed.errors import HotbedError
from hotbed.jagged import Jagged, ModelParallelInput
from hotbed.lazy import lazy
from hotbed.plan import Cut, Plan, Tile, make_plan
from hotbed.specs import Dynamic, Feature, Table
from hotbed.train import Callback, Trainer, evaluate

if TYPE_CHECKING:
    from hotbed.data import ParquetSource
    from hotbed.data.prepare import prepare

__all__ = [
    "Batch",
    "Callback",
    "Cut",
    "Dynamic",
    "EmbeddingCollection",
    "Embeddings",
    "Feature",
    "HotbedError",
    "Jagged",
    "Loader",
    "MemoryOptions",
    "ModelParallelInput",
    "ParallelOptions",
    "ParquetSource",
    "Plan",
    "Recipe",
    "Schema",
    "Source",
    "SplitBinarySource",
    "Table",
    "Tile",
    "Trainer",
    "distribute",
    "evaluate",
    "init_from",
    "load_checkpoint",
    "make_plan",
    "mean_over_ranks",
    "nn",
    "optim",
    "prepare",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy(
    __name__,
    {"ParquetSource": "hotbed.data.parquet", "prepare": "hotbed.data.prepare"},
    renamed={"Spread": "ModelParallelInput"},
)
