"""The benchmark of loaders gives all samples to all of them; its figures mean nothing in so short a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import loader, loader_rates, readers
from benchmarks.loader_rates import TORCHREC, rate, sides, write_data

SAMPLES = 1500
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loader")
    write_data(folder, SAMPLES)
    return folder


def test_each_loader_gives_all_samples(data: Path) -> None:
    found = sides(data, 400, 1)
    here = {name: step for name, step in found.items() if "1 workers" not in name}
    assert len(here) == 12 and TORCHREC in here
    for name, step in here.items():
        counts = list(step())
        assert sum(counts) == SAMPLES, name
        assert "preadv" in name or max(counts) == 400


@pytest.mark.full
def test_workers_of_pytorch(data: Path) -> None:
    assert sum(sides(data, 400, 1)["DataLoader, 1 workers, whole batches, shuffled"]()) == SAMPLES


def test_a_rate_is_of_epochs_that_follow_each_other() -> None:
    begun: list[int] = []
    assert rate(lambda: begun.append(1) or iter([5, 5]), 0.001) > 0
    assert len(begun) > 2  # the first for warmth


def test_all_is_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader_rates, "rate", lambda step, seconds: 2000.0)
    monkeypatch.setattr(loader, "train", lambda folder, recipes, options=(): [WAITS for _ in recipes])
    monkeypatch.setattr(loader, "make_recipes", lambda folder, samples: {"demo": folder, "lookups only": folder})
    monkeypatch.setattr(readers, "measure", lambda *_: 7.0)
    out = tmp_path / "found.json"
    loader.main(["--only", "rates", "stalls", "--samples", "10000", "--rounds", "2", "--json", str(out)])
    loader.main(["--only", "ranks", "--samples", "10000", "--rounds", "2", "--json", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert len(found["rates"]) == 2 * 14
    assert [r["model"] for r in found["stalls"]] == ["demo", "lookups only"] * 2
    assert {r["reader"] for r in found["ranks"]} == {"each", "first", "owners"}
    said = capsys.readouterr().out
    assert "2,000  (100%)" in said and "12.5%" in said and "owners" in said


WAITS = {"stall_share": 0.125, "samples_per_s": 10.0, "name": "x"}


@pytest.mark.full
def test_two_trainers_wait_for_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that is lookups only is trained by the same commands."""
    pytest.importorskip("distributed", reason="needs hotbed[dask]")
    monkeypatch.setattr(loader, "WORKERS", 1)
    found = loader.pool(tmp_path, 3000, 1)
    assert [(r["model"], r["readers"], r["trainer"]) for r in found] == [
        (model, name, trainer)
        for model in ("demo", "lookups only")
        for name in ("threads", "pool")
        for trainer in (0, 1)
    ]
    assert all(0 <= r["stall_share"] <= 1 and r["samples_per_s"] > 0 for r in found)
