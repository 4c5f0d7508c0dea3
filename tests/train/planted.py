"""A small learnable problem in memory, and a small DLRM for it."""

from collections.abc import Callable, Sequence

import torch

from hotbed.batch import Batch
from hotbed.config import ScheduleRecipe, TrainRecipe
from hotbed.jagged import Jagged
from hotbed.nn import DLRM
from hotbed.optim import RowWiseAdagrad
from hotbed.specs import Feature, Table
from hotbed.train import Callback, Trainer

ROWS = {"user": 50, "item": 30, "page": 3}
DENSE = 4
DIM = 8


def batches(count: int, size: int = 64, *, seed: int = 0, last: int | None = None) -> list[Batch]:
    """Batches whose labels depend on numericals and ids; the last may be shorter."""
    effects = torch.Generator().manual_seed(1)
    of_row = {name: torch.randn(rows, generator=effects) for name, rows in ROWS.items()}
    of_dense = torch.randn(DENSE, generator=effects)
    generator = torch.Generator().manual_seed(seed)
    made: list[Batch] = []
    for n in [size] * (count - 1) + [last or size]:
        ids = {name: torch.randint(0, rows, (n,), generator=generator) for name, rows in ROWS.items()}
        dense = torch.randn(n, DENSE, generator=generator)
        score = dense @ of_dense + sum(of_row[name][i] for name, i in ids.items())
        labels = (torch.rand(n, generator=generator) < score.sigmoid()).float()[:, None]
        made.append(Batch(sparse=Jagged.from_dict(ids), dense=dense, labels=labels, extra={"user": ids["user"]}))
    return made


def trainer(
    recipe: TrainRecipe,
    *,
    schedule: ScheduleRecipe | None = None,
    callbacks: Sequence[Callback] = (),
    tasks: int = 1,
    lr: float = 0.05,
) -> Trainer:
    torch.manual_seed(recipe.seed)
    tables = [Table(name, rows, DIM) for name, rows in ROWS.items()]
    features = [Feature(name, name) for name in ROWS]
    model = DLRM(tables, features, DENSE, bottom=(16, DIM), top=(16, tasks), seed=recipe.seed)
    return Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=lr / 10),
        RowWiseAdagrad(model, lr=lr),
        recipe=recipe,
        schedule=schedule,
        callbacks=callbacks,
    )


class Do(Callback):
    """Does something after some steps."""

    def __init__(self, actions: dict[int, Callable[[Trainer], object]]) -> None:
        self.actions = actions

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step in self.actions:
            self.actions[trainer.step](trainer)


class Losses(Callback):
    """Keeps every loss and evaluation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.aucs: list[float] = []
        self.records: list[dict[str, float]] = []
        self.ended = 0

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.losses.append(loss)

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        self.records.append(record)

    def on_eval(self, trainer: Trainer, metrics: object) -> None:
        self.aucs.append(metrics.auc)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer) -> None:
        self.ended += 1
