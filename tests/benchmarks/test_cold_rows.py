"""Steps with rows in a file run in a control group that is limited by what the file has; times mean nothing here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cold_rows
from hotbed.errors import HotbedError


def in_a_group() -> str | None:
    """Why no control group can be made here; None if one can."""
    try:
        with cold_rows.group():
            return None
    except HotbedError as error:
        return str(error)


@pytest.mark.parametrize("side", ["file, cache for a half", "memory"])
def test_a_side_is_limited_by_a_quarter_of_its_rows(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not := in_a_group():
        pytest.skip(why_not)
    limits: list[int] = []
    monkeypatch.setattr(cold_rows, "set_limit", lambda _, nbytes: limits.append(nbytes))
    monkeypatch.setattr(cold_rows, "keep_heap", lambda _: None)  # of the process, which has other tests
    for name, value in {"WARM_UP": 3, "STEPS": 8, "BATCH": 64, "ROWS_AFTER_WARM_UP": 2_000}.items():
        monkeypatch.setattr(cold_rows, name, value)
    found = cold_rows.steps(side, tmp_path)
    assert found["step_ms"] > 0
    on_disk = found["file_bytes"]
    assert (on_disk > 0) == (side != "memory") == (found["hit_rate"] is not None)
    assert found["rows_bytes"] <= on_disk
    assert found["cached_bytes"] == found["rows_bytes"] // 4
    assert limits == [found["own_bytes"] + found["cached_bytes"]] * (on_disk > 0) + [1 << 60]  # and none at the end


def test_sides_are_held_against_memory() -> None:
    run = {"rows_bytes": 4e6, "file_bytes": 6e6, "cached_bytes": 1e6, "hit_rate": 0.5, "read_bytes": 2e6}
    table = cold_rows._table({"memory": [{"step_ms": 100.0}], "file": [{"step_ms": 150.0, **run}]})  # pyright: ignore[reportPrivateUsage]
    assert [list(column.cells)[1] for column in table.columns] == ["file", "150", "1.50", "4", "6", "1", "50%", "2.0"]
