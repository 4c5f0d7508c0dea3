"""Train and test the model of a recipe: ``hotbed train`` and ``hotbed demo`` call `train`.

`train` calls `hotbed.train.runs.build` (model, optimizers, trainer), `loaders`, `resume`, `Trainer.fit` and `report`.
Functions are in the order in which `train` calls them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from hotbed.checkpoint import Directory, Taken, directory, find_checkpoint, init_from, read_manifest
from hotbed.config import Recipe
from hotbed.config.validation import checkpoint_policy, monitored, notice, patience
from hotbed.data import Loader, Source, open_readers
from hotbed.data.skew.hot_cold import HotColdLoader
from hotbed.embed import Distributed
from hotbed.errors import StoppedError
from hotbed.nn.normalization import normalization_of
from hotbed.train.checkpoints import refuse_other_checkpoints
from hotbed.train.ranks.process_group import limit_of, on_first, watchdog
from hotbed.train.runs.build import build, open_source, train_splits
from hotbed.train.runs.callbacks import (
    Callback,
    EarlyStop,
    JsonLines,
    KeepBest,
    KeepLast,
    TensorBoard,
    own_callbacks,
    refuse_callbacks,
    signals_to,
)
from hotbed.train.runs.hot_batches import HotSchedule
from hotbed.train.runs.loaders import TrainingLoader, evaluation_loader, training_loader
from hotbed.train.runs.report import METRICS, RunDirectory, ShowProgress, StageProgress, print_taken, summary_of
from hotbed.train.runs.resume import Resume, finished_run, resume_from, resume_newest, virtual_ranks_before
from hotbed.train.runs.stored_model import (
    FEATURES,
    FeaturesState,
    bad_ids,
    check_id_kinds,
    check_vocabularies,
    has_features,
    lacks_vocabularies,
    load_features,
)
from hotbed.train.trainer import Trainer

if TYPE_CHECKING:  # the import takes half a second, so only runs that publish import the module
    from hotbed.train.runs.publish import Publisher


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Extra work of `train` when a run continues on different data, e.g. on the next day's data."""

    # Called on all ranks after the model is loaded, with the trainer, the source and a loader of the train split
    before: Callable[[Trainer, Source, Loader], None]
    kept: Collection[int] = ()  # checkpoints of these steps are kept


@dataclass(frozen=True)
class Run:
    """Objects that the steps of `train` share."""

    recipe: Recipe
    source: Source
    trainer: Trainer
    directory: RunDirectory
    console: Console

    @property
    def checkpoints(self) -> Directory:
        """Directory of the run's checkpoints."""
        return directory(self.recipe.train.checkpoint_dir or self.directory.checkpoints)

    def print(self, text: str) -> None:
        """Print a line on the first rank."""
        if self.trainer.ranks.is_first:
            self.console.print(text, soft_wrap=True)

    def watchdog(self) -> AbstractContextManager[None]:
        """Return a context that ends this process when training or evaluation hangs."""
        trainer, ranks = self.trainer, self.trainer.ranks
        return watchdog(
            lambda: trainer.clock.batches,
            limit_of(self.recipe, ranks.size),
            self.directory.path,
            rank=ranks.rank,
            here=lambda: f"rank {ranks.rank} of {ranks.size}, step {trainer.step + 1:,}",
            is_exempt=lambda: trainer.saver.is_waited_for,
        )


def train(
    recipe: Recipe,
    run: RunDirectory,
    console: Console,
    *,
    resume: str | Path | None = None,
    extra: Mapping[str, Any] | None = None,
    continuation: Continuation | None = None,
) -> dict[str, Any]:
    """Train and test the model of a recipe, and write the run's directory.

    Parameters
    ----------
    recipe
        Data, model, optimizers and so on.
    run
        Directory to write.
    console
        Console for progress.
    resume
        Checkpoint to resume, or a directory (then its newest checkpoint is resumed). Training continues bit for bit,
        unless there are more processes than virtual ranks. A recipe that would train a different model is refused
        (`refuse_another_recipe`). ``"auto"`` resumes the newest run of this name in the directory of that run, or
        starts a run if there is none. If the newest run is finished, nothing is trained. ``"none"`` starts a run. The
        default is ``"none"``, but under torchrun the newest run of this recipe is resumed (see `Resume`).
    extra
        Additional entries of the summary.
    continuation
        Extra work on resume if the data has changed.

    Returns
    -------
    dict
        Content of ``summary.json``.
    """
    data = recipe.data
    with open_readers(data.executor, data.workers) as readers:
        # 1. Open the data source.
        wanted = Resume.of(resume, recipe)
        refuse_callbacks(recipe)
        source = open_source(data)
        # 2. Build the model, its optimizers and the trainer.
        trainer = build(recipe, source, virtual_ranks=virtual_ranks_before(recipe, run, wanted))
        job, ranks = Run(recipe, source, trainer, run, console), trainer.ranks
        # 3. Return the summary if the run is finished.
        if (finished := _finished(job, wanted)) is not None:
            return finished
        if continuation is None and (text := notice(recipe)):
            job.print(text)
        # 4. Open the loaders of the splits.
        batches = training_loader(recipe, source, ranks, trainer.model, readers)
        valid = evaluation_loader(recipe, source, data.valid_split, ranks, readers)
        test = evaluation_loader(recipe, source, data.test_split, ranks, readers)
        ids = trainer.other_parts["ids"] = IdCounts(trainer)
        if has_features(source):
            trainer.other_parts[FEATURES] = FeaturesState(source)
        try:
            # 5. Resume a checkpoint, or start a new run, perhaps with tables of the checkpoint ``init.checkpoint``.
            resumed = _resume(job, wanted, batches, other_data=continuation is not None)
            taken = [] if resumed is not None or recipe.init.checkpoint is None else _init(job, recipe.init.checkpoint)
            # 6. Create the run's directory, and lock the directory of its checkpoints.
            run.share(ranks)
            if recipe.train.checkpoint != "none":
                trainer.saver.lock(job.checkpoints)  # before the check, because another run may start there
                refuse_other_checkpoints(job.checkpoints, resumed)
            # 7. Measure boundaries of buckets and statistics of numericals that the checkpoint does not have.
            measure_buckets(trainer, source, train_splits(recipe), console)
            measure_numericals(trainer, source, train_splits(recipe), console)
            if continuation and (new := evaluation_loader(recipe, source, data.train_split, ranks, readers)):
                with job.watchdog():
                    continuation.before(trainer, source, new)
            # 8. Train.
            _fit(job, batches, valid, continuation.kept if continuation else ())
        finally:
            trainer.saver.release()
        # 9. Test.
        with job.watchdog():
            tested = None if test is None else trainer.evaluate(test).to_dict()
        # 10. Write the summary.
        summary = {**summary_of(recipe, trainer, run, ids.total(), taken, tested), **(extra or {})}
        if ranks.is_first:
            run.finish(summary)
        return summary


def _finished(job: Run, wanted: Resume) -> dict[str, Any] | None:
    """Return the summary of the run to resume if this run is finished, else None."""
    if wanted.by_recipe:
        job.print("under torchrun, the newest run of this recipe is resumed (--resume none starts a new run)")
    summary = finished_run(job.trainer, job.recipe, job.directory, wanted) if wanted.auto else None
    if summary is not None:
        job.print(
            f"{summary['run']} is finished after {summary['steps']:,} steps. Raise train.steps or train.epochs to "
            "continue, or start a new run with --resume none"
        )
    return summary


def _resume(job: Run, wanted: Resume, batches: TrainingLoader, *, other_data: bool) -> Directory | None:
    """Load the checkpoint to resume, and set the loader to the checkpoint's position in the data.

    Return the path of the checkpoint, or None for a new run.
    """
    recipe, trainer = job.recipe, job.trainer
    if wanted.auto:
        resumed = resume_newest(trainer, recipe, job.directory, wanted, job.console)
    else:
        resumed = None if wanted.path is None else resume_from(wanted.path, trainer, recipe)
    if resumed is None:
        if wanted.auto:
            job.print("no checkpoint to resume; a new run starts")
        return None
    with trainer.ranks.together(f"compare {recipe.data.path} with the data of {resumed}"):
        manifest = read_manifest(resumed)
        if other_data:
            check_id_kinds(manifest, job.source, str(recipe.data.path))
            check_vocabularies(job.source, manifest)
        else:
            load_features(job.source, manifest)
    _warn_of_unknown_vocabularies(job, resumed)
    trainer.resume_data(batches, other_data=other_data)
    job.print(f"resumed from {resumed} at step {trainer.step:,}")
    return resumed


def _init(job: Run, checkpoint: str) -> list[Taken]:
    """Load tables and parameters of ``checkpoint`` as the recipe's ``init`` section requests, and report them."""
    recipe, ranks = job.recipe, job.trainer.ranks
    with ranks.together("find the checkpoint of init.checkpoint"):
        found = [str(find_checkpoint(checkpoint))] if ranks.is_first else []
    source, init = directory(ranks.names(found)[0]), recipe.init
    parts = job.trainer.parts()
    taken = init_from(source, parts, rename=init.rename, leave=init.leave, optimizers=init.optimizers)
    with ranks.together("compare the vocabularies"):
        manifest = read_manifest(source)
        load_features(job.source, manifest, other_tables=True)
        check_vocabularies(job.source, manifest, taken, init.rename)
    if ranks.is_first:
        print_taken(job.console, str(source), taken)
    _warn_of_unknown_vocabularies(job, source)
    return taken


def _warn_of_unknown_vocabularies(job: Run, checkpoint: Directory) -> None:
    if job.trainer.ranks.is_first and lacks_vocabularies(read_manifest(checkpoint), job.source):
        job.print(f"warning: {checkpoint} has no vocabularies to compare, so the vocabularies of the data are used")


def _fit(job: Run, batches: TrainingLoader, valid: Loader | None, kept: Collection[int]) -> None:
    """Train with the callbacks of the recipe; raise `StoppedError` if a signal ended training."""
    trainer, is_first = job.trainer, job.trainer.ranks.is_first
    progress = ShowProgress(job.console) if is_first else Callback()
    trainer.callbacks += [*_callbacks(job, kept, _publisher(job)), progress]
    if isinstance(batches, HotColdLoader):
        trainer.callbacks.append(HotSchedule(batches, job.recipe.hot))
    with signals_to(trainer) as stopped_by:
        if is_first:
            job.directory.begin(job.recipe, trainer.model.plan if isinstance(trainer.model, Distributed) else None)
        try:
            with job.watchdog():
                trainer.fit(batches, valid)
        finally:
            if isinstance(progress, ShowProgress):
                progress.close()
    if trainer.stop_requested:
        fix = "No checkpoint was saved, because train.checkpoint is 'none'"
        if job.recipe.train.checkpoint != "none":
            fix = f"Resume with --resume {job.checkpoints / f'last-{trainer.step:08d}'}"
        raise StoppedError(
            f"stopped by a signal after step {trainer.step:,}. {fix}", stopped_by[-1] if stopped_by else SIGTERM
        )


def _publisher(job: Run) -> Publisher | None:
    """Create the publisher of checkpoints on the first rank, if the recipe has ``train.publish``."""
    train, ranks = job.recipe.train, job.trainer.ranks
    if train.publish is None:
        return None
    from hotbed.train.runs.model_export import Exporter
    from hotbed.train.runs.publish import Publisher

    with ranks.together(f"publish to {train.publish}"):
        if not ranks.is_first:
            return None
        made = Publisher(directory(train.publish), Exporter(job.recipe, job.source), train.publish_full_every)
        made.begin(job.trainer.step, job.checkpoints)
        return made


def _callbacks(job: Run, kept: Collection[int], publisher: Publisher | None) -> list[Callback]:
    recipe, path, is_first = job.recipe, job.directory.path, job.trainer.ranks.is_first
    train, policy, enough = recipe.train, checkpoint_policy(recipe), patience(recipe)
    callbacks: list[Callback] = [JsonLines(path / METRICS)] if is_first else []
    callbacks += own_callbacks(recipe, path, is_first=is_first)
    if train.tensorboard and is_first:
        callbacks.append(TensorBoard(path / "tensorboard"))
    background = train.checkpoint_in_background
    if train.checkpoint != "none":
        callbacks.append(
            KeepLast(
                job.checkpoints,
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
        callbacks.append(KeepBest(job.checkpoints, recipe, background=background, publisher=publisher))
    if enough is not None:
        callbacks.append(EarlyStop(enough, monitored(recipe)))
    return callbacks


def measure_numericals(trainer: Trainer, source: Source, splits: Sequence[str], console: Console) -> None:
    """Measure the numerical columns without statistics in the model's normalization. All ranks must call this."""
    normalization = normalization_of(trainer.model)
    if normalization is None or not normalization.unmeasured:
        return
    ranks = trainer.ranks

    def measure() -> None:
        with StageProgress(console) as progress, torch.no_grad():
            normalization.measure(source, splits, progress=partial(progress, "measure"))

    on_first(measure)
    for statistics in normalization.state_dict().values():
        statistics.copy_(ranks.gather(statistics if ranks.is_first else statistics[:0]))


def measure_buckets(trainer: Trainer, source: Source, splits: Sequence[str], console: Console) -> None:
    """Measure the boundaries of buckets that have none yet; all ranks must call this."""
    ranks, encoder = trainer.ranks, source.encoder
    wanted = [] if encoder is None else encoder.unmeasured
    if encoder is None or not wanted:
        return

    def measure() -> None:
        with StageProgress(console) as progress:
            source.measure(splits, progress=partial(progress, "quantiles"))

    on_first(measure)
    for bucket in wanted:
        # 0.0 is padding, because the list of boundaries may be empty.
        own = [*encoder.boundaries[bucket.name], 0.0] if ranks.is_first else []
        found = ranks.gather(torch.tensor(own, dtype=torch.float64, device=trainer.device))
        encoder.boundaries[bucket.name] = found[:-1].tolist()


class IdCounts:
    """Count the invalid ids of all ranks, including ids from before the run was resumed."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before: dict[str, int] = {}

    def total(self) -> dict[str, int]:
        """Return the number of invalid ids by feature; all ranks must call this."""
        own = self._trainer.ranks.add_counts(bad_ids(self._trainer.model))
        return dict(Counter(self._before) + Counter(own))

    def state_dict(self) -> dict[str, int]:
        """Return the number of invalid ids by feature, for a checkpoint; all ranks must call this."""
        return self.total()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let `total` include the saved counts, which are from before the run was resumed."""
        self._before = dict(state)
