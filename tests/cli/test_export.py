"""Protects that `hotbed checkpoint convert --to torch` makes of a run what runs where hotbed is not installed."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.checkpoint import find_checkpoint, load_checkpoint, read_manifest
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.data import Loader
from hotbed.errors import CheckpointError, DataError
from hotbed.train.runs.build import build_model, open_source
from hotbed.train.runs.model_export import export_single
from tests.cli.cases import train

SCRIPT = """
import sys, torch
sys.modules["hotbed"] = None  # as if it were not installed
dense, ids, expected = torch.load(sys.argv[2])
logits = torch.export.load(sys.argv[1]).module()(dense, ids)
torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
"""


def test_a_run_becomes_a_file_that_needs_torch_only(tmp_path: Path, recipe: Path, prepared: Path) -> None:
    status, _, run = train(recipe, "--train.checkpoint", "last")
    assert status == 0
    found = export_single(run, tmp_path / "out")
    assert found == json.loads((tmp_path / "out" / "inputs.json").read_text())
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["inputs.json", "model.pt2"]
    assert len(found["dense"]) == 13
    assert len(found["ids"]) == 26
    source = open_source(Recipe.from_dict(_recipe_of(run)).data)
    model = build_model(Recipe.from_dict(_recipe_of(run)), source, torch.device("cpu")).eval()
    load_checkpoint(find_checkpoint(run), {"model": model})
    batch = next(iter(Loader(source, "test", 50)))
    with torch.no_grad():
        torch.save((batch.dense, _long(batch.sparse.to_dict()), model(batch)), tmp_path / "expected.pt")
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out" / "model.pt2"), str(tmp_path / "expected.pt")], check=True
    )
    with pytest.raises(CheckpointError, match="out exists already and contains inputs"):
        export_single(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"memory://out is not local"):
        export_single(run, "memory://out")


def test_a_run_is_exported_without_its_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    rows = {
        "user": draw.integers(0, 50, 2000),
        "word": draw.choice(["a", "b", "c"], 2000),
        "x": draw.normal(size=2000),
        "click": draw.integers(0, 2, 2000),
    }
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table(rows), data / "part.parquet")
    assert main(["init", str(data), "--out", str(tmp_path / "r.yaml")]) == 0
    assert main(["train", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "runs"), "--train.epochs", "1"]) == 0
    (run,) = (tmp_path / "runs").glob("*/*")
    assert main(["export", str(run), str(tmp_path / "with")]) == 0
    data.rename(tmp_path / "elsewhere")
    assert main(["export", str(run), str(tmp_path / "without")]) == 0
    for file in (f for f in (tmp_path / "with").rglob("*") if f.is_file() and f.name != "manifest.json"):
        other = tmp_path / "without" / file.relative_to(tmp_path / "with")
        if file.suffix == ".pt2":
            ours, theirs = (torch.export.load(f).state_dict for f in (file, other))
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        else:
            assert file.read_bytes() == other.read_bytes(), file
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "torch"), "--to", "torch"]) == 0
    assert {"inputs.json", "model.pt2"} == {f.name for f in (tmp_path / "torch").iterdir()}
    inputs = json.loads((tmp_path / "torch" / "inputs.json").read_text())
    assert {name: of["values"] for name, of in inputs["ids"].items()} == {"user": "integers", "word": "text"}


def test_prepared_data_that_are_gone_are_named(tmp_path: Path, recipe: Path, prepared: Path) -> None:
    status, _, run = train(recipe, "--train.checkpoint", "last")
    assert status == 0
    prepared.rename(prepared.with_name("moved"))
    try:
        with pytest.raises(DataError, match=f"{prepared}.*--data"):
            export_single(run, tmp_path / "out")
    finally:
        prepared.with_name("moved").rename(prepared)


def _recipe_of(run: Path) -> Any:
    return read_manifest(find_checkpoint(run)).recipe


def _long(ids: Mapping[str, Any]) -> dict[str, Any]:
    return {name: of.long() for name, of in ids.items()}
