"""Protects: hashes of checkpoints are equal for equal bits, however they are stored, and differ for one other bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.checkpoint import convert as convert_module
from hotbed.checkpoint import save_checkpoint
from hotbed.checkpoint.content_hash import content_hashes
from hotbed.commands.main import main

TABLES = [hb.Table("user", 300, 16, dtype="bf16", fp32_rows=20, init_seed=1), hb.Table("item", 90, 16, init_seed=2)]
FEATURES = [hb.Feature("user", "user"), hb.Feature("item", "item")]


def model_of(tier: Any) -> tuple[Any, Any]:
    model = torch.nn.Sequential(hb.EmbeddingCollection(TABLES, FEATURES, device="meta"))
    model = hb.distribute(model, hb.make_plan(TABLES, 1, hb.Cut(tier=tier)), device="cpu")
    return model, hb.optim.RowWiseAdagrad(model, lr=0.1)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        ids = {f.name: torch.randint(0, 80, (8, 2), generator=draw) for f in FEATURES}
        model(hb.Jagged.from_dict(ids)).concatenate().square().sum().backward()
        optimizer.step()


def test_hashes_are_of_values_not_of_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, dict[str, str]] = {}
    for tier in ("device", "host", "disk"):
        model, optimizer = model_of(tier)
        parts = {"model": model, "sparse": optimizer}
        train(model, optimizer, range(3))
        base = save_checkpoint(tmp_path / f"{tier}-base", parts, track=True, background=True)
        base.wait()
        train(model, optimizer, range(3, 4))
        save_checkpoint(tmp_path / f"{tier}-difference", parts, base=base)
        save_checkpoint(tmp_path / f"{tier}-full", parts)
        for kind in ("difference", "full"):
            found[f"{tier}-{kind}"] = content_hashes(tmp_path / f"{tier}-{kind}")
    for compact in (True, False):
        convert_module.convert(tmp_path / "device-full", tmp_path / f"converted-{compact}", compact=compact)
        found[f"converted-{compact}"] = content_hashes(tmp_path / f"converted-{compact}")
    monkeypatch.setattr(convert_module, "MEMORY_BYTES", 700)  # other windows
    found["in pieces"] = content_hashes(tmp_path / "disk-difference")
    found["all rows in pieces"] = content_hashes(tmp_path / "device-full")
    assert len({json.dumps(hashes, sort_keys=True) for hashes in found.values()}) == 1, found
    assert content_hashes(tmp_path / "device-base") != found["device-full"]


def test_inspect_shows_which_table_differs(tmp_path: Path) -> None:
    model, optimizer = model_of("device")
    parts = {"model": model, "sparse": optimizer}
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "a", parts)
    (collection,) = (m for m in model.modules() if isinstance(m, hb.EmbeddingCollection))
    rows = collection.weight("item").clone()
    rows[5, 3] = rows[5, 3].view(torch.int32).add(1).view(torch.float32)
    collection.set_weight("item", rows)
    save_checkpoint(tmp_path / "b", parts)
    shown: list[dict[str, Any]] = []
    for name in "ab":
        file = tmp_path / f"{name}.json"
        assert main(["checkpoint", "inspect", str(tmp_path / name), "--hash", "--json", str(file)]) == 0
        shown.append(json.loads(file.read_text()))
    hashes = [{entry["of"]: entry["sha256"] for entry in of["hashes"]} for of in shown]
    assert {name for name in hashes[0] if hashes[0][name] != hashes[1][name]} == {"0.item"}
    assert shown[0]["sha256"] != shown[1]["sha256"]
