"""Protects that options override the recipe wherever they stand, and mistakes in either get one clear message."""

import json
import os
from pathlib import Path
from threading import Thread

import pytest
import yaml

from hotbed.cli.main import main
from tests.cli.cases import Output, refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train.stesp", "3"], "unknown argument --train.stesp; did you mean '--train.steps'?"),
        (["--dense_optimzer.class_path=torch.optim.SGD"], "did you mean '--dense_optimizer.class_path'?"),
        (["--train.batch_size", "many"], "train.batch_size: got 'many', expected an integer"),
        (["--train.steps", "2.5"], "train.steps: got 2.5, expected an integer or null"),
        (["--train.precision", "fp17"], "train.precision: got 'fp17', expected one of auto, fp32, tf32, bf16, fp16"),
        (["--dense_optimizer.init_args.lrr", "1"], "dense_optimizer: torch.optim.Adam: init_args: got 'lrr'"),
        (["--dense_optimizer.init_args.lr", "-1"], "dense_optimizer: torch.optim.Adam rejected init_args"),
        (["--dense_optimizer.init_args.x", "1"], "dense_optimizer: torch.optim.Adam: init_args: got 'x'"),
        (["--dense_optimizer.class_path", "hotbd.Adam"], "to PYTHONPATH; did you mean 'hotbed'?"),
        (["--sparse_optimizer.class_path", "torch.Size"], "is torch.Size, expected a torch.optim.Optimizer"),
        (["--model.init_args.bottom", "[16, 4]"], "dim of table 'C1': got 8, expected 4"),
        (["--sparse_optimizer.class_path", "torch.optim.SGD"], "sparse_optimizer: torch.optim.SGD"),
        (
            ["--sparse_optimizer_groups.wide.optimizer.init_args.lr", "0.1"],
            "lacks 'sparse_optimizer_groups.wide.tables', which is required",
        ),
        (
            ["--sparse_optimizer_groups", "{x: {tables: [C1, wide], optimizer: {class_path: hotbed.optim.SGD}}}"],
            "sparse_optimizer_groups.x: 'wide' matches no table. The tables are embeddings.C1, embeddings.C2",
        ),
        (["--data.valid_split", "vaild"], "data.valid_split: got 'vaild', expected one of train, valid, test; did"),
        (["--data.dim", "{C1: 8}"], "dim: table 'C2' is missing"),
        (["--train.eval_every", "5"], "Set data.valid_split"),
        (["--model.init_args.bottom.x", "1"], "got [16, 8] for model.init_args.bottom"),
        (["--model.init_args.a.b"], "argument --model.init_args.a.b: expected one argument"),
    ],
)
def test_mistakes_in_overrides_get_one_clear_message(
    args: list[str], message: str, recipe: Path, capsys: Output
) -> None:
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), "--train.steps", "1", *args]
    assert message in refused(argv, capsys)
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize("how", ["{}", "--recipe {}", "--recipe={}", "--train.steps 1 {}", "--dry_run {}"])
def test_a_misspelt_key_is_found_wherever_the_recipe_is_named(how: str, recipe: Path, capsys: Output) -> None:
    recipe.write_text(recipe.read_text().replace("batch_size", "batchsize"))
    message = refused(["train", *how.format(recipe).split()], capsys)
    assert "unknown key 'train.batchsize'" in message and "did you mean 'batch_size'?" in message


def test_options_override_the_recipe_also_before_it(recipe: Path) -> None:
    for how in ([str(recipe)], ["--recipe", str(recipe)]):
        runs = recipe.parent / f"runs{len(how)}"
        assert main(["train", "--train.steps", "2", "--train.log_every=1", "--out", str(runs), *how]) == 0
        (written,) = runs.glob("small/*/recipe.yaml")
        used = yaml.safe_load(written.read_text())["train"]
        assert (used["steps"], used["log_every"], used["batch_size"]) == (2, 1, 128)


def test_a_second_recipe_and_an_option_without_value_are_refused(recipe: Path, capsys: Output) -> None:
    assert "unknown argument other.yaml" in refused(["train", str(recipe), "other.yaml"], capsys)
    assert "argument --recipe: expected one argument" in refused(["train", "--recipe"], capsys)
    assert "--train.steps: expected one argument" in refused(["train", str(recipe), "--train.steps"], capsys)


def test_a_recipe_without_an_end_is_refused_and_a_pipe_is_read(
    recipe: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.files.MOST_TEXT_BYTES", 10_000)
    message = refused(["train", "/dev/zero"], capsys)
    assert "/dev/zero is longer than 10,000 bytes, so it is not a recipe" in message
    source = ["--data.source.class_path", "hotbed.data.ZipfSource", "--data.path", "/dev/zero"]
    source += ["--data.source.init_args.train_samples", "100"]
    assert "/dev/zero is longer than 10,000 bytes" in refused(["train", str(recipe), *source], capsys)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=lambda: pipe.write_text(recipe.read_text()))
    writer.start()
    status = main(["train", str(pipe), "--dry_run", "--json", str(tmp_path / "plan.json")])
    writer.join()
    assert (status, len(json.loads((tmp_path / "plan.json").read_text())["tables"])) == (0, 26)


def test_a_recipe_that_lacks_a_key(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "r.yaml"
    for text, key in (
        ("name: x\n", "data.path"),
        ("name: x\ndata: {path: p}\ntrain: {batch_size: 1}\n", "model.class_path"),
    ):
        file.write_text(text)
        assert f"lacks '{key}', which is required" in refused(["train", str(file)], capsys)
