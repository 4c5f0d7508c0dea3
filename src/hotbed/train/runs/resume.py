"""Resume a run: find its checkpoint, load it, and refuse settings that would train something else.

``--resume PATH`` goes on from a checkpoint in a run of its own. ``--resume auto`` goes on with the newest run of the
recipe's name, in its directory, or begins: the same command starts a run and, after a crash of any rank, takes it up
again, as ``torchrun --max-restarts`` does. Under torchrun this is the default, among the runs of the same recipe: one
that trains otherwise is another run, not a mistake (`Resume`). The first rank looks; all load the same checkpoint, or
all fail.

Learning rates, moments and positions come out of the checkpoint, so another value in the recipe would be ignored or,
worse, applied in part. A resumed run may change only how long it goes on, what it shows and keeps, and where it runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
from hotbed.config import Recipe
from hotbed.config.validation import monitored, patience
from hotbed.errors import DamagedError, HotbedError, RecipeError
from hotbed.files import read_yaml
from hotbed.train.checkpoints import set_aside
from hotbed.train.runs.report import RECIPE, SUMMARY, RunDirectory
from hotbed.train.runs.stored_model import FEATURES, FeaturesState
from hotbed.train.trainer import Trainer

AUTO, NEVER = "auto", "none"
"""What ``--resume`` takes in the place of a path."""
_LENGTH = ("steps", "epochs", "patience", "monitor")
"""Keys of `TrainRecipe` that say when a run is over."""

_MAY_DIFFER = keys_that_may_differ(Recipe)
_OF_A_RUN = ("data", "init", *(key for key in _MAY_DIFFER if key.startswith("train.checkpoint")))
"""Settings that may differ on resume, but by which torchrun's restarts tell the runs of a name apart."""


def refuse_another_recipe(checkpoint: str | Path | Directory, recipe: Recipe) -> Manifest:
    """Raise `RecipeError` if a recipe would train otherwise than the one that a checkpoint was made with."""
    manifest = read_manifest(checkpoint)
    if manifest.recipe is not None:
        _refuse_difference(f"{checkpoint}", manifest.recipe, recipe)
    return manifest


def _refuse_difference(what: str, stored: Mapping[str, Any], recipe: Recipe) -> None:
    if differing := _differing(stored, recipe):
        lines = "; ".join(f"{key} was {before!r} and is now {now!r}" for key, (before, now) in differing.items())
        raise RecipeError(
            f"{what} was made with another recipe: {lines}. A resumed run goes on as it began: give the values "
            f"that it was made with, or train from the start with --resume none"
        )


def _differing(
    stored: Mapping[str, Any], recipe: Recipe, compared: Collection[str] = ()
) -> dict[str, tuple[object, object]]:
    """Return the old and new values of settings that must not differ, and of the ``compared`` ones that do."""
    # Both as recipes, so that options which are not set have their defaults; and through JSON, which has no tuples.
    before, now = (_by_key(json.loads(json.dumps(r.to_dict()))) for r in (Recipe.from_dict(stored), recipe))
    both = {key: (before.get(key), now.get(key)) for key in {**before, **now}}
    return {
        key: values
        for key, values in both.items()
        if values[0] != values[1] and (not is_within(key, _MAY_DIFFER) or is_within(key, compared))
    }


def _by_key(value: object, key: str = "") -> dict[str, object]:
    """Plain values by dotted key; an empty mapping counts as a value."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    parts = cast("Mapping[str, Any]", value).items()
    return {k: v for name, part in parts for k, v in _by_key(part, f"{key}.{name}".lstrip(".")).items()}


# -- which checkpoint ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What ``--resume`` asks for."""

    path: str | Path | None = None  # a checkpoint, or a directory whose newest is meant
    auto: bool = False  # go on with an earlier run of the recipe's name, in its directory, or begin
    # with ``auto``: only runs that this recipe has begun count, with these data and this warm start; else the newest
    # run does, and another recipe is an error
    by_recipe: bool = False

    @staticmethod
    def of(option: str | Path | None, recipe: Recipe) -> Resume:
        """What the option means; without it, a run under torchrun goes on, because torchrun may start it again."""
        keeps = recipe.train.checkpoint != "none"
        if option == AUTO and not keeps:
            needed = "--resume auto needs checkpoints to go on from"
            raise RecipeError(f"{needed}, but train.checkpoint is 'none'; set it to 'last'")
        if option is None and keeps and "TORCHELASTIC_RUN_ID" in os.environ:
            return Resume(auto=True, by_recipe=True)
        return Resume(path=None if option in (AUTO, NEVER) else option, auto=option == AUTO)

    def earlier(self, run: RunDirectory, recipe: Recipe) -> Path | None:
        """The newest run of this name that counts and keeps its checkpoints where the recipe does."""
        for earlier in run.earlier(recipe.train.checkpoint_dir):
            if not self.by_recipe or _is_of(earlier, recipe):
                return earlier
        return None


def _is_of(run: Path, recipe: Recipe) -> bool:
    """Whether a run was made with this recipe; one that this release cannot read was not."""
    try:
        return not _differing(read_yaml(run / RECIPE) or {}, recipe, _OF_A_RUN)
    except HotbedError:
        return False


def finished_run(trainer: Trainer, recipe: Recipe, run: RunDirectory, resume: Resume) -> dict[str, Any] | None:
    """Summary of the run to go on with if it was trained and tested to the end; all ranks must call this."""
    ranks, summaries = trainer.ranks, list[str]()
    with ranks.together("read the run to go on with"):
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


def resume_from(path: str | Path, trainer: Trainer, recipe: Recipe) -> Directory:
    """Load a checkpoint, or the newest of a run or of the runs of a name; all ranks must call this."""
    ranks = trainer.ranks
    with ranks.together("find the checkpoint to go on from"):
        found = [str(find_checkpoint(path))] if ranks.is_first else []
    checkpoint = directory(ranks.names(found)[0])
    with ranks.together(f"go on from {checkpoint}"):
        manifest = refuse_another_recipe(checkpoint, recipe)
        if over := why_over(manifest, recipe):
            raise RecipeError(f"{checkpoint} is of a run that is finished: {over}; hotbed eval tests it as it is")
        load_checkpoint(checkpoint, _parts(manifest, trainer))
    return checkpoint


def resume_newest(
    trainer: Trainer, recipe: Recipe, run: RunDirectory, resume: Resume, console: Console
) -> Directory | None:
    """Load the newest whole checkpoint of the run to go on with; all ranks must call this.

    Damaged checkpoints that are newer are set aside, with a warning, once an older one is loaded. The run goes on in
    its directory; where no checkpoint was ever finished, nothing is loaded.
    """
    ranks = trainer.ranks
    with ranks.together("look for a run to go on with"):
        earlier = resume.earlier(run, recipe) if ranks.is_first else None
    earlier = [Path(name) for name in ranks.names([] if earlier is None else [str(earlier)])]
    if recipe.train.checkpoint_dir is None and not earlier:
        return None
    place = directory(recipe.train.checkpoint_dir or earlier[0] / "checkpoints")
    names, unfinished = _names(place, trainer)
    if names:
        trainer.saver.lock(place)
        names, unfinished = _names(place, trainer)
    damage: dict[str, str] = {}
    for name in names:
        reason = _load_whole(place / name, trainer, recipe)
        if reason is None:
            break
        damage[name] = reason
    whole = [name for name in names if name not in damage]
    if damage and not whole:
        raise DamagedError(f"no checkpoint in {place} is whole: {'; '.join(damage.values())}; remove them to begin")
    if ranks.is_first:
        for name, reason in damage.items():
            trainer.saver.check()
            where = set_aside(place / name)
            console.print(f"warning: {reason}; {name} is {where}, and an older one is taken", soft_wrap=True)
        for name in unfinished:
            if not whole or step_of(place / name) > step_of(place / whole[0]):
                console.print(f"warning: {place / name} was never finished and is left out", soft_wrap=True)
    if not whole:
        return None
    if earlier:
        run.reopen(earlier[0])
    return place / whole[0]


def _names(place: Directory, trainer: Trainer) -> tuple[list[str], list[str]]:
    """Checkpoints in a directory, and those that were never finished, the newest first."""
    ranks = trainer.ranks
    with ranks.together(f"look into {place}"):
        whole = [checkpoint.name for checkpoint in checkpoints_in(place)] if ranks.is_first else []
        others = {n for n in place.names() if NAME.fullmatch(n)} - {*whole} if ranks.is_first else set[str]()

    def newest_first(names: list[str]) -> list[str]:
        return sorted(names, key=lambda name: (step_of(place / name), name), reverse=True)

    return newest_first(ranks.names(whole)), newest_first(ranks.names(sorted(others)))


def _load_whole(checkpoint: Directory, trainer: Trainer, recipe: Recipe) -> str | None:
    """Load a checkpoint, or tell what any rank found damaged."""
    reasons: list[str] = []
    with trainer.ranks.together(f"go on from {checkpoint}"):
        try:
            manifest = refuse_another_recipe(checkpoint, recipe)
            load_checkpoint(checkpoint, _parts(manifest, trainer))
        except DamagedError as error:
            reasons = [str(error).replace("\n", " ")]
    reasons = trainer.ranks.names(reasons)
    return reasons[0] if reasons else None


def _parts(manifest: Manifest, trainer: Trainer) -> dict[str, Any]:
    """Return the parts to load. A run on data without vocabularies has not saved any; the data may have them now."""
    parts = dict(trainer.parts())
    state = parts.get(FEATURES)
    if FEATURES not in manifest.parts and isinstance(state, FeaturesState) and not state.has_derived:
        del parts[FEATURES]
    return parts


def why_over(manifest: Manifest, recipe: Recipe) -> str | None:
    """Why nothing is left to train after a checkpoint, and how to go on all the same; None if something is."""
    position, train = cast("Mapping[str, Any]", manifest.parts.get("position", {})), recipe.train
    step, epoch = position.get("step", manifest.step), position.get("epoch", 0)
    if train.steps is not None and step >= train.steps:
        return f"step {step:,} is reached and train.steps is {train.steps:,}; raise train.steps to go on"
    if epoch >= train.epochs:
        return f"epoch {epoch:,} is over and train.epochs is {train.epochs:,}; raise train.epochs to go on"
    early, enough = position.get("callbacks", {}).get("EarlyStop"), patience(recipe)
    if early is not None and enough is not None and monitored(recipe) == early["monitor"]:
        waited = early["waited"]
        if waited >= enough:
            return (
                f"{waited:,} evaluations in a row were no better and train.patience is {enough:,}; raise "
                "train.patience to go on"
            )
    return None
