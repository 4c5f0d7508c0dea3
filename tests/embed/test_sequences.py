"""Features with ``pooling="none"`` give one vector per id, with the gradients of one."""

import re

import pytest
import torch
from torch import nn

from hotbed import ops
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.optim import SGD, RowWiseAdagrad
from hotbed.specs import Feature, Table

BAGS = {
    "ragged": [[3, 1, 3], [], [0], [9, 3]],
    "fixed": torch.tensor([[3, 1], [3, 3], [0, 9], [2, 2]]),
    "one": torch.tensor([3, 1, 3, 0]),
    "none": torch.empty(4, 0, dtype=torch.int64),
    "nested": torch.nested.nested_tensor_from_jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3, 3])),
}
MIXED = [
    Feature("before", table="items", pooling="mean"),
    Feature("history", table="items", pooling="none"),
    Feature("other", table="words", pooling="none"),
    Feature("item", table="items"),
    Feature("past", table="users", pooling="none"),
]


def make(*features: Feature, **options) -> EmbeddingCollection:
    features = features or (Feature("h", table="items", pooling="none"),)
    tables = [Table("users", rows=6, dim=8), Table("items", rows=10, dim=8), Table("words", rows=7, dim=3)]
    used = {f.table for f in features}
    return EmbeddingCollection([t for t in tables if t.name in used], features, **options)


def mixed_ids(size: int = 5, seed: int = 0) -> Jagged:
    draw = torch.Generator().manual_seed(seed)

    def ragged(rows):
        return [
            torch.randint(0, rows, (n,), generator=draw).tolist()
            for n in torch.randint(0, 4, (size,), generator=draw).tolist()
        ]

    return Jagged.from_dict(
        {
            "past": torch.randint(0, 6, (size, 2), generator=draw),
            "item": torch.randint(0, 10, (size,), generator=draw),
            "history": ragged(10),
            "before": ragged(10),
            "other": ragged(7),
        }
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("bags", BAGS.values(), ids=BAGS.keys())
def test_every_id_gets_its_row(bags, backend):
    collection, batch = make(backend=backend), Jagged.from_dict({"h": bags})
    expected = [collection.weight("items")[i] for i in batch["h"].values.split(batch["h"].lengths().tolist())]
    h = collection(batch)["h"]
    assert h.is_nested and h.layout == torch.jagged and h.shape[0] == 4 and h.shape[2] == 8
    assert all(torch.equal(a, b) for a, b in zip(h.unbind(), expected, strict=True))


@pytest.mark.parametrize("max_len", [None, 3, 6])
def test_padding_of_ragged_bags(max_len):
    collection = make(Feature("h", table="items", pooling="none", max_len=max_len))
    vectors, mask = collection(Jagged.from_dict({"h": BAGS["ragged"]})).padded("h")
    length = max_len or 3
    assert vectors.shape == (4, length, 8)
    assert mask.tolist() == [[i < n for i in range(length)] for n in (3, 0, 1, 2)]
    assert torch.equal(vectors[mask], collection.weight("items")[[3, 1, 3, 0, 9, 3]])
    assert not vectors[~mask].any()


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("bags", BAGS.values(), ids=BAGS.keys())
def test_rows_are_looked_up_into_padded_memory(bags, padding, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    of = {"backend": backend, "device": device}
    jagged = make(Feature("h", table="items", pooling="none", max_len=4), **of)
    collection = make(Feature("h", table="items", pooling="none", max_len=4, padding=padding), **of)
    batch = Jagged.from_dict({"h": bags}).to(device)
    expected, expected_mask = jagged(batch).padded("h")
    e = collection(batch)
    vectors, mask = e.padded("h")
    assert e["h"] is vectors and vectors.shape == (4, 4, 8)
    lengths = batch["h"].lengths()
    if padding == "right":
        assert torch.equal(vectors, expected) and torch.equal(mask, expected_mask)
    else:
        assert torch.equal(mask, torch.arange(4, device=device) >= 4 - lengths[:, None])
        assert torch.equal(vectors[mask], expected[expected_mask]) and not vectors[~mask].any()


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("weighted", [False, True])
def test_padded_lookups_train_to_the_bits_of_jagged_ones(padding, weighted):
    def trained(padding):
        walk = Feature("w", table="users", pooling="none", max_len=2, padding=padding)
        collection = make(walk, Feature("h", table="items", pooling="none", max_len=5, padding=padding), *MIXED[3:4])
        optimizer = RowWiseAdagrad(collection, lr=0.1)
        weights = {"h": torch.linspace(-1, 1, 6)} if weighted else None
        for _ in range(3):
            batch = Jagged.from_dict({"h": BAGS["ragged"], "w": BAGS["fixed"] % 6, "item": BAGS["one"]}, weights)
            e = collection(batch)
            loss = sum(e.padded(name)[0].square().sum((1, 2)) @ torch.arange(1.0, 5.0) for name in ("h", "w"))
            (loss + e["item"].sum()).backward()
            optimizer.step()
        return [collection.weight(table) for table in collection.tables]

    # a sum over places is in another order where these are elsewhere, a gradient is not
    assert all(map(torch.equal, trained(padding), trained(None)))


def test_only_limited_sequences_are_padded():
    for feature in ({"pooling": "none"}, {"max_len": 3}):
        with pytest.raises(SpecError, match="expected pooling 'none' and a max_len"):
            Feature("h", table="items", padding="right", **feature)
    with pytest.raises(SpecError, match="padding: got 'middle', expected one of right, left"):
        Feature("h", table="items", pooling="none", max_len=3, padding="middle")


def test_weights_multiply_rows():
    collection, w = make(), torch.tensor([0.5, 2.0, -1.0, 3.0, 1.0, 0.0])
    h = collection(Jagged.from_dict({"h": BAGS["ragged"]}, {"h": w}))["h"]
    torch.testing.assert_close(h.values(), collection.weight("items")[[3, 1, 3, 0, 9, 3]] * w[:, None])


def test_bad_ids_of_a_sequence_are_dropped_or_hashed():
    collection = make(
        Feature("d", table="items", pooling="none", on_bad_id="drop"),
        Feature("h", table="items", pooling="none", on_bad_id="hash"),
    )
    wild = torch.tensor([[1, 99], [-1, -2], [3, 4]])
    e = collection(Jagged.from_dict({"d": wild, "h": wild}))
    rows = collection.weight("items")
    assert [len(bag) for bag in e["d"].unbind()] == [1, 0, 2]
    assert torch.equal(e["d"].values(), rows[[1, 3, 4]])
    vectors, mask = e.padded("d")
    assert mask.tolist() == [[True, False], [False, False], [True, True]] and torch.equal(vectors[2], rows[3:5])
    assert [len(bag) for bag in e["h"].unbind()] == [2, 2, 2]
    assert torch.equal(e["h"].values()[[0, 4, 5]], rows[[1, 3, 4]])
    assert collection.bad_ids == {"d": 3, "h": 3}


def test_sequences_and_pooled_features_mix():
    collection = make(*MIXED)
    for size, seed in ((5, 0), (3, 1), (5, 2), (1, 3), (0, 4)):
        batch = mixed_ids(size, seed)
        e = collection(batch)
        assert list(e) == [f.name for f in MIXED]
        for feature in MIXED:
            bags, weight = batch[feature.name], collection.weight(feature.table)
            if feature.pooling == "none":
                assert torch.equal(e[feature.name].values(), weight[bags.values])
                assert torch.equal(e[feature.name].offsets().diff(), bags.lengths())
            else:
                offsets = bags.lengths().cumsum(0) - bags.lengths()
                pooled = nn.functional.embedding_bag(bags.values, weight, offsets, mode=feature.pooling)
                torch.testing.assert_close(e[feature.name], pooled)


def test_only_pooled_features_stack_and_only_others_are_padded():
    e = make(*MIXED)(mixed_ids())
    for method in (e.stack, e.concatenate):
        message = f"{method.__name__}(): got pooling='none' of history, past, other"
        with pytest.raises(BatchError, match=re.escape(message)):
            method()
    with pytest.raises(BatchError, match="feature 'item': got a pooled feature"):
        e.padded("item")


def test_a_row_in_pooled_and_other_features_is_updated_once():
    collection = make(Feature("p", table="items"), Feature("s", table="items", pooling="none"))
    optimizer = RowWiseAdagrad(collection, lr=0.5, eps=1e-12)
    before = collection.weight("items").clone()
    e = collection(Jagged.from_dict({"p": torch.tensor([2, 5]), "s": [[2, 2], []]}))
    (e["p"].sum() + e["s"].values().sum() * 2).backward()
    optimizer.step()
    # g is 1 + 2 + 2 in row 2 and 1 in row 5; v = g², so each moves by lr.
    torch.testing.assert_close(collection.weight("items")[[2, 5]], before[[2, 5]] - 0.5)
    assert optimizer.state_dict()["state"][0]["sum_of_squares"].nonzero().flatten().tolist() == [2, 5]
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["sum_of_squares"][[2, 5]], torch.tensor([25.0, 1.0]))


def test_gradients_reach_only_the_features_of_the_loss():
    collection = make(*MIXED)
    optimizer = SGD(collection, lr=1.0)
    before = {t: collection.weight(t).clone() for t in collection.tables}
    batch = mixed_ids()
    e = collection(batch)
    assert all(e[f.name].requires_grad for f in MIXED)
    e["history"].values().sum().backward()
    optimizer.step()
    moved = before["items"] - collection.weight("items")
    torch.testing.assert_close(moved[:, 0], torch.bincount(batch["history"].values, minlength=10).float())
    for table in ("users", "words"):
        assert torch.equal(collection.weight(table), before[table])


def test_eval_and_frozen_tables_get_no_gradient():
    collection = make().eval()
    assert not collection(Jagged.from_dict({"h": BAGS["ragged"]}))["h"].requires_grad
    collection.train().freeze("items")
    assert not collection(Jagged.from_dict({"h": BAGS["ragged"]}))["h"].requires_grad


def test_a_sequence_costs_one_launch_per_feature_and_all_pooled_ones_share_one():
    collection = make(*MIXED)
    ops.launches.clear()
    collection(mixed_ids())
    assert dict(ops.launches) == {"cpu.lookup": 4}
