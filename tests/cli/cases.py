"""What tests of commands share: running one, and reading what it said."""

import json
from pathlib import Path
from typing import Any

import pytest

from hotbed.cli.main import main

Output = pytest.CaptureFixture[str]


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
