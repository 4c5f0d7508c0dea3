"""Search settings of a recipe on its valid split: `tune`.

Each trial trains the recipe with other values for some keys (`search_space`) and is judged by the valid split alone;
the test split is never opened. The first trial is the recipe as it is. Drawing, pruning and the journal are optuna's; a
trial's draw depends on the seed, its number and the trials before it, so a search that was interrupted goes on as if it
had not been.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from torch import Tensor
from typing_extensions import override

from hotbed.config import HIGHER_IS_BETTER, Monitor, Recipe
from hotbed.config.validation import checkpoint_policy, monitored, patience
from hotbed.data import Source
from hotbed.data.executors import Tasks
from hotbed.errors import NonFiniteError, RecipeError
from hotbed.files import read_yaml, write_text
from hotbed.nn.normalization import normalization_of
from hotbed.parsing import TextError, parse_json, read_limited
from hotbed.train.build import build_trainer, open_source, train_splits
from hotbed.train.callbacks import EarlyStop
from hotbed.train.loaders import evaluation_loader, readers_of, training_loader
from hotbed.train.measure import measure_buckets, measure_numericals
from hotbed.train.metrics import Metrics
from hotbed.train.report import RECIPE, ShowProgress, recipe_yaml
from hotbed.train.search_space import Space, changed, search_space
from hotbed.train.trainer import Callback, Trainer

if TYPE_CHECKING:
    import optuna

BEST = "best.yaml"
_JOURNAL, _SETTINGS = "journal.log", "settings.json"
_EVALUATIONS = 4
"""Per epoch, where a recipe has one epoch and does not say: by these trials are pruned."""


@dataclass(frozen=True)
class Tuned:
    """What a search has found so far.

    Attributes
    ----------
    directory
        Where the journal is, and ``best.yaml``.
    best
        The recipe with the best values.
    value
        Its metric on the valid split.
    trials
        Per trial: number, state (``complete``, ``pruned`` or ``failed``), metric, values and seconds.
    """

    directory: Path
    monitor: Monitor
    best: Recipe
    value: float
    trials: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        best = {"value": self.value, "recipe": str(self.directory / BEST)}
        return {"monitor": self.monitor, "best": best, "trials": self.trials}


def tune(recipe: Recipe, directory: Path, console: Console, *, trials: int, seed: int = 0) -> Tuned:
    """Search until there are so many trials, those of earlier calls in this directory included.

    Parameters
    ----------
    recipe
        What to begin with; it needs a valid split.
    directory
        Where the journal and the best recipe go; a search in it is gone on with.
    console
        Where progress goes.
    trials
        How many trials the search has in the end.
    seed
        Of the draws.

    Raises
    ------
    RecipeError
        If optuna is not installed, the recipe cannot be tuned, or the directory holds another search.
    KeyboardInterrupt
        Ctrl-C; the best recipe so far is written.
    """
    optuna = _optuna()
    _check(recipe, trials)
    begun_with = replace(recipe, data=replace(recipe.data, test_split=None))
    source = open_source(begun_with.data)
    spaces = search_space(begun_with)
    _begin(directory, recipe, seed, spaces)
    study, measured = _study(optuna, recipe, directory, spaces), dict[str, Tensor]()
    console.print(f"{len(spaces)} settings: {', '.join(space.key for space in spaces)}", soft_wrap=True)
    try:
        while (done := _finished(study)) < trials:
            study.sampler = optuna.samplers.TPESampler(seed=(seed + done) % 2**32, n_startup_trials=8)
            _run_trial(optuna, study, begun_with, source, spaces, measured, console)
            _say(study, trials, console)
    finally:
        tuned = _found(study, recipe, spaces, directory)
        if tuned is not None:
            write_text(directory / BEST, best_yaml(tuned, recipe))
    if tuned is None:
        raise NonFiniteError(
            f"none of {len(study.trials):,} trials came to an evaluation: losses were NaN or infinite; lower the "
            "learning rates of the recipe"
        )
    return tuned


def best_yaml(tuned: Tuned, recipe: Recipe) -> str:
    """The best recipe as YAML, with what was changed as a comment."""
    changes = changed(recipe, tuned.best)
    lines = [
        f"# The best of {len(tuned.trials):,} trials of `hotbed tune`: {tuned.monitor} {tuned.value:.5f} on the split "
        f"'{recipe.data.valid_split}'.",
        *(f"#   {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items()),
        *([] if changes else ["#   No trial was better than the recipe as it was."]),
        "# The test split was not used: hotbed train THIS_FILE tests on it once.",
    ]
    return "\n".join(lines) + "\n" + recipe_yaml(tuned.best)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise RecipeError(
            f"hotbed tune needs optuna, which cannot be imported ({error}); pip install 'hotbed[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _check(recipe: Recipe, trials: int) -> None:
    if trials < 1:
        raise RecipeError(f"--trials is {trials:,}, must be at least 1")
    if recipe.data.valid_split is None:
        raise RecipeError(
            "the recipe has no valid split to compare trials on, and the test split is not for that; draft it with "
            "hotbed init --valid, or set data.valid_split and let the source have one"
        )
    if recipe.hot.batches == "alternating":
        raise RecipeError("hot.batches is 'alternating', which tune does not search with; leave it out")
    if recipe.init.checkpoint is not None:
        raise RecipeError("init.checkpoint is set, but trials begin with initial values; leave it out")


def _begin(directory: Path, recipe: Recipe, seed: int, spaces: list[Space]) -> None:
    """Make the directory, or refuse one in which another search was begun."""
    settings = {"seed": seed, "spaces": [space.to_dict() for space in spaces]}
    file = directory / _SETTINGS
    if file.is_file():
        try:
            earlier = parse_json(read_limited(file))
        except TextError as error:
            raise RecipeError(f"{file} {error}; choose another --name or --out, or remove {directory}") from None
        same = Recipe.from_dict(cast("Mapping[str, Any]", read_yaml(directory / RECIPE))) == recipe
        if not same or earlier != settings:
            began = earlier.get("seed") if isinstance(earlier, dict) else None
            what = "recipe" if not same else "seed" if began != seed else "search space"
            raise RecipeError(
                f"{directory} holds a search with another {what}; choose another --name or --out, or remove it"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / RECIPE, recipe_yaml(recipe))
    write_text(file, json.dumps(settings, indent=2) + "\n")


def _study(optuna: Any, recipe: Recipe, directory: Path, spaces: list[Space]) -> optuna.Study:
    backend = optuna.storages.journal.JournalFileBackend(str(directory / _JOURNAL))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="tune",
        load_if_exists=True,
        direction="maximize" if monitored(recipe) in HIGHER_IS_BETTER else "minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    if not study.trials:
        study.enqueue_trial({space.key: space.value for space in spaces})
    for trial in study.trials:  # of a process that was killed
        if trial.state == optuna.trial.TrialState.RUNNING:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if trial.number == 0:
                study.enqueue_trial({space.key: space.value for space in spaces})
    return study


def _finished(study: optuna.Study) -> int:
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)


class _Report(Callback):
    """Report evaluations to a trial, and end training where they are worse than the median of those before.

    Parameters
    ----------
    trial
        To report to.
    monitor
        The metric.
    best
        Whether a run keeps the model of its best evaluation.
    due
        Steps to evaluate after, besides those of the recipe.
    """

    def __init__(self, trial: optuna.Trial, monitor: Monitor, *, best: bool, due: Collection[int] = ()) -> None:
        self._trial, self._monitor, self._best, self._due = trial, monitor, best, due
        self.values: list[float] = []
        self.pruned = False

    @property
    def value(self) -> float:
        """What the trial is judged by: the best evaluation if that is what a run keeps, else the last."""
        if not self._best:
            return self.values[-1]
        return max(self.values) if self._monitor in HIGHER_IS_BETTER else min(self.values)

    @override
    def on_step(self, trainer: Trainer, loss: float) -> None:
        trainer.evaluate_now = trainer.step in self._due

    @override
    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        self.values.append(metrics.value(self._monitor))
        self._trial.report(self.value, len(self.values))
        if not trainer.finished and self._trial.should_prune():
            self.pruned = trainer.stop = True


def _run_trial(
    optuna: Any,
    study: optuna.Study,
    recipe: Recipe,
    source: Source,
    spaces: list[Space],
    measured: dict[str, Tensor],
    console: Console,
) -> None:
    """Train once with drawn values, and tell the study what came out."""
    states, trial = optuna.trial.TrialState, study.ask()
    drawn = recipe
    for space in spaces:
        drawn = space.apply(drawn, space.draw(trial))
    started = time.perf_counter()
    try:
        with readers_of(drawn) as readers:
            report = _train(drawn, source, trial, measured, console, readers)
    except NonFiniteError:
        trial.set_user_attr("diverged", True)
        study.tell(trial, state=states.PRUNED)
        return
    except BaseException:
        study.tell(trial, state=states.FAIL)
        raise
    trial.set_user_attr("seconds", round(time.perf_counter() - started, 1))
    if report.pruned:
        study.tell(trial, state=states.PRUNED)
    else:
        study.tell(trial, report.value)


def _train(
    recipe: Recipe,
    source: Source,
    trial: optuna.Trial,
    measured: dict[str, Tensor],
    console: Console,
    readers: Tasks | None,
) -> _Report:
    """Train and evaluate; statistics of numericals are measured by the first trial, and kept for the others."""
    trainer = build_trainer(recipe, source)
    measure_buckets(trainer, source, train_splits(recipe), console)
    if (normalization := normalization_of(trainer.model)) is not None:
        if measured:
            normalization.load_state_dict(measured)
        measure_numericals(trainer, source, train_splits(recipe), console)
        measured |= {name: of.clone() for name, of in normalization.state_dict().items()}
    loader = training_loader(recipe, source, trainer.ranks, trainer.model, readers)
    best, due = checkpoint_policy(recipe) == "best", _due(recipe, len(loader))
    report = _Report(trial, monitored(recipe), best=best, due=due)
    trainer.callbacks.append(report)
    if (enough := patience(recipe)) is not None:
        trainer.callbacks.append(EarlyStop(enough, monitored(recipe)))
    progress = ShowProgress(console) if console.is_terminal else None
    if progress is not None:
        trainer.callbacks.append(progress)
    valid = evaluation_loader(recipe, source, recipe.data.valid_split, trainer.ranks, readers)
    try:
        trainer.fit(loader, valid)
    finally:
        trainer.saver.release()
        if progress is not None:
            progress.close()
    return report


def _due(recipe: Recipe, in_epoch: int) -> set[int]:
    """Steps to evaluate after, besides those of the recipe: some to prune by, and the last if no other is."""
    wanted = recipe.train
    last = min(in_epoch * wanted.epochs, wanted.steps or in_epoch * wanted.epochs)
    due = set[int]()
    if wanted.eval_every is None and wanted.epochs == 1:
        due = {last * part // _EVALUATIONS for part in range(1, _EVALUATIONS)}
    if last < (in_epoch if wanted.eval_every is None else wanted.eval_every) or wanted.steps == last:
        due.add(last)
    return due


def _say(study: optuna.Study, trials: int, console: Console) -> None:
    trial = study.trials[-1]
    shown = "diverged" if "diverged" in trial.user_attrs else trial.state.name.lower()
    value = next(reversed(trial.intermediate_values.values()), None)
    reached = "" if value is None else f" {value:.5f}"
    values = "  ".join(f"{_short(key)} {_number(of)}" for key, of in trial.params.items())
    console.print(f"trial {_finished(study)}/{trials}: {shown}{reached}  {values}", soft_wrap=True)


def _found(study: optuna.Study, recipe: Recipe, spaces: list[Space], directory: Path) -> Tuned | None:
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        return None
    best = recipe
    for space in spaces:
        best = space.apply(best, study.best_trial.params[space.key])
    names = {"COMPLETE": "complete", "PRUNED": "pruned"}
    trials = [
        {
            "number": trial.number,
            "state": names.get(trial.state.name, "failed"),
            "value": trial.value if trial.state.name == "COMPLETE" else None,
            "values": trial.params,
            "seconds": trial.user_attrs.get("seconds"),
        }
        for trial in study.trials
        if trial.state.name in names
    ]
    return Tuned(directory, monitored(recipe), best, study.best_value, trials)


def _short(key: str) -> str:
    return key.replace(".init_args", "").replace("_optimizer", "")


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
