"""Graphs of HugeCTR become recipes of hotbed's models, or it is said which layer has no counterpart."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.commands.init import draft_recipe
from hotbed.commands.main import main
from hotbed.config import Recipe
from hotbed.errors import RecipeError, SpecError
from tests.checkpoint import hugectr_models as models
from tests.checkpoint.peers import random_reference


def drafted(path: Path, graph: Any) -> tuple[str, Any]:
    (path / "model.json").write_text(json.dumps(graph))
    text = draft_recipe(path / "model.json")
    Recipe.from_dict(yaml.safe_load(text))  # what a recipe cannot be is refused
    return text, yaml.safe_load(text)


MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "DLRM": (lambda: models.dlrm(random_reference(padding=1)), {"bottom": [24, 16], "top": [32, 8, 1]}),
    "WideDeep": (models.wide_and_deep, {"top": [24, 1], "dropout": 0.5}),
    "DeepFM": (models.deepfm, {"top": [40, 1]}),
    "DCNv2": (models.cross, {"layers": 2, "low_rank": None, "top": [8, 1]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_recognized(tmp_path: Path, name: str) -> None:
    graph, arguments = MODELS[name]
    _, recipe = drafted(tmp_path, graph())
    assert recipe["model"] == {"class_path": f"hotbed.nn.{name}", "init_args": arguments}
    assert recipe["name"] == "model"


def test_optimizers_and_sizes_are_taken(tmp_path: Path) -> None:
    text, recipe = drafted(tmp_path, models.dlrm(random_reference(padding=1)))
    assert recipe["dense_optimizer"] == {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    assert recipe["sparse_optimizer"] == {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.5}}
    assert recipe["schedule"] == {"warmup_steps": 300} and recipe["train"] == {"batch_size": 4096}
    assert recipe["data"]["dim"] == 16
    assert "numericals 13, labels 1, tables\n#   sparse_embedding1: 3 features, dim 16, pooling sum\n" in text
    text, recipe = drafted(tmp_path, models.cross())
    assert "The graph names no optimizer; these are those of recipes/criteo_kaggle.yaml." in text
    assert "Cross layers of multicross1 have a vector each (DCN), those here a matrix (DCN-V2)." in text
    graph = models.cross()
    graph["layers"][5]["mc_param"]["projection_dim"] = 4
    assert drafted(tmp_path, graph)[1]["model"]["init_args"]["low_rank"] == 4
    graph = {**models.deepfm(), "optimizer": {"type": "MomentumSGD"}}
    assert "HugeCTR's optimizer MomentumSGD has no counterpart" in drafted(tmp_path, graph)[0]


def test_layers_that_are_left_out_are_named(tmp_path: Path) -> None:
    graph = models.cross()
    graph["layers"].insert(7, models.layer("BatchNorm", "bn1", "fc1", bn_param={"factor": 1.0, "eps": 1e-5}))
    assert "# bn1 (BatchNorm) is left out: MLPs here have ReLU and dropout.\n" in drafted(tmp_path, graph)[0]


def test_what_has_no_counterpart_is_named(tmp_path: Path) -> None:
    graph = copy.deepcopy(models.cross())
    graph["layers"][5]["type"], graph["layers"][7]["type"] = "GRU", "PReLU_Dice"
    (tmp_path / "model.json").write_text(json.dumps(graph))
    with pytest.raises(RecipeError, match=r"without counterpart in hotbed: multicross1 \(GRU\), relu1 \(PReLU_Dice\)"):
        draft_recipe(tmp_path / "model.json")
    graph = models.cross()
    graph["layers"][5]["type"] = "ReLU"
    (tmp_path / "model.json").write_text(json.dumps(graph))
    with pytest.raises(RecipeError, match="is none of hotbed's models: it has neither Interaction"):
        draft_recipe(tmp_path / "model.json")
    with pytest.raises(SpecError, match="to which options such as 'DIN' say nothing; leave them out"):
        draft_recipe(tmp_path / "model.json", model="DIN")
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(RecipeError, match="has no list of layers"):
        draft_recipe(tmp_path / "model.json")


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.json").write_text(json.dumps(models.deepfm()))
    assert main(["init", str(tmp_path / "model.json"), "--out", str(tmp_path / "recipe.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["model"]["class_path"] == "hotbed.nn.DeepFM"
    assert main(["init", str(tmp_path / "none.json")]) != 0
    assert "none.json is missing" in capsys.readouterr().err
