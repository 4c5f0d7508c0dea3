"""A small prepared log, a recipe for it, and what the tests of the command line share.

A test module imports the fixtures by name; pytest knows them by the names without ``_fixture``.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.cli import main
from hotbed.data import write_synthetic_log

Output = pytest.CaptureFixture[str]


@pytest.fixture(name="log", scope="session")
def log_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    write_synthetic_log(path, 3000, seed=1)
    return path


@pytest.fixture(name="prepared", scope="session")
def prepared_fixture(log: Path) -> Path:
    out = log.parent / "prepared"
    argv = ["prepare", str(log), str(out), "--threshold", "5", "--valid_fraction", "0.1", "--json", str(out) + ".json"]
    assert main(argv) == 0
    return out


@pytest.fixture(name="recipe")
def recipe_fixture(tmp_path: Path, prepared: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "data": {"path": str(prepared), "dim": 8},
                "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
                "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
                "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
                "train": {"batch_size": 128, "device": "cpu"},
            }
        )
    )
    return file


@pytest.fixture(name="wide_output", autouse=True)
def wide_output_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def train(recipe: Path, *args: str) -> tuple[int, dict[str, Any], Path]:
    """Exit status, summary and directory of a run."""
    file = recipe.parent / "summary.json"
    status = main(["train", str(recipe), "--out", str(recipe.parent / "runs"), "--json", str(file), *args])
    summary = json.loads(file.read_text()) if file.exists() else {}
    return status, summary, Path(summary.get("run", "."))


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
