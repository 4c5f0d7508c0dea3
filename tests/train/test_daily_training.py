"""Tests of `hotbed daily` over several ranks, and of the stability index of days."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from torch import Tensor

from hotbed.config import Recipe
from hotbed.data.drafting.profile import BINS, bins_of
from hotbed.errors import CommError, DataError
from hotbed.train.ranks import process_group
from hotbed.train.workflows import daily_training as daily
from hotbed.train.workflows.daily_training import Days, stability
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
from tests.ranks import Ranks
from tests.train.launcher import Launcher

# -- several ranks -----------------------------------------------------------------------------------------------------


def on_ranks(group: dist.ProcessGroup, recipe: Path, logs: Path, out: str, days: int) -> list[dict[str, Any]]:
    options = Days(data=f"{logs}/day={{date}}", first=FIRST, last=FIRST + timedelta(days=days - 1), changes=True)
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    return rows_of(daily.train_days(made, options, recipe.parent / out, Console(quiet=True)))


def test_ranks_train_days_as_one_process_does(ranks: Ranks, tmp_path: Path) -> None:
    logs, recipe = write_days(tmp_path), write_recipe(tmp_path)
    whole = ranks.run(3, on_ranks, recipe, logs, "whole", 2)
    assert whole == [whole[0]] * 3
    assert [record["samples"] for record in whole[0]] == [400, 400]
    one = on_ranks(None, recipe, logs, "one", 2)  # type: ignore[arg-type]
    for record, alone in zip(whole[0], one, strict=True):
        for key in ("new_rows", "unseen_share", "label_means", "drift", "step"):
            assert record[key] == alone[key], key


@pytest.mark.full
def test_two_ranks_train_days_and_go_on_after_a_signal(launcher: Launcher, tmp_path: Path) -> None:
    logs, recipe = write_days(tmp_path), write_recipe(tmp_path)
    options = ["--from", str(FIRST), "--until", str(FIRST + timedelta(days=1)), "--changes"]
    options += ["--train.epochs", "25", "--train.log_every", "1"]
    _, *whole = arguments(recipe, logs, "whole", *options)
    with launcher.start(tmp_path / "first", 2, *whole, command="daily") as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    _, *stopped = arguments(recipe, logs, "stopped", *options)
    second = tmp_path / "stopped" / str(FIRST + timedelta(days=1))
    with launcher.start(tmp_path / "second", 2, *stopped, command="daily") as started:
        metrics = second / "metrics.jsonl"
        started.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
        for rank in (0, 1):
            started.send(rank, signal.SIGTERM)
        assert 0 not in started.wait()
        assert f"stopped by a signal on {second.name}" in (started.text(0, "err"))
    assert len(days_of(recipe, "stopped")) == 1
    with launcher.start(tmp_path / "third", 2, *stopped, command="daily") as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    found, expected = days_of(recipe, "stopped"), days_of(recipe, "whole")
    assert rows_of(found) == rows_of(expected)
    assert expected[1]["samples"] == 400  # of both ranks
    assert_equal(*(state_of(recipe, logs, records[-1]["checkpoint"]) for records in (found, expected)))
    changes = [pq.read_table(tmp_path / out / second.name / "changes.parquet") for out in ("stopped", "whole")]
    assert changes[0].equals(changes[1])


def patient(group: dist.ProcessGroup) -> tuple[str, int, str]:
    """What the first rank found out while others waited; how often they were told; and an error of it."""
    told, broadcast = list[int](), dist.broadcast

    def counted(tensor: object, source: int) -> object:
        told.append(1)
        return broadcast(tensor, source)  # type: ignore[arg-type]

    def slow() -> str:
        time.sleep(4 * process_group.HEARTBEAT_S)
        return "done"

    def failing() -> str:
        raise DataError("the disk is full")

    dist.broadcast = counted  # type: ignore[assignment]
    try:
        found = process_group.on_first(slow)
    finally:
        dist.broadcast = broadcast
    try:
        process_group.on_first(failing)
    except (DataError, CommError) as error:
        return found, len(told), f"{type(error).__name__}: {error}"
    return found, len(told), ""


def test_ranks_that_wait_for_the_first_are_told_that_it_is_busy(ranks: Ranks) -> None:
    """So `parallel.timeout_s` is no limit for what it does: to write the changes of large tables takes longer."""
    first, *others = ranks.run(3, patient)
    assert first[0::2] == ("done", "DataError: the disk is full")
    assert [other[0::2] for other in others] == [("done", "CommError: rank 0 failed: the disk is full")] * 2
    assert all(other[1] > 2 for other in (first, *others))


# -- drift between days ------------------------------------------------------------------------------------------------


def index(a: Tensor, b: Tensor) -> float:
    def counted(values: Tensor) -> dict[str, dict[str, int]]:
        bins, counts = bins_of(values).unique(return_counts=True)
        return {"x": dict(zip(map(str, bins.tolist()), counts.tolist(), strict=True))}

    return stability(counted(a), counted(b))["x"]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.02, 1.0, 1e6, 1e15])
def test_it_sees_numbers_of_any_size(scale: float) -> None:
    """Click rates of one to three per cent were in one bin once."""
    draw = torch.Generator().manual_seed(1)
    day, next_day, other = (scale * torch.rand(20_000, generator=draw).double() for _ in range(3))
    assert index(day, next_day) < 0.02
    assert index(day, 0.6 * other) > 0.25
    assert index(day, other + scale) > 1
    assert index(day, -other) > 1


def test_bins_rise_with_numbers() -> None:
    values = torch.tensor([-torch.inf, -1e30, -3.0, -0.1, -1e-12, 0.0, 1e-12, 0.1, 0.2, 3.0, 1e15, torch.inf])
    bins = bins_of(values)
    assert bins.tolist() == sorted(bins.tolist())
    assert len(set(bins.tolist())) == len(values) - 1  # no finite number above 2^64 is told from infinity
    assert bins_of(torch.tensor([torch.nan])).tolist() == [BINS - 1]
    assert int(bins.min()) >= 0 and int(bins.max()) < BINS - 1
