"""Any tiles of a table load what any tiles saved."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotbed.checkpoint import saved_tables as tables_module
from hotbed.checkpoint import tensor_files as tensors_module
from hotbed.checkpoint import tensor_files as writing_module
from hotbed.errors import CheckpointError
from hotbed.plan.tiling import column_unit
from hotbed.specs import RowDtype, Table
from tests.checkpoint.tiles import Rectangles, Tiles, load, save
from tests.matrix import examples
from tests.tilings import rectangles


@st.composite
def tables(draw: st.DrawFn) -> Table:
    dtype: RowDtype = draw(st.sampled_from(["fp32", "bf16", "fp16", "int8", "fp8"]))
    rows = draw(st.integers(1, 40))
    dim = draw(st.sampled_from([5, 16, 48] if dtype != "int8" else [5, 128, 300]))
    return Table("t", rows, dim, dtype=dtype, fp32_rows=draw(st.integers(0, rows)))


def tilings_of(table: Table) -> st.SearchStrategy[Rectangles]:
    return rectangles(range(table.rows), range(table.dim), column_unit(table), 3)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.fixture(autouse=True)
def tiny_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, and what is read at once, so small that even these tables need many."""
    Tiles(Table("t", 3, 16), [(range(3), range(16))]).fill(0)  # compiles kernels
    monkeypatch.setattr(writing_module, "FILE_BYTES", 2000)
    monkeypatch.setattr(tensors_module, "CHUNK_BYTES", 700)
    monkeypatch.setattr(tables_module, "CHUNK_BYTES", 700)


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_any_tiles_load_what_any_tiles_saved(data: st.DataObject) -> None:
    table = data.draw(tables())
    saved = Tiles(table, data.draw(tilings_of(table)))
    saved.fill(1)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "c", saved, ranks=data.draw(st.integers(1, 3)))
        loaded = Tiles(table, data.draw(tilings_of(table)), seed=5)
        load(Path(folder) / "c", loaded)
        assert_equal(loaded.values(), saved.values())
        # And back: what is stored is equal, not only the values.
        save(Path(folder) / "again", loaded)
        back = Tiles(table, [(t.shard.rows, t.shard.cols) for t in saved.tiles], seed=6)
        load(Path(folder) / "again", back)
    assert back.bits() == saved.bits()


@given(st.data())
@settings(max_examples=examples(50), deadline=None)
def test_rows_of_another_dtype_are_rounded_to_the_nearest(data: st.DataObject) -> None:
    table, other = data.draw(tables()), data.draw(tables())
    other = Table("t", table.rows, table.dim, dtype=other.dtype, fp32_rows=min(other.fp32_rows, table.rows))
    saved = Tiles(table, data.draw(tilings_of(table)))
    saved.fill(1)
    expected = Tiles(other, [(range(table.rows), range(table.dim))])
    exponents = expected.tiles[0].arena.store.arrays()["exponents"]
    exponents.fill_(-120)
    expected.tiles[0].arena.store.write(expected.tiles[0].arena.slots(0), saved.values()["rows"])
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "c", saved)
        loaded = Tiles(other, data.draw(tilings_of(other)), seed=5)
        load(Path(folder) / "c", loaded)
    assert torch.equal(loaded.values()["rows"], expected.values()["rows"])
    for name in ("sum", "m"):
        assert torch.equal(loaded.values()[name], saved.values()[name])


def test_files_are_filled_up_to_their_limit_and_tiles_are_cut_where_they_are_larger(tmp_path: Path) -> None:
    table = Table("t", 100, 16)  # a row takes 64 bytes, its moments 68
    tiles = Tiles(table, [(range(100), range(16))])
    manifest = save(tmp_path / "c", tiles)
    sizes = [f.stat().st_size for f in (tmp_path / "c").glob("*.safetensors")]
    assert len(sizes) == 7
    assert max(sizes) < 2000 + 1000  # and a header
    assert [len(tile.rows) for tile in manifest.tables["t"].tiles] == [15] * 6 + [10]


def test_tiles_that_are_not_all_of_a_table_are_no_checkpoint(tmp_path: Path) -> None:
    tiles = Tiles(Table("t", 10, 16), [(range(9), range(16))])
    with pytest.raises(CheckpointError, match=r"the tiles of table 't' do not cover it: .* 9 × 16, .* 10 × 16"):
        save(tmp_path / "c", tiles)
    assert not (tmp_path / "c" / "manifest.json").exists()
