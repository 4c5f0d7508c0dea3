"""Checkpoints whose bytes are unharmed but do not agree with each other are refused before anything is loaded."""

from __future__ import annotations

import hashlib
import json
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
    manifest = json.loads((path / "manifest.json").read_text())
    (name,) = {tile["file"] for table in manifest["tables"].values() for tile in table["tiles"]}
    data = (path / name).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(manifest, header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    (path / name).write_bytes(data)
    entry = manifest["files"][name]
    entry["bytes"], entry["sha256"][:1] = len(data), [hashlib.sha256(data).hexdigest()]
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))


def key_of(manifest: dict[str, Any], table: str, array: str) -> str:
    return f"{manifest['tables'][table]['tiles'][0]['key']}/{array}"


def other_dtype(manifest: dict[str, Any], header: dict[str, Any]) -> None:
    header[key_of(manifest, "t", "weight")]["dtype"] = "I32"


def other_shape(manifest: dict[str, Any], header: dict[str, Any]) -> None:
    header[key_of(manifest, "t", "moment.exp_avg")]["shape"] = [4, 6]


def fewer_exponents(manifest: dict[str, Any], header: dict[str, Any]) -> None:
    header[key_of(manifest, "n", "exponents")]["shape"] = [2, 2]


def no_such_key(manifest: dict[str, Any], _: dict[str, Any]) -> None:
    manifest["tables"]["t"]["tiles"][0]["key"] = "elsewhere"


def no_such_file(manifest: dict[str, Any], _: dict[str, Any]) -> None:
    manifest["tables"]["t"]["tiles"][0]["file"] = "elsewhere.safetensors"


def one_hash_too_many(manifest: dict[str, Any], _: dict[str, Any]) -> None:
    file = manifest["tables"]["t"]["tiles"][0]["file"]
    manifest["files"][file]["sha256"].append("0" * 64)


def beyond_the_file(manifest: dict[str, Any], header: dict[str, Any]) -> None:
    header[key_of(manifest, "t", "weight")]["data_offsets"] = [1 << 20, (1 << 20) + 96]


def keys_that_fall(manifest: dict[str, Any], header: dict[str, Any]) -> None:
    tile = manifest["tables"]["t"]["tiles"][0]
    tile["keyed"] = True
    weight = header.pop(key_of(manifest, "t", "weight"))
    header[f"{tile['key']}/keys"] = {**weight, "dtype": "I64", "shape": [12]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_dtype, r"weight': got torch\.int32 \[6, 4\], expected torch\.float32 \[6, 4\]"),
        (other_shape, r"moment\.exp_avg': got torch\.float32 \[4, 6\], expected torch\.float32 \[6, 4\]"),
        (fewer_exponents, r"exponents': got torch\.int8 \[2, 2\], expected torch\.int8 \[4, 1\]"),
        (no_such_key, "has no array 'elsewhere/weight'"),
        (no_such_file, r"got elsewhere\.safetensors, expected a file of the manifest"),
        (one_hash_too_many, "got 2 hashes, expected"),
        (beyond_the_file, "is not a supported safetensors file: array '.*weight' does not match the file"),
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


def test_a_forged_checkpoint_that_agrees_is_loaded(saved: Path) -> None:
    """So the refusals above are of what was changed there."""
    forge(saved, lambda *_: None)
    made, optimizer = model()
    load_checkpoint(saved, {"model": made, "sparse": optimizer})
    verify_checkpoint(saved)


def test_a_header_that_cannot_be_one(saved: Path) -> None:
    file = next(saved.glob("tables-*"))
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])
    data = file.read_bytes()
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"][file.name]["sha256"] = [hashlib.sha256(data).hexdigest()]
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (saved / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CheckpointError, match="is not a safetensors file: its header would be 1,099,511,627,776 bytes"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("entry", ["step", "tables", "files"])
def test_a_manifest_that_lacks_an_entry(saved: Path, entry: str) -> None:
    forge(saved, lambda manifest, _: None)
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["sha256"], manifest[entry]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (saved / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CheckpointError, match=f"manifest.json: '{entry}' is missing"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("name", ["", "a/b", "../model", "-x"])
def test_parts_are_named_as_files_can_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"part name: got '{name}', expected"):
        save_checkpoint(tmp_path / "c", {name: nn.Linear(2, 2)})
    assert not (tmp_path / "c").exists()


class TwoOfOneName:
    """A state whose paths have one spelling."""

    def state_dict(self) -> dict[str, Any]:
        return {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}

    def load_state_dict(self, _: Any) -> None:
        raise AssertionError


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two tensors of part 'x' would have the same name in x\.safetensors"):
        save_checkpoint(tmp_path / "c", {"x": TwoOfOneName()})
    assert not (tmp_path / "c").exists()
