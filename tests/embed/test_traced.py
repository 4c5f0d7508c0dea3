"""Lookups in graphs of ``torch.compile``: whole models in one graph, to the bit of eager, with every gradient once."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import hotbed as hb
from hotbed.embed.compile_ops import _Calls
from hotbed.errors import BatchError, OptimizerError
from hotbed.optim import SGD, Adam
from hotbed.torch_hooks import _numbered

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),  # dynamo itself does
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # inductor itself calls it
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
]
NAMES = ("a", "b", "c")
POOLINGS = dict(zip(NAMES, ("sum", "mean", "sum"), strict=True))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids_of(samples, draw, *, ragged=False, weighted=False, bad=False):
    ids = {name: torch.randint(0, 20, (samples,), generator=draw) for name in NAMES}
    if ragged:
        lengths = torch.randint(0, 4, (samples,), generator=draw)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        ids["b"] = torch.randint(0, 20, (int(offsets[-1]),), generator=draw), offsets
    made = hb.Jagged.from_dict(ids)
    if bad:
        made.values[1] = 99
    weights = torch.rand(len(made.values), generator=draw).requires_grad_() if weighted else None
    return hb.Jagged(
        made.names, made.values, batch_size=samples, fixed=made.fixed, offsets=made.offsets, weights=weights
    )


def collection(dims=(8, 4, 8), **options):
    tables = [hb.Table(name, rows=20, dim=dim) for name, dim in zip(NAMES, dims, strict=True)]
    return hb.EmbeddingCollection(
        tables, [hb.Feature(name, table=name, pooling=POOLINGS[name], **options) for name in NAMES]
    )


def trained(backend, *, sizes=(6, 7, 9), accumulate=1, **of_ids):
    """Train a collection; return its rows, the gradients of weights, and what it counted."""
    embeddings, draw = collection(on_bad_id="drop"), torch.Generator().manual_seed(1)
    optimizer = Adam(embeddings, lr=0.1)

    def loss(ids):
        return embeddings(ids).concatenate().sin().sum()

    step = loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)
    of_weights = []
    for number, samples in enumerate(sizes, 1):
        ids = ids_of(samples, draw, **of_ids)
        step(ids).backward()
        of_weights += [] if ids.weights is None else [ids.weights.grad]
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [embeddings.weight(name).clone() for name in NAMES], of_weights, embeddings.bad_ids


@pytest.mark.parametrize(
    ("backend", "of_ids"),
    [
        ("eager", {"ragged": True, "weighted": True, "bad": True}),
        ("aot_eager", {"ragged": True, "weighted": True}),
        ("aot_eager", {"accumulate": 3}),
    ],
    ids=["eager, repaired ids", "ragged and weighted", "accumulated"],
)
def test_tables_of_several_dims_have_the_bits_of_eager(backend, of_ids):
    (rows, weights, bad), (expected, of_weights, counts) = trained(backend, **of_ids), trained(None, **of_ids)
    assert all(map(torch.equal, rows, expected))
    assert len(weights) == len(of_weights) and all(map(torch.equal, weights, of_weights))
    assert bad == counts


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_two_equal_lookups_give_two_gradients(backend):
    def row(compiled):
        embeddings = collection()
        optimizer = SGD(embeddings, lr=1.0)

        def loss(ids):
            return embeddings(ids)["a"].sum() + embeddings(ids)["a"].sum()

        step = torch.compile(loss, backend=backend, fullgraph=True) if compiled else loss
        step(ids_of(4, torch.Generator().manual_seed(0))).backward()
        optimizer.step()
        return embeddings.weight("a"), embeddings.weight("b")

    for found, expected in zip(row(True), row(False), strict=True):
        assert torch.equal(found, expected)


def kept():
    """How many lookups wait for backward."""
    gc.collect()
    return sum(isinstance(thing, _Calls) for thing in _numbered.values())


def test_nothing_is_kept_without_backward_and_copies_look_up_their_own_rows():
    embeddings = collection(on_bad_id="error")
    optimizer = SGD(embeddings, lr=1.0)
    look_up = torch.compile(lambda e, ids: e(ids).concatenate(), backend="aot_eager", fullgraph=True)
    ids = ids_of(4, torch.Generator().manual_seed(0))
    vectors = look_up(embeddings, ids)
    assert vectors.requires_grad
    before_it_died = kept()
    del vectors
    assert kept() == before_it_died - 1
    with torch.no_grad():
        before = look_up(embeddings, ids)
        assert kept() == before_it_died - 1
    copied = copy.deepcopy(embeddings)
    look_up(embeddings, ids).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(look_up(copied, ids), before)
        assert torch.equal(look_up(embeddings, ids), embeddings(ids).concatenate())
        sent = pickle.loads(pickle.dumps(ids))
        assert not torch.equal(sent.number, ids.number)
        assert torch.equal(look_up(copied, sent), before)
        ids.values[0] = 77  # which were found to be right before
        with pytest.raises(BatchError, match="got id 77 at sample 0, expected 0 to 19 for rows 20"):
            look_up(copied, ids)


def test_what_no_graph_holds_says_so():
    sequences = hb.EmbeddingCollection([hb.Table("a", 20, 4)], [hb.Feature("a", table="a", pooling="none")])
    ids = ids_of(4, torch.Generator().manual_seed(0))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"tables must be on one rank and not dynamic, features must be pooled"
    ):
        torch.compile(lambda i: sequences(i).padded("a")[0], backend="eager", fullgraph=True)(ids)
    torch._dynamo.reset()
    found = torch.compile(sequences, backend="eager")(ids)  # by a graph break
    assert torch.equal(found.padded("a")[0], sequences(ids).padded("a")[0])


def test_what_is_gone_is_an_error():
    embeddings, ids = collection(), ids_of(4, torch.Generator().manual_seed(0))
    torch.compile(embeddings, backend="eager", fullgraph=True)(ids)  # registers the operators
    nothing = torch.tensor([-1])
    with pytest.raises(OptimizerError, match="got a copy of the tensor that a compiled lookup saved, and the lookup"):
        torch.ops.hotbed.receive(nothing, [torch.zeros(4, 1, 8)], 0, 0)
    given = nothing, ids.values, None, None, torch.zeros(()), torch.empty(0)
    with pytest.raises(BatchError, match="was deleted before its recomputation"):
        torch.ops.hotbed.look_up(*given, embeddings.number, 0, 4, torch.float32, False, False)
