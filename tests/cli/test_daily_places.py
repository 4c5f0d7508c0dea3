"""Protects: days may be in an object store, with their checkpoints, and tables that grow go on from day to day."""

from __future__ import annotations

import uuid
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hotbed.checkpoint.storage import new_output
from hotbed.cli.main import main
from tests.cli.cases import Output
from tests.cli.growing import ROOM
from tests.cli.test_daily import (
    FIRST,
    arguments,
    assert_equal,
    days_of,
    rows_of,
    state_of,
    write_days,
    write_recipe,
)
from tests.matrix import full

LAST = str(FIRST + timedelta(days=2))


def test_days_and_checkpoints_in_an_object_store(s3: str, tmp_path: Path) -> None:
    logs, recipe, at = write_days(tmp_path), write_recipe(tmp_path), s3.replace("PATH", f"{uuid.uuid4().hex}/PATH")
    for file in logs.rglob("*.parquet"):
        with new_output(at.replace("PATH", f"logs/{file.parent.name}/part.parquet")) as stream:
            pq.write_table(pq.read_table(file), stream, row_group_size=100)
    whole = ["--from", str(FIRST), "--until", LAST, "--keep", "2", "--changes"]
    assert main(arguments(recipe, logs, "here", *whole)) == 0
    remote = arguments(recipe, logs, "there", *whole, "--train.checkpoint_dir", at.replace("PATH", "kept"))
    remote[remote.index("--data") + 1] = at.replace("PATH", "logs/day={date}")
    for until in (str(FIRST), LAST, LAST):  # in two commands, and one that finds nothing to do
        remote[remote.index("--until") + 1] = until
        assert main(remote) == 0
    here, there = days_of(recipe, "here"), days_of(recipe, "there")
    assert rows_of(here) == rows_of(there)
    assert there[-1]["checkpoint"].startswith("s3://")
    assert_equal(*(state_of(recipe, logs, records[-1]["checkpoint"]) for records in (here, there)))
    file = f"{there[-1]['folder']}/changes.parquet"
    assert pq.read_table(tmp_path / "there" / file).equals(pq.read_table(tmp_path / "here" / file))


@pytest.mark.parametrize("full_every", [full("1"), "2"])
def test_a_table_that_grows_goes_on_from_day_to_day(full_every: str, tmp_path: Path, capsys: Output) -> None:
    logs = write_days(tmp_path, users=100, new=80)
    recipe = write_recipe(tmp_path, users=1001, class_path="tests.cli.growing.Growing")
    options = ["--from", str(FIRST), "--train.checkpoint_every", "3", "--train.checkpoint_full_every", full_every]
    assert main([*arguments(recipe, logs, "whole", *options), "--changes"]) == 0
    records = days_of(recipe, "whole")
    for until in (str(FIRST), LAST, str(FIRST + timedelta(days=3))):
        assert main([*arguments(recipe, logs, "parts", *options), "--until", until]) == 0
    assert rows_of(records) == rows_of(days_of(recipe, "parts"))
    assert records[0]["evicted"] == {"embeddings.user": 0}
    assert all(0 < record["ids"]["embeddings.user"] <= ROOM for record in records)
    assert all(record["evicted"]["embeddings.user"] > 0 for record in records[1:])
    assert f"{records[-1]['evicted']['embeddings.user']:,} ids evicted" in capsys.readouterr().err
    for before, record in pairwise(records):
        changes = pq.read_table(tmp_path / "whole" / record["folder"] / "changes.parquet").to_pylist()
        gone = [change for change in changes if (change["table"], change["op"]) == ("embeddings.user", "delete")]
        assert len(gone) == record["evicted"]["embeddings.user"]
        assert {change["base"] for change in changes} == {before["step"]}
