import pytest
import torch

from hotbed.batch import Batch, Embeddings
from hotbed.errors import BatchError
from hotbed.jagged import Jagged

IDS = Jagged.from_dict({"a": torch.tensor([1, 2, 3]), "h": [[1], [], [2, 3]]})


def full_batch() -> Batch:
    return Batch(
        sparse=IDS,
        dense=torch.arange(6.0).view(3, 2),
        labels=torch.tensor([[0.0], [1.0], [0.0]]),
        weights=torch.tensor([1.0, 2.0, 3.0]),
        extra={"group": torch.tensor([7, 8, 9])},
    )


def test_take_and_concatenate_keep_columns_together():
    batch = full_batch().take(torch.tensor([2, 0]))
    assert batch.sparse["a"].values.tolist() == [3, 1]
    assert batch.dense.tolist() == [[4, 5], [0, 1]]
    assert batch.weights.tolist() == [3, 1]
    assert batch.extra["group"].tolist() == [9, 7]
    joined = Batch.concatenate([batch, full_batch()])
    assert len(joined) == 5
    assert joined.labels.flatten().tolist() == [0, 0, 0, 1, 0]
    assert Batch.concatenate([batch]) is batch


def test_batches_of_different_columns_do_not_concatenate():
    whole = full_batch()
    for other in (Batch(sparse=IDS), Batch(sparse=IDS, dense=whole.dense, labels=whole.labels, weights=whole.weights)):
        with pytest.raises(BatchError, match="must have the same columns"):
            Batch.concatenate([whole, other])


def test_to_moves_every_column():
    moved = full_batch().to("meta")
    assert {t.device.type for t in (moved.dense, moved.labels, moved.weights, moved.sparse.values)} == {"meta"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"dense": torch.zeros(3)}, r"dense must be floating point \[3, …\], got float32 \[3\]"),
        ({"labels": torch.zeros(2, 1)}, r"labels must be floating point \[3, …\], got float32 \[2, 1\]"),
        ({"labels": torch.zeros(3, 1, dtype=torch.int64)}, "labels must be floating point"),
        ({"weights": torch.zeros(3, 1)}, r"weights must be floating point \[3\]"),
        ({"extra": {"group": torch.zeros(2)}}, "extra column 'group' has 2 samples, the batch has 3"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, message):
    with pytest.raises(BatchError, match=message):
        Batch(sparse=IDS, **columns)


def test_embeddings_of_one_dim_stack_without_a_copy():
    vectors = torch.rand(3, 2, 4)
    e = Embeddings(["a", "b"], [([0, 1], vectors)])
    assert e.stack() is vectors
    assert torch.equal(e["b"], vectors[:, 1])
    assert torch.equal(e.concatenate(), vectors.flatten(1))
    assert list(e) == ["a", "b"] and len(e) == 2


def test_embeddings_of_several_dims_keep_the_order_of_features():
    wide, narrow = torch.rand(3, 2, 4), torch.rand(3, 1, 2)
    e = Embeddings(["a", "n", "b"], [([0, 2], wide), ([1], narrow)])
    assert torch.equal(e.concatenate(), torch.cat([wide[:, 0], narrow[:, 0], wide[:, 1]], 1))
    with pytest.raises(BatchError, match=r"stack\(\) needs features of one dim, got a: 4, n: 2, b: 4"):
        e.stack()
    with pytest.raises(BatchError, match="no feature 'x'; there are a, n, b"):
        e["x"]
