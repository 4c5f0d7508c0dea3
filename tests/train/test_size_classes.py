"""Ids are padded to sizes that seldom change, and what trains with them is the same, to the bit."""

from __future__ import annotations

import pytest
import torch

import hotbed as hb
from hotbed.train.cuda_graph import STEPS, SizeClasses, size_class

TABLES = [hb.Table("a", rows=40, dim=4), hb.Table("b", rows=9, dim=4)]
FEATURES = [hb.Feature("x", table="a"), hb.Feature("y", table="b", pooling="mean"), hb.Feature("z", table="a")]


def ids(*lengths: int) -> hb.Jagged:
    """One sample per length: "x" has so many ids, "y" one, "z" one more than "x"."""
    draw = torch.Generator().manual_seed(sum(lengths))

    def bags(more: int) -> list[list[int]]:
        return [torch.randint(0, 9, (n + more,), generator=draw).tolist() for n in lengths]

    return hb.Jagged.from_dict({"x": bags(0), "y": torch.ones(len(lengths), dtype=torch.int64), "z": bags(1)})


def collection(*features: hb.Feature, **options) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection(TABLES, features or FEATURES, **options)


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
        features = [hb.Feature("x", table="a", pooling="none"), FEATURES[1], hb.Feature("z", table="a", pooling="none")]
        model = hb.EmbeddingCollection(TABLES, features)
    elif case == "dynamic":
        tables = [hb.Table("a", rows="dynamic", dim=4, init_bound=0.5, dynamic=hb.Dynamic(256 * 16)), TABLES[1]]
        model = hb.EmbeddingCollection(tables, FEATURES)
    else:
        model = torch.nn.Linear(1, 1)
    assert SizeClasses(model)(given) is given


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_training_is_the_same_to_the_bit(backend, padding):
    features = FEATURES
    if padding is not None:
        features = [hb.Feature("x", table="a", pooling="none", max_len=24, padding=padding), *FEATURES[1:]]
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
