"""Protects `hotbed demo --promise`: every plan, a run that is killed, and a number of ranks that cannot be."""

import json
from pathlib import Path

import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused


@pytest.mark.full
def test_one_process_leaves_the_same_bits_under_every_plan(tmp_path: Path) -> None:
    """Two processes: ``tests/journeys/test_promise_hash.py``."""
    file = tmp_path / "promise.json"
    options = ["--ranks", "1", "--processes", "1", "2", "3", "--steps", "4"]
    options += ["--out", str(tmp_path / "runs"), "--json", str(file)]
    assert main(["demo", "--promise", *options]) == 0
    result = json.loads(file.read_text())
    hashes = {plan["sha256"] for plan in result["plans"]} | {result["resumed"]["sha256"]}
    assert len(hashes) == 1
    by_count = {found["processes"]: found["sha256"] for found in result["processes"]}
    assert list(by_count) == [1, 2, 3] and {*by_count.values(), result["continued"]["sha256"]} == {by_count[1]}
    assert result["equal"] is True
    assert Path(result["run"]).parent == tmp_path / "runs" / "promise"


def test_a_number_that_cannot_be_is_refused(tmp_path: Path, capsys: Output) -> None:
    argv = ["demo", "--promise", "--ranks", "0", "--steps", "9", "--out", str(tmp_path)]
    assert "got 0, 1 and 9, expected at least 1, 1 and 4" in refused(argv, capsys)
    assert not list(tmp_path.iterdir())
