"""Protects: memory for saving and loading does not grow with the number of trained rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.checkpoint import convert, tensor_files
from hotbed.checkpoint import saved_tables as tables
from hotbed.checkpoint.convert import content_hashes
from hotbed.checkpoint.tensor_files import TensorFiles

JOB = """
import json, sys
from pathlib import Path
import torch
import hotbed as hb

folder, count = Path(sys.argv[1]), int(sys.argv[2])


def peak_mib(action):
    Path("/proc/self/clear_refs").write_text("5")
    status = lambda key: int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) / 1024
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def made():
    with torch.device("meta"):
        model = torch.nn.Sequential(hb.EmbeddingCollection([hb.Table("t", 1 << 40, 4)], [hb.Feature("f", "t")]))
    cut = hb.Cut(tier="disk", cache_rows=10_000)
    model = hb.distribute(model, hb.make_plan([hb.Table("t", 1 << 40, 4)], 1, cut))
    optimizer = hb.optim.RowWiseAdagrad(model, lr=0.1)
    (collection,) = (m for m in model.modules() if isinstance(m, hb.EmbeddingCollection))
    (tile,) = collection.local_tiles("t")
    return {"model": model, "sparse": optimizer}, tile.arena.store


def save_others(parts, store):
    saving = hb.save_checkpoint(folder / "background", parts, background=True, track=True)
    store.write(torch.arange(1000) * 97, torch.zeros(1000, 4))
    saving.wait()
    for first in range(0, count // 4, 1 << 14):
        slots = torch.arange(first, first + (1 << 14)) * 97
        store.write(slots, torch.ones(len(slots), 4))
    hb.save_checkpoint(folder / "difference", parts, background=True, base=saving).wait()


def write(store, first, last):
    for start in range(first, last, 1 << 14):
        store.write(torch.arange(start, start + (1 << 14)) * 97, torch.ones(1 << 14, 4))


parts, store = made()
write(store, 0, 1 << 14)
hb.save_checkpoint(folder / "first", parts)  # compiles kernels
hb.load_checkpoint(folder / "first", parts)
found = {"train": peak_mib(lambda: write(store, 0, count))}
found["save"] = peak_mib(lambda: hb.save_checkpoint(folder / "full", parts))
found["background and difference"] = peak_mib(lambda: save_others(parts, store))
print(json.dumps(found))
"""


def measured(folder: Path, count: int) -> dict[str, float]:
    """Peaks of memory in MiB, over what the process took before."""
    job = [sys.executable, "-c", JOB, str(folder / str(count)), str(count)]
    run = subprocess.run(job, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_for_saving_is_bounded(tmp_path: Path) -> None:
    small, large = measured(tmp_path, 1 << 19), measured(tmp_path, 1 << 21)
    for what in ("save", "background and difference"):  # a busy disk lets 32 MiB of rows wait
        assert large[what] < 200, (what, small, large)  # 459 before memory was bounded
        assert large[what] - small[what] < 100, (what, small, large)


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_keys_and_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Any) -> None:
    monkeypatch.setattr(tensor_files, "KEYS_AT_ONCE", 16)
    monkeypatch.setattr(tables, "CHUNK_BYTES", 640)
    monkeypatch.setattr(convert, "MEMORY_BYTES", 640)
    read: dict[str, int] = {}
    read_rows = TensorFiles.read_rows

    def noted(self: TensorFiles, file: str, key: str, rows: range) -> torch.Tensor:
        read[key.split("/")[-1]] = max(read.get(key.split("/")[-1], 0), len(rows))
        return read_rows(self, file, key, rows)

    monkeypatch.setattr(TensorFiles, "read_rows", noted)
    table = hb.Table("t", 3000, 4)

    def made(tier: Any) -> dict[str, Any]:
        model = torch.nn.Sequential(hb.EmbeddingCollection([table], [hb.Feature("f", "t")], device="meta"))
        model = hb.distribute(model, hb.make_plan([table], 1, hb.Cut(tier=tier)), device="cpu")
        return {"model": model, "sparse": hb.optim.Adam(model, lr=0.1)}

    parts = made("disk")
    ids = torch.arange(1, 3000, 3).view(-1, 1)
    parts["model"](hb.Jagged.from_dict({"f": ids}))["f"].square().sum().backward()
    parts["sparse"].step()
    hb.save_checkpoint(tmp_path / "c", parts)
    other = made(tier)
    hb.load_checkpoint(tmp_path / "c", other)
    convert.convert(tmp_path / "c", tmp_path / "d", compact=True)
    assert read["keys"] <= 16 and read["weight"] <= 160, read
    for one, same in zip(parts.values(), other.values(), strict=True):
        assert str(one.state_dict()) == str(same.state_dict())
    assert content_hashes(tmp_path / "c") == content_hashes(tmp_path / "d")
