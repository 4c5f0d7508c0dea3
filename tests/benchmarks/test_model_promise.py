"""Protects that the table of hashes has those of all models and plans, and that a plan that changes one is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import model_promise
from benchmarks.model_promise import BEGIN, END, differing, section, table
from tests.train.test_models import OF_MODELS


def test_a_hash_that_a_plan_changes_is_seen() -> None:
    found = {"1": {"DLRM": {"a": "1" * 64, "b": "1" * 64}}, "2": {"DLRM": {"a": "2" * 64, "b": "3" * 64}}}
    assert table(found)[2:] == ["| DLRM | `1111111111111111` | **2 hashes** |"]
    assert differing(found) == ["DLRM on 2 ranks: a 2222222222222222, b 3333333333333333"]
    assert section(found, "here").startswith(BEGIN)


def test_one_model_on_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    model_promise.main(["--models", "HSTU", "--ranks", "1", "--json", str(out), "--page", str(page)])
    (hashes,) = json.loads(out.read_text())["sha256"]["1"].values()
    assert list(hashes) == list(model_promise.SETTINGS[1])
    (digest,) = set(hashes.values())
    assert f"| HSTU | `{digest[:16]}` |" in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")
    assert "old" not in page.read_text()
    assert digest[:16] in capsys.readouterr().out


def test_the_page_has_all_models() -> None:
    """Made anew where one is added."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0]
    assert "hashes**" not in shown
    for of in OF_MODELS:
        assert f"| {of.__name__.removeprefix('Test')} | `" in shown
