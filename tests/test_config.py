import ast
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hotbed.config
from hotbed.config import (
    Component,
    ParallelRecipe,
    Recipe,
    ScheduleRecipe,
    SparseOptimizerGroup,
    TrainRecipe,
)
from hotbed.config.validation import checkpoint_policy, notice, patience
from hotbed.errors import RecipeError, SpecError
from hotbed.specs import Table

RECIPES = Path(__file__).parent.parent / "recipes"


def values(**train: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "data": {"path": "somewhere"},
        "model": {"class_path": "hotbed.nn.DLRM"},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1}},
        "sparse_optimizer": {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 8, **train},
    }


def test_a_recipe_goes_to_plain_values_and_back() -> None:
    recipe = Recipe.from_dict(values(steps=3))
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


FTRL = {"class_path": "hotbed.optim.FTRL", "init_args": {"lr": 0.1}}


def test_groups_of_optimizers_go_to_plain_values_and_back() -> None:
    assert Recipe.from_dict(values()).sparse_optimizer_groups == {}
    norms = {"parameters": ["*norm*", "top.*.bias"], "optimizer": {"class_path": "torch.optim.SGD"}}
    given = {"sparse_optimizer_groups": {"wide": {"tables": "wide.*", "optimizer": FTRL}}}
    recipe = Recipe.from_dict(values() | given | {"dense_optimizer_groups": {"norms": norms}})
    wide = SparseOptimizerGroup(tables=["wide.*"], optimizer=component("hotbed.optim.FTRL", lr=0.1))
    assert recipe.sparse_optimizer_groups == {"wide": wide}
    assert recipe.dense_optimizer_groups["norms"].parameters == ["*norm*", "top.*.bias"]
    assert recipe.dense_optimizer_groups["norms"].optimizer == component("torch.optim.SGD")
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("key", "groups", "message"),
    [
        ("sparse", 3, "sparse_optimizer_groups: got 3, expected a mapping of names to sections"),
        ("sparse", {"wide": 3}, "sparse_optimizer_groups.wide: got 3, expected a mapping"),
        ("sparse", {"wide": {"optimizer": FTRL}}, "lacks 'sparse_optimizer_groups.wide.tables', which is required"),
        ("sparse", {"wide": {"tables": "wide"}}, "lacks 'sparse_optimizer_groups.wide.optimizer.class_path', which is"),
        (
            "sparse",
            {"wide": {"tables": "wide", "optimizer": {"class_path": "FTRL"}}},
            "sparse_optimizer_groups.wide.optimizer.class_path: got 'FTRL', expected an import path",
        ),
        ("sparse", {"wide": {"table": "wide"}}, "unknown key 'sparse_optimizer_groups.wide.table'. "),
        ("sparse", {"wide": {"tables": [], "optimizer": FTRL}}, "sparse_optimizer_groups.wide.tables: got [], expect"),
        ("dense", {"a": {"parameters": [1], "optimizer": FTRL}}, "a.parameters: got 1, expected text"),
        ("sparse", {"a b": {"tables": "w", "optimizer": FTRL}}, "groups: got the name 'a b', expected letters"),
        ("dense", {"x_schedule": {"parameters": "w", "optimizer": FTRL}}, "got the name 'x_schedule', expected"),
        ("dense", {"model": {"parameters": "w", "optimizer": FTRL}}, "got the name 'model', which checkpoints use"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be(key: str, groups: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(values() | {f"{key}_optimizer_groups": groups})
    assert message in str(caught.value)


def test_two_groups_of_one_name_are_refused() -> None:
    given = {
        "dense_optimizer_groups": {"x": {"parameters": "top", "optimizer": FTRL}},
        "sparse_optimizer_groups": {"x": {"tables": "user", "optimizer": FTRL}},
    }
    with pytest.raises(RecipeError, match="dense_optimizer_groups and sparse_optimizer_groups both have a group"):
        Recipe.from_dict(values() | given)


def test_how_processes_share_the_work_is_part_of_a_recipe() -> None:
    assert Recipe.from_dict(values()).parallel == ParallelRecipe(plan="table", dense="ddp", overlap=True, reader="each")
    given = {"plan": "plans/mine.json", "dense": "fsdp", "forward_codec": "bf16", "overlap": False, "timeout_s": 7}
    recipe = Recipe.from_dict(values(checkpoint="none") | {"parallel": given})
    assert given.items() <= recipe.to_dict()["parallel"].items()
    assert Recipe.from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.name)
def test_every_recipe_that_comes_with_hotbed_is_valid(file: Path) -> None:
    recipe = Recipe.from_dict(yaml.safe_load(file.read_text(encoding="utf-8")))
    components = (recipe.model, recipe.dense_optimizer, recipe.sparse_optimizer, recipe.data.source)
    groups = (*recipe.dense_optimizer_groups.values(), *recipe.sparse_optimizer_groups.values())
    for component in (*components, *(group.optimizer for group in groups)):
        component.load()
    assert recipe.name == file.stem


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.batch_size", -5, "train.batch_size: got -5, expected at least 1"),
        ("train.batch_size", 1.5, "train.batch_size: got 1.5, expected an integer"),
        ("train.epochs", 0, "train.epochs: got 0, expected at least 1"),
        ("train.steps", 0, "train.steps: got 0, expected at least 1"),
        ("train.seed", -1, "train.seed: got -1, expected at least 0"),
        ("train.patience", 0, "train.patience: got 0, expected at least 1"),
        ("train.precision", "fp17", "train.precision: got 'fp17', expected one of auto, fp32, tf32, bf16, fp16"),
        ("train.device", "gpu", "train.device: got 'gpu', expected one of auto, cpu, cuda"),
        ("train.monitor", "AUC", "train.monitor: got 'AUC', expected one of auc, logloss"),
        ("train.checkpoint", "all", "train.checkpoint: got 'all', expected one of auto, none, last, best"),
        ("train.stpes", 5, "unknown key 'train.stpes'. The keys of train are batch_size"),
        ("train.stpes", 5, "did you mean 'steps'?"),
        ("tarin", {}, "unknown key 'tarin'. The keys of a recipe are name"),
        ("tarin", {}, "did you mean 'train'?"),
        ("train", 3, "train: got 3, expected a mapping"),
        ("data.path", "", "data.path is empty"),
        ("data.dim", 0, "data.dim: got 0, expected at least 1"),
        ("data.dim", {"users": -4}, "data.dim.users: got -4, expected at least 1"),
        ("data.dtype", "int4", "data.dtype: got 'int4', expected one of fp32, bf16, fp16, int8, fp8 or a mapping"),
        ("data.dtype", {"users": "f16"}, "data.dtype.users: got 'f16', expected one of fp32, bf16, fp16, int8, fp8"),
        ("data.fp32_rows", -1, "data.fp32_rows: got -1, expected at least 0"),
        ("data.fp32_rows", {"users": 0.5}, "data.fp32_rows.users: got 0.5, expected an integer"),
        (
            "data.on_bad_id",
            "hsah",
            "data.on_bad_id: got 'hsah', expected one of error, drop, hash; did you mean 'hash'?",
        ),
        ("data.workers", 0, "data.workers: got 0, expected at least 1"),
        ("data.source", {"class_path": "Parquet"}, "data.source.class_path: got 'Parquet', expected an import path"),
        ("model.init_arg", {}, "unknown key 'model.init_arg'. The keys of model are class_path, init_args"),
        ("model", None, "model: got None, expected a mapping"),
        ("name", "a/b", "name: got 'a/b', expected a plain directory name"),
        ("schedule", {"warmup_steps": -1}, "schedule.warmup_steps: got -1, expected at least 0"),
        ("schedule", {"decay_start": 5}, "schedule.decay_start or schedule.decay_end is set without the other"),
        (
            "schedule",
            {"warmup_steps": 9, "decay_start": 5, "decay_end": 20},
            "schedule.decay_start: got 5, expected at least 9 (schedule.warmup_steps)",
        ),
        ("schedule", {"decay_start": 5, "decay_end": 5}, "schedule.decay_end: got 5, expected at least 6"),
        (
            "schedule",
            {"decay_share": 0.0},
            "schedule.decay_share: got 0.0, expected a finite number above 0 and at most 1",
        ),
        (
            "schedule",
            {"decay_share": 1.5},
            "schedule.decay_share: got 1.5, expected a finite number above 0 and at most 1",
        ),
        (
            "schedule",
            {"decay_share": 0.5, "decay_start": 1, "decay_end": 9},
            "schedule.decay_share and schedule.decay_start are both set",
        ),
        (
            "schedule",
            {"decay_power": 0.0},
            "schedule.decay_power: got 0.0, expected a finite number above 0; 1 is linear",
        ),
        ("parallel", {"plan": ""}, "parallel.plan is empty"),
        ("parallel", {"dense": "dpp"}, "parallel.dense: got 'dpp', expected one of ddp, fsdp; did you mean 'ddp'?"),
        ("parallel", {"reader": "frist"}, "parallel.reader: got 'frist', expected one of each, first"),
        ("parallel", {"reader": "frist"}, "did you mean 'first'?"),
        (
            "parallel",
            {"forward_codec": "int4"},
            "parallel.forward_codec: got 'int4', expected one of fp32, bf16, fp16, ",
        ),
        (
            "parallel",
            {"backward_codec": "bf61"},
            "parallel.backward_codec: got 'bf61', expected one of fp32, bf16, fp16",
        ),
        (
            "parallel",
            {"timeout_s": 0},
            "parallel.timeout_s: got 0, expected at least 1 and at most 31,536,000 (a year)",
        ),
        ("parallel", {"timeout_s": 1.5}, "parallel.timeout_s: got 1.5, expected an integer"),
        ("parallel", {"replicas": 0}, "parallel.replicas: got 0, expected at least 1"),
        ("parallel", {"sync_every": 0}, "parallel.sync_every: got 0, expected at least 1"),
        ("parallel", {"layout": "group"}, "parallel.layout: got 'group', expected one of groups, replicas"),
        ("parallel", {"paln": "row"}, "unknown key 'parallel.paln'. The keys of parallel are plan, hardware, dense"),
        ("parallel", {"paln": "row"}, "did you mean 'plan'?"),
        ("parallel", "row", "parallel: got 'row', expected a mapping"),
    ],
)
def test_a_bad_value_names_its_key_and_limit(key: str, value: Any, message: str) -> None:
    given = values()
    *parents, last = key.split(".")
    at = given
    for parent in parents:
        at = at[parent]
    at[last] = value
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(given)
    assert message in str(caught.value)


def test_a_missing_key_is_named() -> None:
    given = values()
    del given["train"]["batch_size"]
    with pytest.raises(RecipeError, match=r"lacks 'train\.batch_size', which is required"):
        Recipe.from_dict(given)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(
        RecipeError, match=r"train\.steps is 30, but the learning rate is 0 after schedule\.decay_end 20"
    ):
        Recipe.from_dict(values(steps=30) | {"schedule": {"decay_start": 10, "decay_end": 20}})
    for train in ({"eval_every": 5}, {"patience": 2}, {"checkpoint": "best"}):
        with pytest.raises(RecipeError, match=r"but there is no split to evaluate on"):
            Recipe.from_dict(values(**train))
    with pytest.raises(RecipeError, match=r"train\.checkpoint_every is set, but train\.checkpoint is 'none'"):
        TrainRecipe(batch_size=1, checkpoint="none", checkpoint_every=3)
    recipe = Recipe.from_dict(values())
    replace(recipe, data=replace(recipe.data, valid_split="valid"), train=replace(recipe.train, checkpoint="best"))


def test_the_schedule_is_nvidias() -> None:
    # 8,000 steps of warm-up, constant to 48,000, then quadratic to 0 at 72,000.
    factor = ScheduleRecipe(warmup_steps=8000, decay_start=48_000, decay_end=72_000).factor
    steps = [1, 4000, 7999, 8000, 48_000, 60_000, 71_999, 72_000, 80_000]
    expected = [1 / 8000, 0.5, 7999 / 8000, 1, 1, 0.25, (1 / 24_000) ** 2, 0, 0]
    assert [factor(s) for s in steps] == pytest.approx(expected)
    assert {ScheduleRecipe().factor(s) for s in (1, 2, 1000)} == {1.0}
    assert ScheduleRecipe(decay_start=0, decay_end=10, decay_power=1).factor(7) == pytest.approx(0.3)


def test_the_rate_falls_at_the_end_of_every_epoch() -> None:
    schedule = ScheduleRecipe(warmup_steps=2, decay_share=0.5, decay_power=1)
    factors = [schedule.factor(step, 8) for step in range(1, 17)]
    fall = [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert factors == [0.5, *fall[1:], *fall]
    assert schedule.factor(1) == 0.5  # also where the steps of an epoch are not known yet


@pytest.mark.parametrize(
    ("train", "valid_split", "policy", "epochs_waited"),
    [
        ({"epochs": 2}, "valid", "best", 2),
        ({"epochs": 1}, "valid", "last", None),
        ({"epochs": 2}, None, "last", None),
        ({"epochs": 2, "steps": 5}, "valid", "last", None),
        ({"epochs": 2, "checkpoint_every": 5}, "valid", "last", None),
        ({"epochs": 2, "eval_every": 5}, "valid", "best", None),
        ({"epochs": 2, "checkpoint": "last"}, "valid", "last", None),
        ({"epochs": 2, "checkpoint": "none"}, "valid", "none", None),
        ({"epochs": 2, "checkpoint": "none", "patience": 7}, "valid", "none", 7),
        ({"epochs": 2, "patience": None}, "valid", "best", None),
    ],
)
def test_validation_decides_where_there_is_something_to_decide(
    train: dict[str, Any], valid_split: str | None, policy: str, epochs_waited: int | None
) -> None:
    given = values(**train)
    given["data"]["valid_split"] = valid_split
    recipe = Recipe.from_dict(given)
    assert (checkpoint_policy(recipe), patience(recipe)) == (policy, epochs_waited)
    text = notice(recipe)
    assert (text is not None) == ((valid_split is None and recipe.train.epochs > 1) or "checkpoint_every" in train)
    assert "checkpoint_every" not in train or "remove train.checkpoint_every" in str(text)


# -- components ----------------------------------------------------------------------------------------------------


def component(class_path: str, **init_args: Any) -> Component:
    return Component(class_path=class_path, init_args=init_args)


def test_a_component_is_made_from_what_is_given_and_its_init_args() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = component("torch.optim.SGD", lr=0.25, momentum=0.5).build([weight])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["momentum"] == 0.5


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (component("no_such_package.Model"), "module 'no_such_package' does not exist. Install it"),
        (component("hotbed.no_such.Model"), "module 'hotbed.no_such' does not exist"),
        (component("torch.optim.Adm", lr=1), "module 'torch.optim' has no class 'Adm'; did you mean 'Adam'?"),
        (component("torch.optim.lr_scheduler"), "module 'torch.optim' has no class 'lr_scheduler'"),
        (component("torch.optim.Adam", lrr=1.0), "torch.optim.Adam: init_args: got 'lrr', expected one of lr, betas"),
        (component("torch.optim.Adam", lrr=1.0), "did you mean 'lr'?"),
        (component("torch.optim.Adam", params=[]), "hotbed passes 'params' itself"),
        (component("torch.optim.Adam", lr=-1.0), "torch.optim.Adam rejected init_args {'lr': -1.0}: Invalid learning"),
        (component("hotbed.optim.SGD"), "hotbed.optim.SGD requires 'lr'"),
    ],
)
def test_a_component_that_cannot_be_made_says_why(made: Component, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        made.build([torch.nn.Parameter(torch.zeros(2))])
    assert message in str(caught.value)


class TakesNothing:
    pass


def test_a_class_that_does_not_take_what_hotbed_gives() -> None:
    with pytest.raises(RecipeError, match=r"got an unexpected keyword argument 'tables'"):
        component("tests.test_config.TakesNothing").build(tables=[])


def test_hotbeds_own_errors_are_passed_on() -> None:
    with pytest.raises(SpecError, match="rows: got 0"):
        component("hotbed.specs.Table", name="a", rows=0, dim=4).build()
    assert component("hotbed.specs.Table", name="a", rows=1, dim=4).build() == Table("a", 1, 4)


def test_a_module_that_cannot_import_something_is_not_called_missing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "half_there.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        component("half_there.Model").load()


def modules_of_config() -> list[ast.Module]:
    files = sorted(Path(hotbed.config.__file__).parent.glob("*.py"))
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def test_config_imports_nothing_heavy() -> None:
    nodes = [node for tree in modules_of_config() for node in ast.walk(tree)]
    modules = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    modules += [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    rest = {name for name in modules if name.split(".")[0] not in sys.stdlib_module_names}
    allowed = {"hotbed.checks", "hotbed.errors", "hotbed.specs", "typing_extensions"}
    assert {name for name in rest if not name.startswith("hotbed.config.")} == allowed


def test_every_field_of_the_recipe_has_a_docstring() -> None:
    found = [n for tree in modules_of_config() for n in tree.body if isinstance(n, ast.ClassDef)]
    classes = {n.name: n.body for n in found if n.name not in ("Range", "Setting", "Section")}
    assert {"Component", "Recipe", "MemoryRecipe", "HotRecipe", "InitRecipe"} < set(classes)
    for name, body in classes.items():
        for field, after in pairwise(body if name != "Recipe" else ()):  # whose sections are documented
            assert not isinstance(field, ast.AnnAssign) or isinstance(after, ast.Expr), ast.unparse(field)
