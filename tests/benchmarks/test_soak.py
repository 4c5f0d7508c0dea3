"""The soak run finds what rises and what does not, and runs from log to curves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import CURVES, draw, flatness, report

Record = dict[str, float]


def hour(busy: float = 1.0, **changed: list[float]) -> list[Record]:
    """A sample every ten seconds, all curves flat but some; ``busy``: how many times as long the fixed work took."""
    work = {"reference_s": 0.1, "reference_clock_s": 0.1 * busy}
    return [
        {"at": 10.0 * i, **work, **dict.fromkeys(CURVES, 1e9), **{name: values[i] for name, values in changed.items()}}
        for i in range(360)
    ]


def test_a_saw_tooth_with_noise_is_flat_and_a_slow_leak_is_not() -> None:
    noise = random.Random(1)
    teeth = [1e9 + 3e8 * (i % 30) / 30 + noise.uniform(-1e7, 1e7) for i in range(360)]
    flat = flatness(hour(rss=teeth))
    assert all(each["flat"] for each in flat.values())
    leak = [tooth * (1 + 0.1 * i / 360) for i, tooth in enumerate(teeth)]
    flat = flatness(hour(rss=leak))
    assert not flat["rss"]["flat"] and flat["anonymous"]["flat"]
    assert flat["rss"]["per_hour"] > 80  # MiB


def test_what_happens_while_caches_fill_does_not_count() -> None:
    assert flatness(hour(threads=[min(i, 59) for i in range(360)]))["threads"]["flat"]
    assert not flatness(hour(open_files=[5.0 + i // 90 for i in range(360)]))["open_files"]["flat"]


def test_a_run_that_becomes_slower_is_not_flat_and_one_that_becomes_faster_is() -> None:
    falling = [1000.0 - i / 2 for i in range(360)]
    assert not flatness(hour(samples_per_work=falling))["samples_per_work"]["flat"]
    assert flatness(hour(samples_per_work=falling[::-1]))["samples_per_work"]["flat"]


@pytest.mark.parametrize("rate", ["samples_per_s", "samples_per_cpu_s"])
def test_rates_of_a_busy_machine_are_not_judged(rate: str) -> None:
    falling = {rate: [1000.0 - i / 2 for i in range(360)]}
    assert flatness(hour(1.0, **falling))[rate]["flat"] is False
    flat = flatness(hour(1.5, **falling))
    assert flat[rate]["flat"] is None
    assert flat["samples_per_work"]["flat"]
    (line,) = [line for line in report(flat).splitlines() if line.startswith(f"{CURVES[rate].title}  ")]
    assert line.endswith("not judged: the machine was busy")


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = hour()
    draw({"samples": samples, "flat": flatness(samples)}, tmp_path / "soak.svg")
    assert "<svg" in (tmp_path / "soak.svg").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always = {name: curve._replace(share=1e9, least=1e9) for name, curve in CURVES.items()}
    monkeypatch.setattr(soak, "CURVES", always)
    soak.main(["--minutes", "0.1", "--every_s", "0.5", "--samples", "6000", "--json", str(tmp_path / "soak.json")])
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["whole"] == 3
    assert found["checkpoints"] >= 3
    assert len(found["samples"]) > 3
    assert all(sample["rss"] > 1e8 and sample["threads"] > 1 and sample["disk"] > 1e5 for sample in found["samples"])
