"""Bags that are too long are refused, or cut off and counted."""

import re

import pytest
import torch

from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.specs import Feature, Table

LONG = [[1], [2, 3, 4, 5], [], [6, 7, 8]]


def make(pooling: str = "sum", **options) -> EmbeddingCollection:
    """Feature ``h`` has a limit of 2, feature ``a`` has none."""
    features = [Feature("h", table="t", pooling=pooling, max_len=2, **options), Feature("a", table="t")]
    return EmbeddingCollection([Table("t", rows=10, dim=4)], features)


def one_feature(name: str, **options) -> EmbeddingCollection:
    return EmbeddingCollection([Table("t", rows=5, dim=4)], [Feature(name, table="t", **options)])


def batch(h, weights=None) -> Jagged:
    return Jagged.from_dict({"a": torch.zeros(len(h), 3, dtype=torch.int64), "h": h}, weights)


@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize(
    ("h", "found"),
    [(LONG, "4 ids at sample 1"), (torch.zeros(5, 3, dtype=torch.int64), "3 ids at sample 0")],
    ids=["ragged", "fixed"],
)
def test_a_bag_that_is_too_long_is_refused(pooling, h, found):
    message = f"feature 'h': got {found}, expected at most max_len 2"
    collection, ids = make(pooling), batch(h)
    for refuse in (collection, collection.check, collection.verify):
        with pytest.raises(BatchError, match=re.escape(message)):
            refuse(ids)
    assert not ids.verified and not collection.truncated_ids


@pytest.mark.parametrize("h", [[[1], [2, 3], [], [6, 7]], torch.ones(4, 2, dtype=torch.int64), torch.ones(4).long()])
def test_bags_of_the_limit_pass_as_they_are(h):
    collection, ids = make(), batch(h)
    assert collection.verify(ids)
    assert collection.check(ids) is ids
    assert not collection.truncated_ids


@pytest.mark.parametrize("h", [LONG, torch.arange(8).view(2, 4)], ids=["ragged", "fixed"])
def test_the_last_ids_of_a_long_bag_may_stay(h):
    collection = make("none", on_too_long="keep_last")
    cut = collection.check(batch(h))
    lists = [list(map(int, bag)) for bag in h]
    found = cut["h"].values.split(cut["h"].lengths().tolist())
    assert [bag.tolist() for bag in found] == [bag[-2:] for bag in lists]
    assert collection.truncated_ids == {"h": sum(max(len(bag) - 2, 0) for bag in lists)}


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize(
    ("h", "first"),
    [(LONG, [[1], [2, 3], [], [6, 7]]), (torch.arange(8).view(2, 4), [[0, 1], [4, 5]])],
    ids=["ragged", "fixed"],
)
def test_a_long_bag_is_cut_to_its_first_ids_and_counted(pooling, h, first):
    collection = make(pooling, on_too_long="truncate")
    weights = torch.rand(sum(len(bag) for bag in h))
    kept = torch.cat([w[:2] for w in weights.split([len(bag) for bag in h])])
    given, cut = batch(h, {"h": weights}), batch(first, {"h": kept})
    a, b = collection(given), collection(cut)
    if pooling == "none":
        assert [len(bag) for bag in a["h"].unbind()] == [len(bag) for bag in first]
        assert a.padded("h")[0].shape == (len(h), 2, 4)
    for name in ("h", "a"):
        x, y = (e.padded("h")[0] if pooling == "none" and name == "h" else e[name] for e in (a, b))
        assert torch.equal(x, y)
    too_many = sum(map(len, h)) - sum(map(len, first))
    assert collection.truncated_ids == {"h": too_many} and not collection.bad_ids
    collection(given)
    assert collection.truncated_ids == {"h": 2 * too_many}


def test_what_is_cut_off_is_not_looked_at():
    collection = make(on_too_long="truncate", on_bad_id="drop")
    ids = collection.check(batch([[1, 2, 99], [99, 3, 4]]))
    assert ids["h"].values.tolist() == [1, 2, 3] and ids["h"].lengths().tolist() == [2, 1]
    assert collection.truncated_ids == {"h": 2} and collection.bad_ids == {"h": 1}


def test_verify_leaves_long_bags_to_check():
    collection, ids = make(on_too_long="truncate"), batch(LONG)
    assert not collection.verify(ids)
    assert not ids.verified and not collection.truncated_ids
    assert len(collection.check(ids)["h"].values) == 5
    assert len(ids["h"].values) == 8


def test_a_checked_batch_is_not_checked_again():
    collection = make(on_too_long="truncate")
    checked = collection.check(batch(LONG))
    # (feature, n) means that ids are below n, (feature, -n) that bags have at most n.
    assert checked.verified == {("h", 10), ("a", 10), ("h", -2)}
    assert collection.check(checked) is checked
    assert collection.check(checked.to("cpu")).verified == checked.verified


def test_a_smaller_limit_checks_again():
    ids = batch([[1, 2], [3]])
    make().check(ids)
    with pytest.raises(BatchError, match="got 2 ids at sample 0, expected at most max_len 1"):
        one_feature("h", max_len=1).check(ids)


@pytest.mark.parametrize("on_too_long", ["error", "truncate"])
def test_without_samples_no_bag_is_too_long(on_too_long):
    collection, ids = make(on_too_long=on_too_long), batch(torch.empty(0, 3, dtype=torch.int64))
    assert collection(ids)["h"].shape == (0, 4)
    assert collection.truncated_ids["h"] == 0
