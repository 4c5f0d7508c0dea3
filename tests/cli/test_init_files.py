"""Protects that any table gives a recipe that loads and trains a step, or one clear message; never a traceback."""

import datetime
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.cli.main import main
from tests.cli.cases import Output, refused, train

RNG = np.random.default_rng(0)
N = 240
CLICK = (np.arange(N) % 7 < 3).astype(np.int8)
USER = np.arange(N) * 7 % 31
STEP = ("--train.device", "cpu", "--train.steps", "1", "--train.epochs", "1", "--train.checkpoint", "none")
Make = Callable[[Path], Any]


def frame(**columns: Any) -> pl.DataFrame:
    return pl.DataFrame({"click": CLICK, "user": USER, **columns})


def write(file: Path, **columns: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"click": CLICK, "user": USER, **columns})
    pq.write_table(table, file)
    return file


def trained(path: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    """The recipe that is drafted for a path, with which a step has been trained and what there is to test tested."""
    out = tmp_path / "drafted.yaml"
    assert main(["init", str(path), "--out", str(out), *options]) == 0
    status, summary, _ = train(out, *STEP)
    assert status == 0
    recipe = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert ("test" in summary) == (recipe["data"]["test_split"] == "test")
    return recipe


def schema_of(recipe: dict[str, Any]) -> dict[str, Any]:
    return recipe["data"]["source"]["init_args"]["schema"]


# -- files that work -------------------------------------------------------------------------------------------------


def written(name: str, **columns: Any) -> Make:
    return lambda folder: write(folder / name, **columns)


def csv(name: str, text: bytes | None = None, **options: Any) -> Make:
    def make(folder: Path) -> Path:
        table = frame(x=RNG.random(N), city=RNG.choice(["Köln", "a,b", 'q"t'], N))
        table.write_csv(folder / "plain", **options)
        data = (folder / "plain").read_bytes() if text is None else text
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return folder / name

    return make


def several(*names: str) -> Make:
    def make(folder: Path) -> Path:
        for name in names:
            write(folder / "data" / name)
        return folder / "data"

    return make


LINES = "\n".join(f"{i % 2},{i % 9}" for i in range(N)).encode()
GOOD: dict[str, Make] = {
    "upper case": written("LOG.PARQUET"),
    "pandas' index": written("log.parquet", **{"__index_level_0__": np.arange(N), "Unnamed: 0": np.arange(N)}),
    "polars' types": written(
        "log.parquet",
        cat=pa.array(RNG.choice(["a", "b"], N)).cast(pa.dictionary(pa.uint32(), pa.large_string())),
        u=RNG.integers(0, 9, N).astype(np.uint64),
        at=pa.array(np.arange(N), pa.timestamp("ns", "UTC")),
        took=pa.array(np.arange(N), pa.duration("ms")),
        t=pa.array(np.arange(N), pa.time64("us")),
        raw=pa.array([b"\x00\xff", b"x"] * (N // 2)),
        large=pa.array(RNG.choice(["a", "b"], N), pa.large_string()),
        nothing=pa.nulls(N),
        money=pa.array(RNG.integers(0, 999, N)).cast(pa.decimal128(21, 2)),
        struct=pa.array([{"a": 1}] * N),
        map=pa.array([[("k", 1)]] * N, pa.map_(pa.string(), pa.int64())),
        ids=pa.array([[1, 2], [], None] * (N // 3), pa.large_list(pa.int32())),
        four=pa.array([[1, 2, 3, 4]] * N, pa.list_(pa.int64(), 4)),
    ),
    "floats": written(
        "log.parquet",
        half=RNG.random(N).astype(np.float16),
        inf=np.where(np.arange(N) % 9, RNG.random(N), np.inf),
        nan=np.where(np.arange(N) % 2, RNG.random(N), np.nan),
        huge=RNG.random(N) * 1e300,
        tiny=RNG.random(N) * 1e-300,
        whole=np.floor(RNG.random(N) * 9),
        seldom=(np.arange(N) == 7) + 0.5,
    ),
    "integers": written(
        "log.parquet",
        low=np.full(N, -(2**63)) + USER,
        high=np.full(N, 2**63 - 1) - USER,
        unsigned=np.full(N, 2**64 - 1, np.uint64) - USER.astype(np.uint64),
    ),
    "one column": written("log.parquet"),
    "many columns": written("log.parquet", **{f"c{i}": RNG.integers(0, 9, N) for i in range(60)}),
    "csv": csv("log.csv"),
    "tsv.gz": csv("log.tsv.gz", separator="\t"),
    "csv with a byte order mark": csv("log.csv", include_bom=True),
    "csv without a last line end": csv("log.csv", b"label,a\n" + LINES),
    "csv with empty lines": csv("log.csv", b"label,a\n\n" + LINES + b"\n\n\n"),
    "spaces in names": csv("log.csv", b"label, a b\n" + LINES),
    "a folder": several("a.parquet", "b.parquet"),
    "splits": several("train.parquet", "test.parquet", "valid.parquet"),
    "dev and holdout": several("train/a.parquet", "dev/a.parquet", "holdout/a.parquet"),
    "hive": several("day=2024-01-01/h=1/a.parquet", "day=2024-01-02/h=2/a.parquet", "day=2024-01-03/h=1/a.parquet"),
    "hidden files": several("a.parquet", ".b.parquet", "_SUCCESS/c.parquet"),
}


@pytest.mark.parametrize("kind", GOOD)
def test_files_that_work(tmp_path: Path, kind: str) -> None:
    recipe = trained(GOOD[kind](tmp_path), tmp_path)
    assert "user" in str(schema_of(recipe)) or "label" in str(schema_of(recipe))


# -- files that do not -----------------------------------------------------------------------------------------------


def raw(name: str, content: bytes) -> Make:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def without_label(folder: Path) -> Path:
    pq.write_table(pa.table({"user": USER}), folder / "log.parquet")
    return folder / "log.parquet"


BAD: dict[str, tuple[Make, str]] = {
    "nothing": (lambda folder: folder / "none.parquet", "does not exist, expected a Parquet, CSV or TSV file"),
    "empty folder": (lambda folder: folder, "got no files, expected .parquet, .parq, .pq, .csv or .tsv"),
    "no header": (raw("log.csv", b"1,7\n0,8\n"), "log.csv has no header: its first line is 1, 7"),
    "no label": (without_label, "no label column, expected a usual name (label, labels, click, "),
    "test only": (several("test/a.parquet", "valid/a.parquet"), "got the splits valid, test"),
    "side table": (several("train.parquet", "items.parquet"), "(hotbed init PATH --test PATH)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_files_that_do_not_are_explained(tmp_path: Path, kind: str, capsys: Output) -> None:
    make, message = BAD[kind]
    found = refused(["init", str(make(tmp_path)), "--out", str(tmp_path / "r.yaml")], capsys)
    assert message in found
    assert not (tmp_path / "r.yaml").exists()


# -- options ---------------------------------------------------------------------------------------------------------


def test_ratings_in_the_order_of_movielens(tmp_path: Path) -> None:
    """By user, with times: the newest rows are the test, and rating is mapped."""
    n = 6000
    users = np.sort(RNG.integers(0, 200, n))
    table = pl.DataFrame(
        {
            "user_id": users,
            "movie_id": RNG.integers(1, 400, n),
            "rating": RNG.integers(1, 6, n),
            "timestamp": RNG.integers(956_000_000, 1_046_000_000, n),
        }
    )
    table.write_csv(tmp_path / "ratings.csv")
    recipe = trained(tmp_path / "ratings.csv", tmp_path, "--positive", ">= 4")
    args = recipe["data"]["source"]["init_args"]
    assert args["split"]["by"] == "time" and args["split"]["column"] == "timestamp"
    assert args["split"]["valid_from"] < args["split"]["test_from"]
    assert recipe["data"].get("shuffle", True)  # the rows are not in the order of time
    assert schema_of(recipe)["labels"] == [{"column": "rating", "positive": ">= 4"}]
    assert {c["name"]: c["rows"] for c in schema_of(recipe)["sparse"]} == {"user_id": 4096, "movie_id": 8192}


def test_an_unlabeled_test_file_is_named_and_not_used(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "data").mkdir()
    frame(x=RNG.random(N)).write_csv(tmp_path / "data/train.csv")
    frame(x=RNG.random(N)).drop("click").write_csv(tmp_path / "data/test.csv")
    recipe = trained(tmp_path / "data", tmp_path)
    args = recipe["data"]["source"]["init_args"]
    assert args["split_paths"] == {"test": None}
    assert args["split"]["by"] == "hash" and args["split"]["test"] == 0.1
    text = (tmp_path / "drafted.yaml").read_text()
    assert "# The test files (test.csv) have no column 'click' and are not used." in text
    message = refused(["init", str(tmp_path / "data/train.csv"), "--test", str(tmp_path / "data/test.csv")], capsys)
    assert "test.csv has no column 'click'" in message


def test_a_test_file_that_is_elsewhere(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path / "a/log.parquet")
    write(tmp_path / "b/later.parquet")
    recipe = trained(tmp_path / "a", tmp_path, "--test", str(tmp_path / "b/later.parquet"))
    args = recipe["data"]["source"]["init_args"]
    assert args["split_paths"] == {"test": str(tmp_path / "b/later.parquet")}
    several("train.parquet", "test.parquet")(tmp_path)
    message = refused(["init", str(tmp_path / "data"), "--test", str(tmp_path / "b")], capsys)
    assert "has a test split. Remove --test" in message


def test_columns_and_times_by_option(tmp_path: Path, capsys: Output) -> None:
    path = write(tmp_path / "log.parquet", week=np.arange(N) // 20, a=USER, b=USER)
    recipe = trained(path, tmp_path, "--time", "week", "--drop", "a", "b", "--label", "click")
    assert recipe["data"]["source"]["init_args"]["split"] == {
        "by": "time",
        "column": "week",
        "valid_from": 9,
        "test_from": 11,
    }
    assert recipe["data"]["shuffle"] is False
    assert [c["name"] for c in schema_of(recipe)["sparse"]] == ["user"]
    text = (tmp_path / "drafted.yaml").read_text()
    assert "# - 'a' (int64): --drop" in text and "'week' (int64): a time (the rows are split by it)" in text
    message = refused(["init", str(path), "--time", "weke"], capsys)
    assert "got 'weke'" in message and "did you mean 'week'" in message
    write(tmp_path / "log.parquet", one=np.arange(N) > 100)
    assert "--time: got one, expected a time" in refused(["init", str(path), "--time", "one"], capsys)


def test_many_features_get_a_model_that_fits_them(tmp_path: Path) -> None:
    """400 ids and 100 floats had a DLRM of 80,000 products, whose first layer had 82 million weights."""
    ids = {f"id{i}": RNG.integers(0, 20, N) for i in range(400)}
    floats = {f"x{i}": RNG.random(N) for i in range(100)}
    out = tmp_path / "r.yaml"
    assert main(["init", str(write(tmp_path / "wide.parquet", **ids, **floats)), "--out", str(out)]) == 0
    recipe = yaml.safe_load(out.read_text())
    assert recipe["model"]["class_path"] == "hotbed.nn.DCNv2"
    assert "401 features have 80,601 pairs" in out.read_text()
    assert train(out, *STEP)[0] == 0


def test_a_validation_split_is_cut_off_where_it_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "r.yaml"
    assert main(["init", str(write(tmp_path / "log.parquet")), "--valid", "--out", str(out)]) == 0
    data = yaml.safe_load(out.read_text())["data"]
    assert (data["valid_split"], data["source"]["init_args"]["split"]["valid"]) == ("valid", 0.2)  # below 5,000 rows


# -- any columns -----------------------------------------------------------------------------------------------------


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=6)
VALUES: list[Callable[[np.random.Generator, int], Any]] = [
    lambda rng, n: rng.integers(-5, 5, n),
    lambda rng, n: rng.integers(0, 2**62, n),
    lambda rng, n: rng.random(n) * 10.0 ** rng.integers(-300, 300),
    lambda rng, n: np.where(rng.random(n) < 0.5, np.nan, rng.integers(0, 99, n)),
    lambda rng, n: rng.normal(0, 1, n).astype(np.float32),
    lambda rng, n: pa.array(rng.integers(0, 10**9, n), pa.timestamp("s")),
    lambda rng, n: pa.array(rng.integers(0, 20_000, n).astype(np.int32), pa.date32()),
    lambda rng, n: [str(i) for i in rng.integers(0, 50, n)],
    lambda rng, n: pa.array([None if i < 5 else f"x{i}" for i in rng.integers(0, 50, n)], pa.string()),
    lambda rng, n: rng.random(n) < 0.5,
    lambda rng, n: pa.nulls(n),
    lambda rng, n: pa.array([list(range(int(k))) for k in rng.integers(0, 4, n)], pa.list_(pa.int64())),
    lambda rng, n: pa.array([["a"] * int(k) for k in rng.integers(0, 4, n)], pa.list_(pa.string())),
    lambda rng, n: pa.array([[0.5]] * n),
    lambda rng, n: pa.array([{"a": 1}] * n),
    lambda rng, n: pa.array(rng.integers(0, 999, n)).cast(pa.decimal128(25, 3)),
    lambda rng, n: pa.array([bytes([int(i)]) for i in rng.integers(0, 255, n)]),
    lambda rng, n: pa.array(rng.choice(["p", "q"], n)).dictionary_encode(),
    lambda rng, n: np.full(n, 3),
    lambda rng, n: np.arange(n),
    lambda rng, n: pa.array([datetime.time(1, 2)] * n),
]
LABELS: list[Callable[[np.random.Generator, int], Any]] = [
    lambda rng, n: np.arange(n) % 2,
    lambda rng, n: np.arange(n) % 2 * 2 - 1,
    lambda rng, n: np.arange(n) % 2 == 0,
    lambda rng, n: np.where(np.arange(n) % 2, "yes", "no"),
    lambda rng, n: np.arange(n) % 5 + 1,
    lambda rng, n: rng.random(n),
    lambda rng, n: np.zeros(n),
    lambda rng, n: pa.array([None, 1, 0] * n)[:n],
    lambda rng, n: [["a", "b", "c"][i % 3] for i in range(n)],
]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.sampled_from([1, 2, 3, 49, 60, 300]),
    columns=st.dictionaries(names, st.sampled_from(range(len(VALUES))), max_size=6),
    label=st.sampled_from(range(len(LABELS))),
    seed=st.integers(0, 99),
    as_csv=st.booleans(),
)
def test_any_columns_train_or_are_explained(
    tmp_path_factory: pytest.TempPathFactory,
    capsys: Output,
    n: int,
    columns: dict[str, int],
    label: int,
    seed: int,
    as_csv: bool,
) -> None:
    folder, rng = tmp_path_factory.mktemp("any"), np.random.default_rng(seed)
    made = {name: VALUES[kind](rng, n) for name, kind in columns.items() if name != "label"}
    table = pa.table({"label": LABELS[label](rng, n), **made})
    path = folder / "log.parquet"
    pq.write_table(table, path, row_group_size=max(1, n // 3))
    if as_csv:
        plain = [name for name in table.column_names if not pa.types.is_nested(table.schema.field(name).type)]
        plain = [name for name in plain if not pa.types.is_binary(table.schema.field(name).type)]
        path = folder / "log.csv"
        pl.from_arrow(table.select(plain)).write_csv(path)  # type: ignore[union-attr]
    out = folder / "drafted.yaml"
    status = main(["init", str(path), "--out", str(out)])
    if status == 0:
        status, _, run = train(out, *STEP[:-1], "last")
    if status == 0:
        scores = folder / "scores.parquet"
        status = main(["eval", "--checkpoint", str(run), "--split", "train"]) or main(
            ["predict", str(run), str(path), "--out", str(scores)]
        )
        assert status or pq.read_metadata(scores).num_rows == n
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if status:
        assert "hotbed: error: " in captured.err
        assert status == 2
