"""Hundreds of features cost as many operations as a few."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import hotbed as hb
from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.optim import RowWiseAdagrad
from hotbed.specs import Feature, Table
from tests.ranks import Ranks


class Operations(TorchDispatchMode):
    """Counts operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def batch(features: int, bags: str, seed: int) -> Jagged:
    names = [f"f{i}" for i in range(features)]
    draw = torch.Generator().manual_seed(seed)
    if bags == "fixed":
        return Jagged(names, torch.randint(0, 9, (4 * features,), generator=draw), batch_size=4)
    fixed = [None if bags == "ragged" or i % 2 else 2 for i in range(features)]
    lengths = torch.randint(0, 4, (fixed.count(None), 4), generator=draw)
    offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    total = int(lengths.sum()) + 8 * (features - len(lengths))
    return Jagged(names, torch.randint(0, 9, (total,), generator=draw), batch_size=4, fixed=fixed, offsets=offsets)


@pytest.mark.parametrize("max_len", [None, 5])
@pytest.mark.parametrize("bags", ["fixed", "ragged", "both"])
def test_a_step_takes_as_many_operations_for_many_features_as_for_few(bags, max_len):
    def operations(features: int) -> Counter[str]:
        names = [f"f{i}" for i in range(features)]
        collection = EmbeddingCollection(
            [Table(n, rows=9, dim=8) for n in names], [Feature(n, table=n, max_len=max_len) for n in names]
        )
        optimizer = RowWiseAdagrad(collection, lr=0.1, groups=[{"tables": ["f1"], "lr": 0.2}])
        for seed in range(2):  # the first step makes what is kept
            with Operations() as operations:
                collection(batch(features, bags, seed)).concatenate().sum().backward()
                optimizer.step()
        return operations.found

    assert operations(40) == operations(4)


def operations_on_cut_rows(group: dist.ProcessGroup, plan: str) -> list[Counter[str]]:
    """Of a step, for few tables and for many."""
    found = []
    for features in (4, 24):
        names = [f"f{i}" for i in range(features)]
        tables = [Table(n, rows=9, dim=48) for n in names]
        model = hb.distribute(EmbeddingCollection(tables, [Feature(n, table=n) for n in names]), plan, group=group)
        optimizer = RowWiseAdagrad(model, lr=0.1)
        model(batch(features, "ragged", 0)).concatenate().sum().backward()
        with Operations() as operations:
            optimizer.step()
        found.append(operations.found)
    return found


def test_rows_that_are_cut_are_updated_by_as_many_operations_for_many_tables(ranks: Ranks):
    for few, many in ranks.run(3, operations_on_cut_rows, "column"):
        assert few == many


@pytest.mark.parametrize("bags", ["fixed", "ragged", "both"])
@pytest.mark.parametrize("way", ["hash", "drop", "truncate"])
def test_many_features_are_repaired_in_one_copy(bags, way, monkeypatch):
    names = [f"f{i}" for i in range(6)]
    rows = 9 if way == "truncate" else 5
    options = {"on_too_long": "truncate", "max_len": 1} if way == "truncate" else {"on_bad_id": way}
    collection = EmbeddingCollection([Table("t", rows=rows, dim=8)], [Feature(n, table="t", **options) for n in names])
    one_by_one = batch(6, bags, 0)
    for name in names:
        single = EmbeddingCollection([Table("t", rows=rows, dim=8)], [Feature(name, table="t", **options)])
        one_by_one = single.check(one_by_one)
    copies = []
    make = Jagged.with_features
    monkeypatch.setattr(Jagged, "with_features", lambda ids, changed: copies.append(changed) or make(ids, changed))
    checked = collection.check(batch(6, bags, 0))
    assert len(copies) <= 1
    for name in names:
        for got, expected in zip(checked[name], one_by_one[name], strict=True):
            assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected
