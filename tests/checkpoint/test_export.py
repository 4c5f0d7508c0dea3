"""Tables as safetensors files."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from hotbed.checkpoint import convert as convert_module
from hotbed.checkpoint import save_checkpoint
from hotbed.checkpoint.convert import convert, export_tables
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.specs import Feature, Table
from tests.checkpoint.damage import flip_last_bit
from tests.checkpoint.test_tiles import tables, tilings_of
from tests.checkpoint.tiles import Tiles, save
from tests.matrix import examples


@pytest.fixture(autouse=True)
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    Tiles(Table("t", 3, 16), [(range(3), range(16))]).fill(0)  # compiles kernels
    monkeypatch.setattr(convert_module, "MEMORY_BYTES", 1000)


@given(st.data())
@settings(max_examples=examples(24), deadline=None)
def test_any_tiles_become_one_array_with_their_values(data: st.DataObject) -> None:
    table = data.draw(tables())
    tiles = Tiles(table, data.draw(tilings_of(table)))
    tiles.fill(1, sorted(data.draw(st.sets(st.integers(0, table.rows - 1)))))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save(root / "c", tiles)
        convert(root / "c", root / "compact", compact=True)
        for source in ("c", "compact"):
            export_tables(root / source, root / f"{source} out")
            weight = load_file(root / f"{source} out" / "t.safetensors")["weight"].clone()
            narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(table.dtype, torch.float32)
            assert weight.dtype == (torch.float32 if table.fp32_rows else narrow)
            assert torch.equal(weight.float(), tiles.values()["rows"])


def a_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.bags = EmbeddingCollection(
        [Table("a/b c", 50, 8), Table("item", 40, 4, dtype="bf16")], [Feature("x", "a/b c"), Feature("y", "item")]
    )
    model.linear = nn.Linear(3, 2)
    model.tied = model.linear
    return model


def test_a_model_in_files(tmp_path: Path) -> None:
    model = a_model()
    save_checkpoint(tmp_path / "c", {"model": model}, step=3)
    seen: list[tuple[int, int]] = []
    found = export_tables(tmp_path / "c", tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert found == json.loads((tmp_path / "out" / "tables.json").read_text())
    assert found == {
        "step": 3,
        "tables": {
            "bags.a/b c": {"file": "bags.a%2Fb%20c.safetensors", "rows": 50, "dim": 8, "dtype": "fp32"},
            "bags.item": {"file": "bags.item.safetensors", "rows": 40, "dim": 4, "dtype": "bf16"},
        },
    }
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "bags.a%2Fb%20c.safetensors",
        "bags.item.safetensors",
        "dense.safetensors",
        "tables.json",
    ]
    assert seen[-1] == (560, 560)
    dense = load_file(tmp_path / "out" / "dense.safetensors")
    assert set(dense) == {"linear.weight", "linear.bias", "tied.weight", "tied.bias"}
    assert torch.equal(dense["tied.weight"], model.linear.weight)
    with pytest.raises(CheckpointError, match=r"out exists already and contains bags"):
        export_tables(tmp_path / "c", tmp_path / "out")


def test_a_checkpoint_without_a_model_and_one_that_is_damaged(tmp_path: Path) -> None:
    tiles = Tiles(Table("t", 30, 16), [(range(30), range(16))])
    save(tmp_path / "c", tiles)
    export_tables(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out" / "dense.safetensors").exists()
    file = next((tmp_path / "c").glob("tables-*"))
    flip_last_bit(file)
    with pytest.raises(CheckpointError, match="its content has changed"):
        export_tables(tmp_path / "c", tmp_path / "again")
    assert not (tmp_path / "again").exists()
