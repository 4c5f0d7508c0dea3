"""One recipe trains alike on the CPU and on a GPU, and a GPU repeats itself to the bit."""

import pytest
import torch

from hotbed import ops
from hotbed.config import TrainRecipe
from hotbed.nn import DLRM
from hotbed.optim import RowWiseAdagrad
from hotbed.specs import Feature, Table
from hotbed.train import Trainer
from tests.train import planted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def losses(device: str, precision: str = "fp32") -> list[float]:
    torch.manual_seed(0)
    with torch.device(device):
        model = DLRM(
            [Table(name, rows, planted.DIM) for name, rows in planted.ROWS.items()],
            [Feature(name, name) for name in planted.ROWS],
            planted.DENSE,
            bottom=(16, planted.DIM),
            top=(16, 1),
        )
    kept = planted.Losses()
    trainer = Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.005),
        RowWiseAdagrad(model, lr=0.05),
        recipe=TrainRecipe(batch_size=64, device=device, precision=precision),
        callbacks=[kept],
    )
    trainer.fit(planted.batches(30))
    return kept.losses


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 2e-2)])
def test_a_gpu_trains_as_the_cpu_does(precision, tolerance):
    ops.launches.clear()
    on_gpu = losses("cuda", precision)
    assert ops.launches["triton.update"] == 30 and not ops.launches["cpu.update"]
    assert max(abs(a - b) for a, b in zip(on_gpu, losses("cpu"), strict=True)) < tolerance


def test_a_gpu_repeats_itself_to_the_bit():
    assert losses("cuda") == losses("cuda")
