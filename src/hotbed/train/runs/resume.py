"""Resume a run: find its checkpoint, load it, and refuse settings that would train a different model.

``--resume PATH`` resumes a checkpoint in a new run directory. ``--resume auto`` resumes the newest run of the recipe's
name in the directory of that run; if there is no such run, it starts one. So the same command starts a run and resumes
the run after a crash. Under torchrun the default is like ``auto``, but only runs of the same recipe are resumed
(`Resume`), because ``torchrun --max-restarts`` repeats the command. The first rank searches for the checkpoint. Then
all ranks load that checkpoint, or all ranks fail.

Learning rates, moments and positions are loaded from the checkpoint. New values of these settings in the recipe would
be ignored or applied in part, so they are refused. A resumed run may change the fields that are marked
``MAY_DIFFER_ON_RESUME`` in `hotbed.config.recipe` and `hotbed.config.parallel_memory`, e.g. the number of steps and the
device.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console

from hotbed.checkpoint import (
    Directory,
    Manifest,
    checkpoints_in,
    directory,
    find_checkpoint,
    load_checkpoint,
    read_manifest,
)
from hotbed.checkpoint.manifest import NAME, step_of
from hotbed.checks import is_within, keys_that_may_differ
from hotbed.comm import Link
from hotbed.config import Recipe
from hotbed.config.validation import monitored, patience
from hotbed.errors import DamagedError, HotbedError, RecipeError
from hotbed.files import read_yaml
from hotbed.train.checkpoints import set_aside
from hotbed.train.runs.report import RECIPE, SUMMARY, RunDirectory
from hotbed.train.runs.stored_model import FEATURES, FeaturesState
from hotbed.train.trainer import Trainer

AUTO, NEVER = "auto", "none"
"""Values of ``--resume`` that are no paths."""
_LENGTH = ("steps", "epochs", "patience", "monitor")
"""Keys of `TrainRecipe` that determine when a run ends."""

_KEYS_THAT_MAY_DIFFER = keys_that_may_differ(Recipe)
_OF_A_RUN = ("data", "init", *(key for key in _KEYS_THAT_MAY_DIFFER if key.startswith("train.checkpoint")))
"""Settings that must be equal for a restart by torchrun, although a run that the user resumes may change them."""


def refuse_another_recipe(checkpoint: str | Path | Directory, recipe: Recipe) -> Manifest:
    """Raise `RecipeError` if a recipe would train a different model than a checkpoint's recipe."""
    manifest = read_manifest(checkpoint)
    if manifest.recipe is not None:
        _refuse_difference(f"{checkpoint}", manifest.recipe, recipe)
    return manifest


def _refuse_difference(name: str, stored: Mapping[str, Any], recipe: Recipe) -> None:
    if differing := _find_differences(stored, recipe):
        lines = "; ".join(f"{key} was {before!r} and is now {now!r}" for key, (before, now) in differing.items())
        raise RecipeError(
            f"{name} was trained with a different recipe: {lines}. Use the old values, or start a new run with "
            "--resume none"
        )


def _find_differences(
    stored: Mapping[str, Any], recipe: Recipe, compared: Collection[str] = ()
) -> dict[str, tuple[object, object]]:
    """Return the old and new value of each setting that differs, except settings that may differ on resume.

    Settings within the keys ``compared`` are always included if they differ.
    """
    # Both are parsed as recipes, so that unset options have their defaults. JSON turns tuples into lists.
    before, now = (values_by_key(json.loads(json.dumps(r.to_dict()))) for r in (Recipe.from_dict(stored), recipe))
    both = {key: (before.get(key), now.get(key)) for key in {**before, **now}}
    return {
        key: values
        for key, values in both.items()
        if values[0] != values[1] and (not is_within(key, _KEYS_THAT_MAY_DIFFER) or is_within(key, compared))
    }


def values_by_key(value: object, key: str = "") -> dict[str, object]:
    """Return nested plain values by dotted key, e.g. ``train.steps``; an empty mapping counts as a value."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    parts = cast("Mapping[str, Any]", value).items()
    return {k: v for name, part in parts for k, v in values_by_key(part, f"{key}.{name}".lstrip(".")).items()}


# -- which checkpoint ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Parsed value of ``--resume``."""

    path: str | Path | None = None  # a checkpoint, or a directory with checkpoints
    auto: bool = False  # whether to resume the newest run of the recipe's name in that run's directory
    by_recipe: bool = False  # whether ``auto`` skips runs with a different recipe, data or warm start without an error

    @staticmethod
    def of(option: str | Path | None, recipe: Recipe) -> Resume:
        """Parse the option; under torchrun, which repeats the command, the default resumes runs of the same recipe."""
        keeps = recipe.train.checkpoint != "none"
        if option == AUTO and not keeps:
            raise RecipeError(
                "--resume is auto, but train.checkpoint is 'none', so no run has checkpoints. Set train.checkpoint to "
                "'last'"
            )
        if option is None and keeps and "TORCHELASTIC_RUN_ID" in os.environ:
            return Resume(auto=True, by_recipe=True)
        return Resume(path=None if option in (AUTO, NEVER) else option, auto=option == AUTO)

    def earlier(self, run: RunDirectory, recipe: Recipe) -> Path | None:
        """Return the directory of the newest run with the recipe's ``checkpoint_dir`` that can be resumed, or None."""
        for earlier in run.earlier(recipe.train.checkpoint_dir):
            if not self.by_recipe or _is_of(earlier, recipe):
                return earlier
        return None


def _is_of(run: Path, recipe: Recipe) -> bool:
    """Return whether a run has this recipe; return False if the run's recipe cannot be read."""
    try:
        return not _find_differences(read_yaml(run / RECIPE) or {}, recipe, _OF_A_RUN)
    except HotbedError:
        return False


def finished_run(trainer: Trainer, recipe: Recipe, run: RunDirectory, resume: Resume) -> dict[str, Any] | None:
    """Return the summary of the run to resume if this run is finished, else None; all ranks must call this."""
    ranks, summaries = trainer.ranks, list[str]()
    with ranks.together("read the run to resume"):
        earlier = resume.earlier(run, recipe) if ranks.is_first else None
        if earlier is not None and (earlier / SUMMARY).is_file():
            stored = Recipe.from_dict(read_yaml(earlier / RECIPE))
            _refuse_difference(f"{earlier}", stored.to_dict(), recipe)
            summary, wanted = json.loads((earlier / SUMMARY).read_text(encoding="utf-8")), recipe.train
            is_as_long = all(getattr(stored.train, key) == getattr(wanted, key) for key in _LENGTH)
            is_longer = summary["epochs"] >= wanted.epochs or summary["steps"] >= (wanted.steps or math.inf)
            if is_as_long or is_longer:
                summaries = [json.dumps(summary)]
    summaries = ranks.names(summaries)
    return json.loads(summaries[0]) if summaries else None


def virtual_ranks_before(recipe: Recipe, run: RunDirectory, resume: Resume) -> int | None:
    """Return the number of virtual ranks of the checkpoint to resume, or None.

    The model is built with this number, before the checkpoint is loaded. All ranks must call this.
    """
    if not (resume.auto or resume.path):
        return None
    total = torch.zeros(1, dtype=torch.int64)
    several = dist.is_available() and dist.is_initialized()
    if not several or dist.get_rank() == 0:
        for checkpoint in _newest_first(recipe, run, resume):
            with suppress(HotbedError, OSError):  # which the later steps report
                total[0] = read_manifest(checkpoint).parts.get("position", {}).get("virtual_ranks", 0)
                break
    if several:
        link = Link(None, timedelta(seconds=recipe.parallel.timeout_s))
        total = link.broadcast("virtual ranks", total.to(link.device), 0).wait()
    return int(total) or None


def _newest_first(recipe: Recipe, run: RunDirectory, resume: Resume) -> list[Directory]:
    """List the checkpoints to resume, newest first."""
    with suppress(HotbedError, OSError):
        if resume.path is not None:
            return [directory(str(find_checkpoint(resume.path)))]
        earlier = resume.earlier(run, recipe)
        if recipe.train.checkpoint_dir is not None or earlier is not None:
            where = directory(recipe.train.checkpoint_dir or cast("Path", earlier) / "checkpoints")
            return sorted(checkpoints_in(where), key=step_of, reverse=True)
    return []


def resume_from(path: str | Path, trainer: Trainer, recipe: Recipe) -> Directory:
    """Load a checkpoint, or the newest checkpoint of a directory; return its path. All ranks must call this."""
    ranks = trainer.ranks
    with ranks.together("find the checkpoint to resume"):
        found = [str(find_checkpoint(path))] if ranks.is_first else []
    checkpoint = directory(ranks.names(found)[0])
    with ranks.together(f"resume {checkpoint}"):
        manifest = refuse_another_recipe(checkpoint, recipe)
        if over := why_finished(manifest, recipe):
            raise RecipeError(
                f"{checkpoint} belongs to a finished run: {over}. Or evaluate the checkpoint with hotbed eval"
            )
        load_checkpoint(checkpoint, _parts(manifest, trainer))
    return checkpoint


def resume_newest(
    trainer: Trainer, recipe: Recipe, run: RunDirectory, resume: Resume, console: Console
) -> Directory | None:
    """Load the newest undamaged checkpoint of the run to resume; all ranks must call this.

    If the newest checkpoints are damaged, an older one is loaded. Then the damaged checkpoints are renamed with a
    warning. The run continues in its own directory. Return None if the run has no complete checkpoint.
    """
    ranks = trainer.ranks
    with ranks.together("find the run to resume"):
        earlier = resume.earlier(run, recipe) if ranks.is_first else None
    earlier = [Path(name) for name in ranks.names([] if earlier is None else [str(earlier)])]
    if recipe.train.checkpoint_dir is None and not earlier:
        return None
    where = directory(recipe.train.checkpoint_dir or earlier[0] / "checkpoints")
    names, unfinished = _names(where, trainer)
    if names:
        trainer.saver.lock(where)
        names, unfinished = _names(where, trainer)
    damage: dict[str, str] = {}
    for name in names:
        reason = _load_whole(where / name, trainer, recipe)
        if reason is None:
            break
        damage[name] = reason
    whole = [name for name in names if name not in damage]
    if damage and not whole:
        raise DamagedError(
            f"all checkpoints in {where} are damaged: {'; '.join(damage.values())}. Remove these checkpoints to start "
            "a new run"
        )
    if ranks.is_first:
        for name, reason in damage.items():
            trainer.saver.check()
            done = set_aside(where / name)
            console.print(f"warning: {reason}. {name} was {done}, and an older checkpoint is used", soft_wrap=True)
        for name in unfinished:
            if not whole or step_of(where / name) > step_of(where / whole[0]):
                console.print(f"warning: {where / name} is incomplete and is ignored", soft_wrap=True)
    if not whole:
        return None
    if earlier:
        run.reopen(earlier[0])
    return where / whole[0]


def _names(where: Directory, trainer: Trainer) -> tuple[list[str], list[str]]:
    """Return the names of complete and incomplete checkpoints of a directory, newest first."""
    ranks = trainer.ranks
    with ranks.together(f"list {where}"):
        whole = [checkpoint.name for checkpoint in checkpoints_in(where)] if ranks.is_first else []
        others = {n for n in where.names() if NAME.fullmatch(n)} - {*whole} if ranks.is_first else set[str]()

    def newest_first(names: list[str]) -> list[str]:
        return sorted(names, key=lambda name: (step_of(where / name), name), reverse=True)

    return newest_first(ranks.names(whole)), newest_first(ranks.names(sorted(others)))


def _load_whole(checkpoint: Directory, trainer: Trainer, recipe: Recipe) -> str | None:
    """Load a checkpoint on all ranks; return the error of a rank that finds the checkpoint damaged, or None."""
    reasons: list[str] = []
    with trainer.ranks.together(f"resume {checkpoint}"):
        try:
            manifest = refuse_another_recipe(checkpoint, recipe)
            load_checkpoint(checkpoint, _parts(manifest, trainer))
        except DamagedError as error:
            reasons = [str(error).replace("\n", " ")]
    reasons = trainer.ranks.names(reasons)
    return reasons[0] if reasons else None


def _parts(manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's parts, which will be loaded from the checkpoint.

    The part `FEATURES` is omitted if the checkpoint lacks it and the source has no derived columns.
    """
    parts = dict(trainer.parts())
    state = parts.get(FEATURES)
    if FEATURES not in manifest.parts and isinstance(state, FeaturesState) and not state.has_derived:
        del parts[FEATURES]
    return parts


def why_finished(manifest: Manifest, recipe: Recipe) -> str | None:
    """Return why training is finished at a checkpoint and how to continue; return None if it is not finished."""
    position, train = cast("Mapping[str, Any]", manifest.parts.get("position", {})), recipe.train
    step, epoch = position.get("step", manifest.step), position.get("epoch", 0)
    if train.steps is not None and step >= train.steps:
        return f"step {step:,} is reached and train.steps is {train.steps:,}. Raise train.steps to continue"
    if epoch >= train.epochs:
        return f"epoch {epoch:,} is over and train.epochs is {train.epochs:,}. Raise train.epochs to continue"
    early, enough = position.get("callbacks", {}).get("EarlyStop"), patience(recipe)
    if early is not None and enough is not None and monitored(recipe) == early["monitor"]:
        waited = early["waited"]
        if waited >= enough:
            return (
                f"{waited:,} evaluations in a row did not improve {early['monitor']} and train.patience is {enough:,}. "
                "Raise train.patience to continue"
            )
    return None
