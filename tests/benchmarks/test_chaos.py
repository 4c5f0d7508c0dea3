"""Protects: a campaign's file keeps what was lost once, also when it was tried again."""

from __future__ import annotations

import json

from benchmarks.chaos import text_of
from tests.crashes.campaign import Outcome


def test_lost_points_that_were_tried_again_are_kept() -> None:
    lost = {"workload": "chain", "phase": "saving", "index": 3, "operation": "write", "lost": "does not go on"}
    mended = {**lost, "lost": None}
    for before in ([], [lost], [lost, lost]):
        found = json.loads(text_of(7, [{"points": 1}], Outcome([mended]), before))
        assert found["retried"] == before
        assert found["points"] == [mended]
        assert (found["seed"], found["all"], found["lost"]) == (7, 1, 0)
