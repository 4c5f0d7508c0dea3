"""Protects: the commands of the pages run from end to end, and their results stay those that were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.journeys.run import HERE, JOURNEYS, differences, run_journey


@pytest.mark.parametrize("name", JOURNEYS)
def test_commands_leave_what_was_recorded(name: str, tmp_path: Path) -> None:
    recorded = json.loads((HERE / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
    found = json.loads(json.dumps(run_journey(name, tmp_path), default=str))
    assert len(found) == len(recorded) == len(JOURNEYS[name])
    for step, expected in zip(found, recorded, strict=True):
        if "left out" not in step:
            assert not (lines := differences(step, expected)), f"{step.get('run')}:\n" + "\n".join(lines)
