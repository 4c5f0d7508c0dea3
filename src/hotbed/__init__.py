"""Train recommendation models whose embedding tables outgrow the memory next to the compute.

Every name is imported when it is first used, so that ``hotbed --help`` need not wait for torch.
"""

from typing import TYPE_CHECKING

from hotbed import machine as machine  # before anything loads torch, and torch its OpenMP runtime

# isort: split
from hotbed.lazy import lazy

if TYPE_CHECKING:
    from hotbed import nn, optim
    from hotbed.batch import Batch, Embeddings
    from hotbed.checkpoint import init_from, load_checkpoint, save_checkpoint
    from hotbed.compat import swap_embeddings
    from hotbed.config import MemoryOptions, ParallelOptions, Recipe
    from hotbed.data import Loader, ParquetSource, Schema, Source, SplitBinarySource
    from hotbed.data.preparation.prepare_dataset import prepare
    from hotbed.embed import EmbeddingCollection, clip_grad_norm_, distribute, mean_over_ranks
    from hotbed.errors import HotbedError
    from hotbed.jagged import Jagged
    from hotbed.plan import Cut, Plan, Tile, make_plan
    from hotbed.specs import Dynamic, Feature, Table
    from hotbed.train import Callback, Trainer, evaluate
    from hotbed.train.workflows.prediction import predict

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
    "clip_grad_norm_",
    "distribute",
    "evaluate",
    "init_from",
    "load_checkpoint",
    "make_plan",
    "mean_over_ranks",
    "nn",
    "optim",
    "predict",
    "prepare",
    "save_checkpoint",
    "swap_embeddings",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Batch": "hotbed.batch",
        "Callback": "hotbed.train",
        "Cut": "hotbed.plan",
        "Dynamic": "hotbed.specs",
        "EmbeddingCollection": "hotbed.embed",
        "Embeddings": "hotbed.batch",
        "Feature": "hotbed.specs",
        "HotbedError": "hotbed.errors",
        "Jagged": "hotbed.jagged",
        "Loader": "hotbed.data",
        "MemoryOptions": "hotbed.config",
        "ParallelOptions": "hotbed.config",
        "ParquetSource": "hotbed.data",
        "Plan": "hotbed.plan",
        "Recipe": "hotbed.config",
        "Schema": "hotbed.data",
        "Source": "hotbed.data",
        "SplitBinarySource": "hotbed.data",
        "Table": "hotbed.specs",
        "Tile": "hotbed.plan",
        "Trainer": "hotbed.train",
        "clip_grad_norm_": "hotbed.embed",
        "distribute": "hotbed.embed",
        "evaluate": "hotbed.train",
        "init_from": "hotbed.checkpoint",
        "load_checkpoint": "hotbed.checkpoint",
        "make_plan": "hotbed.plan",
        "mean_over_ranks": "hotbed.embed",
        "nn": "hotbed",
        "optim": "hotbed",
        "predict": "hotbed.train.workflows.prediction",
        "prepare": "hotbed.data.preparation.prepare_dataset",
        "save_checkpoint": "hotbed.checkpoint",
        "swap_embeddings": "hotbed.compat",
    },
)
