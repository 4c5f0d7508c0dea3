"""Protects that `hotbed train` does what the recipe and the options say, and refuses what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checkpoint import Directory, checkpoints_in, read_manifest
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.embed import EmbeddingCollection
from hotbed.plan import make_plan
from hotbed.train.runs.build import build_model, open_source, tables_of
from tests.cli.cases import Output, inspected, refused, train


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
    assert "--split: got 'tset', expected one of" in refused(
        ["eval", "--checkpoint", str(run), "--split", "tset"], capsys
    )


def test_of_several_epochs_validation_decides_which_model_is_tested_and_kept(recipe: Path, capsys: Output) -> None:
    longer = ["--data.valid_split", "valid", "--train.epochs", "9", "--sparse_optimizer.init_args.lr", "0.5"]
    status, summary, run = train(recipe, *longer)
    assert status == 0
    losses = {line["step"]: line["logloss"] for line in _records(run) if line["event"] == "eval"}
    best = min(losses, key=losses.__getitem__)
    assert summary["best_step"] == best < summary["steps"] == best + 2 * 19  # two more epochs were no better
    assert f"step {best} was tested" in capsys.readouterr().out
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == [f"best-{best:08d}"]
    file = recipe.parent / "eval.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["test"] == summary["test"]


def test_several_epochs_without_a_valid_split_are_noticed(recipe: Path, capsys: Output) -> None:
    _, summary, run = train(recipe, "--train.epochs", "2")
    assert (summary["steps"], summary["best_step"]) == (38, None)
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["last-00000038"]
    said = "train.epochs is 2, but there is no valid split"
    assert said in capsys.readouterr().err


def test_a_resumed_run_refuses_settings_that_it_would_not_obey(recipe: Path, capsys: Output) -> None:
    _, _, run = train(recipe, "--train.steps", "3")
    resume = ["--resume", str(checkpoints_in(run / "checkpoints")[-1])]
    others = ["--dense_optimizer.init_args.lr", "0.5", "--data.window", "3", "--sparse_optimizer.init_args.eps", "0.1"]
    message = refused(["train", str(recipe), *resume, *others], capsys)
    assert "data.window was 8 and is now 3; dense_optimizer.init_args.lr was 0.01 and is now 0.5; sparse_" in message
    assert "sparse_optimizer.init_args.eps was None and is now 0.1" in message
    shown = ["--train.log_every", "1", "--data.workers", "1", "--train.checkpoint", "none"]
    status, summary, _ = train(recipe, *resume, *shown, "--train.steps", "5", "--name", "other")
    assert (status, summary["steps"], summary["samples"]) == (0, 5, 5 * 128)


def test_a_run_can_be_repeated_from_its_recipe(recipe: Path) -> None:
    _, first, run = train(recipe, "--train.steps", "8", "--train.seed", "3")
    _, second, _ = train(run / "recipe.yaml")
    assert (second["seed"], second["test"]) == (3, first["test"])


def test_a_dry_run_prints_bytes_and_allocates_no_table(
    recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EmbeddingCollection] = []
    original = EmbeddingCollection.__init__

    def spy(self: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(EmbeddingCollection, "__init__", spy)
    monkeypatch.setattr("hotbed.train.runs.memory_estimate.TRACED_ROWS", 4)
    status, plan, _ = train(recipe, "--dry_run")
    assert status == 0
    assert made[0].device.type == "meta"
    assert len(made) == 2  # the other is traced, and has a few rows of each table
    assert all(table.rows <= 4 for table in made[1].tables.values())
    assert len(plan["tables"]) == 26
    rows = sum(table["rows"] for table in plan["tables"])
    assert sum(table["weight_bytes"] for table in plan["tables"]) == rows * 8 * 4
    assert sum(table["moment_bytes"] for table in plan["tables"]) == rows * 4
    assert plan["table_bytes"] == rows * 36
    assert plan["dense_parameters"] == 13 * 16 + 16 + 16 * 8 + 8 + 360 * 16 + 16 + 16 + 1
    assert "dense parameters" in capsys.readouterr().out
    assert not (recipe.parent / "runs").exists()


def test_a_dry_run_shows_the_plan_of_several_ranks(
    recipe: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, plan, _ = train(recipe, "--dry_run")
    assert status == 0
    assert not {"plan", "ranks"} & set(plan)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    status, of_three, _ = train(recipe, "--dry_run", "--plan", "row")
    assert (status, of_three["plan"]["world_size"], len(of_three["ranks"])) == (0, 3, 3)
    assert sum(rank["bytes"] for rank in of_three["ranks"]) == of_three["table_bytes"] == plan["table_bytes"]
    shown = capsys.readouterr().out
    assert "3 row parts" in shown
    assert "MiB" in shown
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(of_three["plan"]))
    monkeypatch.delenv("WORLD_SIZE")
    status, from_file, _ = train(recipe, "--dry_run", "--plan", str(file))
    assert (status, from_file["plan"]) == (0, of_three["plan"])


def test_a_plan_that_there_is_not_is_said_in_one_process(recipe: Path, tmp_path: Path, capsys: Output) -> None:
    for options in ([], ["--dry_run"]):
        message = refused(["train", str(recipe), "--plan", "tabel", *options], capsys)
        assert "plan tabel does not exist" in message
    file = tmp_path / "plan.json"
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    file.write_text(make_plan(tables_of(open_source(made.data), made.data), 2, "row").to_json())
    message = refused(["train", str(recipe), "--plan", str(file)], capsys)
    assert "the plan is for 2 ranks, but torch.distributed is not initialized" in message


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
    args = [
        "--model.class_path",
        f"{__name__}.Linear",
        "--model.init_args",
        "{scale: 0.5}",
        "--data.dim",
        "1",
    ]
    status, summary, run = train(recipe, *args)
    assert status == 0
    assert summary["test"]["auc"] > 0.5
    assert main(["eval", "--checkpoint", str(run), "--trust_recipe"]) == 0


class Stubborn(nn.Module):
    """Makes its parameters on the CPU whatever the default device is."""

    def __init__(self, tables: Any, features: Any, dense_features: int, seed: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dense_features, 1, device="cpu")


def test_a_model_that_ignores_the_default_device_is_moved(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text()) | {"model": {"class_path": f"{__name__}.Stubborn"}}
    made = Recipe.from_dict(values)
    model = build_model(made, open_source(made.data), torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_run_that_was_killed_is_not_finished(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.train.trainer.Trainer.fit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["train", str(recipe), "--out", str(recipe.parent / "runs")]) == 130
    (run,) = (recipe.parent / "runs" / "small").iterdir()
    found = inspected(run, recipe.parent)
    assert (found["finished"], found["checkpoints"]) == (False, [])


def test_a_new_model_begins_with_an_earlier_one(recipe: Path, capsys: Output) -> None:
    _, _, run = train(recipe, "--train.steps", "7")
    capsys.readouterr()
    status, summary, again = train(recipe, "--init_from", str(run), "--data.frozen", "[C1]", "--train.steps", "1")
    shown = " ".join(capsys.readouterr().err.split())
    assert (status, summary["steps"], summary["samples"]) == (0, 1, 128)
    tables = {entry["name"]: entry for entry in summary["init"] if entry["what"] == "table"}
    assert len(tables) == 26
    assert all(entry["taken"] for entry in tables.values())
    assert "moments" in tables["embeddings.C1"]["note"]
    assert "reinitialized" not in str(tables)
    assert "parameters of the dense part" in shown
    assert yaml.safe_load((again / "recipe.yaml").read_text())["init"]["checkpoint"] == str(run)
    before, after = (checkpoints_in(path / "checkpoints")[-1] for path in (run, again))
    weights = [rows_of(checkpoint, "embeddings.C1") for checkpoint in (before, after)]
    assert torch.equal(*weights)  # it was frozen
    assert not torch.equal(rows_of(before, "embeddings.C2"), rows_of(after, "embeddings.C2"))
    assert "init.rename is set, but init.checkpoint is not" in refused(
        ["train", str(recipe), "--init.rename", "{a: b}"], capsys
    )


def rows_of(checkpoint: Directory, table: str) -> torch.Tensor:
    (tile,) = read_manifest(checkpoint).tables[table].tiles
    return load_file(Path(checkpoint.path) / tile.file)[f"{tile.key}/weight"]


class TooLarge(nn.Module):
    """Has a layer that no machine can hold; torch says so in these words."""

    def __init__(self, **_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried")


def test_a_model_larger_than_memory_is_said_to_be_so(recipe: Path, capsys: Output) -> None:
    rows = recipe.parent / "rows.yaml"
    rows.write_text("rows: {C1: 20000000000}\ndense: 13\n")
    source = ["--data.source.class_path", "hotbed.data.ZipfSource", "--data.path", str(rows), "--data.dim", "1024"]
    source += ["--data.source.init_args.train_samples", "100", "--data.test_split", "null"]
    model = ["--model.class_path", f"{__name__}.Linear", "--model.init_args", "{}"]
    message = refused(["train", str(recipe), *source, *model], capsys)
    assert "rows or moments in cpu memory: got" in message
    assert "memory.tier disk (Cut(tier='disk'))" in message
    message = refused(["train", str(recipe), "--model.class_path", f"{__name__}.TooLarge"], capsys)
    assert "DefaultCPUAllocator: can't allocate memory: you tried; " in message
    assert "bytes of cpu memory are free. Reduce train.batch_size" in message


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
