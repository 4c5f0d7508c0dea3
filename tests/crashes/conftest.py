from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crashes.campaign import Campaign, Commands
from tests.crashes.workloads import make_data


@pytest.fixture(name="commands", scope="module")
def _commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(make_data(tmp_path_factory.mktemp("crashes"))) as commands:
        yield commands


@pytest.fixture
def campaign(commands: Commands, tmp_path: Path) -> Campaign:
    return Campaign(commands, tmp_path, seed=11)
