"""The benchmark of histories runs, and its sides agree; its figures mean nothing at these sizes."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import sequences


def test_every_side_is_reported(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--samples", "7", "--length", "3", "--dim", "4", "--rows", "9"]
    sequences.main([*sizes, "--histories", "1", "2", "--rounds", "1", "--json", str(out)])
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [r["histories"] for r in results] == [1, 2]
    assert all(len(r[what][side]) == 1 for r in results for what in ("lookup", "step") for side in sequences.SIDES)


def test_all_sides_look_up_the_same_places() -> None:
    bags = {"h": sequences._bags(5, 4, 9, 0)}
    plain, _ = sequences._plain(bags, 4, 2, 9)
    padded, _ = sequences._ours(bags, 4, 2, 9, True)
    assert torch.equal(plain()["h"].any(-1), padded()["h"].any(-1))
