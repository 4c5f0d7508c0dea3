"""Go from a recipe to a trained, tested model: what ``hotbed train`` and ``demo`` call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from hotbed.checkpoint import Directory, Taken, directory, find_checkpoint, init_from, read_manifest
from hotbed.config import Recipe
from hotbed.config.validation import checkpoint_policy, monitored, notice, patience
from hotbed.data import Loader, Source
from hotbed.data.executors import Tasks
from hotbed.data.hot_loader import HotColdLoader
from hotbed.embed import Distributed, collections_of
from hotbed.errors import StoppedError
from hotbed.optim import SparseOptimizer
from hotbed.plan.cost import table_bytes
from hotbed.store import Traffic
from hotbed.train.broadcast import BroadcastLoader
from hotbed.train.build import build_trainer, open_source, train_splits
from hotbed.train.callbacks import (
    Callback,
    EarlyStop,
    JsonLines,
    TensorBoard,
    own_callbacks,
    refuse_callbacks,
    signals_to,
)
from hotbed.train.checkpointing import refuse_other_checkpoints
from hotbed.train.hot_batches import HotSchedule
from hotbed.train.loaders import evaluation_loader, readers_of, training_loader
from hotbed.train.measure import FeaturesState, measure_buckets, measure_numericals
from hotbed.train.parallel import Ranks
from hotbed.train.report import METRICS, RunDirectory, ShowProgress, environment, print_taken
from hotbed.train.resume import Resume, finished_run, resume_from, resume_newest
from hotbed.train.retention import KeepBest, KeepLast
from hotbed.train.stored import FEATURES, bad_ids, begin_with, go_on_with, has_features, unknown_vocabularies
from hotbed.train.throughput import Balance
from hotbed.train.trainer import Trainer
from hotbed.train.watchdog import Watchdog, limit_of

if TYPE_CHECKING:  # half a second of imports, for runs that publish alone
    from hotbed.train.publish import Publisher


class Positioned(Protocol):
    """A loader with a position."""

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of samples depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a run does besides, because its data are not those that it began with."""

    # called by all ranks once the model is loaded, before the first step, with the trainer, the source, and batches of
    # its train split to evaluate on
    before: Callable[[Trainer, Source, Loader], None]
    kept: Collection[int] = ()  # steps of which checkpoints are not removed


class OtherData:
    """Give a loader the position of one that had other samples: at the start of an epoch that is its number alone."""

    def __init__(self, loader: Positioned) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """The loader's position."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; within an epoch, only of the same samples."""
        if not state["consumed"]:
            state = {**self._loader.state_dict(), "epoch": state["epoch"], "consumed": 0}
        self._loader.load_state_dict(state)


def train(
    recipe: Recipe,
    run: RunDirectory,
    console: Console,
    *,
    resume: str | Path | None = None,
    extra: Mapping[str, Any] | None = None,
    continuation: Continuation | None = None,
) -> dict[str, Any]:
    """Train and test by a recipe, and write the run's directory.

    Parameters
    ----------
    recipe
        What to do.
    run
        Where to write.
    console
        Where progress goes.
    resume
        Checkpoint to go on from, or a directory whose newest is meant; with as many processes as before, what is
        trained then is bit for bit what the run that made it would have trained.
        A recipe that would train something else is refused (`refuse_another_recipe`).
        ``"auto"``: go on with the newest run of this name in its directory if it has a checkpoint, else begin; of one
        that is finished nothing is trained or tested again. ``"none"``: begin. Without a value, begin, but under
        torchrun go on with the newest run of this recipe (see `Resume`).
    extra
        Further entries of the summary.
    continuation
        How to go on with other data than those that the checkpoint to resume from was trained on.

    Returns
    -------
    dict
        The summary, as in ``summary.json``.
    """
    with readers_of(recipe) as readers:
        return _train(recipe, run, console, Resume.of(resume, recipe), extra or {}, continuation, readers)


def _train(
    recipe: Recipe,
    run: RunDirectory,
    console: Console,
    wanted: Resume,
    extra: Mapping[str, Any],
    continuation: Continuation | None,
    readers: Tasks | None,
) -> dict[str, Any]:
    refuse_callbacks(recipe)
    source = open_source(recipe.data)
    trainer = build_trainer(recipe, source)
    ranks = trainer.ranks
    if wanted.by_recipe and ranks.is_first:
        console.print("under torchrun a run of this recipe is gone on with (--resume none begins a new one)")
    if wanted.auto and (summary := finished_run(trainer, recipe, run, wanted)) is not None:
        if ranks.is_first:
            console.print(
                f"{summary['run']} is finished: {summary['steps']:,} steps are trained and tested, and nothing is "
                "left to train; raise train.steps or train.epochs to go on, or begin a new run with --resume none",
                soft_wrap=True,
            )
        return summary
    if ranks.is_first and continuation is None and (told := notice(recipe)):
        console.print(told, soft_wrap=True)
    loader = training_loader(recipe, source, ranks, trainer.model, readers)
    ids = trainer.other_parts["ids"] = IdCounts(trainer, recipe)
    if has_features(source):
        trainer.other_parts[FEATURES] = FeaturesState(source)
    try:
        other_data = None if continuation is None else source
        taken = _begin(trainer, loader, recipe, run, wanted, console, source, other_data=other_data)
        measure_buckets(trainer, source, train_splits(recipe), console)
        measure_numericals(trainer, source, train_splits(recipe), console)
        if continuation is not None and (
            batches := evaluation_loader(recipe, source, recipe.data.train_split, ranks, readers)
        ):
            with watchdog(trainer, recipe, run):
                continuation.before(trainer, source, batches)
        valid = evaluation_loader(recipe, source, recipe.data.valid_split, ranks, readers)
        kept = () if continuation is None else continuation.kept
        signal = _fit(trainer, loader, valid, recipe, source, run, console, kept)
    finally:
        trainer.saver.release()
    if trainer.told_to_stop:
        raise StoppedError(_stopped(trainer, recipe, run), signal or SIGTERM)
    test = evaluation_loader(recipe, source, recipe.data.test_split, ranks, readers)
    with watchdog(trainer, recipe, run):
        tested = None if test is None else trainer.evaluate(test).to_dict()
    summary = {
        "name": recipe.name,
        "seed": recipe.train.seed,
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "samples": trainer.samples,
        "samples_per_s": trainer.samples_per_s,
        "stall_share": trainer.clock.stall_share,
        "time": trainer.clock.seconds,
        **trainer.numerics.summary(),
        "best_step": best_step(trainer),
        "test": tested,
        "ids_out_of_range": ids.total(),
        "checkpoints": of_checkpoints(trainer),
        **({"init": [t.to_dict() for t in taken]} if taken else {}),
        **of_ranks(trainer),
        **of_memory(trainer),
        "tables": of_tables(trainer),
        **environment(trainer.device),
        "run": str(run.path),
        **extra,
    }
    if ranks.is_first:
        run.finish(summary)
    return summary


def _begin(
    trainer: Trainer,
    loader: Loader | BroadcastLoader | HotColdLoader,
    recipe: Recipe,
    run: RunDirectory,
    resume: Resume,
    console: Console,
    source: Source,
    *,
    other_data: Source | None,
) -> list[Taken]:
    """Load what training begins with or goes on from, and choose the run's directory; what a new model has taken."""
    ranks, taken = trainer.ranks, list[Taken]()
    resumed = None
    if resume.auto:
        resumed = resume_newest(trainer, recipe, run, resume, console)
    elif resume.path is not None:
        resumed = resume_from(resume.path, trainer, recipe)
    if resumed is None and recipe.init.checkpoint is not None:
        with ranks.together("find the checkpoint to begin with"):
            found = [str(find_checkpoint(recipe.init.checkpoint))] if ranks.is_first else []
        begun_with = directory(ranks.names(found)[0])
        taken = init_from(
            begun_with,
            trainer.parts(),
            rename=recipe.init.rename,
            leave=recipe.init.leave,
            optimizers=recipe.init.optimizers,
        )
        with ranks.together("compare the vocabularies"):
            begin_with(source, read_manifest(begun_with), taken, recipe.init.rename)
        if ranks.is_first:
            print_taken(console, str(begun_with), taken)
        _tell_unknown(source, begun_with, ranks, console)
    if resumed is not None:
        with ranks.together(f"compare {recipe.data.path} with the data of {resumed}"):
            go_on_with(source, read_manifest(resumed), recipe.data.path, are_others=other_data is not None)
        _tell_unknown(source, resumed, ranks, console)
        trainer.resume_data(loader if other_data is None else OtherData(loader))
        if ranks.is_first:
            console.print(f"resumed from {resumed} at step {trainer.step:,}", soft_wrap=True)
    elif resume.auto and ranks.is_first:
        console.print("there is no checkpoint to go on from; a new run begins")
    run.share(ranks)
    if recipe.train.checkpoint != "none":
        trainer.saver.lock(_checkpoints(recipe, run))  # before looking: another run may be about to begin there
        refuse_other_checkpoints(_checkpoints(recipe, run), resumed)
    return taken


def _tell_unknown(source: Source, checkpoint: Directory, ranks: Ranks, console: Console) -> None:
    if ranks.is_first and (told := unknown_vocabularies(source, read_manifest(checkpoint))) is not None:
        console.print(f"warning: {checkpoint}: {told}", soft_wrap=True)


def _checkpoints(recipe: Recipe, run: RunDirectory) -> Directory:
    return directory(recipe.train.checkpoint_dir or run.checkpoints)


def _fit(
    trainer: Trainer,
    loader: Loader | BroadcastLoader | HotColdLoader,
    valid: Loader | None,
    recipe: Recipe,
    source: Source,
    run: RunDirectory,
    console: Console,
    kept: Collection[int] = (),
) -> int | None:
    """Train, and show and keep what the recipe says; the signal that asked this process to stop, if one did."""
    ranks = trainer.ranks
    progress = ShowProgress(console) if ranks.is_first else Callback()
    checkpoints = _checkpoints(recipe, run)
    publisher = _publisher(trainer, recipe, source, checkpoints)
    trainer.callbacks += [*_callbacks(recipe, run, checkpoints, ranks, kept, publisher), progress]
    if isinstance(loader, HotColdLoader):
        trainer.callbacks.append(HotSchedule(loader, recipe.hot))
    with signals_to(trainer) as signals:
        if ranks.is_first:
            run.begin(recipe, trainer.model.plan if isinstance(trainer.model, Distributed) else None)
        try:
            with watchdog(trainer, recipe, run):
                trainer.fit(loader, valid)
        finally:
            if isinstance(progress, ShowProgress):
                progress.close()
    return signals.stopped_by


def watchdog(trainer: Trainer, recipe: Recipe, run: RunDirectory) -> Watchdog:
    """What ends this process if it hangs while it trains or evaluates."""
    ranks = trainer.ranks
    return Watchdog(
        lambda: trainer.clock.batches,
        limit_of(recipe, ranks.size),
        run.path,
        rank=ranks.rank,
        here=lambda: f"rank {ranks.rank} of {ranks.size}, step {trainer.step + 1:,}",
        is_exempt=lambda: trainer.saver.is_waited_for,
    )


def _stopped(trainer: Trainer, recipe: Recipe, run: RunDirectory) -> str:
    where = "no checkpoint was saved, for train.checkpoint is 'none'"
    if recipe.train.checkpoint != "none":
        where = f"go on with --resume {_checkpoints(recipe, run) / f'last-{trainer.step:08d}'}"
    return f"stopped by a signal after step {trainer.step:,}; {where}"


class IdCounts:
    """How many ids were out of range, in the run and in those that it goes on from, over all ranks."""

    def __init__(self, trainer: Trainer, recipe: Recipe) -> None:
        self._trainer, self._recipe = trainer, recipe
        self._before: dict[str, int] = {}

    def total(self) -> dict[str, int]:
        """By feature; all ranks must call this."""
        own = self._trainer.ranks.add_counts(_own_bad_ids(self._trainer, self._recipe))
        return dict(Counter(self._before) + Counter(own))

    def state_dict(self) -> dict[str, int]:
        """The counts so far."""
        return self.total()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting."""
        self._before = dict(state)


def _own_bad_ids(trainer: Trainer, recipe: Recipe) -> dict[str, int]:
    """The same, of ids that no other rank counts: where owners read, all owners of a table read its ids."""
    counts = bad_ids(trainer.model)
    if recipe.parallel.reader != "owners" or not isinstance(trainer.model, Distributed):
        return counts
    first_owner = {table: tiles[0].owner for table, tiles in trainer.model.plan.by_table.items()}
    collections = collections_of(trainer.model).values()
    own = {f.name for c in collections for f in c.features if first_owner[f.table] == trainer.ranks.rank}
    return {feature: count for feature, count in counts.items() if feature in own}


def _publisher(trainer: Trainer, recipe: Recipe, source: Source, checkpoints: Directory) -> Publisher | None:
    """What publishes the run's checkpoints, on the first rank, if the recipe says so."""
    if recipe.train.publish is None:
        return None
    from hotbed.train.export import Exporter
    from hotbed.train.publish import Publisher

    with trainer.ranks.together(f"publish to {recipe.train.publish}"):
        if not trainer.ranks.is_first:
            return None
        made = Publisher(directory(recipe.train.publish), Exporter(recipe, source), recipe.train.publish_full_every)
        made.begin(trainer.step, checkpoints)
        return made


def _callbacks(
    recipe: Recipe,
    run: RunDirectory,
    place: Directory,
    ranks: Ranks,
    kept: Collection[int],
    publisher: Publisher | None,
) -> list[Callback]:
    train, policy, enough = recipe.train, checkpoint_policy(recipe), patience(recipe)
    callbacks: list[Callback] = [JsonLines(run.path / METRICS)] if ranks.is_first else []
    callbacks += own_callbacks(recipe, run.path, is_first=ranks.is_first)
    if train.tensorboard and ranks.is_first:
        callbacks.append(TensorBoard(run.path / "tensorboard"))
    background = train.checkpoint_in_background
    if train.checkpoint != "none":
        callbacks.append(
            KeepLast(
                place,
                recipe,
                train.checkpoint_every,
                minutes=train.checkpoint_minutes,
                keep_last=train.keep_last,
                keep_every=train.keep_every,
                kept=kept,
                background=background,
                at_end=policy == "last",
                publisher=publisher,
            )
        )
    if policy == "best":
        callbacks.append(KeepBest(place, recipe, background=background, publisher=publisher))
    if enough is not None:
        callbacks.append(EarlyStop(enough, monitored(recipe)))
    return callbacks


def best_step(trainer: Trainer) -> int | None:
    """Step of the best evaluation, to whose model training went back; None where none was kept."""
    return next((callback.step for callback in trainer.callbacks if isinstance(callback, KeepBest)), None)


def of_checkpoints(trainer: Trainer) -> dict[str, Any]:
    """What a summary says of checkpoints: how many, and the seconds that training waited for them."""
    records = trainer.saver.records
    return {"saved": len(records), "stalled_s": sum(record["stalled_s"] for record in records)}


def of_memory(trainer: Trainer) -> dict[str, Any]:
    """What a summary says of rows that are not all in the device's memory."""
    collections, traffic = collections_of(trainer.model).values(), trainer.traffic
    if traffic == Traffic():
        return {}
    held = {"table_bytes": sum(c.nbytes for c in collections), "disk_bytes": sum(c.disk_bytes for c in collections)}
    return {"memory": {**held, "hit_rate": traffic.hit_rate, **asdict(traffic)}}


def of_tables(trainer: Trainer) -> list[dict[str, Any]]:
    """What a summary says of each table."""
    clock = trainer.clock
    moments = {
        name: optimizer.rule.moments
        for optimizer in trainer.optimizers.values()
        if isinstance(optimizer, SparseOptimizer)
        for group in optimizer.param_groups
        for name in group["tables"]
    }
    collections = collections_of(trainer.model)
    norms = trainer.backward.logged.norms(trainer.ranks.add, trainer.ranks.size)
    found: list[dict[str, Any]] = []
    for path, collection in collections.items():
        served = collection.served
        counts = iter(trainer.ranks.add(*chain.from_iterable(served.values())))
        rates = {t: h / (h + m) if h + m else None for t, h, m in zip(served, counts, counts, strict=True)}
        for table in collection.tables.values():
            ids = sum(clock.ids[f.name] for f in collection.features if f.table == table.name)
            whole = f"{path}.{table.name}"
            found.append(
                {
                    "table": whole if len(collections) > 1 else table.name,
                    "rows": table.rows,
                    "dim": table.dim,
                    "dtype": table.dtype,
                    "bytes": table_bytes(table, moments.get(whole, moments.get(table.name, ()))),
                    # of the first rank; None where its batches have ids of other ranks
                    "ids_per_sample": ids / clock.drawn if clock.drawn else None,
                    "hit_rate": rates[table.name],
                    "grad_norm": norms[path, table.name],
                }
            )
    return found


def of_ranks(trainer: Trainer) -> dict[str, Any]:
    """What a summary says of several ranks: how much of their exchanges the steps hid, and the whole run's balance."""
    if trainer.ranks.size == 1:
        return {}
    replicas = trainer.model.wire.replicas if isinstance(trainer.model, Distributed) else None
    averaged: dict[str, Any] = {}
    if replicas is not None:
        averaged["replicas"] = replicas.link.size
    if replicas is not None and not replicas.exact:
        averaged |= {"syncs": replicas.syncs, "sync_waited_s": replicas.waited_s}
    return {
        **averaged,
        **Balance(trainer.model).record(),
        "ranks": trainer.ranks.size,
        "ids_exchange_s": trainer.prefetcher.exchange_s,
        "ids_exchange_hidden_share": trainer.prefetcher.hidden_share,
    }
