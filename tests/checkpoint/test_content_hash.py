"""Protects: hashes of checkpoints are equal for equal bits, however they are stored, and differ for one other bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.checkpoint import convert, directory, read_manifest, save_checkpoint
from hotbed.checkpoint import convert as convert_module
from hotbed.checkpoint.convert import content_hashes
from hotbed.checkpoint.differential import open_with_bases
from hotbed.cli.main import main

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


@pytest.mark.parametrize("trained", ["nothing", "narrow rows"])
def test_rows_of_one_kind_are_hashed_alike_in_every_tier(tmp_path: Path, trained: str) -> None:
    found: list[dict[str, str]] = []
    for tier in ("device", "disk"):
        model, optimizer = model_of(tier)
        if trained == "narrow rows":
            ids = {"user": torch.tensor([[50, 60]]), "item": torch.tensor([[1, 2]])}
            model(hb.Jagged.from_dict(ids)).concatenate().sum().backward()
            optimizer.step()
        save_checkpoint(tmp_path / tier, {"model": model, "sparse": optimizer})
        found.append(content_hashes(tmp_path / tier))
    assert found[0] == found[1]


def test_tables_of_other_initial_values_are_other_tables(tmp_path: Path) -> None:
    found: set[str] = set()
    for number, seed in enumerate((1, 2, 1)):
        model = hb.EmbeddingCollection([hb.Table("t", 50, 4, init_seed=seed)], [hb.Feature("f", "t")])
        save_checkpoint(tmp_path / str(number), {"model": model})
        found.add(content_hashes(tmp_path / str(number))["t"])
    assert len(found) == 2


def test_few_rows_of_a_huge_table_are_hashed_at_once(tmp_path: Path) -> None:
    tables = [hb.Table("t", 1 << 40, 8)]
    model = torch.nn.Sequential(hb.EmbeddingCollection(tables, [hb.Feature("f", "t")], device="meta"))
    model = hb.distribute(model, hb.make_plan(tables, 1, hb.Cut(tier="disk")), device="cpu")
    optimizer = hb.optim.SGD(model, lr=0.1)
    ids = torch.arange(2000).view(-1, 1) * (1 << 29)
    model(hb.Jagged.from_dict({"f": ids}))["f"].sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer})
    manifest = read_manifest(tmp_path / "c")
    with open_with_bases(directory(tmp_path / "c"), manifest) as files:
        assert len(list(convert._windows(manifest.tables["0.t"], files))) == 1
    assert len(content_hashes(tmp_path / "c")["0.t"]) == 64


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
