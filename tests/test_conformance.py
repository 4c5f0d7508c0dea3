"""Protects that docs/published.md has the figures of files and tests, and that published setups are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.conformance.__main__ import BEGIN, CLAIMS, END, ROOT, ClaimError, main, predictions, resolved
from benchmarks.published.report import published
from benchmarks.published.setups import Setup, read, sizes
from hotbed.config import Recipe, ScheduleRecipe
from hotbed.data import Loader
from hotbed.files import read_yaml
from hotbed.plan.hardware import Hardware
from hotbed.train.runs.build import open_source

CLAIM: dict[str, Any] = {"source": "neo", "claim": "it is fast", "published": "2 ×"}


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "published.md"
    kept = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
    page.write_text(f"{kept.split(BEGIN)[0]}{BEGIN}\nold\n{END}{kept.split(END)[1]}", encoding="utf-8")
    main(["--page", str(page), "--json", str(tmp_path / "rows.json")])
    assert page.read_text(encoding="utf-8") == kept, "run `make conformance`"
    assert '"claim"' in (tmp_path / "rows.json").read_text(encoding="utf-8")


def test_every_published_figure_has_a_row() -> None:
    given = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    published = yaml.safe_load((ROOT / "benchmarks" / "published" / "rows.yaml").read_text(encoding="utf-8"))
    measured_elsewhere = [row for row in published["rows"] if "quality is measured" in row.get("missing", "")]
    assert len(list(predictions())) + len(measured_elsewhere) == len(published["rows"])
    assert {row["source"] for row in [*given["rows"], *predictions()]} == set(given["sources"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"kind": "believed"}, "is believed, expected one of measured, tested, simulated, missing, scope"),
        ({"kind": "simulated", "ours": "2 ×"}, "is simulated and has no value. Name a file"),
        ({"kind": "tested", "tests": ["tests/test_specs.py::test_no_such"]}, "test_no_such, which is no test"),
        ({"kind": "measured", "ours": "{0}", "value": [{"file": "none.json", "path": []}]}, "no file .*none.json"),
    ],
)
def test_what_is_not_there_is_an_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        resolved({**CLAIM, **row})


def test_commands_are_of_the_tree_or_of_a_named_commit() -> None:
    """A command of a removed module names the last commit that has it, and files that this commit wrote are read."""
    for row in yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))["rows"]:
        module = row.get("command", "").partition("python -m ")[2].partition(" ")[0].replace(".", "/")
        if module:
            exists = (ROOT / f"{module}.py").is_file() or (ROOT / module / "__main__.py").is_file()
            assert exists != ("commit" in row), row["claim"]
    with pytest.raises(ClaimError, match=r"no file .*none.json"):
        resolved({**CLAIM, "kind": "measured", "commit": "1234567", "value": [{"file": "none.json", "path": []}]})
    assert resolved({**CLAIM, "kind": "measured", "commit": "1234567", "ours": "2 ×"})["ours"] == "2 ×"


def test_a_difference_is_smaller_by_the_rows_that_no_sample_touches() -> None:
    def smaller(samples: float) -> float:
        row = {**CLAIM, "kind": "simulated", "value": [{"tables": "criteo_1tb_t3", "samples": samples}], "ours": "{0}"}
        return float(resolved(row)["ours"])

    assert smaller(1e-3) == pytest.approx(177_944_291 / 26e-3, rel=1e-3)  # a row of each of 26 tables per sample
    assert smaller(1e6) > smaller(1e7) > smaller(1e15) == pytest.approx(1)


# -- what is published of setups, where no figure comes from it --------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("criteo_1tb", None),
        ("criteo_1tb_t15", 32_709_138),
        ("criteo_1tb_t3", 177_944_291),
        ("criteo_1tb_t0", 882_774_575),
    ],
)
def test_recipes_have_nvidias_settings(name: str, rows: int | None) -> None:
    recipe = Recipe.from_dict(read_yaml(ROOT / "recipes" / f"{name}.yaml"))
    assert recipe.schedule == ScheduleRecipe(warmup_steps=8000, decay_start=48_000, decay_end=72_000, decay_power=2)
    for optimizer in (recipe.dense_optimizer, recipe.sparse_optimizer):
        assert optimizer.class_path.endswith(".SGD") and optimizer.init_args == {"lr": 24.0}
    assert (recipe.train.batch_size, recipe.train.epochs, recipe.data.dim) == (65_536, 1, 128)
    assert recipe.model.init_args == {"bottom": [512, 256, 128], "top": [1024, 1024, 512, 256, 1]}
    if rows is not None:  # samples that are computed, as many as the log has
        source = open_source(recipe.data)
        assert (sum(source.schema.rows.values()), source.samples("train")) == (rows, 4_195_197_692)
        assert len(Loader(source, "train", recipe.train.batch_size)) == 64_014


def test_hot_rows_are_predicted_with_the_published_settings() -> None:
    setup = Setup(**published()["setups"]["fae"])
    recipe, work, _, _ = read(setup)
    assert (setup.hot_bytes, recipe.train.batch_size, recipe.data.dim) == (256 << 20, 1024, 16)
    assert recipe.model.init_args == {"bottom": [512, 256, 64, 16], "top": [512, 256, 1]}
    for optimizer in (recipe.dense_optimizer, recipe.sparse_optimizer):
        assert optimizer.class_path.endswith(".SGD") and optimizer.init_args == {"lr": 0.01}
    rows = [use.table.rows for use in work.uses]
    assert (len(rows), sum(rows), rows[2], rows[-1]) == (26, 33_762_577, 10_131_227, 142_572)


@pytest.mark.parametrize("name", ["neo_a", "neo_f", "neo_i"])
def test_models_of_neo_are_predicted_for_the_published_machines(name: str) -> None:
    setup = Setup(**published()["setups"][name])
    machine = Hardware.load(setup.hardware)
    assert (setup.ranks, machine.ranks_per_node, machine.device_bytes) == (128, 8, 40e9)
    assert machine.network == 200e9 / 8


@pytest.mark.parametrize(("name", "billions", "ids"), [("neo_a", 793, 15), ("neo_f", 12_000, 20), ("neo_i", 332, 70)])
def test_recipes_have_the_published_numbers_of_parameters_and_operations(name: str, billions: float, ids: int) -> None:
    given = published()["setups"][name]
    work = read(replace(Setup(**given), mflop=None))[1]
    assert sizes(work)["billions"] == pytest.approx(billions, rel=0.01)
    assert {use.ids for use in work.uses} == {ids}
    assert work.dense.flops / 1e6 == pytest.approx(given["mflop"], rel=0.02)
