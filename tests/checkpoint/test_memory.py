"""Protects: memory for saving and loading does not grow with the number of trained rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import json, shutil, sys
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
found = {}
if (folder / "full").exists():
    found["load"] = peak_mib(lambda: hb.load_checkpoint(folder / "full", parts))
else:
    found["train"] = peak_mib(lambda: write(store, 0, count))
    found["save"] = peak_mib(lambda: hb.save_checkpoint(folder / "full", parts))
    found["background and difference"] = peak_mib(lambda: save_others(parts, store))
shutil.rmtree(folder / "first")
print(json.dumps(found))
"""


def measured(folder: Path, count: int) -> dict[str, float]:
    """Peaks of memory in MiB, over what the process took before."""
    job = [sys.executable, "-c", JOB, str(folder / str(count)), str(count)]
    found: dict[str, float] = {}
    for _ in ("train and save", "load"):
        run = subprocess.run(job, capture_output=True, text=True, check=True, timeout=600)
        found |= json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_for_saving_and_loading_is_bounded(tmp_path: Path) -> None:
    small, large = measured(tmp_path, 1 << 19), measured(tmp_path, 1 << 21)
    for what in ("save", "background and difference"):
        assert large[what] < 128, (what, small, large)
        assert large[what] - small[what] < 60, (what, small, large)  # it was 130 before memory was bounded
    assert large["load"] - large["train"] < 128, (small, large)  # the index of rows and a cache are in both
