"""Protects that raw rows of logs and tables have the scores that prepared rows have, to the bit."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.checkpoint.storage import directory
from hotbed.cli.main import main
from hotbed.data import SplitBinarySource
from hotbed.data.encoding.prepared_dataset import VocabularyEntry
from hotbed.data.encoding.vocabulary import VOCABULARY, Vocabulary, read_vocabulary, vocabulary_file, write_vocabulary
from hotbed.data.files.criteo import COLUMNS, DENSE, LABEL, SPARSE
from hotbed.data.formats.synthetic import write_synthetic_log
from hotbed.serve.served_model import ServedModel
from tests.cli.cases import Output, refused, small_recipe, train, write_yaml

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
    """A small recipe for a prepared dataset, which keeps its last checkpoint."""
    return small_recipe(data, train={"checkpoint": "last", **options})


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory, log: Path, prepared: Path) -> Run:
    folder = tmp_path_factory.mktemp("raw")
    recipe = folder / "small.yaml"
    write_yaml(recipe, recipe_of(prepared))
    status, _, run = train(recipe)
    assert status == 0
    scores = predicted(run, prepared, folder / "prepared.parquet", "--split", "test")
    rows = write_log(raw(log)[-TEST_ROWS:], folder / "rows.tsv")
    return Run(run, rows, scores)


def test_raw_rows_have_the_scores_of_prepared_ones(tmp_path: Path, trained: Run) -> None:
    assert len(set(trained.scores)) > TEST_ROWS // 2
    assert predicted(trained.path, trained.rows, tmp_path / "tsv.parquet") == trained.scores
    rows = raw(trained.rows).drop(LABEL)
    rows.write_csv(tmp_path / "day_24", separator="\t", include_header=False)  # as Kaggle's rows to predict
    assert predicted(trained.path, tmp_path / "day_24", tmp_path / "day_24.parquet") == trained.scores
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
        ("hex", pl.lit("xyz").alias("C3"), "column 'C3': 'xyz' at row 0 (row 0 of the file); expected a hexadecimal"),
        ("long", pl.lit("123456789").alias("C3"), "column 'C3': '123456789' at row 0 (row 0 of the file); expected a"),
        (
            "low",
            pl.lit(-4).alias("I2"),
            "column 'I2': -4 at row 0 (row 0 of the file); expected an integer of at least",
        ),
        ("part", pl.lit(1.5).alias("I2"), "column 'I2': 1.5 at row 0 (row 0 of the file); expected an integer of at"),
        ("ids", pl.lit(7).alias("C1"), "column 'C1': got int32, expected raw values (hexadecimal)"),
    ]:
        good.with_columns(column).write_parquet(tmp_path / f"{name}.parquet")
        out = tmp_path / f"of_{name}.parquet"
        told = refused(["predict", str(trained.path), str(tmp_path / f"{name}.parquet"), "--out", str(out)], capsys)
        assert message in told
        assert not out.exists()
    good.drop("C5").write_parquet(tmp_path / "less.parquet")
    argv = ["predict", str(trained.path), str(tmp_path / "less.parquet"), "--out", str(tmp_path / "x.parquet")]
    assert "column 'C5' is missing" in refused(argv, capsys)


def test_vocabularies_that_are_not_there_or_others_are_told(
    tmp_path: Path, prepared: Path, trained: Run, capsys: Output
) -> None:
    data, out = tmp_path / "data", tmp_path / "scores.parquet"
    shutil.copytree(prepared, data)
    recipe = write_yaml(tmp_path / "small.yaml", recipe_of(data, steps=2))
    status, _, run = train(recipe)
    assert status == 0
    capsys.readouterr()
    description = data / "feature_spec.yaml"
    kept = description.read_text()
    argv = ["predict", str(run), str(trained.rows), "--out", str(out)]
    values = yaml.safe_load(kept)
    entry = values["metadata"].pop("preparation")
    write_yaml(description, values)
    assert "has no vocabularies" in refused(argv, capsys)
    values["metadata"]["preparation"] = {**entry, "numericals": "cube"}
    write_yaml(description, values)
    message = "metadata.preparation: numericals: got 'cube', expected 'log', 'log_zero' or 'as_is'"
    assert message in refused(argv, capsys)
    other = {**entry["vocabularies"], "C2": {**entry["vocabularies"]["C2"], "sha256": "0" * 64}}
    values["metadata"]["preparation"] = {**entry, "vocabularies": other}
    write_yaml(description, values)
    told = refused(argv, capsys)
    assert "table 'C2': got data prepared with" in told
    description.write_text(kept)
    file = data / "vocabulary/C2.parquet"
    shutil.copy(data / "vocabulary/C3.parquet", file)
    assert "table 'C2': got " in refused(argv, capsys)
    file.unlink()
    assert f"{file} does not exist" in refused(argv, capsys)
    assert not out.exists()


def test_a_run_goes_on_with_the_vocabularies_that_it_began_with(tmp_path: Path, prepared: Path, capsys: Output) -> None:
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    recipe = write_yaml(tmp_path / "small.yaml", recipe_of(data))
    options = ("--train.checkpoint_every", "2", "--train.epochs", "9")
    values = yaml.safe_load((data / "feature_spec.yaml").read_text())
    entry = values["metadata"].pop("preparation")
    write_yaml(data / "feature_spec.yaml", values)
    status, _, run = train(recipe, *options, "--train.steps", "2")
    assert status == 0
    values["metadata"]["preparation"] = entry
    write_yaml(data / "feature_spec.yaml", values)
    capsys.readouterr()
    assert train(recipe, *options, "--train.steps", "4", "--resume", str(run))[0] == 0
    warning = "has no vocabularies"
    assert capsys.readouterr().err.count(warning) == 1
    assert train(recipe, *options, "--train.steps", "5", "--resume", str(tmp_path / "runs" / "small"))[0] == 0
    assert warning not in capsys.readouterr().err
    entry["vocabularies"]["C7"]["sha256"] = "1" * 64
    write_yaml(data / "feature_spec.yaml", values)
    newest = tmp_path / "runs" / "small"
    capsys.readouterr()
    status, _, _ = train(recipe, *options, "--train.steps", "6", "--resume", str(newest))
    assert status == 2
    told = capsys.readouterr().err
    assert "table 'C7': got data prepared with" in told
    assert "(--init_from)" in told


def test_packed_data_keep_the_vocabularies(tmp_path: Path, prepared: Path) -> None:
    recipe = write_yaml(tmp_path / "small.yaml", recipe_of(prepared))
    assert main(["pack", str(recipe), str(tmp_path / "packed"), "--budget", "20000", "--sample", "1"]) == 0
    for place in (prepared, tmp_path / "packed"):
        encoder = SplitBinarySource(place).encoder
        assert encoder is not None
        assert encoder.preparation is not None
        table = encoder.preparation.read("C1")
        assert len(table.keys) == encoder.preparation.entry.vocabularies["C1"].values > 0
        assert table.keys.nbytes + table.values.nbytes == 12 * len(table.keys)  # and 8 of hashes


def swapped(data: Path, table: str) -> None:
    """Give the values of the first two ids of a table each other's id."""
    values = read_vocabulary(vocabulary_file(data / VOCABULARY, table)).values
    values = values.take(pa.array([1, 0, *range(2, len(values))]))
    write_vocabulary(vocabulary_file(data / VOCABULARY, table), Vocabulary(values))
    description = yaml.safe_load((data / "feature_spec.yaml").read_text())
    entry = VocabularyEntry.of(values, "hexadecimal").model_dump()
    description["metadata"]["preparation"]["vocabularies"][table] = entry
    (data / "feature_spec.yaml").write_text(yaml.safe_dump(description))


def test_a_new_model_takes_rows_of_a_vocabulary_that_has_grown_and_of_no_other(
    tmp_path: Path, prepared: Path, trained: Run, capsys: Output
) -> None:
    write_synthetic_log(tmp_path / "day2.tsv", 1500, seed=2)
    prepare = ["prepare", str(tmp_path / "day2.tsv"), str(tmp_path / "grown"), "--threshold", "3"]
    assert main([*prepare, "--vocabulary", str(prepared / VOCABULARY)]) == 0
    grown, before = (SplitBinarySource(place).schema.rows for place in (tmp_path / "grown", prepared))
    assert any(grown[name] > before[name] for name in SPARSE)
    recipe = write_yaml(tmp_path / "small.yaml", recipe_of(tmp_path / "grown", steps=2))
    status, summary, run = train(recipe, "--init_from", str(trained.path))
    assert status == 0
    assert sum(of["what"] == "table" and of["taken"] for of in summary["init"]) == len(SPARSE)
    assert "warning" not in capsys.readouterr().err
    assert len(predicted(run, trained.rows, tmp_path / "grown.parquet")) == TEST_ROWS
    other = tmp_path / "other"
    shutil.copytree(prepared, other)
    swapped(other, "C4")
    write_yaml(recipe, recipe_of(other, steps=2))
    told = refused(["train", str(recipe), "--out", str(tmp_path / "runs2"), "--init_from", str(trained.path)], capsys)
    assert "table 'C4': got data prepared with" in told
    assert "hotbed prepare RAW OUT --vocabulary OLD/vocabulary" in told
    assert not (tmp_path / "runs2").exists()
    assert train(recipe, "--init_from", str(trained.path), "--init.leave", '["C4"]')[0] == 0


@pytest.mark.full
def test_a_day_whose_vocabulary_is_another_is_refused(tmp_path: Path, prepared: Path, capsys: Output) -> None:
    for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
        shutil.copytree(prepared, tmp_path / day)
    swapped(tmp_path / "2026-01-03", "C4")
    recipe = write_yaml(tmp_path / "small.yaml", recipe_of(tmp_path / "{date}"))
    argv = ["daily", str(recipe), "--out", str(tmp_path / "days"), "--from", "2026-01-01"]
    assert main([*argv, "--until", "2026-01-02"]) == 0
    assert "table 'C4': got data prepared with" in refused(argv, capsys)


def test_columns_of_digits_only_are_text_where_raw_values_are(tmp_path: Path, prepared: Path, trained: Run) -> None:
    values = read_vocabulary(vocabulary_file(prepared / VOCABULARY, "C1")).values
    digits = [text for value in values.to_pylist() if (text := f"{value:x}").isdecimal()][:5]
    assert digits
    rows = raw(trained.rows).drop(LABEL)[: len(digits)].with_columns(pl.Series("C1", digits))
    rows.write_csv(tmp_path / "rows.csv")
    rows.with_columns(pl.col(DENSE).cast(pl.Int64)).write_parquet(tmp_path / "rows.parquet")
    expected = predicted(trained.path, tmp_path / "rows.parquet", tmp_path / "of_parquet.parquet")
    assert predicted(trained.path, tmp_path / "rows.csv", tmp_path / "of_csv.parquet") == expected


def test_vocabularies_are_looked_for_where_they_are_said_to_be(
    tmp_path: Path, prepared: Path, trained: Run, s3: str, capsys: Output
) -> None:
    recipe, data, moved = tmp_path / "small.yaml", tmp_path / "data", tmp_path / "moved"
    shutil.copytree(prepared, data)
    write_yaml(recipe, recipe_of(data, steps=2))
    status, _, run = train(recipe)
    assert status == 0
    expected = predicted(run, trained.rows, tmp_path / "before.parquet")
    data.rename(moved)
    argv = ["predict", str(run), str(trained.rows), "--out", str(tmp_path / "out.parquet")]
    told = refused(argv, capsys)
    assert "the training data, which cannot" in told
    assert f"{data}/feature_spec.yaml does not exist" in told
    assert "--prepared DATASET" in told
    assert predicted(run, trained.rows, tmp_path / "after.parquet", "--prepared", str(moved)) == expected
    swapped(moved, "C4")
    assert "table 'C4': got data prepared with" in refused([*argv, "--prepared", str(moved)], capsys)
    gone = ["predict", str(trained.path), str(tmp_path / "no.tsv"), "--out", str(tmp_path / "out.parquet")]
    assert "no.tsv does not exist" in refused(gone, capsys)
    gone[2] = str(prepared)
    assert "--prepared is" in refused([*gone, "--prepared", str(prepared)], capsys)
    for folder, file in (("prepared", prepared / "feature_spec.yaml"), ("raw", trained.rows)):
        writer = directory(s3.replace("PATH", folder)).writer(file.name)
        writer.write(memoryview(file.read_bytes()))
        writer.finish()
    argv = ["predict", str(trained.path), s3.replace("PATH", f"raw/{trained.rows.name}"), "--device", "cpu"]
    assert main([*argv, "--out", str(tmp_path / "remote.parquet")]) == 0
    assert pl.read_parquet(tmp_path / "remote.parquet")["score"].to_list() == trained.scores
    gone[2] = s3.replace("PATH", "prepared")
    assert "got a URI, expected a local folder" in refused(gone, capsys)


def test_a_model_that_does_not_say_what_its_rows_stand_for_gets_no_raw_values(
    tmp_path: Path, prepared: Path, trained: Run, capsys: Output
) -> None:
    data, recipe = tmp_path / "data", tmp_path / "small.yaml"
    shutil.copytree(prepared, data)
    described = (data / "feature_spec.yaml").read_text()
    values = yaml.safe_load(described)
    del values["metadata"]["preparation"]
    write_yaml(data / "feature_spec.yaml", values)
    write_yaml(recipe, recipe_of(data, steps=2, epochs=9))
    status, _, run = train(recipe)
    assert status == 0
    assert main(["export", str(run), str(tmp_path / "encoded")]) == 0
    (data / "feature_spec.yaml").write_text(described)
    message = "the checkpoint has no vocabularies"
    argv = ["predict", str(run), str(trained.rows), "--out", str(tmp_path / "out.parquet")]
    for command in (argv, ["export", str(run), str(tmp_path / "model")]):
        told = refused(command, capsys)
        assert message in told
        assert "--resume RUN" in told
    assert not (tmp_path / "model").exists()
    assert train(recipe, "--resume", str(run), "--train.steps", "3")[0] == 0
    newest = str(tmp_path / "runs" / "small")
    assert len(predicted(Path(newest), trained.rows, tmp_path / "now.parquet")) == TEST_ROWS
    assert main(["export", newest, str(tmp_path / "model")]) == 0
    since = str(next((run / "checkpoints").glob("last-*")))
    told = refused(["export", newest, str(tmp_path / "change"), "--since", since], capsys)
    assert "recorded no vocabularies" in told


# -- rows of tables --------------------------------------------------------------------------------------------------


ROWS, TABLE_TEST_ROWS = 400, 60
SCHEMA: dict[str, Any] = {
    "sparse": [
        {"name": "code", "rows": 2},
        {"name": "item", "rows": 2},
        {"name": "history", "rows": 2, "table": "item", "ids": None, "pooling": "mean"},
    ],
    "dense": ["age", {"name": "price", "rule": "asinh", "missing": "indicator"}],
    "labels": ["click"],
    "weight": "weight",
}


class TableRun(NamedTuple):
    """A run on a prepared table, the dataset, raw rows of its test split, and their scores when read prepared."""

    path: Path
    data: Path
    rows: Path
    scores: list[float]


def table() -> pa.Table:
    """Codes that are text though most look like numbers, integers, lists of them, missing and rare values."""
    rng = np.random.default_rng(0)
    lists = [None if i % 7 == 0 else rng.integers(0, 40, i % 4).tolist() for i in range(ROWS)]
    codes = rng.zipf(1.3, ROWS) % 60
    return pa.table(
        {
            "code": [None if i % 11 == 0 else str(c) if c else "ü" for i, c in enumerate(codes)],
            "item": pa.array(rng.integers(-20, 20, ROWS), pa.int16()),
            "history": pa.array(lists, pa.list_(pa.int32())),
            "age": [None if i % 9 == 0 else i % 70 for i in range(ROWS)],
            "price": [None if i % 5 == 0 else float(x) for i, x in enumerate(rng.lognormal(3, 2, ROWS))],
            "click": rng.integers(0, 2, ROWS),
            "weight": rng.random(ROWS),
        }
    )


@pytest.fixture(name="of_table", scope="module")
def _of_table(tmp_path_factory: pytest.TempPathFactory) -> TableRun:
    return run_on(tmp_path_factory.mktemp("tables"))


def run_on(folder: Path, *options: str) -> TableRun:
    """Prepare with some options, and train."""
    raw = table()
    pq.write_table(raw, folder / "raw.parquet")
    (folder / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    argv = ["prepare", str(folder / "raw.parquet"), str(folder / "data"), "--schema", str(folder / "schema.yaml")]
    assert main([*argv, "--threshold", "3", "--test_rows", str(TABLE_TEST_ROWS), *options]) == 0
    recipe = recipe_of(folder / "data")
    recipe["data"]["source"] = yaml.safe_load((folder / "data/source.yaml").read_text())
    (folder / "small.yaml").write_text(yaml.safe_dump(recipe))
    status, _, run = train(folder / "small.yaml")
    assert status == 0
    scores = predicted(run, folder / "data", folder / "prepared.parquet", "--split", "test")
    pq.write_table(raw[-TABLE_TEST_ROWS:].drop_columns(["click", "weight"]), folder / "rows.parquet")
    return TableRun(run, folder / "data", folder / "rows.parquet", scores)


def test_raw_rows_of_tables_have_the_scores_of_prepared_ones(tmp_path: Path, of_table: TableRun) -> None:
    assert len(set(of_table.scores)) > TABLE_TEST_ROWS // 2
    assert predicted(of_table.path, of_table.rows, tmp_path / "raw_scores.parquet") == of_table.scores
    rows = pq.read_table(of_table.rows)
    coded = rows.set_column(0, "code", rows["code"].dictionary_encode())
    pq.write_table(coded, tmp_path / "coded.parquet")
    assert predicted(of_table.path, tmp_path / "coded.parquet", tmp_path / "of_coded.parquet") == of_table.scores


@pytest.mark.parametrize("encoded", [False, True])
def test_servers_take_raw_values_of_exported_models(tmp_path: Path, of_table: TableRun, encoded: bool) -> None:
    assert main(["export", str(of_table.path), str(tmp_path / "model")]) == 0
    rows = pq.read_table(of_table.rows)
    if encoded:
        rows = pq.read_table(of_table.data / "test", columns=rows.column_names)
    model = ServedModel.open(tmp_path / "model", encoded=encoded)
    kinds = {column.name: column.kind for column in model.encoder.columns()}
    numbers = {"age": "numbers", "price": "numbers"}
    assert kinds == {"code": "integers" if encoded else "text", "item": "integers", "history": "integers"} | numbers
    answered, _ = model.score(model.encoder.table(json.loads(json.dumps(rows.to_pydict()))))
    assert answered[:, 0].tolist() == of_table.scores
    model.close()


def test_raw_rows_of_retrieval_need_no_negatives(tmp_path: Path, of_table: TableRun) -> None:
    recipe = yaml.safe_load((of_table.data.parent / "small.yaml").read_text())
    recipe["model"] = {"class_path": "hotbed.nn.TwoTower", "init_args": {"item": ["item"], "widths": [4]}}
    columns = recipe["data"]["source"]["init_args"]["schema"]["sparse"]
    rows = next(column["rows"] for column in columns if column["name"] == "item")
    pq.write_table(pa.table({"item": np.arange(rows)}), tmp_path / "items.parquet")
    recipe["retrieval"] = {"negatives": "history", "items": str(tmp_path / "items.parquet")}
    recipe["train"]["steps"] = 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status, _, run = train(tmp_path / "recipe.yaml")
    assert status == 0
    prepared = predicted(run, of_table.data, tmp_path / "prepared.parquet", "--split", "test")
    pq.write_table(pq.read_table(of_table.rows).drop_columns(["history"]), tmp_path / "rows.parquet")
    assert predicted(run, tmp_path / "rows.parquet", tmp_path / "raw.parquet") == prepared


def test_parts_of_prepared_data_are_not_taken_for_raw_ones(tmp_path: Path, of_table: TableRun) -> None:
    assert predicted(of_table.path, of_table.data / "test", tmp_path / "of_folder.parquet") == of_table.scores
    (file,) = (of_table.data / "test").iterdir()
    shutil.copy(file, tmp_path / "elsewhere.parquet")
    assert predicted(of_table.path, tmp_path / "elsewhere.parquet", tmp_path / "of_file.parquet") == of_table.scores


def test_hashed_values_are_taken_by_predictions_and_servers(tmp_path: Path) -> None:
    run = run_on(tmp_path, "--hash_rows", "{code: 40, item: 64}", "--hash_seed", "5")
    assert not list((run.data / "vocabulary").iterdir())
    assert predicted(run.path, run.rows, tmp_path / "raw_scores.parquet") == run.scores
    assert main(["export", str(run.path), str(tmp_path / "model")]) == 0
    model = ServedModel.open(tmp_path / "model")
    answered, _ = model.score(model.encoder.table(json.loads(json.dumps(pq.read_table(run.rows).to_pydict()))))
    assert answered[:, 0].tolist() == run.scores
    model.close()


def test_codes_of_a_text_file_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    raw = table().drop_columns(["history", "weight"])
    pq.write_table(raw, tmp_path / "raw.parquet")
    schema = {"sparse": SCHEMA["sparse"][:2], "dense": ["age", "price"], "labels": ["click"]}
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(schema))
    argv = ["prepare", str(tmp_path / "raw.parquet"), str(tmp_path / "data"), "--schema", str(tmp_path / "schema.yaml")]
    assert main([*argv, "--threshold", "3", "--format", "split_binary"]) == 0
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe_of(tmp_path / "data", steps=3)))
    status, _, run = train(tmp_path / "small.yaml")
    assert status == 0
    prepared = predicted(run, tmp_path / "data", tmp_path / "prepared.parquet", "--split", "test")
    rows = pl.read_parquet(tmp_path / "raw.parquet")[-len(prepared) :]
    digits = pl.col("code").is_null() | (pl.col("code") != "ü")  # nothing in the file tells that they are text then
    rows.filter(digits).write_csv(tmp_path / "rows.tsv", separator="\t")
    scores = predicted(run, tmp_path / "rows.tsv", tmp_path / "scores.parquet")
    expected = [score for score, is_digits in zip(prepared, rows.select(digits)["code"], strict=True) if is_digits]
    assert scores == expected
    assert len(set(scores)) > 10


def test_what_cannot_be_asked_is_told(tmp_path: Path, of_table: TableRun, capsys: Output) -> None:
    rows = pq.read_table(of_table.rows)
    out = tmp_path / "scores.parquet"
    argv = ["predict", str(of_table.path), str(tmp_path / "rows.parquet"), "--out", str(out)]
    for column, values, message in [
        ("code", pa.array(range(TABLE_TEST_ROWS)), "column 'code': got int64, expected raw values (text)"),
        ("item", pa.array(["5"] * TABLE_TEST_ROWS), "column 'item': got string, expected raw values (integers)"),
        (
            "history",
            pa.array(range(TABLE_TEST_ROWS)),
            "sparse column 'history'",
        ),
        ("history", pa.array([["5"]] * TABLE_TEST_ROWS), "expected raw values (integers)"),
    ]:
        other = rows.set_column(rows.column_names.index(column), column, values)
        pq.write_table(other, tmp_path / "rows.parquet")
        assert message in refused(argv, capsys)
    shutil.copytree(of_table.data, tmp_path / "data")
    (tmp_path / "data/vocabulary/item.parquet").unlink()
    recipe = recipe_of(tmp_path / "data", steps=2)
    recipe["data"]["source"] = yaml.safe_load((of_table.data / "source.yaml").read_text())
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    status, _, run = train(tmp_path / "small.yaml")  # needs no vocabulary
    assert status == 0
    argv = ["predict", str(run), str(of_table.rows), "--out", str(out)]
    assert "vocabulary/item.parquet does not exist" in refused(argv, capsys)
    assert not out.exists()
