"""Protects: what is wrong with a directory of days, or asked of it, is said before anything of it is changed."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from hotbed.checkpoint import directory, save_checkpoint
from hotbed.cli.main import main
from hotbed.errors import CheckpointError
from hotbed.train.directory_lock import OWNER, lock
from hotbed.train.workflows import daily_training as train_days
from tests.cli.cases import Output, refused
from tests.cli.test_daily import FIRST, arguments, days_of, write_days, write_recipe

DAYS = [FIRST + timedelta(days=n) for n in range(4)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four days and a recipe, of which three days are trained."""
    folder = tmp_path_factory.mktemp("days")
    argv = arguments(write_recipe(folder), write_days(folder), "out", "--from", str(FIRST))
    assert main([*argv, "--until", str(DAYS[2])]) == 0
    return folder


@pytest.fixture(name="daily")
def _daily(tmp_path: Path, trained: Path) -> Path:
    """The recipe, in a copy of the folder."""
    shutil.copytree(trained, tmp_path / "days")
    records = tmp_path / "days" / "out" / "days.jsonl"
    records.write_text(records.read_text().replace(str(trained), str(tmp_path / "days")))
    return tmp_path / "days" / "daily.yaml"


@pytest.fixture(name="logs")
def _logs(daily: Path) -> Path:
    return daily.parent / "logs"


@pytest.fixture
def command(daily: Path, logs: Path) -> list[str]:
    """A command that goes on with the fourth day."""
    return arguments(daily, logs, "out", "--from", str(FIRST))


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != OWNER}


@pytest.mark.parametrize("why", ["another recipe", "no data", "until", "columns", "no marker"])
def test_a_restart_that_cannot_be_sets_nothing_aside(
    why: str, command: list[str], daily: Path, logs: Path, capsys: Output
) -> None:
    second = logs / f"day={DAYS[1]}"
    options = ["--restart_from", str(DAYS[1])]
    if why == "another recipe":
        options += ["--dense_optimizer.init_args.lr", "0.5"]
        expected = "different recipe: dense_optimizer.init_args.lr was 0.01 and is now 0.5"
    elif why == "no data":
        for day in DAYS[1:]:
            (logs / f"day={day}").rename(logs / f"gone={day}")
        expected = f"--restart_from is {DAYS[1]}"
    elif why == "until":
        options += ["--until", str(FIRST)]
        expected = f"--until is {FIRST}, expected at least --restart_from {DAYS[1]}"
    elif why == "no marker":
        options += ["--marker", "_SUCCESS"]
        expected = "has no _SUCCESS yet"
    else:
        (second / "part.parquet").write_bytes(b"PAR1")
        expected = "part.parquet"
    before = files(daily.parent / "out")
    assert expected in refused([*command, *options], capsys)
    assert files(daily.parent / "out") == before


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"samples": 3}'])
def test_a_damaged_file_of_what_was_measured_is_named(
    content: bytes | None, command: list[str], daily: Path, capsys: Output
) -> None:
    """Of the day before, which drift is measured against."""
    file = daily.parent / "out" / str(DAYS[2]) / "before.json"
    file.unlink() if content is None else file.write_bytes(content)
    message = refused(command, capsys)
    assert str(file) in message
    assert message.endswith(f"--restart_from {DAYS[2]}")
    assert len(days_of(daily, "out")) == 3
    if content is not None:
        return
    assert main([*command, "--restart_from", str(DAYS[2])]) == 0
    assert len(days_of(daily, "out")) == 4


@pytest.mark.parametrize("line", ['{"day": "2026-', json.dumps({"day": str(DAYS[1])})])
def test_a_damaged_record_is_named(line: str, command: list[str], daily: Path, capsys: Output) -> None:
    file = daily.parent / "out" / "days.jsonl"
    file.write_text("\n".join([file.read_text().splitlines()[0], line]))
    assert "days.jsonl, line 2 " in refused(command, capsys)


@pytest.mark.parametrize("when", ["first", "later"])
def test_checkpoints_of_another_model_are_not_taken_for_the_days(
    when: str, daily: Path, logs: Path, capsys: Output
) -> None:
    place = daily.parent / "shared"
    command = arguments(daily, logs, "other", "--from", str(FIRST), "--train.checkpoint_dir", str(place))
    if when == "later":
        assert main([*command, "--until", str(FIRST)]) == 0
    save_checkpoint(place / "last-00000099", {}, step=99, recipe={"data": {"path": "other"}})
    before = files(place)
    message = refused(command, capsys)
    assert f"{place}/last-00000099" in message
    assert str(daily.parent / "other") in message
    assert "train.checkpoint_dir" in message
    assert files(place) == before


def test_old_checkpoints_are_kept_while_another_command_has_the_directory(daily: Path) -> None:
    place = daily.parent / "out" / "checkpoints"
    recipe = train_days.Recipe.from_dict(yaml.safe_load(daily.read_text()))
    table = train_days.DayTable(daily.parent / "out", recipe, train_days.Days(data="{date}", keep=1), None)
    before = sorted(path.name for path in place.glob("last-*"))
    with lock(directory(place)), pytest.raises(CheckpointError, match="is running"):
        table._remove_old()
    assert sorted(path.name for path in place.glob("last-*")) == before
    table._remove_old()
    assert sorted(path.name for path in place.glob("last-*")) == before[-1:]


def test_the_first_day_of_a_model_that_begins_with_another_is_evaluated(
    command: list[str], daily: Path, logs: Path
) -> None:
    begun_with = days_of(daily, "out")[-1]["checkpoint"]
    last = [str(DAYS[3]), "--until", str(DAYS[3])]
    assert main([*command, "--until", str(DAYS[3])]) == 0
    again = arguments(daily, logs, "again", "--init_from", begun_with, "--from", *last)
    assert main(again) == 0
    (found,), expected = days_of(daily, "again"), days_of(daily, "out")[-1]
    assert found["metrics"] == expected["metrics"]
    assert found["metrics"]["auc"] > 0
