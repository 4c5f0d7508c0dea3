import gzip
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.cli import COMMANDS, main
from hotbed.data import write_synthetic_log
from hotbed.embed import EmbeddingCollection
from hotbed.errors import DataError
from hotbed.train.checkpoint import checkpoints_of

REAL_LOG = Path(__file__).parents[2] / "shared" / "data" / "criteo_kaggle_110k.tsv.gz"

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    write_synthetic_log(path, 3000, seed=1)
    return path


@pytest.fixture(scope="session")
def prepared(log: Path) -> Path:
    out = log.parent / "prepared"
    argv = ["prepare", str(log), str(out), "--threshold", "5", "--valid_fraction", "0.1", "--json", str(out) + ".json"]
    assert main(argv) == 0
    return out


@pytest.fixture
def recipe(tmp_path: Path, prepared: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "data": {"path": str(prepared), "dim": 8},
                "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
                "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
                "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
                "train": {"batch_size": 128, "device": "cpu"},
            }
        )
    )
    return file


@pytest.fixture(autouse=True)
def wide_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def train(recipe: Path, *args: str) -> tuple[int, dict[str, Any], Path]:
    """Exit status, summary and directory of a run."""
    file = recipe.parent / "summary.json"
    status = main(["train", str(recipe), "--out", str(recipe.parent / "runs"), "--json", str(file), *args])
    summary = json.loads(file.read_text()) if file.exists() else {}
    return status, summary, Path(summary.get("run", "."))


def refused(argv: list[str], capsys: Output) -> str:
    """The one message of a command that fails."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


# -- help and errors -----------------------------------------------------------------------------------------------


def test_help_lists_every_command(capsys: Output) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("demo", "init", "prepare", "train", "eval", "inspect"):
        assert f"  {name} " in text
    assert len(COMMANDS) == 6


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"hotbed {command}" in capsys.readouterr().out


def test_help_of_train_describes_the_recipe(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "Samples per step, over all processes." in text
    assert "hotbed train RECIPE.yaml" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "there is no command 'trian'; there are demo, init, prepare, train, eval, inspect; did you mean"),
        (["prepare", "a"], "out"),
        (["prepare", "absent.tsv", "out"], "absent.tsv"),
        (["prepare", "a", "b", "--threshold", "x"], "threshold is 'x', must be int"),
        (["prepare", "a", "b", "--treshold", "3"], "unknown argument --treshold; did you mean '--threshold'?"),
        (["prepare", "a", "b", "--threshold", "-3"], "threshold is -3, must be at least 1"),
        (["demo", "absent.tsv"], "absent.tsv does not exist; give a raw Criteo log"),
        (["demo", "--samples", "5"], "samples is 5, must be at least 100"),
        (["train", "absent.yaml"], "there is no recipe absent.yaml"),
        (["eval", "--checkpoint", "absent"], "absent is neither a checkpoint"),
        (["inspect", "absent"], "absent does not exist"),
        (["init", "absent"], "absent"),
    ],
)
def test_mistakes_get_one_clear_message(
    argv: list[str], message: str, capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(argv, capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train.stesp", "3"], "unknown argument --train.stesp; did you mean '--train.steps'?"),
        (["--dense_optimzer.class_path=torch.optim.SGD"], "did you mean '--dense_optimizer.class_path'?"),
        (["--train.batch_size", "-5"], "train.batch_size is -5, must be at least 1"),
        (["--train.batch_size", "many"], "train.batch_size is 'many', must be int"),
        (["--train.steps", "2.5"], "train.steps is '2.5', must be int or null"),
        (["--train.precision", "fp17"], "train.precision is 'fp17', must be 'fp32', 'bf16'"),
        (["--dense_optimizer.init_args.lrr", "1"], "dense_optimizer: torch.optim.Adam takes no 'lrr'"),
        (["--dense_optimizer.init_args.lr", "-1"], "dense_optimizer: torch.optim.Adam refused init_args"),
        (["--dense_optimizer.class_path", "torch.nn.Linear"], "dense_optimizer: torch.nn.Linear takes no 'lr'"),
        (["--model.class_path", "hotbed.nn.DLRN"], "no class 'DLRN'; did you mean 'DLRM'?"),
        (["--model.class_path", "hotbed.specs.Table", "--model.init_args", "{}"], "model: hotbed.specs.Table needs"),
        (["--model.init_args.bottom", "[16, 4]"], "has dim 8 but the bottom MLP ends with 4"),
        (["--sparse_optimizer.class_path", "torch.optim.SGD"], "sparse_optimizer: torch.optim.SGD"),
        (["--data.source.class_path", "hotbed.specs.Feature"], "data.source"),
        (["--data.path", "nowhere"], "nowhere"),
        (["--data.valid_split", "vaild"], "data.valid_split is 'vaild', but the data has only train, valid, test; did"),
        (["--data.dim", "{C1: 8}"], "dim leaves out table 'C2'"),
        (["--train.eval_every", "5"], "set data.valid_split"),
        (["--resume", "nowhere"], "nowhere"),
        (["--model.init_args.bottom.x", "1"], "model.init_args.bottom is [16, 8], which has no 'x' to set"),
        (["--model.init_args.a.b"], "argument --model.init_args.a.b needs a value"),
    ],
)
def test_mistakes_in_overrides_get_one_clear_message(
    args: list[str], message: str, recipe: Path, capsys: Output
) -> None:
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), "--train.steps", "1", *args]
    assert message in refused(argv, capsys)
    assert not (recipe.parent / "runs").exists()


def test_a_misspelt_key_in_the_file_is_found(recipe: Path, capsys: Output) -> None:
    recipe.write_text(recipe.read_text().replace("batch_size", "batchsize"))
    message = refused(["train", str(recipe)], capsys)
    assert "unknown key 'train.batchsize'" in message
    assert "did you mean 'batch_size'?" in message


def test_a_recipe_that_is_not_yaml_or_lacks_a_key(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("{")
    assert main(["train", str(file)]) == 2
    assert "r.yaml is not YAML" in capsys.readouterr().err
    file.write_text("name: x\n")
    assert "data.path" in refused(["train", str(file)], capsys)
    file.write_text("name: x\ndata: {path: p}\ntrain: {batch_size: 1}\n")
    assert "lacks 'model.class_path', which is required" in refused(["train", str(file)], capsys)
    file.write_text("- 1\n")
    assert "the recipe is [1], must be a mapping" in refused(["train", str(file)], capsys)


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(DataError, match="absent does not exist"):
        main(["inspect", "absent", "--debug"])


def test_json_is_not_written_when_the_command_fails(tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path / "absent"), "--json", str(tmp_path / "out.json")]) == 2
    assert list(tmp_path.iterdir()) == []


# -- commands ------------------------------------------------------------------------------------------------------


def test_prepare_reports_what_it_made(prepared: Path, capsys: Output) -> None:
    report = json.loads(Path(f"{prepared}.json").read_text())
    assert report["samples"] == {"train": 2400, "valid": 300, "test": 300}
    assert len(report["rows"]) == 26
    message = refused(["prepare", str(prepared.parent / "log.tsv"), str(prepared)], capsys)
    assert "exists already" in message


def test_train_writes_a_run_and_eval_reads_it(recipe: Path, capsys: Output) -> None:
    status, summary, run = train(recipe, "--data.valid_split", "valid", "--train.checkpoint", "best")
    assert status == 0
    assert {"auc", "logloss", "normalized_entropy", "calibration"} <= summary["test"].keys()
    assert summary["steps"] == 19
    assert summary["samples_per_s"] > 0
    assert (summary["seed"], summary["name"], summary["ids_out_of_range"]) == (0, "small", {})
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "recipe.yaml",
        "summary.json",
    ]
    assert json.loads((run / "summary.json").read_text()) == summary
    assert "normalized entropy" in capsys.readouterr().out
    file = recipe.parent / "eval.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["test"] == summary["test"]
    assert main(["eval", "--checkpoint", str(run), "--split", "train"]) == 0
    assert "--split is 'tset', but the data has only" in refused(
        ["eval", "--checkpoint", str(run), "--split", "tset"], capsys
    )


def test_a_run_can_be_repeated_from_its_recipe(recipe: Path) -> None:
    _, first, run = train(recipe, "--train.steps", "8", "--train.seed", "3")
    _, second, _ = train(run / "recipe.yaml")
    assert second["test"] == first["test"]
    assert second["seed"] == 3


def test_overrides_are_typed_and_win_over_the_file(recipe: Path) -> None:
    args = ["--train.steps", "2", "--dense_optimizer.init_args.lr", "1e-3", "--train.epochs=4", "--data.shuffle=false"]
    status, summary, run = train(recipe, *args)
    used = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (status, summary["steps"]) == (0, 2)
    assert used["dense_optimizer"]["init_args"] == {"lr": 0.001}
    assert (used["train"]["epochs"], used["data"]["shuffle"]) == (4, False)


def test_a_resumed_run_ends_where_one_that_was_not_stopped_ends(recipe: Path) -> None:
    _, whole, _ = train(recipe, "--train.epochs", "2")
    _, _, run = train(recipe, "--train.epochs", "2", "--train.steps", "11")
    checkpoint = checkpoints_of(run)[-1]
    assert checkpoint.name == "last-00000011"
    _, resumed, _ = train(recipe, "--train.epochs", "2", "--resume", str(checkpoint))
    assert (resumed["steps"], resumed["samples"]) == (whole["steps"], whole["samples"] - 11 * 128)
    assert resumed["test"] == whole["test"]


def test_a_dry_run_prints_bytes_and_allocates_no_table(
    recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 0
    original = EmbeddingCollection.__init__

    def spy(self: EmbeddingCollection, tables: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal largest
        largest = max(table.rows for table in tables)
        original(self, tables, *args, **kwargs)

    monkeypatch.setattr(EmbeddingCollection, "__init__", spy)
    status, plan, _ = train(recipe, "--dry_run")
    assert (status, largest) == (0, 1)
    assert len(plan["tables"]) == 26
    rows = sum(table["rows"] for table in plan["tables"])
    assert sum(table["weight_bytes"] for table in plan["tables"]) == rows * 8 * 4
    assert sum(table["moment_bytes"] for table in plan["tables"]) == rows * 4
    assert plan["table_bytes"] == rows * 36
    assert plan["dense_parameters"] == 13 * 16 + 16 + 16 * 8 + 8 + 360 * 16 + 16 + 16 + 1
    assert "dense parameters" in capsys.readouterr().out
    assert not (recipe.parent / "runs").exists()


class Linear(nn.Module):
    """A model of a user: the sum of one number per id."""

    def __init__(self, tables: Any, features: Any, dense_features: int, seed: int, scale: float = 1.0) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(tables, features, seed=seed)
        self.dense = nn.Linear(dense_features, 1)
        self.scale = scale

    def forward(self, batch: Batch) -> Tensor:
        assert batch.dense is not None
        return self.dense(batch.dense) + self.scale * self.embeddings(batch.sparse).concatenate().sum(1, keepdim=True)


def test_a_model_of_the_user_works(recipe: Path) -> None:
    args = ["--model.class_path", "tests.test_cli.Linear", "--model.init_args", "{scale: 0.5}", "--data.dim", "1"]
    status, summary, run = train(recipe, *args)
    assert status == 0
    assert summary["test"]["auc"] > 0.5
    assert main(["eval", "--checkpoint", str(run)]) == 0


def test_demo_makes_prepares_trains_and_tests(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "summary.json"
    assert main(["demo", "--samples", "3000", "--out", str(tmp_path / "runs"), "--json", str(file)]) == 0
    summary = json.loads(file.read_text())
    assert 0.5 < summary["test"]["auc"] < summary["best_attainable"]["auc"]
    assert summary["test"]["logloss"] > summary["best_attainable"]["logloss"]
    assert summary["best_attainable"]["normalized_entropy"] < 1
    captured = capsys.readouterr()
    assert "best attainable" in captured.out
    assert "planted click model" in captured.err
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


# -- Parquet: init, inspect, train ---------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    n = 2000
    user, item = rng.integers(0, 40, n), rng.integers(0, 20, n)
    score = rng.normal(0, 1, 40)[user] + rng.normal(0, 1, 20)[item]
    table = pa.table(
        {
            "click": (rng.random(n) < 1 / (1 + np.exp(-score))).astype(np.int8),
            "user": user,
            "item": [f"item-{i}" for i in item],
            "price": rng.random(n),
        }
    )
    pq.write_table(table, tmp_path / "clicks.parquet", row_group_size=200)
    return tmp_path / "clicks.parquet"


def test_init_drafts_a_recipe_that_trains(parquet: Path, tmp_path: Path, capsys: Output) -> None:
    assert main(["init", str(parquet)]) == 0
    drafted = capsys.readouterr().out
    out = tmp_path / "drafted.yaml"
    assert main(["init", str(parquet), "--out", str(out)]) == 0
    assert out.read_text() == drafted
    assert "exists already and is not overwritten" in refused(["init", str(parquet), "--out", str(out)], capsys)
    small = ["--train.batch_size", "128", "--data.source.init_args.schema.group", "user", "--train.device", "cpu"]
    status, summary, _ = train(out, *small)
    assert status == 0
    assert summary["test"]["samples"] == 200
    assert summary["test"]["groups"] + summary["test"]["groups_left_out"] <= 40
    assert summary["test"]["gauc"] > 0


def test_init_without_a_label_says_how_to_name_one(parquet: Path, tmp_path: Path, capsys: Output) -> None:
    table = pq.read_table(parquet).rename_columns(["outcome", "user", "item", "price"])
    pq.write_table(table, tmp_path / "other.parquet")
    assert "label" in refused(["init", str(tmp_path / "other.parquet")], capsys)
    assert main(["init", str(tmp_path / "other.parquet"), "--label", "outcome"]) == 0
    assert "test_split: null" in capsys.readouterr().out


def inspected(path: Path, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "inspected.json"
    assert main(["inspect", str(path), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_inspect_tells_what_is_there(prepared: Path, parquet: Path, recipe: Path, capsys: Output) -> None:
    found = inspected(prepared, recipe.parent)
    assert found["kind"] == "prepared dataset"
    assert found["samples"] == {"train": 2400, "valid": 300, "test": 300}
    assert "C26" in capsys.readouterr().out
    found = inspected(parquet, recipe.parent)
    assert (found["kind"], found["row_groups"], found["samples"]) == ("Parquet", 10, {"all": 2000})
    assert {"column": "item", "type": "string"} in found["columns"]
    _, summary, run = train(recipe, "--train.steps", "2")
    found = inspected(run, recipe.parent)
    assert (found["kind"], found["finished"], found["summary"]) == ("run", True, summary)
    capsys.readouterr()
    found = inspected(Path(found["checkpoints"][0]), recipe.parent)
    assert (found["kind"], found["step"], found["recipe"], found["verified"]) == ("checkpoint", 2, "small", True)
    assert "model.safetensors" in capsys.readouterr().out


def test_inspect_of_something_else_says_what_it_looks_for(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "notes.txt").write_text("x")
    message = refused(["inspect", str(tmp_path)], capsys)
    assert (
        "is no prepared dataset (feature_spec.yaml), run (recipe.yaml), checkpoint (manifest.json) or Parquet"
        in message
    )


def test_a_run_that_was_killed_is_not_finished(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.train.trainer.Trainer.fit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["train", str(recipe), "--out", str(recipe.parent / "runs")]) == 130
    (run,) = (recipe.parent / "runs" / "small").iterdir()
    found = inspected(run, recipe.parent)
    assert (found["finished"], found["checkpoints"]) == (False, [])


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
