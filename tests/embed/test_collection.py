"""A collection's lookups, updates and module behaviour are those of its definition: features by name, tables shared."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import hotbed
from hotbed import ops
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BackendError, BatchError, OptimizerError, SpecError
from hotbed.jagged import Jagged
from hotbed.ops import reference
from hotbed.optim import SGD, RowWiseAdagrad
from hotbed.specs import Feature, Table

from .collection_cases import FEATURES, TABLES, expected, ids, make


def test_every_feature_gets_its_pooled_vectors():
    collection, batch = make(), ids(9)
    e = collection(batch)
    assert list(e) == ["user", "text", "item", "history"]
    for name, vectors in expected(collection, batch).items():
        torch.testing.assert_close(e[name], vectors)


def test_tables_start_at_the_initial_values_of_their_name_and_seed():
    collection = make(seed=7)
    cells = torch.empty(30, 8)
    reference.initial_values_(cells, seed=TABLES[1].seed(7), rows=range(30), cols=range(8), bound=TABLES[1].bound)
    assert torch.equal(collection.weight("items"), cells)
    assert not torch.equal(make(seed=8).weight("items"), cells)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_neither_the_order_of_features_nor_the_dtype_of_ids_matters(dtype):
    collection, batch = make(), ids()
    bags = batch.to_dict()
    more = Jagged.from_dict({name: bags[name] for name in ("history", "item", "text", "user")} | {"more": bags["item"]})
    shuffled = Jagged(more.names, more.values.to(dtype), batch_size=len(more), fixed=more.fixed, offsets=more.offsets)
    for name, vectors in collection(batch).items():
        assert torch.equal(collection(shuffled)[name], vectors)


def test_short_and_empty_batches():
    collection = make()
    optimizer = SGD(collection, lr=0.1)
    for size in (4, 1, 0):
        e = collection(ids(size))
        assert e["user"].shape == (size, 8) and e["text"].shape == (size, 3)
        e.concatenate().sum().backward()
        optimizer.step()


def test_eval_and_no_grad_never_update():
    collection = make()
    optimizer = SGD(collection, lr=1.0)
    before = {t.name: collection.weight(t.name).clone() for t in TABLES}
    with torch.no_grad():
        assert not collection(ids())["user"].requires_grad
    with torch.inference_mode():
        collection(ids())
    head = torch.ones(8, requires_grad=True)
    (collection.eval()(ids())["user"] * head).sum().backward()
    assert head.grad.abs().sum() > 0
    optimizer.step()
    for name, rows in before.items():
        assert torch.equal(collection.weight(name), rows)
    (collection.train()(ids())["user"] * head).sum().backward()
    optimizer.step()
    assert not torch.equal(collection.weight("users"), before["users"])


def test_frozen_tables_are_left_alone_until_unfrozen():
    tables = [Table("users", rows=50, dim=8), Table("items", rows=30, dim=8, frozen=True), TABLES[2]]
    collection = EmbeddingCollection(tables, FEATURES).freeze("words")
    optimizer = RowWiseAdagrad(collection, lr=1.0)
    before = {t.name: collection.weight(t.name).clone() for t in TABLES}

    def train():
        e = collection(ids())
        assert e["text"].requires_grad == collection.handles["words"].requires_grad
        e.concatenate().square().sum().backward()
        optimizer.step()

    train()
    changed = {name for name, rows in before.items() if not torch.equal(collection.weight(name), rows)}
    assert changed == {"users"}
    assert not optimizer.state_dict()["state"][1]["sum_of_squares"].any()
    collection.unfreeze()
    train()
    changed = {name for name, rows in before.items() if not torch.equal(collection.weight(name), rows)}
    assert changed == {"users", "items", "words"}


def test_state_dict_holds_the_tables_and_loads_back():
    a, b = make(seed=1), make(seed=2)
    assert list(a.state_dict()) == ["users.weight", "items.weight", "words.weight"]
    assert list(a.parameters()) == []
    b.load_state_dict(a.state_dict())
    assert torch.equal(a.weight("words"), b.weight("words"))


def test_the_backend_is_the_one_asked_for():
    batch = ids()
    for backend, ran in (("auto", "cpu"), ("cpu", "cpu"), ("reference", "reference")):
        ops.launches.clear()
        collection = make(backend=backend)
        optimizer = SGD(collection, lr=1.0)
        collection(batch).concatenate().sum().backward()
        optimizer.step()
        assert {key.split(".")[0] for key in ops.launches} == {ran}
        assert ops.launches[f"{ran}.lookup"] == 2  # one launch per arena: dims 8 and 3
        assert ops.launches[f"{ran}.update"] == 2
    with pytest.raises(BackendError, match="backend: got 'cuda', expected one of auto, reference, cpu, triton"):
        make(backend="cuda")


def test_other_default_dtypes_do_not_reach_the_tables():
    torch.set_default_dtype(torch.float64)
    try:
        collection = make()
        optimizer = RowWiseAdagrad(collection, lr=0.1)
        collection(ids()).concatenate().sum().backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert collection.weight("users").dtype == torch.float32
    assert optimizer.state_dict()["state"][0]["sum_of_squares"].dtype == torch.float32


def test_unknown_tables_are_named():
    with pytest.raises(SpecError, match="no table 'item'; tables are users, items, words; did you mean 'items'"):
        make().weight("item")
    with pytest.raises(SpecError, match="no table 'item'"):
        make().freeze("item")


def test_a_later_optimizer_takes_tables_over():
    collection = make()
    first = SGD(collection, lr=0.1)
    second = SGD(collection, lr=0.2)
    before = collection.weight("users").clone()
    collection(ids()).concatenate().sum().backward()
    with pytest.raises(OptimizerError, match="table 'users' has two optimizers: the one made later trains it"):
        first.step()
    assert torch.equal(collection.weight("users"), before)
    second.step()
    assert not torch.equal(collection.weight("users"), before)


def test_a_kernel_is_at_most_five_frames_from_the_module(monkeypatch):
    frames: list[str] = []

    def record(kernel, *args):
        frame = sys._getframe(0)
        while frame is not None:
            frames.append(frame.f_code.co_filename)
            frame = frame.f_back

    monkeypatch.setattr("hotbed.ops.cpu_lookup.launch", record)
    make()(ids())
    first = frames[: frames.index(__file__, 1) if __file__ in frames[1:] else None]
    package = Path(hotbed.__file__).parent
    own = [name for name in first if Path(name).is_relative_to(package)]
    assert 1 <= len(own) <= 4  # and `launch` itself, which is replaced here


def test_what_is_looked_up_can_be_changed_in_place():
    collection = EmbeddingCollection([Table("t", rows=10, dim=4)], [Feature("a", table="t"), Feature("b", table="t")])
    optimizer = SGD(collection, lr=1.0)
    before = collection.weight("t").clone()
    found = collection(Jagged.from_dict({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 3])}))
    found.stack().mul_(2).sum().backward()
    optimizer.step()
    moved = (before - collection.weight("t"))[:, 0]
    torch.testing.assert_close(moved, torch.tensor([0.0, 2, 2, 4, 0, 0, 0, 0, 0, 0]))
    found = collection(Jagged.from_dict({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 3])}))
    assert (torch.nn.functional.relu(found["a"], inplace=True) >= 0).all()


@pytest.mark.parametrize("room", [-1, 2])
def test_room_is_for_one_vector(room):
    with pytest.raises(BatchError, match=f"room: got {room}, expected 0 or 1"):
        make()(ids(), room=room)


def test_a_stack_changed_in_place_is_noticed_where_its_vectors_are_needed():
    collection = EmbeddingCollection([Table("t", rows=10, dim=4)], [Feature("a", table="t")])
    found = collection(Jagged.from_dict({"a": torch.tensor([1, 2])}), room=1)
    w = torch.ones(4, requires_grad=True)
    side = found["a"] * w
    stacked = found.stack(torch.zeros(2, 4))
    stacked.mul_(10)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        (side.sum() + stacked.sum()).backward()


def test_rows_of_a_parameter_are_loaded_without_its_graph():
    collection = EmbeddingCollection([Table("t", rows=10, dim=4)], [Feature("a", table="t")])
    rows = torch.nn.Embedding(10, 4).weight
    collection.load_state_dict({"t.weight": rows})
    assert torch.equal(collection.weight("t"), rows) and not collection.weight("t").requires_grad
    copy.deepcopy(collection)
