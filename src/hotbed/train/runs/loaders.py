"""Create the loaders of a recipe on each rank."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from torch import nn

from hotbed.config import Recipe
from hotbed.data import Loader, Source
from hotbed.data.executors import Tasks
from hotbed.data.skew.hot_cold import COLD, HOT, HotColdLoader
from hotbed.errors import RecipeError
from hotbed.train.metrics import check_batch
from hotbed.train.numerics import resolve_device
from hotbed.train.ranks.broadcast import BroadcastLoader
from hotbed.train.ranks.parallel import Ranks

TrainingLoader: TypeAlias = Loader | BroadcastLoader | HotColdLoader


def training_loader(
    recipe: Recipe, source: Source, ranks: Ranks, model: nn.Module, readers: Tasks | None = None
) -> TrainingLoader:
    """Return this rank's loader of training batches, of the kind that ``parallel.reader`` and ``hot.batches`` require.

    ``readers`` is the executor that the loaders of this process share; without it, each loader uses its own threads.
    """
    train = recipe.data.train_split

    read_all = partial(
        Loader,
        batch_size=recipe.train.batch_size,
        shuffle=recipe.data.shuffle,
        seed=recipe.train.seed,
        window=recipe.data.window,
        workers=recipe.data.workers,
        prefetch=recipe.data.prefetch,
        executor=readers,
    )
    # only this rank's samples
    read_share = partial(read_all, rank=ranks.rank, world_size=ranks.size, virtual_ranks=ranks.virtual.total)
    if recipe.hot.batches == "alternating":
        splits = [f"{train}_{part}" for part in (HOT, COLD)]
        for split in splits:
            if split not in source.splits:
                raise RecipeError(
                    f"hot.batches is 'alternating', but the data has no split '{split}', only "
                    f"{', '.join(source.splits)}. Run hotbed pack, and set data.path to the output of hotbed pack"
                )
        hot, cold = (read_share(source, split) if source.samples(split) else None for split in splits)
        return HotColdLoader(hot, cold, rate=recipe.hot.rate)
    if recipe.parallel.reader == "first" and ranks.link is not None:
        # The host divides hot and cold batches, and adds candidates to batches of retrieval.
        on_host = recipe.hot.batches == "split" or recipe.retrieval is not None
        device = None if on_host else resolve_device(recipe.train.device)
        own = read_all(source, train) if ranks.is_first else None
        return BroadcastLoader(
            own,
            ranks.link,
            device=device,
            check=lambda batch: check_batch(batch, model),
            virtual_ranks=ranks.virtual.total,
        )
    return read_share(source, train)


def evaluation_loader(
    recipe: Recipe, source: Source, split: str | None, ranks: Ranks, readers: Tasks | None = None
) -> Loader | None:
    """Return this rank's loader that reads a split for evaluation; return None if ``split`` is None."""
    if split is None:
        return None
    size, workers = recipe.train.eval_batch_size, recipe.data.workers
    return Loader(
        source,
        split,
        size,
        workers=workers,
        rank=ranks.rank,
        world_size=ranks.size,
        virtual_ranks=ranks.virtual.total,
        executor=readers,
    )
