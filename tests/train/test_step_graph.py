"""Where steps cannot be captured it is said, and they are taken as ever; captured ones: tests/census."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.config import TrainRecipe
from hotbed.errors import BatchError, RecipeError
from hotbed.store import DenseStore
from hotbed.train import Trainer
from hotbed.train.cuda_graph import StepGraph, columns, copy_of

TABLES = [hb.Table("a", rows=40, dim=4), hb.Table("b", rows=9, dim=4)]
FEATURES = [hb.Feature("x", table="a"), hb.Feature("y", table="b", pooling="mean")]


def batch(seed: int) -> hb.Batch:
    draw = torch.Generator().manual_seed(seed)
    bags = [torch.randint(0, 9, (n,), generator=draw).tolist() for n in (1, 0, 2, 3)]
    return hb.Batch(
        sparse=hb.Jagged.from_dict({"x": torch.randint(0, 40, (4,), generator=draw), "y": bags}),
        dense=torch.rand(4, 3, generator=draw),
        labels=torch.randint(0, 2, (4, 1), generator=draw).float(),
        extra={"time": torch.arange(4)},
    )


class Told(hb.Callback):
    def __init__(self) -> None:
        self.chosen, self.losses = "", list[float]()

    def on_numerics(self, trainer: Trainer, chosen: str) -> None:
        self.chosen = chosen

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.losses.append(loss)


def trained(cuda_graph: Any) -> Told:
    torch.manual_seed(0)
    model = hb.nn.DLRM(TABLES, FEATURES, dense_features=3, bottom=(8, 4), top=(8, 1))
    recipe = TrainRecipe(batch_size=4, device="cpu", precision="fp32", cuda_graph=cuda_graph)
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.RowWiseAdagrad(model, lr=0.1)
    told = Told()
    Trainer(model, dense, sparse, recipe=recipe, callbacks=[told]).fit([batch(i) for i in range(4)])
    return told


def test_on_a_cpu_steps_are_taken_as_ever() -> None:
    asked, not_asked = trained("auto"), trained(False)
    assert asked.losses == not_asked.losses
    assert asked.chosen.endswith("; steps are not captured in a CUDA graph: the device is cpu, expected cuda")
    assert "captured" not in not_asked.chosen


def test_who_insists_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"cuda_graph is true, .* the device is cpu"):
        trained(True)


@pytest.mark.parametrize(
    ("options", "dropout", "divided", "late", "why"),
    [
        ({}, 0.5, False, True, None),
        ({"recompute": True}, 0.0, False, True, None),
        ({"recompute": True}, 0.5, False, True, "train.recompute saves the random state for dropout"),
        ({"compile": True}, 0.0, False, True, "train.compile may compile again in any step"),
        ({}, 0.0, True, True, r"batches are divided \(hot.batches split\)"),
        ({"precision": "fp16"}, 0.0, False, False, "the host waits for the loss: train.precision is fp16"),
    ],
)
def test_what_is_not_captured_on_a_gpu_says_why(
    options: dict[str, Any], dropout: float, divided: bool, late: bool, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseStore, "tier", "device")
    model = hb.nn.DLRM(TABLES, FEATURES, dense_features=3, bottom=(8, 4), top=(8, 1), dropout=dropout)
    numerics = SimpleNamespace(is_retrieval=False)
    step: Any = SimpleNamespace(gate=object() if late else None, numerics=numerics, begin=lambda optimizers: None)
    recipe = TrainRecipe(batch_size=4, cuda_graph=True, **options)
    taken = StepGraph(model, recipe, torch.device("cuda"), step, divided=divided)
    if why is None:
        assert taken._why_never() is None
    else:
        with pytest.raises(RecipeError, match=f"train.cuda_graph is true, but steps cannot be captured: {why}"):
            taken.begin([])


@pytest.mark.parametrize(
    ("value", "text"), [("ever", "got 'ever', expected true or false or auto"), ("true", "got 'true', expected true")]
)
def test_other_values_are_refused(value: Any, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        TrainRecipe(batch_size=4, cuda_graph=value)


def test_a_batch_is_copied_to_memory_of_its_own() -> None:
    given = batch(0)
    given.sparse.mark_verified([("x", 40)])
    copied = copy_of(given)
    for one, other in zip(columns(copied), columns(given), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    assert copied.sparse.verified == given.sparse.verified
    assert torch.equal(copied.sparse["x"].values, given.sparse["x"].values)


def test_a_captured_step_may_not_look_at_ids_whose_number_differs() -> None:
    with pytest.raises(BatchError, match="the model itself reads the ids of 'y'"):
        copy_of(batch(0)).sparse["y"]
