"""Commands that are killed at a counted operation of a phase go on, and end to the bit as those that are not."""

import pytest

from tests.crashes.campaign import Campaign
from tests.crashes.workloads import WORKLOADS, Workload
from tests.matrix import full

BY_NAME = {workload.name: workload for workload in WORKLOADS}
IN_SHORT = ("chain", "go on", "prepare")
"""Run always, a point each; `tests/train/test_kills.py` has training and saving."""


@pytest.mark.parametrize(
    ("workload", "points"),
    [(BY_NAME[name], 1) for name in IN_SHORT] + [full(workload, 3) for workload in WORKLOADS],
    ids=lambda value: value.slug if isinstance(value, Workload) else str(value),
)
def test_commands_that_are_killed_end_as_those_that_are_not(
    campaign: Campaign, workload: Workload, points: int
) -> None:
    for phase in workload.phases:
        died = 0
        while died < points:
            died += campaign.try_point(workload, phase)
    assert campaign.outcome.lost == []
    assert campaign.outcome.died.keys() == set(workload.phases)
