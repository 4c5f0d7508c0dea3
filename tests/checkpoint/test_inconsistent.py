"""Checkpoints whose bytes are unharmed but do not agree with each other are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbed.checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.optim import Adam, SparseOptimizer
from hotbed.specs import Feature, Table
from tests.checkpoint.test_checkpoint import Part
from tests.checkpoint.test_fuzz import header_of, manifest_of, put_header, sign, sign_files

Change = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes the manifest, and the header of the tables' file, in place."""


def model() -> tuple[EmbeddingCollection, SparseOptimizer]:
    tables = [Table("t", 6, 4), Table("n", 5, 4, dtype="int8", fp32_rows=1)]
    made = EmbeddingCollection(tables, [Feature("t", table="t"), Feature("n", table="n")])
    return made, Adam(made, lr=0.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made, optimizer = model()
    save_checkpoint(tmp_path / "c", {"model": made, "sparse": optimizer})
    return tmp_path / "c"


def forge(path: Path, change: Change) -> None:
    """Change a checkpoint and make its hashes right."""
    values = manifest_of(path)
    file = path / values["tables"]["t"]["tiles"][0]["file"]
    header, data = header_of(file)
    change(values, header)
    put_header(file, header, data)
    sign(path, values)
    sign_files(path)


def of_tile(table: str, entry: str, to: Any) -> Change:
    """Change an entry of the manifest about a table's tile."""
    return lambda values, _: values["tables"][table]["tiles"][0].update({entry: to})


def of_array(table: str, array: str, **entries: Any) -> Change:
    """Change what a header holds of an array."""
    return lambda values, header: header[f"{values['tables'][table]['tiles'][0]['key']}/{array}"].update(entries)


def keys_that_fall(values: dict[str, Any], header: dict[str, Any]) -> None:
    tile = values["tables"]["t"]["tiles"][0]
    tile["keyed"] = True
    weight = header.pop(f"{tile['key']}/weight")
    header[f"{tile['key']}/keys"] = {**weight, "dtype": "I64", "shape": [12]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_array("t", "weight", dtype="I32"), r"weight': got torch\.int32 \[6, 4\], expected torch\.float32 \[6, 4\]"),
        (of_array("t", "moment.exp_avg", shape=[4, 6]), r"moment\.exp_avg': got torch\.float32 \[4, 6\], expected"),
        (
            of_array("n", "exponents", shape=[2, 2]),
            r"exponents': got torch\.int8 \[2, 2\], expected torch\.int8 \[4, 1\]",
        ),
        (of_tile("t", "key", "elsewhere"), "has no array 'elsewhere/weight'"),
        (of_tile("t", "file", "elsewhere.safetensors"), r"got elsewhere\.safetensors, expected a file of the manifest"),
        (keys_that_fall, "keys' are not ascending rows of the tile"),
    ],
)
def test_what_does_not_agree_is_refused(saved: Path, change: Change, message: str) -> None:
    forge(saved, change)
    made, optimizer = model()
    before = {name: t.clone() for name, t in made.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved, {"model": made, "sparse": optimizer})
    assert all(torch.equal(t, before[name]) for name, t in made.state_dict().items())
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(saved)


def test_a_header_that_cannot_be_one(saved: Path) -> None:
    file = next(saved.glob("tables-*"))
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    sign_files(saved)
    with pytest.raises(CheckpointError, match="is not a safetensors file: its header would be 1,099,511,627,776 bytes"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("name", ["", "a/b", "../model", "-x"])
def test_parts_are_named_as_files_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"part name: got '{name}', expected"):
        save_checkpoint(tmp_path / "c", {name: nn.Linear(2, 2)})
    assert not (tmp_path / "c").exists()


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    part = Part({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(CheckpointError, match=r"two tensors of part 'x' would have the same name in x\.safetensors"):
        save_checkpoint(tmp_path / "c", {"x": part})
    assert not (tmp_path / "c").exists()
