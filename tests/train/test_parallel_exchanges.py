"""What ranks that train together agree on: sums, names, and the metrics of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, NonFiniteError
from hotbed.train import Metrics
from hotbed.train.metrics import evaluate
from hotbed.train.ranks.parallel import Ranks as TrainingRanks
from tests.ranks import Ranks
from tests.train import planted

from .parallel_cases import FEATURES, TABLES, TIMEOUT, Group, make_trainer, place, shares

pytestmark = pytest.mark.usefixtures("one_thread")


def exchanged(group: Group, folder: Path) -> dict[str, Any]:
    there = make_trainer(group).ranks
    rank = there.rank
    own = torch.arange(3 * rank, dtype=torch.float64).view(rank, 3)
    of_dtypes = [
        torch.full((2 - rank,), rank, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
    ]
    return {
        "place": (there.rank, there.size, there.is_first),
        "add": there.add([1e16, 1.0, -1e16][rank], rank, torch.tensor(0.5, requires_grad=True)),
        "gather": there.gather(own),
        "gathered": [there.gather(t) for t in of_dtypes],
        "of one rank": there.gather(torch.tensor([7] if rank == 2 else [], dtype=torch.int64)),
        "of none": there.gather(torch.zeros(0, 4)),
        "names": there.names([["b", "a"], [], ["ü", "b"]][rank]),
        "no names": there.names([]),
        "one name": there.names(["same"]),
        "counts": there.add_counts([{"a": 2, "b": 1}, {}, {"b": 3, "ü": 1 << 40}][rank]),
        "no counts": there.add_counts({}),
        "path": there.path(folder if there.is_first else None),
        "ignored": there.path(folder / str(rank)),
    }


def test_ranks_agree_on_sums_rows_names_and_paths(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "with spaces ü"
    for rank, found in enumerate(ranks.run(3, exchanged, folder)):
        assert found["place"] == (rank, 3, rank == 0)
        assert found["add"] == [(1e16 + 1.0) - 1e16, 3, 1.5]  # in rank order
        assert found["gather"].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
        assert [t.tolist() for t in found["gathered"]] == [[0, 0, 1]] * 7
        assert found["gathered"][0].dtype == torch.bool
        assert (found["of one rank"].tolist(), found["of one rank"].dtype) == ([7], torch.int64)
        assert found["of none"].shape == (0, 4)
        assert (found["names"], found["no names"]) == (["a", "b", "ü"], [])
        assert found["one name"] == ["same"]
        assert (found["counts"], found["no counts"]) == ({"a": 2, "b": 4, "ü": 1 << 40}, {})
        assert (found["path"], found["ignored"]) == (folder, folder / "0")


def test_one_rank_agrees_with_itself(tmp_path: Path) -> None:
    alone = TrainingRanks(nn.Linear(1, 1))
    assert (alone.rank, alone.size, alone.is_first, alone.link) == (0, 1, True, None)
    assert alone.add(1, 2.5, torch.tensor(3.0, requires_grad=True)) == [1, 2.5, 3]
    values = torch.arange(4)
    assert alone.gather(values) is values
    assert alone.names(["b", "a"]) == ["a", "b"]
    assert alone.add_counts({"a": 3}) == {"a": 3}
    assert alone.path(tmp_path) == tmp_path
    alone.at_step(3)
    with pytest.raises(RuntimeError, match="as it was"), alone.explained():
        raise RuntimeError("as it was")


class Sum(nn.Module):
    """Logits of a sample that do not depend on what else is in the batch, to the bit; of one task or two."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(TABLES, FEATURES, seed=4)
        self.scale = nn.Parameter(torch.linspace(1, -2, tasks))

    def forward(self, batch: Batch) -> Tensor:
        assert batch.dense is not None
        return (self.embeddings(batch.sparse).concatenate().sum(1) + batch.dense.sum(1))[:, None] * self.scale


def evaluated(group: Group, weighted: bool, grouped: bool, tasks: int, sizes: Sequence[int]) -> Metrics:
    model: nn.Module = Sum(tasks)
    if group is not None:
        model = hb.distribute(model, "row", group=group, timeout=TIMEOUT)
    batches: list[Batch] = []
    for i, size in enumerate(sizes):
        (batch,) = planted.batches(1, size, seed=i)
        assert batch.labels is not None
        labels = torch.cat([batch.labels, batch.labels.flip(0)], dim=1)[:, :tasks]
        weights = torch.rand(size, generator=torch.Generator().manual_seed(i)) if weighted else None
        batches.append(replace(batch, labels=labels, weights=weights))
    return evaluate(model, shares(batches, group), group="user" if grouped else None, labels=["a", "b"][:tasks])


@pytest.mark.parametrize(
    ("weighted", "grouped", "tasks", "sizes"),
    [
        (False, False, 1, (200, 200, 200, 7)),
        (True, True, 2, (200, 200, 1)),  # ranks without a sample of the last batch
        (False, True, 1, (1,) * 12),  # ranks without any sample
    ],
)
def test_all_ranks_have_the_metrics_of_one(
    ranks: Ranks, weighted: bool, grouped: bool, tasks: int, sizes: tuple[int, ...]
) -> None:
    alone = flat(evaluated(None, weighted, grouped, tasks, sizes))
    assert alone["samples"] == sum(sizes)
    by_rank = [flat(m) for m in ranks.run(3, evaluated, weighted, grouped, tasks, sizes)]
    assert by_rank[1] == by_rank[2] == by_rank[0]
    assert by_rank[0].keys() == alone.keys()
    for name, value in alone.items():
        assert by_rank[0][name] == (None if value is None else pytest.approx(value, rel=1e-9)), name


def flat(metrics: Metrics) -> dict[str, Any]:
    """Plain values, without those of tasks in a dictionary of their own."""
    values = metrics.to_dict()
    for task, own in values.pop("tasks", {}).items():
        values |= {f"{task}.{name}": value for name, value in own.items()}
    return values


def evaluations_that_fail(group: Group) -> list[str]:
    trainer = make_trainer(group)
    batches = shares(planted.batches(2, 9), group)
    said: list[str] = []
    with pytest.raises(BatchError) as nothing:
        trainer.evaluate([])
    said.append(str(nothing.value))
    if place(group)[0] == 2:
        assert batches[1].dense is not None
        batches[1] = replace(batches[1], dense=batches[1].dense * torch.nan)
    with pytest.raises(NonFiniteError) as not_finite:
        trainer.evaluate(batches)
    return [*said, str(not_finite.value)]


def test_an_evaluation_that_fails_does_so_on_all_ranks(ranks: Ranks) -> None:
    for nothing, not_finite in ranks.run(3, evaluations_that_fail):
        assert "no sample to evaluate" in nothing
        assert "task 0 is nan" in not_finite
