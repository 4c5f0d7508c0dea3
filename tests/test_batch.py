"""Batches and embeddings keep their samples and gradients through every conversion, and refuse what does not fit."""

import re
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotbed.batch import Batch, Embeddings
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.specs import Feature

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
        with pytest.raises(BatchError, match="got batches with different columns, expected the same columns in all"):
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
        ({"weights": torch.zeros(3, 1, 1)}, r"weights must be floating point \[3\]"),
        ({"extra": {"group": torch.zeros(2)}}, "got 2 samples, expected the batch's 3"),
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
    with pytest.raises(BatchError, match=r"got dims a: 4, n: 2, b: 4, expected one dim"):
        e.stack()
    with pytest.raises(BatchError, match="got 'x', expected one of a, n, b"):
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


class Written(TorchDispatchMode):
    """Counts the elements that operations write to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, torch.Tensor):
            self.elements += out.numel()
        return out


def of_two_dims(features: int) -> tuple[Embeddings, list[torch.Tensor]]:
    """Features of dims 2 and 4 in turns, ``[3, features]``, and the leaves that they are views of."""
    names = [f"f{i}" for i in range(features)]
    leaves = [torch.rand(3, len(names[i::2]), dim, requires_grad=True) for i, dim in enumerate((2, 4))]
    e = Embeddings(names)
    for i, leaf in enumerate(leaves):
        e.add_pooled(names[i::2], leaf, None)
    return e, leaves


WAYS = {
    "concatenate": lambda e: e.concatenate(),
    "names": lambda e: torch.cat([e[name] for name in e.names], 1),
    "values": lambda e: torch.cat(list(e.values()), 1),
    "some_names_twice": lambda e: torch.cat([e[name] for name in (*e.names[::3], *e.names[::3])], 1),
    "both": lambda e: torch.cat([e["f1"], e.concatenate(), e["f0"]], 1),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_gradient_of_many_features_is_linear_in_their_number(way):
    e, leaves = of_two_dims(64)
    out = way(e)
    with Written() as written:
        out.sum().backward()
    assert written.elements <= 8 * sum(leaf.numel() for leaf in leaves)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_gradients_by_name_and_side_by_side_are_those_of_slices(way):
    e, leaves = of_two_dims(7)
    sliced = {name: leaves[i % 2][:, i // 2] for i, name in enumerate(e.names)}

    class Sliced(dict):
        names = e.names

        def concatenate(self):
            return torch.cat(list(self.values()), 1)

    expected = way(Sliced(sliced))
    out = way(e)
    assert torch.equal(out, expected)
    upstream = torch.rand(out.shape)
    of_slices = torch.autograd.grad(expected, leaves, upstream)
    for _ in range(2):  # the graph is kept
        got = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        assert all(torch.equal(g, s) for g, s in zip(got, of_slices, strict=True))


def test_vectors_that_were_taken_without_a_gradient_get_one_later():
    e, (narrow, _) = of_two_dims(4)
    with torch.no_grad():
        assert e["f2"].grad_fn is None
        e["f2"].add_(1)
    assert torch.equal(e["f2"], narrow[:, 1])
    e["f2"].sum().backward()
    assert narrow.grad.tolist() == [[[0, 0], [1, 1]]] * 3


def of_one_dim(features: int, room: bool = False) -> tuple[Embeddings, torch.Tensor]:
    """Features of dim 4 that are computed from a leaf ``[3, features, 4]``, all ones; and the leaf."""
    names = [f"f{i}" for i in range(features)]
    leaf = torch.ones(3, features, 4, requires_grad=True)
    buffer = torch.ones(3, room + features, 4)
    vectors = Held.apply(leaf, [buffer[:, 1:] if room else buffer])
    e = Embeddings(names)
    e.add_pooled(names, vectors, buffer if room else None)
    return e, leaf


class Held(torch.autograd.Function):
    """Ones in memory that is given, as a lookup does."""

    @staticmethod
    def forward(ctx, leaf, vectors):
        return vectors[0]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def gradient(leaf: torch.Tensor) -> list[float]:
    """By feature; of all samples and columns it is one."""
    assert (leaf.grad == leaf.grad[:1, :, :1]).all()
    return leaf.grad[0, :, 0].tolist()


def test_vectors_by_name_can_be_changed_in_place():
    e, leaf = of_one_dim(3)
    e["f1"].mul_(5)
    torch.nn.functional.relu(e["f2"].sub_(2), inplace=True)
    assert e["f1"].eq(5).all() and e["f2"].eq(0).all()
    (e["f0"].sum() + e["f1"].sum() + e["f2"].sum()).backward()
    assert gradient(leaf) == [1, 5, 0]


@pytest.mark.parametrize("whole", ["stack", "stack_lead", "concatenate"])
@pytest.mark.parametrize("room", [False, True])
def test_what_was_changed_by_name_is_changed_in_all(whole, room):
    e, leaf = of_one_dim(3, room)
    e["f1"].mul_(5)
    lead = torch.full((3, 4), 7.0)
    out = {"stack": e.stack, "stack_lead": lambda: e.stack(lead), "concatenate": e.concatenate}[whole]()
    with torch.no_grad():
        assert e["f1"].eq(5).all()
    expected = [7, 1, 5, 1] if whole == "stack_lead" else [1, 5, 1]
    assert out.view(3, -1, 4)[0, :, 0].tolist() == expected
    e["f0"].mul_(3)  # what was given away stays as it is
    assert out.view(3, -1, 4)[0, :, 0].tolist() == expected
    (out.sum() + e["f0"].sum()).backward()
    assert gradient(leaf) == [1 + 3, 5, 1]


@pytest.mark.parametrize("whole", ["stack", "stack_lead", "concatenate"])
def test_names_after_all_vectors_are_views_that_are_not_changed_in_place(whole):
    e, leaf = of_one_dim(3, room=True)
    lead = torch.full((3, 4), 7.0)
    out = {"stack": e.stack, "stack_lead": lambda: e.stack(lead), "concatenate": e.concatenate}[whole]()
    room = whole == "stack_lead"
    assert e["f2"].data_ptr() == out.view(3, -1, 4)[:, 2 + room].data_ptr()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        e["f0"].mul_(2)
    (out.sum() + e["f0"].sum() + e["f0"].clone().mul_(2).sum()).backward()
    assert gradient(leaf) == [4, 1, 1]


def test_names_are_found_in_a_stack_that_was_changed_in_place():
    e, leaf = of_one_dim(3)
    e.stack()
    before = e["f1"].sum()
    e.stack().mul_(2)
    assert e["f1"].eq(2).all()
    (before + e["f1"].sum()).backward()
    assert gradient(leaf) == [0, 3, 0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo itself does
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_names_get_their_gradients_inside_torch_compile(way, backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda e: way(e).sin(), backend=backend, fullgraph=True)
    for _ in range(2):
        e, leaves = of_two_dims(7)
        upstream = torch.rand(way(e).shape)
        expected = torch.autograd.grad(way(e).sin(), leaves, upstream)
        fresh = Embeddings(e.names)
        for i, leaf in enumerate(leaves):
            fresh.add_pooled(e.names[i::2], leaf, None)
        got = torch.autograd.grad(compiled(fresh), leaves, upstream)
        assert all(torch.allclose(g, x) for g, x in zip(got, expected, strict=True))


def history(name, max_len=None):
    return Feature(name, table="t", pooling="none", max_len=max_len)


def sequences() -> tuple[Embeddings, torch.Tensor]:
    """A pooled feature and two that are not."""
    values = torch.rand(3, 4)
    e = Embeddings(["h", "a", "long"])
    e.add_pooled(["a"], torch.rand(3, 1, 4), None)
    e.add_sequence(history("h"), values, IDS["h"])
    e.add_sequence(history("long", 5), values, IDS["h"])
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
    e.add_sequence(history("h", max_len), torch.empty(0, 4), Jagged.from_dict({"h": bags})["h"])
    padded, mask = e.padded("h")
    assert padded.shape == (len(bags), max_len or 0, 4) and mask.shape == (len(bags), max_len or 0)
    assert not padded.any() and not mask.any()


def test_sequences_do_not_stack_and_pooled_features_are_not_padded():
    e, _ = sequences()
    for method in (e.stack, e.concatenate):
        message = f"{method.__name__}(): got pooling='none' of h, long"
        with pytest.raises(BatchError, match=re.escape(message)):
            method()
    with pytest.raises(BatchError, match="feature 'a': got a pooled feature"):
        e.padded("a")
    with pytest.raises(BatchError, match="got 'lang', expected one of h, a, long; did you mean 'long'"):
        e.padded("lang")
