"""What tests of training over several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.train.launcher import Launcher


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What one process trains to compare with takes no core from the ranks, which have one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts ranks of ``hotbed train``, for all tests of one process."""
    made = Launcher()
    yield made
    made.close()
