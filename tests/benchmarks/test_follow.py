"""Protects that the benchmark of serving beside training sees failed requests, mixed versions and late ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import follow
from benchmarks.planted import LABELS, UNIT, steps_of


def answer(version: int, *steps: int) -> bytes:
    """An answer of one row by parts of these steps."""
    scores = [0.5, *(1 / (1 + math.exp(-step * UNIT)) for step in steps)]
    return json.dumps({"scores": [dict(zip(LABELS, scores, strict=True))], "version": str(version)}).encode()


def test_answers_of_more_than_one_version_are_counted() -> None:
    asked = follow.Asked()
    for step in (1, 17, 900_000):
        asked.take(answer(step, step, step, step))
        assert steps_of(json.loads(answer(step, step, step, step))["scores"][0]) == {step}
    assert (asked.mixed, sorted(asked.first)) == (0, [1, 17, 900_000])
    for at in range(3):
        steps = [17, 17, 17]
        steps[at] = 18
        asked.take(answer(17, *steps))
    asked.take(answer(18, 17, 17, 17))
    assert asked.mixed == 4
    with pytest.raises(OSError, match="without scores"):
        asked.take(b"")


def test_staleness_counts_until_a_version_or_a_later_one_answers() -> None:
    published = {10: 100.0, 20: 110.0, 30: 120.0, 40: 130.0}
    assert follow.stale(published, {"10": 103.0, "20": 111.0, "40": 133.0}) == [1.0, 13.0, 3.0]


@pytest.mark.full
def test_a_tiny_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    always = {name: curve._replace(share=1e9, least=1e9) for name, curve in follow.USED.items()}
    monkeypatch.setattr(follow, "USED", always)
    file = tmp_path / "follow.json"
    options = ["--every_s", "1", "--rate", "10", "--rows", "2000", "--memory_gib", "0.0005"]
    follow.main(["--minutes", "0.2", *options, "--json", str(file)])
    found = json.loads(file.read_text())
    assert not any(found[name] for name in follow.WRONG)
    assert found["requests"] > 0 and found["applied"] > 0 and found["versions"] > 1
    assert found["staleness_s"]["worst"] >= found["staleness_s"]["median"] > 0
    assert "answers of mixed versions: 0" in capsys.readouterr().out
