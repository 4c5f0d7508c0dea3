"""Converting checkpoints: compact and dense ones hold the same, bit for bit, whatever tiles and dtypes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotbed.checkpoint import Manifest, load_checkpoint, read_manifest, save_checkpoint, verify_checkpoint
from hotbed.checkpoint import convert as convert_module
from hotbed.checkpoint import saved_tables as tables_module
from hotbed.checkpoint import tensor_files as tensors_module
from hotbed.checkpoint.convert import convert
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.jagged import Jagged
from hotbed.optim import Adam
from hotbed.specs import Feature, RowDtype, Table
from tests.checkpoint.damage import flip_last_bit
from tests.checkpoint.test_tiles import tables, tilings_of
from tests.checkpoint.tiles import Tiles, load, save
from tests.matrix import examples


@pytest.fixture(autouse=True)
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    Tiles(Table("t", 3, 16), [(range(3), range(16))]).fill(0)  # compiles kernels
    monkeypatch.setattr(convert_module, "MEMORY_BYTES", 2000)
    monkeypatch.setattr(tensors_module, "CHUNK_BYTES", 700)
    monkeypatch.setattr(tables_module, "CHUNK_BYTES", 700)


def rectangles_of(manifest: Manifest) -> set[tuple[range, range, bool]]:
    return {(tile.rows, tile.cols, tile.keyed) for tile in manifest.tables["t"].tiles}


def some_rows(table: Table) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, table.rows - 1))


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_compact_checkpoint_loads_as_the_one_it_was_made_of(data: st.DataObject) -> None:
    table = data.draw(tables())
    trained = Tiles(table, data.draw(tilings_of(table)))
    trained.fill(1, sorted(data.draw(some_rows(table))))
    cut = data.draw(tilings_of(table))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save(root / "dense", trained, ranks=data.draw(st.integers(1, 3)))
        compact = convert(root / "dense", root / "compact", compact=True)
        assert compact == read_manifest(root / "compact") == verify_checkpoint(root / "compact")
        convert(root / "compact", root / "dense again")
        convert(root / "compact", root / "compact again", compact=True)
        loaded = {}
        for name in ("dense", "compact", "dense again", "compact again"):
            loaded[name] = Tiles(table, cut, seed=5)
            loaded[name].fill(2)  # what was there before does not matter
            load(root / name, loaded[name])
        back = Tiles(table, [(t.shard.rows, t.shard.cols) for t in trained.tiles], seed=6)
        load(root / "compact", back)
        assert rectangles_of(read_manifest(root / "compact again")) == rectangles_of(compact)
    assert back.bits() == trained.bits()
    for name in ("compact", "dense again", "compact again"):
        assert loaded[name].bits() == loaded["dense"].bits(), name


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_conversion_to_another_dtype_rounds_as_loading_does(data: st.DataObject) -> None:
    table, other = data.draw(tables()), data.draw(tables())
    other = Table("t", table.rows, table.dim, dtype=other.dtype, fp32_rows=table.fp32_rows)
    trained = Tiles(table, data.draw(tilings_of(table)))
    trained.fill(1, sorted(data.draw(some_rows(table))))
    cut = data.draw(tilings_of(other))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        save(root / "c", trained)
        convert(root / "c", root / "compact", compact=True)
        loaded = {}
        for source in ("c", "compact"):
            for compact in (False, True):
                convert(root / source, root / f"{source} {compact}", dtype=other.dtype, compact=compact)
                loaded[source, compact] = Tiles(other, cut, seed=5)
                load(root / f"{source} {compact}", loaded[source, compact])
        for source in ("c", "compact"):  # the other dtype only here
            loaded[source, None] = Tiles(other, cut, seed=6)
            load(root / source, loaded[source, None])
    expected = loaded.pop(("c", None)).bits()
    for how, tiles in loaded.items():
        assert tiles.bits() == expected, how


def test_a_compact_checkpoint_holds_only_rows_that_have_changed(tmp_path: Path) -> None:
    table = Table("t", 1000, 16)
    tiles = Tiles(table, [(range(1000), range(16))])
    tiles.fill(1, [3, 500, 999])
    held = tiles.tiles[0].arena.store
    held.moments["sum"][7] = 0.75  # its weights are as they were
    save(tmp_path / "c", tiles)
    manifest = convert(tmp_path / "c", tmp_path / "compact", compact=True)
    assert [tile.keyed for tile in manifest.tables["t"].tiles] == [True]
    assert manifest.tables["t"].tiles[0].rows == range(1000)
    assert manifest.nbytes < 1200 < 100_000 < read_manifest(tmp_path / "c").nbytes


def test_a_table_that_nobody_trained_takes_no_rows(tmp_path: Path) -> None:
    table = Table("t", 100, 16, dtype="int8")
    tiles = Tiles(table, [(range(0, 100, 2), range(16)), (range(1, 100, 2), range(16))])
    save(tmp_path / "c", tiles)
    assert convert(tmp_path / "c", tmp_path / "compact", compact=True).nbytes < 500
    verify_checkpoint(tmp_path / "compact")
    loaded = Tiles(table, [(range(100), range(16))], seed=7)
    load(tmp_path / "compact", loaded)
    assert torch.equal(loaded.values()["rows"], tiles.values()["rows"])


def model_and_optimizers(dtype: RowDtype = "fp32") -> dict[str, Any]:
    torch.manual_seed(2)
    model = nn.Module()
    model.embeddings = EmbeddingCollection(
        [Table("user", 50, 8, dtype=dtype), Table("item", 40, 8, dtype=dtype)],
        [Feature("user", "user"), Feature("item", "item")],
    )
    model.linear = nn.Linear(16, 1)
    model.register_buffer("scalar", torch.tensor(2.5))
    return {"model": model, "sparse": Adam(model, lr=0.05), "dense": torch.optim.Adam(model.parameters(), lr=0.1)}


def trained_parts() -> dict[str, Any]:
    parts = model_and_optimizers()
    ids = Jagged.from_dict({"user": torch.tensor([3, 4, 3]), "item": torch.tensor([0, 39, 1])})
    parts["model"].linear(parts["model"].embeddings(ids).concatenate()).square().sum().backward()
    for name in ("sparse", "dense"):
        parts[name].step()
    return parts


def same(parts: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(str(part.state_dict()) == str(others[name].state_dict()) for name, part in parts.items())


@pytest.mark.parametrize("compact", [False, True])
def test_parts_recipe_and_step_are_kept(tmp_path: Path, compact: bool) -> None:
    parts = trained_parts()
    save_checkpoint(tmp_path / "c", parts, step=7, recipe={"name": "x"})
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "c", tmp_path / "d", compact=compact, progress=lambda done, total: seen.append((done, total)))
    others = model_and_optimizers()
    manifest = load_checkpoint(tmp_path / "d", others)
    assert (manifest.step, manifest.recipe) == (7, {"name": "x"})
    assert same(parts, others)
    assert seen[-1] == (720, 720)
    assert len(seen) > 2
    assert not (tmp_path / "d" / "unfinished.json").exists()


def test_without_moments_it_is_for_prediction(tmp_path: Path) -> None:
    parts = trained_parts()
    save_checkpoint(tmp_path / "c", parts)
    manifest = convert(tmp_path / "c", tmp_path / "d", moments=False)
    assert manifest == read_manifest(tmp_path / "d")
    assert list(manifest.parts) == ["model"]
    assert not any(table.moments for table in manifest.tables.values())
    verify_checkpoint(tmp_path / "d")
    others = model_and_optimizers()
    load_checkpoint(tmp_path / "d", {"model": others["model"]})
    assert same({"model": parts["model"]}, others)
    with pytest.raises(CheckpointError, match="got part 'sparse', expected one of model"):
        load_checkpoint(tmp_path / "d", others)


def test_some_tables_may_have_another_dtype(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", trained_parts())
    manifest = convert(tmp_path / "c", tmp_path / "d", dtype={"embeddings.user": "int8"})
    assert {name: table.spec.dtype for name, table in manifest.tables.items()} == {
        "embeddings.user": "int8",
        "embeddings.item": "fp32",
    }


def test_a_checkpoint_may_go_from_and_to_a_store(tmp_path: Path) -> None:
    parts = trained_parts()
    save_checkpoint(f"file://{tmp_path}/c", parts)
    for compact, source, target in ((True, "c", "d"), (False, "d", "e")):
        convert(
            f"memory://{tmp_path}/{source}" if source != "c" else tmp_path / "c",
            f"memory://{tmp_path}/{target}",
            compact=compact,
        )
    others = model_and_optimizers()
    load_checkpoint(f"memory://{tmp_path}/e", others)
    assert same(parts, others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int7"}, "dtype: got 'int7', expected one of fp32, bf16, fp16, int8, fp8; did you mean 'int8'?"),
        (
            {"dtype": {"embeddings.usr": "int8"}},
            "dtype: got table 'embeddings.usr', expected tables of the checkpoint: embeddings.user, embeddings.item; "
            "did you mean 'embeddings.user'?",
        ),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: Any, message: str) -> None:
    save_checkpoint(tmp_path / "c", model_and_optimizers())
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "c", tmp_path / "d", **options)
    assert str(caught.value) == message
    assert not (tmp_path / "d").exists()


def test_nothing_is_overwritten_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", model_and_optimizers())
    with pytest.raises(CheckpointError, match="c exists already"):
        convert(tmp_path / "c", tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        convert(tmp_path, tmp_path / "d")
    file = next((tmp_path / "c").glob("tables-*"))
    flip_last_bit(file)
    with pytest.raises(CheckpointError, match="its content has changed"):
        convert(tmp_path / "c", tmp_path / "d")
    assert not (tmp_path / "d").exists()
