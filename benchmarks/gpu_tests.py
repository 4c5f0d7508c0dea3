"""Skip tests with missing packages: a plugin of pytest for the GPU suite alone. Elsewhere they fail."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

from benchmarks.gpu_suite import OWN, missing_package

_MISSING = re.compile(r"ModuleNotFoundError: (?:No module named '|import of )([\w.]+)")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports a missing package."""
    report = yield
    # Pytest gives the error of an import as text.
    found = _MISSING.findall(str(report.longrepr)) if report.failed else []
    if found and found[-1].split(".")[0] not in OWN:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs the package {found[-1]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that imports a missing package, also in a fixture."""
    report = yield
    name = missing_package(call.excinfo.value) if call.excinfo is not None else None
    if report.failed and name is not None:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: needs the package {name}")
    return report
