"""Protects: a crafted checkpoint is refused before memory is allocated, by an error with file, key, value and limit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbed.checkpoint import (
    RandomState,
    init_from,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.save import Saving
from hotbed.checkpoint.storage import directory
from hotbed.errors import CheckpointError, DamagedError
from tests.checkpoint.test_fuzz import MANIFEST, copied, header_of, manifest_of, put_header, sign, sign_files
from tests.checkpoint.tiles import Rank
from tests.fixtures.models import CASES, build

TABLE = "embeddings.users"
FILE = "tables-00000-00000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with copied("whole") as place:
        (Path(place) / "whole").rename(tmp_path / "whole")
    return tmp_path / "whole"


def set_at(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = to

    return change


def an_overlap(values: Any) -> None:
    (tile,) = values["tables"][TABLE]["tiles"]
    values["tables"][TABLE]["tiles"].append({**tile, "rows": [3, 5, 1], "key": "elsewhere"})


AT = ("tables", TABLE)
LARGE = [0, 2**62, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((set_at("format", to=to), f"checkpoint format: got {to}, expected 1.") for to in (0, 2, 3, 4)),
        (set_at("format", to="x" * 999), "checkpoint format: got 'xxx.*', expected 1. Use the release that"),
        (lambda values: values.pop("base"), "'base' is missing"),
        (set_at("base", to=3), "base: got 3, expected a mapping"),
        (set_at("step", to="3"), r"manifest\.json: step: got '3', expected an integer"),
        (set_at("step", to=True), "step: got True, expected an integer"),
        (set_at("step", to=-1), "step: got -1, expected at least 0"),
        (set_at("step", to=10**40), "step: got 1000.*, expected at most 9,223,372"),
        (set_at("extra", to=1), "extra: got 1, expected no such key"),
        (set_at("base_files", to={}), "base_files: got {}, expected no such key"),
        (set_at(*AT, "base", to=None), f"tables.{TABLE}.base: got None, expected no such key"),
        (set_at(*AT, "dtype", to="fp4"), f"tables.{TABLE}.dtype: got 'fp4', expected 'fp32', 'bf16'"),
        (set_at(*AT, "dim", to=2000), "dim: got 2000, expected at most 1,024"),
        (set_at(*AT, "fp32_rows", to=38), "fp32_rows': got 38, expected at most 37"),
        (set_at(*AT, "init", "bound", to=float("nan")), "init.bound: got nan, expected"),
        (set_at(*AT, "init", "version", to=2), "init.version: got 2, expected 1"),
        (set_at(*AT, "moments", "sum_of_squares", "initial", to=1e39), "initial: got 1e.39, expected at most 3.4028"),
        (set_at(*AT, "tiles", 0, "file", to="../model.safetensors"), "file: got '../model.safetensors': string should"),
        (set_at(*AT, "tiles", 0, "file", to="/etc/x.safetensors"), "file: got '/etc/x.safetensors': string should"),
        (set_at(*AT, "tiles", 0, "rows", to=[0, 37, 0]), "rows.2: got 0, expected at least 1"),
        (set_at(*AT, "tiles", 0, "rows", to=LARGE), "got .*, expected at least 147,573,952,589,676,41"),
        (
            lambda values: values["tables"][TABLE].update(tiles=values["tables"][TABLE]["tiles"] * 2),
            "got 'embeddings.users/1' of tables-.*, which is another tile's",
        ),
        (set_at(*AT, "tiles", 0, "rows", to=[0, 36, 1]), "do not cover it: .* got a plan for 36 × 8"),
        (an_overlap, "do not cover it: row 3, columns 0 … 8 of table .* got two tiles"),
        (set_at("files", FILE, "block_bytes", to=0), "block_bytes: got 0, expected at least 1"),
        (
            set_at("files", FILE, "block_bytes", to=2**40),
            "block_bytes: got 1099511627776, expected at most 1,073,741,824",
        ),
        (set_at("files", FILE, "bytes", to=2**62), "got 1 hashes, expected"),
        (set_at("files", FILE, "sha256", to=["zz"]), "sha256.0: got 'zz': string should match"),
        (set_at("parts", "dense", to={"$tensor": 3}), "'parts.dense.*tensor': got 3, expected a name"),
        (set_at("parts", "dense", to={"$tuple": 3}), "'parts.dense.*tuple': got 3, expected a list"),
        (set_at("parts", "dense", to={"$code": 3}), "'parts.dense': got key '.code', expected one of"),
        (
            set_at("parts", "dense", to={"$items": [[1, 2], [1, 3]]}),
            "items': got .*, expected a list of pairs",
        ),
    ],
)
def test_a_manifest_that_cannot_be(folder: Path, change: Callable[[Any], None], message: str) -> None:
    values = manifest_of(folder)
    change(values)
    sign(folder, values)
    with pytest.raises(CheckpointError, match=message) as found:
        read_manifest(folder)
    assert str(folder) in str(found.value) and len(str(found.value)) < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than 100 deep"),
        ('{"format": ' + "[" * 200 + "]" * 200 + "}", "nested more than 100 deep"),
        ('{"format": 1, "format": 1}', "it has 'format' twice"),
        ("[]", "it is list, expected an object"),
        ("{}", "'format' is missing"),
        ('{"format": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"a": \xff', "damaged"),
    ],
)
def test_text_that_is_no_manifest(folder: Path, text: str, message: str) -> None:
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedError, match=message):
        read_manifest(folder)


def test_a_manifest_too_large_to_be_one_is_not_read(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 1 << 40)
    with pytest.raises(CheckpointError, match=r"got 1,099,511,627,776 bytes, expected at most 268,435,456"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST])
def test_a_link_out_of_the_checkpoint_is_refused(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "outside")
    (folder / name).symlink_to(folder.parent / "outside")
    with pytest.raises(CheckpointError, match=r"is a link out of its directory, to .*outside"):
        verify_checkpoint(folder)


def test_a_checkpoint_behind_a_link_is_read(folder: Path) -> None:
    (folder.parent / "newest").symlink_to(folder)
    verify_checkpoint(folder.parent / "newest")


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: os.mkfifo(path)], ids=["directory", "pipe"])
def test_what_is_no_file_is_refused(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / FILE).unlink()
    make(folder / FILE)
    with pytest.raises(CheckpointError, match="safetensors is not a file"):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [-37, -8], "data_offsets": [0, 1184]}, r"shape.0: got -37, expected at least 0"),
        ({"dtype": "F32", "shape": [37.0, 8], "data_offsets": [0, 1184]}, r"shape.0: got 37.0, expected an integer"),
        ({"dtype": "F3", "shape": [37, 8], "data_offsets": [0, 1184]}, r"dtype: got 'F3', expected 'F64'"),
        ({"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}, r"has the shape .*, which is too large"),
        (
            {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]},
            r"shape: got .*, expected a length of at most 64",
        ),
        ({"dtype": "F32", "shape": [1], "data_offsets": [2**50, 2**50 + 4]}, "does not match the file"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "got start byte 0, expected 4"),
    ],
)
def test_a_header_that_cannot_be(folder: Path, entry: dict[str, Any], message: str) -> None:
    header, data = header_of(folder / FILE)
    put_header(folder / FILE, {**header, "a": entry}, data)
    sign_files(folder)
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(folder)


def test_bytes_that_no_array_has(folder: Path) -> None:
    header, data = header_of(folder / FILE)
    put_header(folder / FILE, header, data + b"more")
    sign_files(folder)
    with pytest.raises(CheckpointError, match="got 4 bytes after its arrays"):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_at("parts", "sparse", "param_groups", to=3),
            "part 'sparse' does not match .*: saved optimizer: got no",
        ),
        (set_at("parts", "sparse", "param_groups", 0, "lr", to="x"), "has an invalid option: .*lr"),
        (set_at("parts", "sparse", "param_groups", 0, "params", to=[]), "got 0 params in a group, expected 3"),
        (
            set_at("parts", "dense", "param_groups", 0, "lr", to="x"),
            r"'param_groups.0.lr': got 'x', expected a value like",
        ),
        (set_at("parts", "dense", to=[]), "part 'dense' does not match this SGD: TypeError"),
        (set_at("parts", "model", "out.bias", to={"$tensor": "x"}), "has no array 'x', but part 'model'"),
    ],
)
def test_a_state_that_cannot_be(folder: Path, change: Callable[[Any], None], message: str) -> None:
    values = json.loads(json.dumps(manifest_of(folder)))
    change(values)
    sign(folder, values)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder, build(CASES["whole"]))


def test_a_step_that_cannot_be_is_refused_by_a_warm_start_too(folder: Path) -> None:
    header, data = header_of(folder / "sparse.safetensors")
    first = min(entry["data_offsets"][0] for entry in header.values())
    negative = torch.tensor(-3).numpy().tobytes()
    put_header(folder / "sparse.safetensors", header, data[:first] + negative + data[first + 8 :])
    sign_files(folder)
    for read in (load_checkpoint, init_from):
        with pytest.raises(CheckpointError, match=r"saved step: got tensor\(-3\), expected a tensor of one number"):
            read(folder, build(CASES["whole"]))


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ('{"token": "now", "files": 3}', r"rank-1.json: files: got 3, expected a mapping"),
        ('{"token": "now", "files": {"../x": {}}}', r"files\.\.\./x: got '\.\./x': string should match"),
        ('{"token": "now", "tiles": {"t": [{"rows": [0, 1]}]}}', r"tiles.t.0.rows.2 is missing"),
        ("{", r"rank-1.json is damaged"),
    ],
)
def test_the_report_of_a_rank_that_cannot_be(tmp_path: Path, report: str, message: str) -> None:
    place = directory(tmp_path)
    (tmp_path / "rank-1.json").write_text(report)
    saving = Saving(place, "now", Manifest(), [], {}, Rank(0, 2), None, None)  # type: ignore[arg-type]
    saving.run()
    with pytest.raises(CheckpointError, match=message):
        raise saving._error or AssertionError


def test_a_manifest_too_large_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.checkpoint.manifest.MOST_BYTES", 300)
    with pytest.raises(CheckpointError, match=r"was not saved: manifest: got .* bytes, expected at most 300"):
        save_checkpoint(tmp_path / "c", {"random": RandomState()})
    assert not (tmp_path / "c").exists()
