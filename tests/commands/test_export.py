"""Protects that `hotbed checkpoint convert --to torch` makes of a run what runs where hotbed is not installed."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbed.checkpoint import find_checkpoint, load_checkpoint, read_manifest, save_checkpoint
from hotbed.config import Recipe
from hotbed.data import Loader
from hotbed.errors import CheckpointError
from hotbed.train.build import build_model, open_source
from hotbed.train.export_single import export_single
from tests.commands.cases import train

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
    with pytest.raises(CheckpointError, match="out exists already and holds inputs"):
        export_single(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"memory://out is no local directory; torch writes model\.pt2 to"):
        export_single(run, "memory://out")


def _recipe_of(run: Path) -> Any:
    return read_manifest(find_checkpoint(run)).recipe


def _long(ids: Mapping[str, Any]) -> dict[str, Any]:
    return {name: of.long() for name, of in ids.items()}


def test_a_checkpoint_without_a_recipe(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", {"model": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match="holds no recipe, so its model cannot be built; use load_checkpoint"):
        export_single(tmp_path / "c", tmp_path / "out")
