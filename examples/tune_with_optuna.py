"""Tune a recipe with Optuna: `python examples/tune_with_optuna.py recipe.yaml --trials 20 --out search`.

Trials are compared on the recipe's valid split; the test split is never read. The first trial is the recipe as it is.
`search/journal.log` stores all trials, so the same command resumes an interrupted search. The best recipe is written to
`search/best.yaml`; train it with `hotbed train search/best.yaml`. Edit `search_space` to tune other settings.
"""

import argparse
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path

import optuna
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from rich.console import Console

import hotbed as hb
from hotbed.errors import NonFiniteError
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.run import measure_buckets, measure_numericals


def search_space(values: dict) -> dict:
    """Return for each tuned key of a recipe its present value and all values that it may have."""
    space, model = {}, values["model"]["init_args"]
    for name in ("sparse_optimizer", "dense_optimizer"):
        rate = values[name]["init_args"]["lr"]
        space[f"{name}.init_args.lr"] = rate, FloatDistribution(rate / 8, rate * 8, log=True)
    if "dropout" in model:
        space["model.init_args.dropout"] = model["dropout"], FloatDistribution(0.0, 0.5)
    if isinstance(dim := values["data"]["dim"], int):
        space["data.dim"] = dim, CategoricalDistribution([dim // 2, dim, dim * 2])
    return space


def with_settings(values: dict, settings: dict) -> dict:
    """Return the recipe's values with other settings."""
    changed = deepcopy(values)
    for key, value in settings.items():
        *parents, name = key.split(".")
        reduce(getitem, parents, changed)[name] = value
    if "data.dim" in settings and "bottom" in (model := changed["model"]["init_args"]):
        *widths, last = model["bottom"]  # the bottom MLP of a DLRM returns vectors of this dim
        model["bottom"] = [*widths, last * settings["data.dim"] // values["data"]["dim"]]
    return changed


def train(trial: optuna.Trial, values: dict) -> float:
    """Train by a recipe; return the best logloss on its valid split."""
    recipe = hb.Recipe.from_dict(with_settings(values, {"data.test_split": None}))
    data, source = recipe.data, open_source(recipe.data)
    trainer, losses = build(recipe, source), []
    measure_buckets(trainer, source, [data.train_split], Console(stderr=True))
    measure_numericals(trainer, source, [data.train_split], Console(stderr=True))

    class Report(hb.Callback):
        def on_eval(self, trainer, metrics) -> None:
            losses.append(metrics.logloss)
            trial.report(metrics.logloss, len(losses))
            if not trainer.finished and trial.should_prune():
                raise optuna.TrialPruned

    trainer.callbacks.append(Report())
    batches = hb.Loader(source, data.train_split, recipe.train.batch_size, shuffle=data.shuffle, seed=recipe.train.seed)
    trainer.fit(batches, hb.Loader(source, data.valid_split, recipe.train.eval_batch_size))
    return min(losses)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="recipe with a valid split (hotbed init --valid)")
    parser.add_argument("--trials", type=int, default=20, help="trials in the end, including those of earlier calls")
    parser.add_argument("--out", type=Path, default=Path("search"), help="directory to write")
    args = parser.parse_args(argv)
    values = hb.Recipe.from_dict(yaml.safe_load(args.recipe.read_text(encoding="utf-8"))).to_dict()
    space = search_space(values)
    args.out.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(args.out / "journal.log")))
    study = optuna.create_study(storage=storage, study_name=values["name"], load_if_exists=True)
    own = {key: value for key, (value, _) in space.items()}
    if not any(trial.params == own for trial in study.trials if trial.state.is_finished()):
        study.enqueue_trial(own)
    while sum(trial.state.is_finished() for trial in study.trials) < args.trials:
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
        trial = study.ask({key: distribution for key, (_, distribution) in space.items()})
        try:
            study.tell(trial, train(trial, with_settings(values, trial.params)))
        except (NonFiniteError, optuna.TrialPruned):  # NonFiniteError: the learning rates are too high
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    if not study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
        raise SystemExit("no trial finished; lower the learning rates")
    (args.out / "best.yaml").write_text(yaml.safe_dump(with_settings(values, study.best_params), sort_keys=False))
    print(f"trial {study.best_trial.number}: logloss {study.best_value:.5f} with {study.best_params}")


if __name__ == "__main__":
    main()
