"""Vectors have the dtype of autocast, and room for one more vector before them costs no copy."""

import pytest
import torch

from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.optim import SGD
from hotbed.specs import Feature, Table

DIM, SIZE = 8, 5
TABLES = [
    Table("users", rows=12, dim=DIM),
    Table("items", rows=9, dim=DIM, dtype="int8", fp32_rows=2),
    Table("pages", rows=7, dim=DIM, dtype="bf16"),
]
FEATURES = [
    Feature("item", table="items", pooling="mean"),
    Feature("user", table="users"),
    Feature("page", table="pages"),
    Feature("seen", table="users"),
]
PRECISIONS = [None, torch.bfloat16, torch.float16]


def make(**options) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, FEATURES, **options)


def ids(size: int = SIZE) -> Jagged:
    draw = torch.Generator().manual_seed(0)
    return Jagged.from_dict(
        {
            "user": torch.randint(0, 12, (size,), generator=draw),
            "item": [torch.randint(0, 9, (i % 4,), generator=draw).tolist() for i in range(size)],
            "page": torch.randint(0, 7, (size, 3), generator=draw),
            "seen": torch.randint(0, 12, (size, 2), generator=draw),
        }
    )


def autocast(dtype):
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moved(collection: EmbeddingCollection, loss) -> dict[str, torch.Tensor]:
    """What one step of plain gradient descent with learning rate 1 subtracts from the float32 rows."""
    optimizer = SGD(collection, lr=1.0)
    before = collection.weight("users").clone()
    loss.backward()
    optimizer.step()
    return before - collection.weight("users")


# -- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_vectors_are_rounded_to_the_dtype_of_autocast(dtype, backend):
    collection = make(backend=backend)
    exact = collection(ids())
    with autocast(dtype):
        e = collection(ids())
    for name, vectors in e.items():
        assert vectors.dtype == (dtype or torch.float32)
        assert torch.equal(vectors, exact[name].to(vectors.dtype))
    assert e.stack().dtype == e.concatenate().dtype == (dtype or torch.float32)
    assert collection(ids())["user"].dtype == torch.float32


def test_sequences_are_rounded_too():
    collection = EmbeddingCollection(TABLES[:1], [Feature("h", table="users", pooling="none")])
    with autocast(torch.bfloat16):
        e = collection(Jagged.from_dict({"h": [[1, 2], [], [3]]}))
    assert e["h"].dtype == e.padded("h")[0].dtype == torch.bfloat16
    assert torch.equal(e["h"].values(), collection.weight("users")[1:4].bfloat16())
    assert torch.equal(moved(collection, e["h"].values().sum())[:5, 0], torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_gradients_arrive_and_are_summed_in_float32(dtype, backend):
    collection = make(backend=backend)
    with autocast(dtype):
        stacked = collection(ids()).stack()
    upstream = random(*stacked.shape).to(stacked.dtype)
    expected = torch.zeros(12, DIM)
    expected.index_add_(0, ids()["user"].values, upstream[:, 1].float())
    expected.index_add_(0, ids()["seen"].values, upstream[:, 3].float().repeat_interleave(2, 0))
    torch.testing.assert_close(moved(collection, (stacked * upstream).sum()), expected)


# -- room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("lead_dtype", [torch.float32, torch.bfloat16])
def test_a_lead_in_the_room_equals_concatenation(lead_dtype, dtype, backend):
    upstream = random(SIZE, 5, DIM)
    results = []
    for how in ("concatenated", "copied", "in the room"):
        collection = make(backend=backend)
        lead = random(SIZE, DIM, seed=2).to(lead_dtype).requires_grad_()
        with autocast(dtype):
            e = collection(ids(), room=int(how == "in the room"))
            if how == "concatenated":
                vectors = e.stack()
                stacked = torch.cat([lead[:, None].to(vectors.dtype), vectors], 1)
            else:
                stacked = e.stack(lead)
        assert stacked.dtype == (dtype or torch.float32) and stacked.is_contiguous()
        rows = moved(collection, (stacked * upstream.to(stacked.dtype)).sum())
        assert lead.grad.dtype == lead_dtype
        results.append((stacked.detach(), lead.grad, rows))
    for expected, *found in zip(*results, strict=True):
        assert all(torch.equal(other, expected) for other in found)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_room_saves_the_copy_of_the_vectors(dtype):
    with autocast(dtype):
        e = make()(ids(), room=1)
        vectors = e.stack()
        stacked = e.stack(random(SIZE, DIM))
    assert stacked[:, 1:].data_ptr() == vectors.data_ptr() == e["item"].data_ptr()
    assert stacked.untyped_storage().data_ptr() == vectors.untyped_storage().data_ptr()


def test_a_second_lead_is_right_too_and_both_get_gradients():
    collection = make()
    e = collection(ids(), room=1)
    leads = [random(SIZE, DIM, seed=i).requires_grad_() for i in (2, 3)]
    stacked = [e.stack(lead) for lead in leads]
    for s, lead in zip(stacked, leads, strict=True):
        assert torch.equal(s, torch.cat([lead[:, None], e.stack()], 1))
    rows = moved(collection, stacked[0].sum() + 2 * stacked[1].sum())
    assert torch.equal(leads[0].grad, torch.ones(SIZE, DIM)) and torch.equal(
        leads[1].grad, torch.full((SIZE, DIM), 2.0)
    )
    count = torch.bincount(torch.cat([ids()["user"].values, ids()["seen"].values]), minlength=12)
    torch.testing.assert_close(rows, (3.0 * count)[:, None].expand(12, DIM))


def test_vectors_used_before_the_lead_keep_their_gradients():
    collection = make()
    e = collection(ids(), room=1)
    scale = random(SIZE, DIM).requires_grad_()
    before = e["user"] * scale  # saves the vectors for backward, before the lead is written beside them
    stacked = e.stack(random(SIZE, DIM, seed=2))
    users = e["user"].detach().clone()
    rows = moved(collection, before.sum() + stacked.sum())
    assert torch.equal(scale.grad, users)
    expected = torch.zeros(12, DIM).index_add_(0, ids()["user"].values, 1 + scale.detach())
    expected += torch.bincount(ids()["seen"].values, minlength=12)[:, None]
    torch.testing.assert_close(rows, expected)


def test_a_lead_trains_although_tables_do_not():
    lead = random(SIZE, DIM).requires_grad_()
    make().eval()(ids(), room=1).stack(lead).sum().backward()
    assert torch.equal(lead.grad, torch.ones(SIZE, DIM))


def test_room_is_left_in_every_dim():
    collection = EmbeddingCollection([*TABLES, Table("words", rows=4, dim=3)], [*FEATURES, Feature("w", table="words")])
    batch = ids().to_dict() | {"w": torch.tensor([0, 1, 2, 3, 0])}
    e, plain = collection(Jagged.from_dict(batch), room=1), collection(Jagged.from_dict(batch))
    assert all(torch.equal(e[name], plain[name]) for name in plain)
    assert torch.equal(e.concatenate(), plain.concatenate())


@pytest.mark.parametrize("size", [1, 0])
def test_small_batches_with_a_lead(size):
    collection = make()
    optimizer = SGD(collection, lr=1.0)
    lead = random(size, DIM).requires_grad_()
    before = collection.weight("users").clone()
    collection(ids(size), room=1).stack(lead).sum().backward()
    optimizer.step()
    assert lead.grad.shape == (size, DIM)
    moved_by = (before - collection.weight("users"))[:, 0].sum().item()
    assert moved_by == pytest.approx(3 * size, abs=1e-5)  # one user and two seen
