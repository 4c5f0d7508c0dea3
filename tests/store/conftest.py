"""Which combinations of stores and formats the quick tests run: every format with one storage, every storage with two.

The others are marked ``full``. A class says with ``every_format`` which storage of it, or whether its only one, goes
through all its formats, and with ``few_formats`` which formats the others are tested with.
"""

from __future__ import annotations

import pytest

from hotbed.testing.store_contract import Format

FEW = (Format("fp32", (0, 0)), Format("int8", (5, 8)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or item.cls is None or not hasattr(item, "callspec"):
            continue
        params, every = item.callspec.params, getattr(item.cls, "every_format", False)
        few = getattr(item.cls, "few_formats", FEW)
        goes_through_all = every is True or ("storage" in params and params["storage"] == every)
        if params.get("format", few[0]) not in few and not goes_through_all:
            item.add_marker(pytest.mark.full)
