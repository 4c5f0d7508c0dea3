"""Run tests under the race checker: ``pytest -p tests.gpu.race_plugin -k triton tests/ops``."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from .race import checking


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test whose launches have faults, after its own assertions."""
    with checking(seed=len(item.nodeid)) as found:
        result = yield
    assert not found.faults, "\n".join(dict.fromkeys(found.faults))
    return result
