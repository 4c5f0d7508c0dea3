"""What tests of commands share: running one, and reading what it said."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.cli.main import main

Output = pytest.CaptureFixture[str]


def train(recipe: Path, *args: str) -> tuple[int, dict[str, Any], Path]:
    """Exit status, summary and directory of a run."""
    file = recipe.parent / "summary.json"
    status = main(["train", str(recipe), "--out", str(recipe.parent / "runs"), "--json", str(file), *args])
    summary = json.loads(file.read_text()) if file.exists() else {}
    return status, summary, Path(summary.get("run", "."))


def small_recipe(
    path: object, schema: dict[str, Any] | None = None, *, name: str = "small", dim: int = 8, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A DLRM that trains in a moment, on a prepared dataset, or on Parquet files that have a schema.

    Keys of ``sections`` are added to a section of the recipe; keys of ``source`` are arguments of the source.
    """
    source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": schema, **sections.pop("source", {})}}
    values: dict[str, Any] = {
        "name": name,
        "data": {"path": str(path), "dim": dim} | ({"source": source} if schema else {}),
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, dim], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 128, "device": "cpu"},
    }
    for section, changed in sections.items():
        values[section] = values.get(section, {}) | changed
    return values


def write_yaml(file: Path, values: Any) -> Path:
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def refused(argv: list[str], capsys: Output) -> str:
    """The one message of a command that fails."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


def inspected(path: Path, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "inspected.json"
    assert main(["inspect", str(path), "--json", str(file)]) == 0
    return json.loads(file.read_text())
