"""Track runs in MLflow. A recipe uses `MLflow` as a callback: ``class_path: hotbed.train.tracking.MLflow``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from hotbed.config import Recipe
from hotbed.errors import RecipeError
from hotbed.train.metrics import Metrics
from hotbed.train.runs.resume import values_by_key
from hotbed.train.trainer import Callback, Trainer

_MOST_PARAMS, _MOST_VALUE = 100, 500
"""Limits of a tracking server: parameters per request, and characters per value."""


class MLflow(Callback):
    """Log a run's recipe, losses, rates and evaluations to MLflow; a resumed run continues its MLflow run.

    Parameters
    ----------
    experiment
        Name of the experiment, which is created if it does not exist.
    tracking_uri
        Server or folder (default: the environment variable ``MLFLOW_TRACKING_URI``).
    run_name
        Name of the run (default: the name of the recipe).
    tags
        Tags of the run by name.
    recipe
        Recipe with the values to log as the run's parameters. hotbed passes the recipe of the run.

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
                f"hotbed.train.tracking.MLflow needs MLflow, which cannot be imported ({error}). Run pip install "
                "mlflow-skinny, or remove the callback"
            ) from None
        self._client: Any = MlflowClient(tracking_uri)
        self._experiment, self._tags = experiment, dict(tags or {})
        self._name = run_name if run_name is not None else None if recipe is None else recipe.name
        values = {} if recipe is None else values_by_key(recipe.to_dict())
        self._params = {key: value for key, value in values.items() if value is not None and value != {}}
        self._run: str | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        """Create the MLflow run, or continue it."""
        if self._run is not None:
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = str(self._client.create_run(experiment, run_name=self._name, tags=self._tags).info.run_id)
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        params = [Param(key, str(value)[:_MOST_VALUE]) for key, value in self._params.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + _MOST_PARAMS])

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Log the loss, learning rates and throughput."""
        self._log(trainer, {f"train/{name}": value for name, value in record.items() if name != "step"})

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Log the metrics of all tasks."""
        self._log(trainer, metrics.curves("valid"))

    def on_train_end(self, trainer: Trainer) -> None:
        """End the MLflow run."""
        if self._run is not None:
            self._client.set_terminated(self._run, "KILLED" if trainer.stop_requested else "FINISHED")

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the MLflow run."""
        return {"run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the id of the MLflow run from a checkpoint, so that training continues that MLflow run."""
        self._run = state["run"]

    def _log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._client.log_batch(self._run, [Metric(name, value, now, trainer.step) for name, value in finite.items()])
