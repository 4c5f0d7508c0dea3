"""Protects that help is there at once, mistakes get one clear message, and every command does what it says."""

import gzip
import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.cli.main import COMMANDS, main
from hotbed.config import Recipe
from hotbed.errors import DataError
from hotbed.machine import release
from tests.cli.cases import Output, inspected, refused, train
from tests.data.data_cases import REAL_LOG

# -- help and errors -----------------------------------------------------------------------------------------------


LIGHT = (
    *("demo", "init", "train", "daily", "eval", "predict", "export", "serve", "completion", "doctor", "warm-up"),
    *("checkpoint", "checkpoint inspect", "checkpoint verify", "checkpoint convert"),
)
"""Commands whose help needs no torch; that of the others shows arguments of functions that do."""
HEAVY = ("prepare", "pack", "plan", "inspect")


def test_help_lists_every_command(capsys: Output) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in text
    assert {command.split()[0] for command in (*LIGHT, *HEAVY)} == COMMANDS.keys()


RECIPE = str(Path(__file__).parents[2] / "recipes" / "criteo_kaggle.yaml")


@pytest.mark.parametrize("more", [[], ["--help"], ["-h"]])
def test_a_command_of_two_words_has_help_for_the_first(more: list[str], capsys: Output) -> None:
    assert main(["checkpoint", *more]) == 0
    text = capsys.readouterr().out
    assert all(f"  {other} " in text for other in ("inspect", "verify", "convert"))


@pytest.mark.parametrize("command", (*LIGHT, *HEAVY))
def test_every_command_has_help(command: str, capsys: Output) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert f"hotbed {command}" in capsys.readouterr().out


def test_the_version_is_that_which_is_installed(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hotbed {release()}\n"


def test_help_and_version_do_not_wait_for_torch() -> None:
    asked = [["--help"], ["--version"], *([*command.split(), "--help"] for command in LIGHT)]
    code = (
        f"from hotbed.cli.main import main; import sys; assert not any(map(main, {asked})); "
        "slow = {'torch', 'numpy', 'numba', 'pyarrow', 'polars', 'rich'} & sys.modules.keys(); assert not slow, slow"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "; did you mean 'train'?"),
        (["checkpoint", "verfy"], "'checkpoint verfy', expected checkpoint inspect, checkpoint verify,"),
        (
            ["train", RECIPE, "--ranks", "2"],
            "--ranks is not an option of hotbed train. torchrun starts several processes",
        ),
        (
            ["train", RECIPE, "--nproc_per_node=2"],
            "torchrun --nproc_per_node 2 -m hotbed train … (docs/many_processes.md)",
        ),
        (["--vresion"], "unknown argument --vresion; did you mean '--version'?"),
        (["eval"], "the following arguments are required: --checkpoint"),
        (["prepare", "a"], "out"),
        (["prepare", "absent.tsv", "out"], "absent.tsv"),
        (["prepare", "a", "b", "--threshold", "x"], "--threshold: got 'x', expected an integer"),
        (["prepare", "a", "b", "--treshold", "3"], "unknown argument --treshold; did you mean '--threshold'?"),
        (["prepare", "a", "b", "--threshold", "-3"], "threshold: got -3"),
        (["demo", "absent.tsv"], "absent.tsv does not exist"),
        (["eval", "--checkpoint", "absent"], "absent is not a checkpoint"),
        (["inspect", "absent"], "absent does not exist"),
    ],
)
def test_mistakes_get_one_clear_message(
    argv: list[str], message: str, capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(argv, capsys)


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(DataError, match="absent does not exist"):
        main(["inspect", "absent", "--debug"])


def test_json_is_not_written_when_the_command_fails(tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path / "absent"), "--json", str(tmp_path / "out.json")]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ([], "table"),
        (["--plan", "row"], "row"),
        (["--plan=plans/mine.json"], "plans/mine.json"),
        (["--parallel.plan", "grid"], "grid"),
        (["--plan", "row", "--parallel.plan", "grid"], "grid"),
    ],
)
def test_a_plan_has_a_short_option(
    options: list[str], plan: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Recipe] = []
    monkeypatch.setattr("hotbed.train.runs.run.train", lambda recipe, *_, **__: found.append(recipe) or {})
    monkeypatch.setattr("hotbed.train.runs.report.print_summary", lambda *_: None)
    assert main(["train", str(recipe), *options]) == 0
    assert main(["train", *options, str(recipe)]) == 0
    assert [made.parallel.plan for made in found] == [plan, plan]


def test_mistakes_in_what_processes_share_get_one_clear_message(recipe: Path, capsys: Output) -> None:
    train = ["train", str(recipe)]
    assert "argument --plan: expected one argument" in refused([*train, "--plan"], capsys)
    assert "unknown argument --paln; did you mean '--plan'?" in refused([*train, "--paln", "row"], capsys)
    assert "parallel.reader: got 'one', expected one of each, first" in refused(
        [*train, "--parallel.reader", "one"], capsys
    )
    assert "parallel.plan is empty. Pass a scheme" in refused([*train, "--parallel.plan", ""], capsys)


# -- prepare and demo -----------------------------------------------------------------------------------------------


def test_prepare_reports_what_it_made(prepared: Path, capsys: Output) -> None:
    report = json.loads(Path(f"{prepared}.json").read_text())
    assert report["samples"] == {"train": 2400, "valid": 300, "test": 300}
    assert len(report["rows"]) == 26
    message = refused(["prepare", str(prepared.parent / "log.tsv"), str(prepared)], capsys)
    assert "exists already" in message


def test_demo_makes_prepares_trains_and_tests(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "summary.json"
    assert main(["demo", "--samples", "3000", "--out", str(tmp_path / "runs"), "--json", str(file)]) == 0
    summary = json.loads(file.read_text())
    assert 0.5 < summary["test"]["auc"] < summary["best_attainable"]["auc"]
    assert summary["test"]["logloss"] > summary["best_attainable"]["logloss"]
    assert summary["best_attainable"]["normalized_entropy"] < 1
    captured = capsys.readouterr()
    assert "best attainable" in captured.out
    assert "synthetic click log" in captured.err
    assert {"data", "log.tsv", "recipe.yaml", "summary.json"} <= {p.name for p in Path(summary["run"]).iterdir()}


def test_demo_takes_a_log(log: Path, tmp_path: Path) -> None:
    assert main(["demo", str(log), "--out", str(tmp_path), "--json", str(tmp_path / "s.json")]) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["data"] == str(log)
    assert "best_attainable" not in summary
    assert summary["test"]["samples"] == 300


@pytest.mark.skipif(not REAL_LOG.exists(), reason="needs ../shared/data/criteo_kaggle_110k.tsv.gz")
def test_demo_learns_from_real_logs(tmp_path: Path) -> None:
    with gzip.open(REAL_LOG) as stream, (tmp_path / "part.tsv").open("wb") as part:
        part.writelines(islice(stream, 20_000))
    assert main(["demo", str(tmp_path / "part.tsv"), "--out", str(tmp_path), "--json", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["test"]["auc"] > 0.68


# -- init and inspect -----------------------------------------------------------------------------------------------


def test_inspect_tells_what_is_there(prepared: Path, recipe: Path, capsys: Output) -> None:
    """Figures of data are in test_inspect_data.py."""
    found = inspected(prepared, recipe.parent)
    assert (found["kind"], found["samples"]) == ("prepared dataset", {"train": 2400, "valid": 300, "test": 300})
    _, summary, run = train(recipe, "--train.steps", "2")
    found = inspected(run, recipe.parent)
    assert (found["kind"], found["finished"], found["summary"]) == ("run", True, summary)
    capsys.readouterr()
    found = inspected(Path(found["checkpoints"][0]), recipe.parent)
    assert (found["kind"], found["step"], found["recipe"], found["verified"]) == ("checkpoint", 2, "small", True)
    assert re.search(r"model-\w{8}\.safetensors", capsys.readouterr().out)


def test_what_is_piped_is_not_wrapped(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the width of any terminal, nor coloured."""
    monkeypatch.setenv("COLUMNS", "40")
    path, column = tmp_path / ("long" * 40) / "clicks.parquet", "column " * 20
    path.parent.mkdir()
    pq.write_table(pa.table({column: [1, 2]}), path)
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(str(path) in line for line in lines)
    assert any(f" {column} " in line and "int64" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


# -- as a process --------------------------------------------------------------------------------------------------


def test_the_program_prints_one_message_and_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotbed", "inspect", str(tmp_path / "absent")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"hotbed: error: {tmp_path / 'absent'} does not exist\n"
