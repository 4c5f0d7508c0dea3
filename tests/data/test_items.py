"""Protects that the items of a data set are found as they were last, and are drawn as often as is said."""

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hotbed as hb
from hotbed.config import Recipe
from hotbed.data.items import ItemDraws, ItemSet, item_ids, items_of
from hotbed.errors import BatchError
from hotbed.train.runs.build import open_source
from tests.train.retrieval_cases import catalogue, log, recipe_for


def test_items_are_what_they_were_last(tmp_path: Path) -> None:
    source = open_source(Recipe.from_dict(recipe_for(tmp_path)).data)
    found = items_of(source, ["item", "genre"], ["train"], counted="train")
    table = log()
    items, genres = table["item"].to_pylist(), table["genre"].to_pylist()
    assert found.ids.tolist() == sorted(set(items))
    assert found.counts.tolist() == [items.count(i) for i in sorted(set(items))]
    bags = found.features["genre"]
    assert bags.offsets is not None
    assert [v.tolist() for v in bags.values.tensor_split(bags.offsets[1:-1])] == [
        dict(zip(items, genres, strict=True))[i] for i in sorted(set(items))
    ]


def test_only_columns_of_items_are_read(tmp_path: Path) -> None:
    """A null label, which training would refuse, is not looked at."""
    values = recipe_for(tmp_path)
    table = log()
    for name, kind in (("click", pa.float32()), ("age", pa.float32())):
        table = table.set_column(table.column_names.index(name), name, pa.nulls(len(table), kind))
    pq.write_table(table, values["data"]["path"])
    source = open_source(Recipe.from_dict(values).data)
    assert items_of(source, ["item"], ["train"]).ids.tolist() == sorted(set(table["item"].to_pylist()))


def test_positions_of_items() -> None:
    assert catalogue().positions(torch.tensor([7, 3, 2, 9, 5])).tolist() == [2, -1, 0, -1, 1]
    assert ItemSet(torch.empty(0, dtype=torch.int64), catalogue().features, torch.empty(0)).positions(
        torch.tensor([1])
    ).tolist() == [-1]


def test_a_sample_has_one_item() -> None:
    ids = hb.Jagged.from_dict({"item": [[1], [], [2]]})
    with pytest.raises(BatchError, match="item 'item' of sample 1: got 0 ids"):
        item_ids(ids, "item")


@pytest.mark.parametrize("by_popularity", [False, True])
def test_items_are_drawn_as_often_as_is_said(by_popularity: bool) -> None:
    items = ItemSet(torch.arange(4), catalogue().features, torch.tensor([6, 0, 1, 3]))
    draws = ItemDraws(items, 5, by_popularity=by_popularity)
    found = torch.cat([draws(step, 1000) for step in range(20)]).bincount(minlength=4) / 20_000
    expected = torch.tensor([0.6, 0, 0.1, 0.3] if by_popularity else [1 / 3, 0, 1 / 3, 1 / 3])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.log_p(torch.arange(4)).exp().float(), expected)
    assert draws.log_p(torch.tensor([-1])).item() == -math.inf
    assert torch.equal(draws(7, 50), ItemDraws(items, 5, by_popularity=by_popularity)(7, 50))
    assert not torch.equal(draws(7, 50), draws(8, 50))


def test_of_items_that_nobody_counted_all_are_drawn() -> None:
    items = ItemSet(torch.arange(3), catalogue().features, torch.zeros(3, dtype=torch.int64))
    assert set(ItemDraws(items, 0, by_popularity=False)(1, 100).tolist()) == {0, 1, 2}
