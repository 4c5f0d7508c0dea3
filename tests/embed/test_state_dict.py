"""Tensors of a state are the tables' memory, in storages of their own for what saves them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_model
from torch import nn

from hotbed.embed import EmbeddingCollection
from hotbed.optim import Adagrad
from hotbed.specs import Feature, RowDtype, Table

DTYPES: tuple[RowDtype, ...] = ("fp32", "bf16", "fp16", "int8", "fp8")


class Model(nn.Module):
    """Two tables of every dtype, and one with float32 rows before narrow ones."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        tables = [Table(f"{dtype}{i}", rows=5 + i, dim=8, dtype=dtype) for dtype in DTYPES for i in range(2)]
        tables.append(Table("hot", rows=6, dim=8, dtype="int8", fp32_rows=2))
        tables.append(Table("narrowest", rows=3, dim=1, dtype="bf16"))
        self.embeddings = EmbeddingCollection(tables, [Feature(t.name, table=t.name) for t in tables], seed=seed)
        self.head = nn.Linear(8, 1)


def equal(a: nn.Module, b: nn.Module) -> bool:
    """Whether all bits of two states are."""
    states = a.state_dict(), b.state_dict()
    assert states[0].keys() == states[1].keys()
    return all(torch.equal(t.view(torch.uint8), states[1][name].view(torch.uint8)) for name, t in states[0].items())


def test_every_tensor_has_a_storage_of_its_own():
    model = Model()
    optimizer = Adagrad(model, lr=0.1)
    moments = [t for state in optimizer.state_dict()["state"].values() for t in state.values() if t.dim()]
    assert len(moments) == len(model.embeddings.tables)
    tensors = [*model.state_dict().values(), *moments]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_a_state_is_the_memory_of_the_tables():
    collection = EmbeddingCollection(
        [Table("a", rows=3, dim=4), Table("b", rows=3, dim=4)], [Feature("a", table="a"), Feature("b", table="b")]
    )
    state = collection.state_dict()
    assert state["b.weight"].data_ptr() == collection.weight("b").data_ptr()
    state["b.weight"].fill_(7)
    assert collection.weight("b").eq(7).all() and not collection.weight("a").eq(7).any()
    expected = collection.weight("a").clone()
    del collection
    assert torch.equal(state["a.weight"], expected)  # the memory is kept as long as the state is


def test_safetensors_keeps_every_table(tmp_path: Path):
    model, other = Model(seed=1), Model(seed=2)
    assert not equal(model, other)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert equal(model, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_of_one_table_holds_no_other(dtype: RowDtype, tmp_path: Path):
    tables = [Table("small", rows=4, dim=16, dtype=dtype), Table("large", rows=50_000, dim=16, dtype=dtype)]
    collection = EmbeddingCollection(tables, [Feature(t.name, table=t.name) for t in tables])
    small = {name: t for name, t in collection.state_dict().items() if name.startswith("small.")}
    torch.save(small, tmp_path / "small.pt")
    assert (tmp_path / "small.pt").stat().st_size < 10_000
    loaded = torch.load(tmp_path / "small.pt")
    assert all(torch.equal(loaded[name].view(torch.uint8), t.view(torch.uint8)) for name, t in small.items())


def test_a_state_on_meta_has_shapes():
    collection = EmbeddingCollection([Table("a", rows=3, dim=4)], [Feature("a", table="a")], device="meta")
    assert collection.state_dict()["a.weight"].shape == (3, 4) and collection.state_dict()["a.weight"].is_meta
