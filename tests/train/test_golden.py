"""A recorded loss curve: a change that is not meant to change numbers must reproduce it.

BLAS sums in another order on other CPUs, hence the tolerance. After a change that is meant to change numbers::

    python -m tests.train.test_golden

and say why in the commit.
"""

import json
from pathlib import Path

import pytest

from hotbed.config import ScheduleRecipe, TrainRecipe
from hotbed.files import write_json
from tests.train import planted
from tests.train.planted import Losses

GOLDEN = Path(__file__).parent.parent / "golden" / "planted_losses.json"
STEPS = 50


def losses() -> list[float]:
    kept = Losses()
    recipe = TrainRecipe(batch_size=64, device="cpu", precision="fp32", seed=7)
    trainer = planted.trainer(recipe, schedule=ScheduleRecipe(warmup_steps=10), callbacks=[kept])
    trainer.fit(planted.batches(STEPS, seed=7, last=23))
    return kept.losses


def test_the_losses_are_those_recorded() -> None:
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert losses() == pytest.approx(recorded["losses"], rel=1e-5)


if __name__ == "__main__":
    write_json(GOLDEN, {"made_by": "python -m tests.train.test_golden", "losses": losses()})
