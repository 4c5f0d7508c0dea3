"""Protects that numericals are measured once, and alike whatever ranks, precision and interruptions a run has."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor, nn

import hotbed as hb
from hotbed.checkpoint import find_checkpoint, load_checkpoint, verify_checkpoint
from hotbed.checkpoint.blocks import VerifiedFiles
from hotbed.checkpoint.load import read_states
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.tensor_files import TensorFiles
from hotbed.config import Recipe
from hotbed.errors import CommError, DataError, NonFiniteError
from hotbed.nn import Normalization
from hotbed.train.runs.build import build_model, open_source
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.run import train
from tests.ranks import RankError, Ranks
from tests.train.numbers import POSITIVE, frame, recipe_of_numbers

pytestmark = pytest.mark.usefixtures("one_thread")
GOLDEN = Path(__file__).parent.parent / "golden" / "scaled_numericals.json"


class Own(nn.Module):
    """A model of a user's own, of ids and numbers side by side."""

    def __init__(self, tables: Any, features: Any, dense_features: int, seed: int) -> None:
        super().__init__()
        self.tables = hb.EmbeddingCollection(tables, features, seed=seed)
        self.layer = nn.Linear(sum(t.dim for t in tables) + dense_features, 1)

    def forward(self, batch: hb.Batch) -> Tensor:
        assert batch.dense is not None
        assert batch.dense.dtype == torch.float32
        return self.layer(torch.cat([self.tables(batch.sparse).concatenate(), batch.dense], 1)).float()


def run(
    group: object, folder: Path, resume: Path | None = None, **changes: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Train the recipe in a folder; the summary, and what was shown."""
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    for section, options in changes.items():
        values[section] = {**values.get(section, {}), **options}
    shown = io.StringIO()
    recipe = Recipe.from_dict(values)
    summary = train(recipe, RunDirectory(folder / "runs", "numbers"), Console(file=shown, width=200), resume=resume)
    return summary, shown.getvalue()


def state_of(summary: dict[str, Any]) -> dict[str, Tensor]:
    """Dense part of the model in a run's newest checkpoint."""
    place = find_checkpoint(summary["run"])
    manifest = read_manifest(place)
    with VerifiedFiles(place, manifest.files) as verified:
        return read_states(manifest, ["model"], TensorFiles(verified))["model"]


def constants_of(summary: dict[str, Any]) -> dict[str, Tensor]:
    return {name: values for name, values in state_of(summary).items() if name.startswith("normalization.")}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_learns_from_raw_numbers(tmp_path: Path) -> None:
    recipe_of_numbers(tmp_path, [POSITIVE])
    summary, shown = run(None, tmp_path)
    assert "measuring numericals …" in shown
    assert summary["test"]["auc"] > 0.75
    found = constants_of(summary)
    train_rows = frame(2000)[:1500]
    seconds = train_rows["seconds"].to_numpy()
    np.testing.assert_allclose(found["normalization.seconds:standard"], [1, seconds.mean(), seconds.std()], rtol=1e-12)
    logs = np.log1p(train_rows["n_log"].to_numpy())
    logs = logs[np.isfinite(logs)]
    np.testing.assert_allclose(found["normalization.n_log:log"], [1, logs.mean(), logs.std()], rtol=1e-12)
    assert sorted(found) == [
        "normalization.n_asinh:asinh",
        "normalization.n_log:log",
        "normalization.n_quantile:quantile",
        "normalization.n_standard:standard",
        "normalization.seconds:standard",
    ]


@pytest.mark.parametrize(
    "changes", [{"model": {"class_path": f"{__name__}.Own", "init_args": {}}}, {"train": {"precision": "bf16"}}]
)
def test_models_of_users_and_bf16(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe_of_numbers(tmp_path, [POSITIVE])
    file = tmp_path / "recipe.yaml"
    values = yaml.safe_load(file.read_text())
    values["train"] |= {"device": "cpu"}
    file.write_text(yaml.safe_dump(values))
    summary, _ = run(None, tmp_path, **changes)
    assert summary["test"]["auc"] > 0.7
    made = hb.predict(
        summary["run"], tmp_path / "log.parquet", tmp_path / "scores.parquet", split="train", trust_recipe=True
    )
    assert made.rows == 2000


@pytest.mark.parametrize("reader", ["each", "first"])
def test_ranks_have_the_statistics_of_one(ranks: Ranks, tmp_path: Path, reader: str) -> None:
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
        recipe_of_numbers(tmp_path / name, [POSITIVE])
    (alone, _), *_ = ranks.run(1, run, tmp_path / "one")
    results = ranks.run(3, several, tmp_path / "several", reader)
    summary, _ = results[0]
    assert (summary["ranks"], summary["steps"]) == (3, alone["steps"])
    assert_same(constants_of(summary), constants_of(alone))
    assert summary["test"]["auc"] == pytest.approx(alone["test"]["auc"], abs=1e-4)
    assert summary["test"]["logloss"] == pytest.approx(alone["test"]["logloss"], abs=1e-6)


def several(group: object, folder: Path, reader: str) -> tuple[dict[str, Any], str]:
    return run(group, folder, parallel={"reader": reader, "plan": "row"})


def test_all_ranks_fail_where_the_first_cannot_measure(ranks: Ranks, tmp_path: Path) -> None:
    recipe_of_numbers(tmp_path, [POSITIVE])
    frame(2000).with_columns(
        seconds=pl.lit(1e308) * pl.when(pl.col("row") % 2 == 0).then(1).otherwise(-1)
    ).write_parquet(tmp_path / "log.parquet", row_group_size=300)
    kinds = ranks.run(3, kind_of_failure, tmp_path)
    assert kinds[0].startswith("DataError: numerical column 'seconds': got values from -1e+308 to 1e+308")
    assert all(k.startswith("CommError: rank 0 failed: ") for k in kinds[1:])


def kind_of_failure(group: object, folder: Path) -> str:
    try:
        run(group, folder)
    except (DataError, CommError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_resumed_run_is_bit_for_bit_and_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_of_numbers(tmp_path, [POSITIVE])
    whole, _ = run(None, tmp_path, train={"epochs": 2})
    stopped, _ = run(None, tmp_path, train={"epochs": 2, "steps": 18})
    monkeypatch.setattr(Normalization, "measure", lambda *_, **__: pytest.fail("measured again"))
    resumed, shown = run(None, tmp_path, Path(stopped["run"]), train={"epochs": 2})
    assert "measuring" not in shown
    assert (resumed["steps"], resumed["test"]) == (whole["steps"], whole["test"])
    assert_same(state_of(resumed), state_of(whole))
    verify_checkpoint(find_checkpoint(resumed["run"]))


def test_a_warm_start_takes_what_is_known_and_measures_what_is_new(tmp_path: Path) -> None:
    file = recipe_of_numbers(tmp_path, [POSITIVE])
    first, _ = run(None, tmp_path)
    before = constants_of(first)
    frame(2000, seed=5).with_columns(pl.col("seconds") + 10**7).write_parquet(
        tmp_path / "log.parquet", row_group_size=300
    )
    values = yaml.safe_load(file.read_text())
    dense = values["data"]["source"]["init_args"]["schema"]["dense"]
    dense[1] = {"name": "n_standard", "rule": "log", "missing": "indicator"}  # which was another rule
    file.write_text(yaml.safe_dump(values))
    second, shown = run(None, tmp_path, init={"checkpoint": first["run"]})
    after = constants_of(second)
    assert "measuring numericals" in shown
    assert after.keys() - before.keys() == {"normalization.n_standard:log"}
    assert float(after["normalization.n_standard:log"][0]) == 1
    assert_same({n: after[n] for n in before if n in after}, {n: before[n] for n in before if n in after})


def test_a_loss_that_is_not_finite_has_its_own_cause(tmp_path: Path) -> None:
    """A missing value with a rule is not to blame; one without is, and the rule is named."""
    file = recipe_of_numbers(tmp_path, [POSITIVE])
    with pytest.raises(NonFiniteError) as caught:
        run(None, tmp_path, dense_optimizer={"init_args": {"lr": 1e30}})
    assert "The cause is in the input" not in str(caught.value)
    values = yaml.safe_load(file.read_text())
    values["data"]["source"]["init_args"]["schema"]["dense"] = ["n_as_is"]
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(NonFiniteError, match=r"column 0 is nan"):
        run(None, tmp_path)


def scaled(folder: Path) -> tuple[hb.ParquetSource, dict[str, Any]]:
    """A run with constants alone, as recipes had before there were rules."""
    recipe_of_numbers(folder, ["buy"])
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    schema = values["data"]["source"]["init_args"]["schema"]
    schema["dense"] = [
        {"name": "seconds", "center": 1_700_043_200, "scale": 25_000},
        {"name": "n_log", "center": 20.1, "scale": 33.3},
        "row",
    ]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    summary, _ = run(None, folder)
    return hb.ParquetSource(folder / "log.parquet", schema), summary


def recorded(folder: Path) -> dict[str, Any]:
    source, summary = scaled(folder)
    parts = [source.read("train", i).dense for i in range(len(source.chunks("train")))]
    dense = torch.cat([part for part in parts if part is not None])
    digest = hashlib.sha256(dense.numpy().tobytes()).hexdigest()
    return {"dense_sha256": digest, "logloss": summary["test"]["logloss"], "state": sorted(state_of(summary))}


def test_recipes_with_constants_alone_are_as_ever(tmp_path: Path) -> None:
    """Recorded before models normalized: ``python -m tests.train.test_run`` in that state."""
    expected = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = recorded(tmp_path)
    assert found["logloss"] == pytest.approx(expected["logloss"], rel=1e-5)  # products round otherwise elsewhere
    assert found["state"] == expected["state"]
    rows, expected_rows = frame(2000), (1_700_043_200, 25_000)
    dense = scaled_values(rows["seconds"].to_numpy(), *expected_rows)
    source = hb.ParquetSource(tmp_path / "log.parquet", open_recipe(tmp_path).schema)
    read = source.read("train", 0).dense
    assert read is not None
    assert read.dtype == torch.float32
    np.testing.assert_array_equal(read[:, 0], dense[:300])


def scaled_values(values: np.ndarray[Any, Any], center: float, scale: float) -> np.ndarray[Any, Any]:
    return np.arcsinh((values - center) / scale).astype(np.float32)


def open_recipe(folder: Path) -> hb.Source:
    return open_source(Recipe.from_dict(yaml.safe_load((folder / "recipe.yaml").read_text())).data)


def test_a_model_built_from_a_stored_recipe_knows_its_statistics(tmp_path: Path) -> None:
    recipe_of_numbers(tmp_path, [POSITIVE])
    summary, _ = run(None, tmp_path)
    source = open_recipe(tmp_path)
    recipe = Recipe.from_dict(read_manifest(find_checkpoint(summary["run"])).recipe or {})
    model = build_model(recipe, source, torch.device("cpu"))
    batch = source.read("test", 0)
    with pytest.raises(hb.HotbedError, match="are not measured"):
        model(batch)
    load_checkpoint(find_checkpoint(summary["run"]), {"model": model})
    assert model(batch).isfinite().all()
