"""Protects: an exported model and changes that were recorded are read unchanged, and score as they did."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.fixtures.make import FOLDER, PUBLISHED
from tests.serve.processes import running

ROWS = [
    {"user": 17, "item": 3, "price": 12.5},
    {"user": 0, "item": 49, "price": 80.0},
    {"user": 5, "item": 1, "price": None},
]
SCORES = [0.3748097058146831, 0.0001608309594475121, 0.43910571548271377]


def test_a_recorded_model_and_its_changes_score_as_they_did(tmp_path: Path) -> None:
    with tarfile.open(FOLDER / PUBLISHED) as archive:
        archive.extractall(tmp_path, filter="data")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "change-000000000004",
        "change-000000000006",
        "model-000000000002",
    ]
    with running(tmp_path, "--port", "0") as server:
        answer = server.answer_of(6, ROWS)
    assert answer["version"] == "6"
    assert answer["scores"] == pytest.approx(SCORES, rel=1e-5)
