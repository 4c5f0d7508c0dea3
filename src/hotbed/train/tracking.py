"""Track runs in MLflow, for recipes that ask for it: `MLflow`, a callback that is named by ``class_path``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from hotbed.config import Recipe
from hotbed.errors import RecipeError
from hotbed.train.metrics import Metrics
from hotbed.train.trainer import Callback, Trainer

_MOST_PARAMS, _MOST_VALUE = 100, 500
"""Parameters that a request to a tracking server may have, and characters of a value."""


class MLflow(Callback):
    """Log a run's recipe, losses, rates and evaluations to MLflow; a resumed run goes on in the same MLflow run.

    Parameters
    ----------
    experiment
        Name of the experiment, which is made where there is none.
    tracking_uri
        Server or folder; default: what ``MLFLOW_TRACKING_URI`` says, as ever with MLflow.
    run_name
        Default: the recipe's name.
    tags
        Of the run, by name.
    recipe
        Whose values become the run's parameters; hotbed gives it.

    Raises
    ------
    RecipeError
        If MLflow is not installed.
    """

    first_rank_only = True

    def __init__(
        self,
        experiment: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
        except ImportError as error:
            raise RecipeError(
                f"hotbed.train.tracking.MLflow needs MLflow, which cannot be imported ({error}); pip install "
                "mlflow-skinny, or leave the callback out"
            ) from None
        self._client: Any = MlflowClient(tracking_uri)
        self._experiment, self._tags = experiment, dict(tags or {})
        self._name = run_name if run_name is not None else None if recipe is None else recipe.name
        self._params = {} if recipe is None else flattened(recipe.to_dict())
        self._run: str | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        """Make the run, or go on with it."""
        if self._run is not None:
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        place = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = str(self._client.create_run(place, run_name=self._name, tags=self._tags).info.run_id)
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        params = [Param(key, str(value)[:_MOST_VALUE]) for key, value in self._params.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Log loss, learning rates and rates."""
        self._log(trainer, {f"train/{name}": value for name, value in record.items() if name != "step"})

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Log the metrics, also those of each task where there are several."""
        self._log(trainer, metrics.curves("valid"))

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the run."""
        if self._run is not None:
            self._client.set_terminated(self._run, "KILLED" if trainer.told_to_stop else "FINISHED")

    def state_dict(self) -> dict[str, Any]:
        """Which MLflow run it is."""
        return {"run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the same MLflow run."""
        self._run = state["run"]

    def _log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._client.log_batch(self._run, [Metric(name, value, now, trainer.step) for name, value in finite.items()])


def flattened(values: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Plain values by dotted key; what is not set is left out."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{key}{name}.")
        elif value is not None:
            found[f"{key}{name}"] = value
    return found
