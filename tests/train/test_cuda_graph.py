"""Tests of CUDA graphs on a CPU: reasons against a capture, copies, size classes. tests/census captures steps."""

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
from hotbed.train.cuda_graph import STEPS, SizeClasses, StepGraph, columns, copy_of, size_class

# -- Where steps cannot be captured it is said, and they are taken as ever; captured ones: tests/census.

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
    with pytest.raises(BatchError, match="the model reads the ids of 'y'"):
        copy_of(batch(0)).sparse["y"]


# -- Ids are padded to sizes that seldom change, and what trains with them is the same, to the bit.

WITH_Z = [
    hb.Feature("x", table="a"),
    hb.Feature("y", table="b", pooling="mean"),
    hb.Feature("z", table="a"),
]


def ids(*lengths: int) -> hb.Jagged:
    """One sample per length: "x" has so many ids, "y" one, "z" one more than "x"."""
    draw = torch.Generator().manual_seed(sum(lengths))

    def bags(more: int) -> list[list[int]]:
        return [torch.randint(0, 9, (n + more,), generator=draw).tolist() for n in lengths]

    return hb.Jagged.from_dict({"x": bags(0), "y": torch.ones(len(lengths), dtype=torch.int64), "z": bags(1)})


def collection(*features: hb.Feature, **options) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection(TABLES, features or WITH_Z, **options)


def test_classes_are_few_and_near():
    classes = [size_class(n) for n in range(1, 5000)]
    assert all(n <= c <= max(n * (1 + 1 / STEPS), STEPS) for n, c in enumerate(classes, 1))
    assert classes == sorted(classes)
    assert len(set(classes)) < 10 * STEPS
    assert all(size_class(c) == c for c in classes)


def test_sizes_rise_with_the_largest_batch_and_then_stay():
    pad = SizeClasses(collection())
    starts = [pad(ids(*lengths)).starts for lengths in ([2, 0, 3], [20, 1, 4], [1, 1, 0], [5, 9, 9])]
    assert starts[0] == (0, 8, 11, 19)
    assert starts[1] == starts[2] == starts[3] == (0, 26, 29, 57)


def test_a_padded_batch_is_read_as_it_was():
    given = ids(2, 0, 3)
    padded = SizeClasses(collection())(given)
    assert len(padded.values) == 19
    for one, other in ((padded, given), (padded.take(torch.tensor([2, 0])), given.take(torch.tensor([2, 0])))):
        assert all(torch.equal(one[name].values, other[name].values) for name in given.names)
        assert all(torch.equal(one[name].lengths(), other[name].lengths()) for name in given.names)
    assert torch.equal(padded.to_keyed()[1], given.to_keyed()[1])
    joined = hb.Jagged.concatenate([padded, padded])
    assert torch.equal(joined["x"].values, given["x"].values.repeat(2))


@pytest.mark.parametrize("case", ["fixed", "unpooled", "dynamic", "no collection"])
def test_what_is_not_padded(case):
    given = ids(2, 0, 3)
    model = collection()
    if case == "fixed":
        given = hb.Jagged.from_dict({name: torch.tensor([1, 2]) for name in "xyz"})
    elif case == "unpooled":
        features = [
            hb.Feature("x", table="a", pooling="none"),
            WITH_Z[1],
            hb.Feature("z", table="a", pooling="none"),
        ]
        model = hb.EmbeddingCollection(TABLES, features)
    elif case == "dynamic":
        tables = [
            hb.Table("a", rows="dynamic", dim=4, init_bound=0.5, dynamic=hb.Dynamic(256 * 16)),
            TABLES[1],
        ]
        model = hb.EmbeddingCollection(tables, WITH_Z)
    else:
        model = torch.nn.Linear(1, 1)
    assert SizeClasses(model)(given) is given


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_training_is_the_same_to_the_bit(backend, padding):
    features = WITH_Z
    if padding is not None:
        features = [hb.Feature("x", table="a", pooling="none", max_len=24, padding=padding), *WITH_Z[1:]]
    if backend == "triton":
        pytest.importorskip("triton")
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    tables = []
    for pads in (False, True):
        model = collection(*features, backend=backend, device=device)
        optimizer = hb.optim.Adam(model, lr=0.1)
        pad = SizeClasses(model)
        for lengths in ([2, 0, 3], [20, 1, 4], [1, 1, 0]):
            batch = ids(*lengths)
            assert model.verify(batch)
            vectors = model((pad(batch) if pads else batch).to(device))
            sum((vectors[f.name] ** 2).sum() for f in features).backward()
            optimizer.step()
        tables.append([t.cpu() for t in model.state_dict().values()])
    assert all(map(torch.equal, *tables))
