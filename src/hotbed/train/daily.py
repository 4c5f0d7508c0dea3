"""Train a model day by day, for as long as there are days: ``hotbed daily``.

A day is a run of `train` that goes on from the checkpoint of the day before, and takes ``train.epochs`` passes over its
samples: the epochs of the model go on counting. Before its first step the model, which has not seen the day, is
evaluated on it (progressive validation). Then the day's checkpoint is published, and last its record is added to
``days.jsonl``, which makes the day a finished one. All state passes from day to day through checkpoints, so one command
for five days, five commands, and a command that is killed and given again train the same bits.

What is in ``OUT``: ``days.jsonl``; ``checkpoints/last-STEP``; and by day a run's directory with ``before.json`` (what
was measured before training), ``seen.npz`` (rows looked up until then) and ``changes.parquet``, if it was asked for.
After a restart from an earlier day, later directories end in ``-2``, and what they replace stays as it was.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from torch import nn

from hotbed.checkpoint.storage import LocalDirectory
from hotbed.config import Recipe
from hotbed.data import Loader, Source
from hotbed.errors import RecipeError, StoppedError
from hotbed.files import write_json
from hotbed.train.days import BEFORE, SEEN, Day, Days, DayTable, Record
from hotbed.train.drift import DayCounts, Watched, read_seen, write_seen
from hotbed.train.lease import DirectoryLock, lock
from hotbed.train.process_group import end_groups, is_first, on_first
from hotbed.train.report import RunDirectory
from hotbed.train.resume import NEVER
from hotbed.train.run import Continuation, train
from hotbed.train.stored import uncut
from hotbed.train.trainer import Trainer


def train_days(
    recipe: Recipe, days: Days, out: Path, console: Console, restart_from: date | None = None
) -> list[Record]:
    """Train every day that has data and is not trained yet; all ranks must call this."""
    refuse_endings(recipe)
    recipe, ignored = whole_days(recipe)
    for message in ignored if is_first() else ():
        console.print(message, soft_wrap=True)
    with _locked(out) as held:
        table: DayTable | None = None

        def opened() -> None:
            nonlocal table
            table = DayTable(out, recipe, days, restart_from)

        def following() -> Day | None:
            return None if table is None else table.next(console)

        def finish(day: Day, started: float) -> None:
            assert table is not None
            held.check()
            table.finish(day, time.monotonic() - started, console)

        on_first(opened)
        while (day := on_first(following)) is not None:
            started = time.monotonic()
            if not day.is_trained:
                _train(recipe, day, console)
                gc.collect()  # models are in cycles: yesterday's tables would stay beside today's
                end_groups()
            on_first(partial(finish, day, started))
        return on_first(lambda: [] if table is None else table.records)


def refuse_endings(recipe: Recipe) -> None:
    """Raise `RecipeError` if a recipe says when training is over, changes with what is left, or is of retrieval."""
    wanted, schedule = recipe.train, recipe.schedule
    for key, value, may in (
        ("train.steps", wanted.steps, (None,)),
        ("train.patience", wanted.patience, (None, "auto")),
        ("train.checkpoint", wanted.checkpoint, ("auto", "last")),
        ("schedule.decay_start", schedule.decay_start, (None,)),
        ("hot.batches", "alternating" if recipe.hot.batches == "alternating" else None, (None,)),
    ):
        if value not in may:
            raise RecipeError(
                f"{key} is {value}, but hotbed daily trains every day in whole, without end; leave it out"
            )
    if recipe.retrieval is not None:
        raise RecipeError(
            "retrieval is set, but hotbed daily evaluates probabilities, and would know the items of one day alone; "
            "leave it out, or train with hotbed train on the days together"
        )
    if wanted.keep_every is not None:
        raise RecipeError(
            f"train.keep_every is {wanted.keep_every}, but hotbed daily keeps a checkpoint for each day; leave it out, "
            "and say with --keep for how many days"
        )


def whole_days(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe of one whole day, and a sentence for each setting that is ignored because days have no end.

    Every row of a day is trained, so rules that cut rows into splits are dropped together with the splits that they
    make. The next day's evaluation before training takes the place of a test split.
    """
    ignored: list[str] = []
    source = uncut(recipe.data.source)
    given = recipe.data.source.init_args
    dropped = [key for key in given if key not in source.init_args]
    dropped += [key for key in source.init_args if source.init_args[key] != given.get(key)]
    if dropped:
        ignored.append(
            f"data.source.init_args.{', '.join(dropped)} is ignored: hotbed daily trains all rows of a day, and "
            "evaluates on them first"
        )
        if recipe.data.valid_split is not None and recipe.train.patience == "auto" and recipe.train.epochs > 1:
            ignored.append(
                f"train.epochs {recipe.train.epochs} is ignored: it is the most that training may take while the "
                "validation split improves, and daily trains without one. Each day is trained once; to train each day "
                f"several times, remove {dropped[0]} from data.source.init_args"
            )
            recipe = replace(recipe, train=replace(recipe.train, epochs=1))
        recipe = replace(recipe, data=replace(recipe.data, source=source, valid_split=None, test_split=None))
    if recipe.schedule.decay_share is not None:
        ignored.append(
            f"schedule.decay_share {recipe.schedule.decay_share:g} is ignored: learning rates do not decay where "
            "training has no end"
        )
        recipe = replace(recipe, schedule=replace(recipe.schedule, decay_share=None))
    return recipe, ignored


def _train(recipe: Recipe, day: Day, console: Console) -> None:
    """Evaluate on a day's data, and train on them."""
    of_day = replace(
        recipe,
        data=replace(recipe.data, path=day.data, test_split=None),
        train=replace(recipe.train, epochs=day.epochs, checkpoint="last", checkpoint_dir=day.place, patience=None),
    )
    run = RunDirectory(day.folder.parent, day.folder.name)
    run.reopen(day.folder)
    if is_first():
        console.print(f"{day.day}: {day.data}", soft_wrap=True)
    is_new = day.before is None and recipe.init.checkpoint is None
    continuation = Continuation(before=partial(_measure, day, is_new), kept=day.kept)
    try:
        train(of_day, run, console, resume=day.resume or NEVER, continuation=continuation)
    except StoppedError as error:
        raise StoppedError(
            f"stopped by a signal on {day.day}; a checkpoint is saved, and the same command goes on", error.signal
        ) from error


def _measure(day: Day, is_new: bool, trainer: Trainer, source: Source, batches: Loader) -> None:
    """Write what the model of the day before makes of a day, and how this one differs; once, before it is trained.

    A model that ``is_new``, neither trained on a day nor begun with another's checkpoint, is not evaluated.
    """
    before, file = day.before, day.folder / BEFORE
    if day.is_begun and on_first(file.exists):  # else training begins with the data as they are now
        return
    counts = DayCounts(source, on_first(lambda: {} if before is None else read_seen(before / SEEN)))
    metrics: dict[str, Any] | None = None
    if is_new:
        for batch in batches:
            counts.add(batch)
            trainer.clock.count()  # for the watchdog
    else:
        with _uncounted(trainer.model):
            metrics = trainer.evaluate(Watched(batches, counts)).to_dict()
    counts.gather(trainer.ranks)
    with trainer.ranks.together(f"write {file}"):
        if trainer.ranks.is_first:
            write_seen(day.folder / SEEN, counts.seen())
            write_json(file, {"metrics": metrics, **counts.record()})


@contextmanager
def _uncounted(model: nn.Module) -> Generator[None]:
    """Leave the counts of ids that were out of range as they are: training on the day counts them."""
    counters = [c for m in model.modules() if isinstance(c := getattr(m, "bad_ids", None), Counter)]
    before = [dict(cast("Counter[str]", counter)) for counter in counters]
    yield
    for counter, values in zip(counters, before, strict=True):
        counter.clear()
        counter.update(values)


@contextmanager
def _locked(out: Path) -> Generator[DirectoryLock]:
    """Keep a directory of days for this command; all ranks must call this, the first one has it."""
    held = lock(LocalDirectory(out))

    def enter() -> None:
        held.__enter__()

    on_first(enter)
    try:
        yield held
    finally:
        if is_first():
            held.__exit__()
