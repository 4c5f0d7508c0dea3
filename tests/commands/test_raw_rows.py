"""Protects that raw rows of a prepared dataset's log have the scores that its rows have, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
import yaml

from hotbed.commands.main import main
from hotbed.data import SplitBinarySource
from hotbed.data.criteo import COLUMNS, DENSE, LABEL, SPARSE
from tests.commands.cases import Output, refused, train

TEST_ROWS = 300
ODD: list[dict[str, Any]] = [
    dict.fromkeys((*DENSE, *SPARSE)),
    {**dict.fromkeys(DENSE, -2), **dict.fromkeys(SPARSE, "0")},
    {**dict.fromkeys(DENSE, 2**62), **dict.fromkeys(SPARSE, "DEADbeef")},
]


class Run(NamedTuple):
    """A run on a prepared dataset, the last rows of its log, and their scores when they are read prepared."""

    path: Path
    rows: Path
    scores: list[float]


def raw(log: Path) -> pl.DataFrame:
    """A log's values as text."""
    return pl.read_csv(log, separator="\t", has_header=False, new_columns=list(COLUMNS), infer_schema=False)


def write_log(rows: pl.DataFrame, file: Path) -> Path:
    rows.select(COLUMNS).write_csv(file, separator="\t", include_header=False)
    return file


def predicted(run: Path, data: Path, out: Path, *options: str) -> list[float]:
    assert main(["predict", str(run), str(data), "--out", str(out), "--device", "cpu", *options]) == 0
    return pl.read_parquet(out)["score"].to_list()


def recipe_of(data: Path, **options: Any) -> dict[str, Any]:
    """A small recipe for a prepared dataset."""
    return {
        "name": "small",
        "data": {"path": str(data), "dim": 8},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 128, "device": "cpu", "checkpoint": "last", **options},
    }


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory, log: Path, prepared: Path) -> Run:
    folder = tmp_path_factory.mktemp("raw")
    recipe = folder / "small.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(prepared)))
    status, _, run = train(recipe)
    assert status == 0
    scores = predicted(run, prepared, folder / "prepared.parquet", "--split", "test")
    rows = write_log(raw(log)[-TEST_ROWS:], folder / "rows.tsv")
    return Run(run, rows, scores)


def test_raw_rows_have_the_scores_of_prepared_ones(tmp_path: Path, trained: Run) -> None:
    assert len(set(trained.scores)) > TEST_ROWS // 2
    assert predicted(trained.path, trained.rows, tmp_path / "tsv.parquet") == trained.scores
    rows = raw(trained.rows).drop(LABEL)
    rows.with_columns(pl.col(DENSE).cast(pl.Int64)).write_parquet(tmp_path / "whole.parquet")
    floats = pl.col(DENSE).cast(pl.Float64)  # as pandas has integers, of which some are missing
    rows.with_columns(floats, pl.col(SPARSE).cast(pl.Categorical)).write_parquet(tmp_path / "floats.parquet")
    for name in ("whole", "floats"):
        assert predicted(trained.path, tmp_path / f"{name}.parquet", tmp_path / f"of_{name}.parquet") == trained.scores


def test_missing_rare_and_extreme_values_are_what_prepare_makes_of_them(
    tmp_path: Path, log: Path, prepared: Path, trained: Run
) -> None:
    odd = pl.DataFrame(ODD, schema={**dict.fromkeys(DENSE, pl.Int64), **dict.fromkeys(SPARSE, pl.String)})
    texts = odd.with_columns(pl.col(DENSE).cast(pl.String), pl.lit("0").alias(LABEL)).select(COLUMNS)
    whole = write_log(pl.concat([raw(log), texts]), tmp_path / "more.tsv")
    share = str(len(ODD) / (3000 + len(ODD)))
    argv = ["prepare", str(whole), str(tmp_path / "more"), "--vocabulary", str(prepared / "vocabulary")]
    assert main([*argv, "--test_fraction", share, "--threshold", "1000000"]) == 0
    assert [f.read_bytes() for f in sorted((prepared / "vocabulary").iterdir())] == [
        f.read_bytes() for f in sorted((tmp_path / "more" / "vocabulary").iterdir())
    ]
    expected = predicted(trained.path, tmp_path / "more", tmp_path / "of_more.parquet", "--split", "test")
    assert len(expected) == len(ODD)
    odd.write_parquet(tmp_path / "odd.parquet")
    assert predicted(trained.path, tmp_path / "odd.parquet", tmp_path / "of_odd.parquet") == expected


def test_rows_that_cannot_be_prepared_are_told(tmp_path: Path, trained: Run, capsys: Output) -> None:
    good = raw(trained.rows).drop(LABEL).with_columns(pl.col(DENSE).cast(pl.Int64))
    for name, column, message in [
        (
            "hex",
            pl.lit("xyz").alias("C3"),
            "column 'C3', row 0 (row 0 of the file): 'xyz' is not a hexadecimal number of at most 8 digits",
        ),
        ("long", pl.lit("123456789").alias("C3"), "'123456789' is not a hexadecimal number of at most 8 digits"),
        (
            "low",
            pl.lit(-3).alias("I2"),
            "column 'I2', row 0 (row 0 of the file): -3 is out of range: ln(x + 3) needs x ≥ −2",
        ),
        (
            "part",
            pl.lit(1.5).alias("I2"),
            "row 0 (row 0 of the file): '1.5' is not an integer; mend it, or leave it missing",
        ),
        ("ids", pl.lit(7).alias("C1"), "column 'C1' is int32, and its raw values are hexadecimal, as they were before"),
    ]:
        good.with_columns(column).write_parquet(tmp_path / f"{name}.parquet")
        out = tmp_path / f"of_{name}.parquet"
        told = refused(["predict", str(trained.path), str(tmp_path / f"{name}.parquet"), "--out", str(out)], capsys)
        assert message in told
        assert not out.exists()
    argv = ["predict", str(trained.path), str(tmp_path / "typo"), "--out", str(tmp_path / "x.parquet")]
    told = refused(argv, capsys)
    assert "typo does not exist; give a prepared dataset, or raw rows as `hotbed prepare` takes them" in told
    good.drop("C5").write_parquet(tmp_path / "less.parquet")
    argv = ["predict", str(trained.path), str(tmp_path / "less.parquet"), "--out", str(tmp_path / "x.parquet")]
    assert "has no column 'C5'" in refused(argv, capsys)


def test_vocabularies_that_are_not_there_or_others_are_told(
    tmp_path: Path, prepared: Path, trained: Run, capsys: Output
) -> None:
    data, out = tmp_path / "data", tmp_path / "scores.parquet"
    shutil.copytree(prepared, data)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(data, steps=2)))
    status, _, run = train(recipe)
    assert status == 0
    capsys.readouterr()
    description = data / "feature_spec.yaml"
    kept = description.read_text()
    argv = ["predict", str(run), str(trained.rows), "--out", str(out)]
    values = yaml.safe_load(kept)
    entry = values["metadata"].pop("preparation")
    description.write_text(yaml.safe_dump(values))
    assert "do not say how raw values became ids: they are of an earlier release" in refused(argv, capsys)
    values["metadata"]["preparation"] = {**entry, "numericals": "cube"}
    description.write_text(yaml.safe_dump(values))
    assert "metadata.preparation: numericals: Input should be 'log' or 'as_is'" in refused(argv, capsys)
    other = {**entry["vocabularies"], "C2": {**entry["vocabularies"]["C2"], "sha256": "0" * 64}}
    values["metadata"]["preparation"] = {**entry, "vocabularies": other}
    description.write_text(yaml.safe_dump(values))
    told = refused(argv, capsys)
    assert "table 'C2': the data were prepared with other values than those the model was trained on" in told
    description.write_text(kept)
    file = data / "vocabulary/C2.parquet"
    shutil.copy(data / "vocabulary/C3.parquet", file)
    assert "has other values of table 'C2' than its dataset was prepared with" in refused(argv, capsys)
    file.unlink()
    assert f"{file} does not exist" in refused(argv, capsys)
    assert not out.exists()


def test_a_run_goes_on_with_the_vocabularies_that_it_began_with(tmp_path: Path, prepared: Path, capsys: Output) -> None:
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(data)))
    options = ("--train.checkpoint_every", "2", "--train.epochs", "9")
    values = yaml.safe_load((data / "feature_spec.yaml").read_text())
    entry = values["metadata"].pop("preparation")
    (data / "feature_spec.yaml").write_text(yaml.safe_dump(values))
    status, _, run = train(recipe, *options, "--train.steps", "2")  # as an earlier release prepared them
    assert status == 0
    values["metadata"]["preparation"] = entry
    (data / "feature_spec.yaml").write_text(yaml.safe_dump(values))
    assert train(recipe, *options, "--train.steps", "4", "--resume", str(run))[0] == 0
    entry["vocabularies"]["C7"]["sha256"] = "1" * 64
    (data / "feature_spec.yaml").write_text(yaml.safe_dump(values))
    newest = tmp_path / "runs" / "small"
    capsys.readouterr()
    status, _, _ = train(recipe, *options, "--train.steps", "6", "--resume", str(newest))
    assert status == 2
    told = capsys.readouterr().err
    assert "table 'C7': the data were prepared with other values than those the model was trained on" in told
    assert "give the data that it was trained on, or train with these (init_from takes over the rows" in told


def test_packed_data_keep_the_vocabularies(tmp_path: Path, prepared: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(prepared)))
    assert main(["pack", str(recipe), str(tmp_path / "packed"), "--budget", "20000", "--sample", "1"]) == 0
    for place in (prepared, tmp_path / "packed"):
        encoder = SplitBinarySource(place).encoder
        assert encoder is not None
        assert encoder.preparation is not None
        assert len(encoder.preparation.read("C1").keys) == encoder.preparation.entry.vocabularies["C1"].values > 0
