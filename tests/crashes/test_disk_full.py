"""A command whose disk is full says so, publishes nothing that cannot be read, and goes on when there is room."""

import pytest

from tests.crashes.campaign import Campaign
from tests.crashes.wants import KINDS, Want
from tests.crashes.workloads import WORKLOADS
from tests.matrix import full

BY_NAME = {workload.name: workload for workload in WORKLOADS}
IN_SHORT = ("tensors", "manifest", "metrics")


@pytest.mark.parametrize("kind", [kind if kind in IN_SHORT else full(kind) for kind in KINDS])
def test_a_full_disk_is_said_and_nothing_is_lost(campaign: Campaign, kind: str) -> None:
    said = campaign.try_want(BY_NAME["tiers" if kind == "rows" else "chain"], Want(kind, 3 if kind != "text" else 1))
    assert campaign.outcome.lost == []
    assert said is not None
    assert "No space left on device" in said or kind == "rows"
    assert len(said.splitlines()) < 20
