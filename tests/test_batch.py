import re
from functools import partial

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


def embeddings(*names: str, room: bool = False) -> tuple[Embeddings, torch.Tensor]:
    """Random pooled features of one dim, ``[3, features, 4]``, and their memory."""
    buffer = torch.rand(3, len(names) + room, 4)
    e = Embeddings(names)
    e.add_pooled(names, buffer[:, room:], buffer if room else None)
    return e, buffer


def test_embeddings_of_one_dim_stack_without_a_copy():
    e, vectors = embeddings("a", "b")
    assert e.stack().data_ptr() == vectors.data_ptr()
    assert torch.equal(e.stack(), vectors)
    assert torch.equal(e["b"], vectors[:, 1])
    assert torch.equal(e.concatenate(), vectors.flatten(1))
    assert list(e) == ["a", "b"] and len(e) == 2


def test_embeddings_of_several_dims_keep_the_order_of_features():
    wide, narrow = torch.rand(3, 2, 4), torch.rand(3, 1, 2)
    e = Embeddings(["a", "n", "b"])
    e.add_pooled(["a", "b"], wide, None)
    e.add_pooled(["n"], narrow, None)
    assert torch.equal(e.concatenate(), torch.cat([wide[:, 0], narrow[:, 0], wide[:, 1]], 1))
    with pytest.raises(BatchError, match=r"stack\(\) needs features of one dim, got a: 4, n: 2, b: 4"):
        e.stack()
    with pytest.raises(BatchError, match="no feature 'x'; there are a, n, b"):
        e["x"]


@pytest.mark.parametrize("room", [False, True])
def test_a_lead_comes_first(room):
    e, vectors = embeddings("a", "b", room=room)
    expected = vectors[:, room:].clone()
    lead = torch.rand(3, 4, requires_grad=True)
    stacked = e.stack(lead)
    assert torch.equal(stacked, torch.cat([lead[:, None], expected], 1))
    assert (stacked.data_ptr() == vectors.data_ptr()) == room
    upstream = torch.rand(3, 3, 4)
    stacked.backward(upstream)
    assert torch.equal(lead.grad, upstream[:, 0])
    assert torch.equal(e.stack(), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo itself does
@pytest.mark.parametrize("room", [False, True])
def test_a_lead_gets_its_gradient_inside_torch_compile(room):
    lead = torch.rand(3, 4, requires_grad=True)
    torch._dynamo.reset()

    @partial(torch.compile, backend="eager")
    def stacked(lead, vectors, buffer):
        e = Embeddings(["a", "b"])
        e.add_pooled(["a", "b"], vectors, buffer)
        return e.stack(lead)

    buffer = torch.rand(3, 3, 4)
    out = stacked(lead, buffer[:, 1:], buffer if room else None)
    upstream = torch.rand(3, 3, 4)
    out.backward(upstream)
    assert torch.equal(lead.grad, upstream[:, 0])


def test_a_second_lead_finds_the_first_one_untouched():
    e, vectors = embeddings("a", room=True)
    expected = vectors[:, 1:].clone()
    first, second = torch.rand(3, 4), torch.rand(3, 4)
    once, twice = e.stack(first), e.stack(second)
    assert torch.equal(once, torch.cat([first[:, None], expected], 1))
    assert torch.equal(twice, torch.cat([second[:, None], expected], 1))


@pytest.mark.parametrize("shape", [(3, 5), (2, 4), (3, 1, 4), (4,)])
def test_a_lead_of_another_shape_is_refused(shape):
    for room in (False, True):
        e, _ = embeddings("a", "b", room=room)
        with pytest.raises(BatchError, match=re.escape(f"lead must be [3, 4], got {list(shape)}")):
            e.stack(torch.rand(shape))


def sequences() -> tuple[Embeddings, torch.Tensor]:
    """A pooled feature and two that are not."""
    values = torch.rand(3, 4)
    e = Embeddings(["h", "a", "long"])
    e.add_pooled(["a"], torch.rand(3, 1, 4), None)
    e.add_sequence("h", values, IDS["h"], None)
    e.add_sequence("long", values, IDS["h"], 5)
    return e, values


def test_sequences_are_nested_or_padded():
    e, values = sequences()
    assert list(e) == ["h", "a", "long"]
    assert e["h"].layout == torch.jagged
    assert [bag.tolist() for bag in e["h"].unbind()] == [values[:1].tolist(), [], values[1:].tolist()]
    for name, length in (("h", 2), ("long", 5)):
        padded, mask = e.padded(name)
        assert padded.shape == (3, length, 4)
        assert mask.tolist() == [[i < n for i in range(length)] for n in (1, 0, 2)]
        assert torch.equal(padded[mask], values)
        assert not padded[~mask].any()


@pytest.mark.parametrize("max_len", [None, 2])
@pytest.mark.parametrize("bags", [[[], []], []], ids=["empty_bags", "no_samples"])
def test_padding_of_nothing(bags, max_len):
    e = Embeddings(["h"])
    e.add_sequence("h", torch.empty(0, 4), Jagged.from_dict({"h": bags})["h"], max_len)
    padded, mask = e.padded("h")
    assert padded.shape == (len(bags), max_len or 0, 4) and mask.shape == (len(bags), max_len or 0)
    assert not padded.any() and not mask.any()


def test_sequences_do_not_stack_and_pooled_features_are_not_padded():
    e, _ = sequences()
    for method in (e.stack, e.concatenate):
        message = f"{method.__name__}() needs pooled features, and h, long has pooling='none'; pick features by name"
        with pytest.raises(BatchError, match=re.escape(message)):
            method()
    with pytest.raises(BatchError, match="feature 'a' is pooled, so there is nothing to pad; give it pooling='none'"):
        e.padded("a")
    with pytest.raises(BatchError, match="no feature 'lang'; there are h, a, long; did you mean 'long'"):
        e.padded("lang")
