"""Days are evaluated, then trained, one after the other; however often the command is called, killed or given again."""

import json
import shutil
import signal
import subprocess
import sys
import uuid
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from hotbed.checkpoint import checkpoints_in, directory, load_checkpoint, save_checkpoint
from hotbed.checkpoint.storage import LocalDirectory, new_output
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.data import Loader
from hotbed.errors import CheckpointError, NotOursError
from hotbed.train.directory_lock import OWNER, lock
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.stored_model import evaluate_checkpoint
from hotbed.train.workflows import daily_training as train_days
from tests.cli.cases import Output, refused, small_recipe, write_yaml
from tests.cli.growing import ROOM
from tests.matrix import full

FIRST = date(2026, 1, 1)
SAMPLES = 400


def write_day(
    logs: Path,
    number: int,
    *,
    samples: int = SAMPLES,
    columns: tuple[str, ...] = ("user", "item"),
    users: int = 40,
    new: int = 10,
) -> Path:
    """Write a day in which later days have other users, some new, and larger numbers; labels depend on users."""
    draw = np.random.default_rng(number)
    users = draw.integers(new * number, new * number + users, samples)
    values: dict[str, Any] = {"user": users, "item": draw.integers(0, 20, samples)}
    numbers = draw.normal(number, 1, samples)
    clicks = (draw.random(samples) < 1 / (1 + np.exp(-(users % 7 - 3.0)))).astype(np.int64)
    folder = logs / f"day={FIRST + timedelta(days=number)}"
    folder.mkdir(parents=True)
    table = {name: values[name] for name in columns} | {"x": numbers, "click": clicks}
    pq.write_table(pa.table(table), folder / "part.parquet", row_group_size=100)
    return folder


def write_days(folder: Path, **how: Any) -> Path:
    for number in range(4):
        write_day(folder / "logs", number, **how)
    return folder / "logs"


def write_recipe(folder: Path, *, users: int = 101, **model: Any) -> Path:
    """Write a recipe of which the data are given."""
    sparse = [{"name": "user", "rows": users}, {"name": "item", "rows": 51}]
    schema = {"sparse": sparse, "dense": ["x"], "labels": ["click"]}
    options = {"batch_size": 50, "precision": "fp32", "epochs": 1}
    values = small_recipe("logs/day={date}", schema, name="daily", dim=4, model=model, train=options)
    return write_yaml(folder / "daily.yaml", values)


@pytest.fixture(name="logs")
def _logs(tmp_path: Path) -> Path:
    return write_days(tmp_path)


@pytest.fixture(name="daily")
def _daily(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def arguments(recipe: Path, logs: Path, out: str, *others: str) -> list[str]:
    return ["daily", str(recipe), "--data", f"{logs}/day={{date}}", "--out", str(recipe.parent / out), *others]


def days_of(recipe: Path, out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.parent / out / "days.jsonl").read_text().splitlines()]


def rows_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on where and when."""
    places = ("data", "checkpoint", "seconds", "folder", "bytes")
    return [{key: value for key, value in record.items() if key not in places} for record in records]


def state_of(recipe: Path, logs: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    """Rows, moments and parameters of a checkpoint, by name."""
    values = yaml.safe_load(recipe.read_text())
    values["data"] |= {"path": f"{logs}/day={FIRST}", "test_split": None}
    of_day = Recipe.from_dict(values)
    trainer = build(of_day)
    load_checkpoint(checkpoint, trainer.parts())
    return tensors_of(trainer)


def tensors_of(trainer: Any) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        for i, state in optimizer.state_dict()["state"].items():
            found |= {f"{name}.{i}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_days_are_evaluated_before_they_are_trained_and_continue_one_model(
    daily: Path, logs: Path, capsys: Output
) -> None:
    assert main(arguments(daily, logs, "out", "--from", str(FIRST), "--json", str(daily.parent / "out.json"))) == 0
    shown = capsys.readouterr().out
    records = days_of(daily, "out")
    assert json.loads((daily.parent / "out.json").read_text())["days"] == records
    assert [record["day"] for record in records] == [str(FIRST + timedelta(days=n)) for n in range(4)]
    assert all(record["day"] in shown for record in records)
    assert [record["step"] for record in records] == [8, 16, 24, 32]
    assert records[0]["metrics"] is None
    assert records[0]["unseen_share"] == 1
    assert 0 < records[1]["unseen_share"] < 0.5
    assert records[2]["drift"]["first_day"]["x"] > records[2]["drift"]["day_before"]["x"] > 0.25
    for before, record in pairwise(records):
        _, _, metrics = evaluate_checkpoint(before["checkpoint"], "train", record["data"])
        assert metrics.to_dict() == record["metrics"]
    # The same by the trainer alone: its epochs are the days.
    recipe = Recipe.from_dict(yaml.safe_load(daily.read_text()))
    trainer = None
    for number, record in enumerate(records):
        values = recipe.to_dict()
        values["data"] |= {"path": record["data"], "test_split": None}
        values["train"]["epochs"] = number + 1
        of_day = Recipe.from_dict(values)
        source = open_source(of_day.data)
        trainer = trainer or build(of_day, source)
        trainer.recipe = of_day.train
        loader = Loader(source, "train", 50, shuffle=True)
        loader._epoch = number
        trainer.fit(loader)
    assert_equal(tensors_of(trainer), state_of(daily, logs, records[-1]["checkpoint"]))


def test_a_drafted_recipe_trains_all_rows_of_every_day(logs: Path, tmp_path: Path, capsys: Output) -> None:
    first = str(next(logs.iterdir()))
    recipe = tmp_path / "drafted.yaml"
    assert main(["init", first, "--out", str(recipe)]) == 0
    values = yaml.safe_load(recipe.read_text())
    assert values["data"]["source"]["init_args"].keys() & {"split", "valid_fraction", "test_fraction"}
    assert values["schedule"]["decay_share"] and values["train"]["epochs"] > 1 and values["data"]["valid_split"]
    capsys.readouterr()
    argv = ["daily", str(recipe), "--data", f"{logs}/day={{date}}", "--out", str(tmp_path / "out")]
    assert main([*argv, "--from", str(FIRST), "--until", str(FIRST + timedelta(days=1))]) == 0
    shown = "".join(capsys.readouterr())
    assert "schedule.decay_share" in shown and "data.source.init_args." in shown
    assert f"train.epochs {values['train']['epochs']} is ignored" in shown
    batch = values["train"]["batch_size"]
    records = days_of(recipe, "out")
    assert [record["samples"] for record in records] == [SAMPLES, SAMPLES]
    assert [record["step"] for record in records] == [-(-SAMPLES // batch), 2 * -(-SAMPLES // batch)]
    # A recipe from which the ignored settings were removed is the same recipe.
    del values["schedule"]["decay_share"]
    source = values["data"]["source"]["init_args"]
    for key in ("split", "valid_fraction", "test_fraction"):
        source.pop(key, None)
    values["data"] |= {"valid_split": None, "test_split": None}
    values["train"]["epochs"] = 1
    recipe.write_text(yaml.safe_dump(values))
    assert main([*argv, "--until", str(FIRST + timedelta(days=2))]) == 0
    assert [record["samples"] for record in days_of(recipe, "out")] == [SAMPLES] * 3


def test_commands_of_a_day_each_and_all_days_again_are_one_command(daily: Path, logs: Path, capsys: Output) -> None:
    assert main(arguments(daily, logs, "whole", "--from", str(FIRST))) == 0
    for number in range(4):
        until = str(FIRST + timedelta(days=number))
        assert main(arguments(daily, logs, "parts", "--from", str(FIRST), "--until", until)) == 0
    whole, parts = days_of(daily, "whole"), days_of(daily, "parts")
    assert rows_of(whole) == rows_of(parts)
    assert_equal(*(state_of(daily, logs, records[-1]["checkpoint"]) for records in (whole, parts)))
    files = [path for path in (daily.parent / "parts").rglob("*.*") if not path.name.startswith(".")]
    before = [path.stat().st_mtime_ns for path in files]
    assert main(arguments(daily, logs, "parts")) == 0
    assert "has no data yet" in capsys.readouterr().err
    assert before == [path.stat().st_mtime_ns for path in files]


KILLED = """
import os, signal, sys
import hotbed.train.workflows.daily_training as daily, hotbed.train.trainer as trainer
days = daily
from hotbed.cli.main import main
left = int(sys.argv[1])
owners = (trainer.Trainer, "_advance"), (daily, "write_json"), (days, "write_text"), (days, "stability")
def dying(method):
    def called(*args, **options):
        global left
        result = method(*args, **options)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return called
for owner, name in owners:
    setattr(owner, name, dying(getattr(owner, name)))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.full
def test_a_command_that_is_killed_goes_on_to_the_same_bits(daily: Path, logs: Path) -> None:
    assert main(arguments(daily, logs, "whole", "--from", str(FIRST), "--train.checkpoint_every", "3")) == 0
    command = arguments(daily, logs, "killed", "--from", str(FIRST), "--train.checkpoint_every", "3")
    # Each day has a file of what was before, 8 steps, indices of drift (not the first) and a record. Killed after that
    # file; within a day; and in the next one between its checkpoint and its record.
    for after in (1, 6, 16):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(after), *command], capture_output=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert main(command) == 0
    whole, killed_days = days_of(daily, "whole"), days_of(daily, "killed")
    assert rows_of(whole) == rows_of(killed_days)
    assert_equal(*(state_of(daily, logs, records[-1]["checkpoint"]) for records in (whole, killed_days)))


def test_a_restart_trains_days_anew_and_loses_none(daily: Path, logs: Path) -> None:
    assert main(arguments(daily, logs, "out", "--from", str(FIRST))) == 0
    first = days_of(daily, "out")
    assert main(arguments(daily, logs, "out", "--restart_from", str(FIRST + timedelta(days=2)))) == 0
    again = days_of(daily, "out")
    assert rows_of(first) == rows_of(again)
    assert [a["checkpoint"] == b["checkpoint"] for a, b in zip(first, again, strict=True)] == [True, True, False, False]
    for record in [*first, *again]:
        evaluate_checkpoint(record["checkpoint"], "train", first[0]["data"])
    assert (daily.parent / "out" / "days-1.jsonl").exists()


def test_only_checkpoints_of_the_newest_days_are_kept(daily: Path, logs: Path, capsys: Output) -> None:
    command = arguments(daily, logs, "out", "--from", str(FIRST), "--keep", "2", "--changes")
    assert main([*command, "--train.checkpoint_every", "3"]) == 0
    records = days_of(daily, "out")
    names = {path.name for path in (daily.parent / "out" / "checkpoints").glob("last-*")}
    assert names == {"last-00000024", "last-00000032"}
    changed = pq.read_table(daily.parent / "out" / records[-1]["folder"] / "changes.parquet")
    assert set(changed["base"].to_pylist()) == {24}
    message = refused([*command, "--restart_from", str(FIRST + timedelta(days=1))], capsys)
    assert message.endswith(f"that has a checkpoint: {records[2]['day']}, {records[3]['day']}")


def test_days_without_data_are_refused_or_skipped(daily: Path, logs: Path, capsys: Output) -> None:
    third = FIRST + timedelta(days=2)
    (logs / f"day={third}").rename(logs / "later")
    command = arguments(daily, logs, "out", "--from", str(FIRST))
    message = refused(command, capsys)
    assert f"{third} has no data" in message
    assert f"but {third + timedelta(days=1)} has data" in message
    assert f"--skip {third}" in message
    assert len(days_of(daily, "out")) == 2
    assert main([*command, "--skip", str(third)]) == 0
    assert [record.get("skipped", False) for record in days_of(daily, "out")] == [False, False, True, False]
    message = refused([*command, "--until", "2026-01-09"], capsys)
    assert "2026-01-05" in message
    assert "--until is 2026-01-09" in message


@pytest.mark.parametrize("kind", ["no marker", "no samples", "other columns", "another recipe"])
def test_a_day_that_cannot_be_trained_leaves_the_days_before(
    kind: str, daily: Path, logs: Path, capsys: Output
) -> None:
    command = arguments(daily, logs, "out", "--from", str(FIRST), "--until", str(FIRST))
    assert main(command) == 0
    records = days_of(daily, "out")
    options = [f"--until={FIRST + timedelta(days=1)}"]
    second = logs / f"day={FIRST + timedelta(days=1)}"
    if kind == "no marker":
        options += ["--marker", "_SUCCESS"]
        expected = "has no _SUCCESS yet, so 2026-01-02 is incomplete"
    elif kind == "another recipe":
        options += ["--sparse_optimizer.init_args.lr", "0.2"]
        expected = "different recipe: sparse_optimizer.init_args.lr was 0.1 and is now 0.2"
    else:
        second.rename(logs / "second")
        some = {"samples": 0} if kind == "no samples" else {"columns": ("user",)}
        write_day(logs, 1, **some)  # type: ignore[arg-type]
        expected = "got no rows" if kind == "no samples" else "item"
    assert expected in refused([*command, *options], capsys)
    assert days_of(daily, "out") == records
    if kind == "no marker":
        (second / "_SUCCESS").touch()
        assert main([*command, *options]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "yesterday"], "--from: got 'yesterday', expected a day"),
        ([], "--from 2026-01-31"),
        (
            ["--from", "2026-01-02", "--until", "2026-01-01"],
            "--until is 2026-01-01, expected at least",
        ),
        (["--from", "2026-01-01", "--keep", "0"], "--keep: got 0, expected at least 1"),
        (["--from", "2026-01-01", "--data", "logs"], "data.path: got 'logs', expected"),
        (["--from", "2026-01-01", "--data", "logs/{day}"], "data.path: got 'logs/{day}', expected"),
        (
            ["--from", "2026-01-01", "--train.steps", "5"],
            "train.steps is 5, but hotbed daily",
        ),
        (
            ["--from", "2026-01-01", "--retrieval.sampled", "5"],
            "retrieval is set, but hotbed daily",
        ),
        (["--from", "2026-01-01", "--restart_from", "2026-01-01"], "the last trained day is none"),
        (
            ["--from", "2026-01-01", "--train.keep_every", "8"],
            "train.keep_every is 8, but hotbed daily",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: list[str], message: str, daily: Path, logs: Path, capsys: Output
) -> None:
    assert message in refused([*arguments(daily, logs, "out"), *options], capsys)
    assert not (daily.parent / "out" / "checkpoints").exists()


def test_two_commands_at_once_are_refused(daily: Path, logs: Path, capsys: Output) -> None:
    with lock(LocalDirectory(daily.parent / "out")):
        assert "belongs to process" in refused(arguments(daily, logs, "out", "--from", str(FIRST)), capsys)
    assert main(arguments(daily, logs, "out", "--from", str(FIRST), "--until", str(FIRST))) == 0
    assert "--from is 2026-01-02, but" in refused(arguments(daily, logs, "out", "--from", "2026-01-02"), capsys)


# -- what is wrong with a directory of days is said before anything of it is changed ---------------------------------


DAYS = [FIRST + timedelta(days=n) for n in range(4)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four days and a recipe, of which three days are trained."""
    folder = tmp_path_factory.mktemp("days")
    argv = arguments(write_recipe(folder), write_days(folder), "out", "--from", str(FIRST))
    assert main([*argv, "--until", str(DAYS[2])]) == 0
    return folder


@pytest.fixture(name="begun")
def _begun(tmp_path: Path, trained: Path) -> Path:
    """The recipe, in a copy of the folder."""
    shutil.copytree(trained, tmp_path / "days")
    records = tmp_path / "days" / "out" / "days.jsonl"
    records.write_text(records.read_text().replace(str(trained), str(tmp_path / "days")))
    return tmp_path / "days" / "daily.yaml"


@pytest.fixture(name="later_logs")
def _later_logs(begun: Path) -> Path:
    return begun.parent / "logs"


@pytest.fixture
def command(begun: Path, later_logs: Path) -> list[str]:
    """A command that goes on with the fourth day."""
    return arguments(begun, later_logs, "out", "--from", str(FIRST))


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != OWNER}


@pytest.mark.parametrize("why", ["another recipe", "no data", "until", "columns", "no marker"])
def test_a_restart_that_cannot_be_sets_nothing_aside(
    why: str, command: list[str], begun: Path, later_logs: Path, capsys: Output
) -> None:
    second = later_logs / f"day={DAYS[1]}"
    options = ["--restart_from", str(DAYS[1])]
    if why == "another recipe":
        options += ["--dense_optimizer.init_args.lr", "0.5"]
        expected = "different recipe: dense_optimizer.init_args.lr was 0.01 and is now 0.5"
    elif why == "no data":
        for day in DAYS[1:]:
            (later_logs / f"day={day}").rename(later_logs / f"gone={day}")
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
    before = files(begun.parent / "out")
    assert expected in refused([*command, *options], capsys)
    assert files(begun.parent / "out") == before


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"samples": 3}'])
def test_a_damaged_file_of_what_was_measured_is_named(
    content: bytes | None, command: list[str], begun: Path, capsys: Output
) -> None:
    """Of the day before, which drift is measured against."""
    file = begun.parent / "out" / str(DAYS[2]) / "before.json"
    file.unlink() if content is None else file.write_bytes(content)
    message = refused(command, capsys)
    assert str(file) in message
    assert message.endswith(f"--restart_from {DAYS[2]}")
    assert len(days_of(begun, "out")) == 3
    if content is not None:
        return
    assert main([*command, "--restart_from", str(DAYS[2])]) == 0
    assert len(days_of(begun, "out")) == 4


@pytest.mark.parametrize(
    ("whole", "line"), [(0, '{"day": "2026-'), (1, '{"day": "2026-'), (1, json.dumps({"day": str(DAYS[1])}))]
)
def test_a_damaged_record_is_named(whole: int, line: str, command: list[str], begun: Path, capsys: Output) -> None:
    """A damaged first record is not taken for a new directory."""
    file = begun.parent / "out" / "days.jsonl"
    file.write_text("\n".join([*file.read_text().splitlines()[:whole], line]))
    assert f"days.jsonl, line {whole + 1} " in refused(command, capsys)


@pytest.mark.parametrize("when", ["first", "later"])
def test_checkpoints_of_another_model_are_not_taken_for_the_days(
    when: str, begun: Path, later_logs: Path, capsys: Output
) -> None:
    place = begun.parent / "shared"
    command = arguments(begun, later_logs, "other", "--from", str(FIRST), "--train.checkpoint_dir", str(place))
    if when == "later":
        assert main([*command, "--until", str(FIRST)]) == 0
    save_checkpoint(place / "last-00000099", {}, step=99, recipe={"data": {"path": "other"}})
    before = files(place)
    message = refused(command, capsys)
    assert f"{place}/last-00000099" in message
    assert str(begun.parent / "other") in message
    assert "train.checkpoint_dir" in message
    assert files(place) == before


def test_old_checkpoints_are_removed_only_by_the_owner_of_the_directory(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = begun.parent / "out" / "checkpoints"
    recipe = train_days.Recipe.from_dict(yaml.safe_load(begun.read_text()))
    table = train_days.DayTable(begun.parent / "out", recipe, train_days.Days(data="{date}", keep=1), None)
    before = sorted(path.name for path in place.glob("last-*"))
    with lock(directory(place)), pytest.raises(CheckpointError, match="is running"):
        table._remove_old()

    def steal_lock(*args: Any) -> Any:
        (place / OWNER).unlink()
        return checkpoints_in(*args)

    with monkeypatch.context() as patch, pytest.raises(NotOursError):
        patch.setattr(train_days, "checkpoints_in", steal_lock)
        table._remove_old()
    assert sorted(path.name for path in place.glob("last-*")) == before
    table._remove_old()
    assert sorted(path.name for path in place.glob("last-*")) == before[-1:]


def test_the_first_day_of_a_model_that_begins_with_another_is_evaluated(
    command: list[str], begun: Path, later_logs: Path
) -> None:
    begun_with = days_of(begun, "out")[-1]["checkpoint"]
    last = [str(DAYS[3]), "--until", str(DAYS[3])]
    assert main([*command, "--until", str(DAYS[3])]) == 0
    again = arguments(begun, later_logs, "again", "--init_from", begun_with, "--from", *last)
    assert main(again) == 0
    (found,), expected = days_of(begun, "again"), days_of(begun, "out")[-1]
    assert found["metrics"] == expected["metrics"]
    assert found["metrics"]["auc"] > 0


# -- days in object stores, and tables that grow ---------------------------------------------------------------------


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
