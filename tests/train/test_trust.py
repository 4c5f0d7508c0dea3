"""Protects: recipes run no code but what their user lets them: that of a file he names, never that of a checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.checkpoint import checkpoints_in
from hotbed.cli.main import main
from hotbed.cli.pages.skew_report import open_data
from hotbed.config import Component, Recipe, check_trust
from hotbed.config.component import components
from hotbed.errors import RecipeError
from hotbed.train.runs.stored_model import evaluate_checkpoint
from hotbed.train.workflows.prediction import predict
from tests.checkpoint.test_fuzz import manifest_of, sign

MODEL = """
from pathlib import Path
import hotbed.nn
Path(__file__).with_suffix(".imported").touch()
class Own(hotbed.nn.DLRM):
    pass
"""
EVIL = "module_of_a_stranger"
KEYS = ["data.source", "model", "dense_optimizer", "sparse_optimizer"]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory in which there is a module of a stranger's; paths of imports are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{EVIL}.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop(EVIL, None)


def imported(at: Path) -> bool:
    return (at / f"{EVIL}.imported").exists()


@pytest.fixture
def run(at: Path, recipe: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["train", str(recipe), "--train.steps", "2", "--out", str(at / "runs"), "--json", "s.json"]) == 0
    capsys.readouterr()
    return Path(json.loads((at / "s.json").read_text())["run"])


def with_class(run: Path, key: str, init_args: dict[str, Any] | None = None) -> Path:
    """Make the recipe that a run and its checkpoint hold name a module of a stranger's."""
    (checkpoint,) = [Path(str(c)) for c in checkpoints_in(run / "checkpoints")]
    manifest = manifest_of(checkpoint)
    section = manifest["recipe"]
    *parents, last = key.split(".")
    for parent in parents:
        section = section[parent]
    section[last] = section[last] | {"class_path": f"{EVIL}.Own"} if init_args is None else init_args
    sign(checkpoint, manifest)
    (run / "recipe.yaml").write_text(yaml.safe_dump(manifest["recipe"]))
    return checkpoint


@pytest.mark.parametrize("key", KEYS)
def test_a_checkpoint_of_a_stranger_runs_no_code(key: str, run: Path, at: Path, prepared: Path) -> None:
    checkpoint = with_class(run, key)
    ways = {
        "eval": lambda: evaluate_checkpoint(checkpoint, "test"),
        "predict": lambda: predict(checkpoint, prepared, at / "scores.parquet"),
        "skew": lambda: open_data(run),
    }
    for way in ways.values():
        with pytest.raises(RecipeError) as caught:
            way()
        assert f"{key} of the recipe in {run}" in str(caught.value)
        assert f"got {EVIL}.Own, expected a class of hotbed or torch.optim" in str(caught.value)
        assert str(caught.value).endswith("add --trust_recipe (in Python: trust_recipe=True)")
    assert not imported(at) and not (at / "scores.parquet").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "--checkpoint", "RUN"],
        ["predict", "RUN", "DATA", "--out", "scores.parquet"],
        ["inspect", "--skew", "RUN"],
        ["checkpoint", "convert", "RUN", "made", "--to", "torch"],
    ],
    ids=lambda c: c[0],
)
def test_commands_say_how_to_trust_it(
    command: list[str], run: Path, at: Path, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_class(run, "model")
    command = [{"RUN": str(run), "DATA": str(prepared)}.get(word, word) for word in command]
    before = sorted(at.rglob("*"))
    assert main(command) == 2
    assert "add --trust_recipe" in capsys.readouterr().err
    assert sorted(at.rglob("*")) == before
    if command[0] == "eval":
        assert main([*command, "--trust_recipe"]) == 0
        assert imported(at)  # from the current directory


def test_classes_that_arguments_name_are_not_imported(run: Path, at: Path, prepared: Path) -> None:
    arguments = {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": {"class_path": f"{EVIL}.Own"}}}
    checkpoint = with_class(run, "model", arguments)
    with pytest.raises(RecipeError, match="rejected init_args"):
        evaluate_checkpoint(checkpoint, "test")
    assert main(["train", str(run / "recipe.yaml")]) == 2
    assert not imported(at)


def test_modules_beside_a_recipe_that_the_user_names_are_found(at: Path, recipe: Path) -> None:
    project = at / "project"
    project.mkdir()
    shutil.move(at / f"{EVIL}.py", project)
    values = yaml.safe_load(recipe.read_text())
    values["model"]["class_path"] = f"{EVIL}.Own"
    (project / "recipe.yaml").write_text(yaml.safe_dump(values))
    command = ["train", "project/recipe.yaml", "--train.steps", "1", "--train.checkpoint", "none"]
    assert main([*command, "--trust_recipe", "false"]) == 2
    assert not imported(project) and str(project) not in sys.path
    assert main(command) == 0
    assert imported(project)
    assert sys.path[-1] == str(project)  # after all that is installed, which it cannot replace


def test_a_module_beside_a_recipe_does_not_hide_an_installed_one(at: Path, recipe: Path) -> None:
    for name in ("yaml", "polars", "own"):
        (at / f"{name}.py").touch()
    shutil.copy(recipe, at / "recipe.yaml")
    assert main(["train", "recipe.yaml", "--train.steps", "1", "--train.checkpoint", "none"]) == 0
    found = {name: PathFinder.find_spec(name, [p for p in sys.path if p]) for name in ("yaml", "polars", "own")}
    assert [name for name, spec in found.items() if spec and spec.origin == str(at / f"{name}.py")] == ["own"]


def test_every_class_that_a_recipe_names_is_checked(recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    adam, sgd = ({"class_path": path, "init_args": {}} for path in ("torch.optim.Adam", "hotbed.optim.SGD"))
    values["dense_optimizer_groups"] = {"a": {"parameters": ["top.*"], "optimizer": adam}}
    values["sparse_optimizer_groups"] = {"b": {"tables": ["C1"], "optimizer": sgd}}
    text = str(Recipe.from_dict(values).to_dict())
    found = dict(components(Recipe.from_dict(values)))
    assert len(found) == text.count("class_path") == 6
    assert [*found] == [*KEYS, "dense_optimizer_groups.a.optimizer", "sparse_optimizer_groups.b.optimizer"]


@pytest.mark.parametrize(
    ("path", "is_trusted"),
    [
        ("hotbed.nn.DLRM", True),
        ("hotbed.nn.models.DLRM", True),
        ("torch.optim.Adam", True),
        ("hotbed.cli.main.X", False),
        ("hotbed_evil.nn.X", False),
        ("torch.hub.X", False),
        ("torch.nn.Linear", False),
        ("numpy.ndarray", False),
    ],
)
def test_what_is_of_hotbed_and_torch_optim(path: str, is_trusted: bool, recipe: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    values["model"]["class_path"] = path
    try:
        check_trust(Recipe.from_dict(values), "x", trusted=False)
    except RecipeError:
        assert not is_trusted
    else:
        assert is_trusted


@pytest.mark.parametrize("path", ["os.system", "subprocess.Popen", "antigravity.x", "builtins.eval", "pip.__main__.x"])
def test_no_recipe_names_python_itself_or_a_program(path: str) -> None:
    with pytest.raises(RecipeError, match="expected a class of hotbed"):
        Component(class_path=path)
