"""Protects that drafts give each column the role of a careful engineer, keep ids exact, and split by time."""

import datetime
import itertools
import logging
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import read_whole

from hotbed.data import Loader, ParquetSource, Schema, SparseColumn, draft_schema
from hotbed.data.columns import Numerical
from hotbed.data.drafting.draft import Draft, draft
from hotbed.data.encoding.encoder import Encoder
from hotbed.errors import DataError, SpecError
from hotbed.nn import Normalization

RNG = np.random.default_rng(0)
N = 4000
CLICK = RNG.integers(0, 2, N)
USER = RNG.integers(0, 300, N)


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=500)
    return path


def drafted(tmp_path: Path, column: Any, name: str = "x", **options: Any) -> Draft:
    """The draft of a table with one column beside a user and a label."""
    return draft(write(tmp_path / "log.parquet", click=CLICK, user=USER, **{name: column}), **options)


def role(found: Draft, name: str = "x") -> str:
    """What a column is for: ``ids``, its rule, or why it is left out."""
    left = {column.name: column.reason for column in found.left_out}
    rules = {numerical.name: numerical.rule for numerical in found.schema.numericals}
    sparse = {column.name: "ids" for column in found.schema.sparse}
    assert sum(name in kind for kind in (left, rules, sparse)) == 1
    return (left | rules | sparse)[name]


def test_proposes_roles_by_name_type_and_values(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.parquet",
        Click=CLICK.astype(np.int8),
        time=pa.array(np.arange(N), pa.timestamp("s")),
        sample_weight=RNG.random(N),
        price=RNG.random(N).astype(np.float32),
        user=np.arange(N) // 4,
        country=pa.array(RNG.choice(["de", "fr", "it"], N)).dictionary_encode(),
        tags=pa.array([["a", "b"], []] * (N // 2)),
        pair=pa.array([[1, 2]] * N, pa.list_(pa.int32(), 2)),
        mobile=RNG.random(N) < 0.5,
        nested=pa.array([{"x": 1}] * N),
    )
    schema = draft_schema(path)
    assert schema == Schema(
        labels=("Click",),
        weight="sample_weight",
        dense=("price",),
        numericals=(Numerical(name="price", rule="standard"),),
        sparse=(
            SparseColumn(name="user", rows=16_384),  # 16 × 1,000, up to a power of 2
            SparseColumn(name="country", rows=64),
            SparseColumn(name="tags", rows=64, ids=None, pooling="mean"),
            SparseColumn(name="pair", rows=64, ids=2),
            SparseColumn(name="mobile", rows=64),
        ),
    )
    assert sum(len(b) for b in Loader(ParquetSource(path, schema), "train", 100)) == N


COUNTS = np.floor(np.exp(RNG.normal(3, 2, N))).astype(int)
CODES = 100_000 + RNG.integers(0, 250, N)
EPOCH = RNG.integers(16 * 10**8, 17 * 10**8, N)
DAYS = RNG.integers(1, 31, N)
HIDDEN = (CLICK == 0) | (RNG.random(N) < 0.6)
"""All negatives, and some positives."""
FEW_NEGATIVES = (CLICK == 0) & (np.cumsum(CLICK == 0) <= 180)
MINUTES = np.datetime64("2024-01-01T00:00") + RNG.integers(0, 2000, N)
DAY = datetime.date(2024, 1, 1)
ROLES: dict[str, tuple[str, Any, str]] = {
    "ids": ("item_id", RNG.integers(0, 900, N), "ids"),
    "ids, camel case": ("itemId", RNG.integers(0, 2000, N) ** 2, "ids"),
    "ids of pandas": ("shop_id", np.where(RNG.random(N) < 0.1, np.nan, RNG.integers(0, 90, N)), "ids"),
    "hashed ids": ("x", RNG.integers(0, 2**62, 100)[RNG.integers(0, 100, N)], "ids"),
    "numbers without a name": ("x", RNG.integers(0, 1000, N), "ids"),
    "few numbers": ("x", RNG.integers(0, 10, N), "ids"),
    "strings": ("x", [f"s{i}" for i in RNG.integers(0, 1000, N)], "ids"),
    "truth": ("x", RNG.random(N) < 0.1, "ids"),
    "ages": ("age", RNG.integers(18, 90, N), "standard"),
    "ages of users": ("Age of user", RNG.integers(18, 90, N), "standard"),
    "ages of accounts as floats": ("account_age", RNG.integers(18, 90, N).astype(float), "standard"),
    "durations": ("duration_of_video", RNG.integers(0, 500, N), "standard"),
    "durations that are all different": ("duration_ms", RNG.permutation(N) + 1000, "standard"),
    "codes of ages": ("age_code", RNG.integers(18, 90, N), "ids"),
    "codes, some -1": ("C20", np.where(RNG.random(N) < 0.2, -1, CODES), "ids"),
    "codes, most -1": ("C20", np.where(RNG.random(N) < 0.7, -1, CODES), "ids"),
    "counts, some -1": ("x", np.where(RNG.random(N) < 0.2, -1, COUNTS), "log"),
    "differences": ("x", RNG.integers(-100, 100, N), "standard"),
    "counts": ("num_views", COUNTS, "log"),
    "counts without a name": ("x", COUNTS, "log"),
    "prices": ("item_price", np.exp(RNG.normal(4, 1.5, N)), "log"),
    "small prices": ("price", np.exp(RNG.normal(-6, 2, N)), "asinh"),
    "profits": ("profit", RNG.standard_t(1.5, N) * 100, "asinh"),
    "standardised": ("x", RNG.normal(0, 1, N), "as_is"),
    "large offset": ("x", 1.7e9 + RNG.normal(0, 1e6, N), "standard"),
    "decimals": ("x", pa.array(np.round(RNG.random(N), 2)).cast(pa.decimal128(9, 2), safe=False), "standard"),
    "float16": ("x", RNG.normal(0, 1, N).astype(np.float16), "as_is"),
    "ids, a few of them large": ("x", np.where(np.arange(N) % 2000 == 0, 10**12, RNG.integers(1, 2000, N)), "ids"),
    "large measures": ("total_bytes", np.floor(RNG.random(N) * 1e14) * 2**10, "standard"),
    "large counts": ("x", np.floor(np.exp(RNG.normal(12, 3, N))), "log"),
    "beyond 64 bits": ("x", np.exp(RNG.normal(60, 1, N)), "log|asinh"),
    "times": ("x", pa.array(RNG.integers(0, 10**9, N), pa.timestamp("s")), r"a time \(timestamp"),
    "days": ("x", pa.array([DAY] * 2000 + [datetime.date(2024, 1, 2)] * 2000), r"a time \(date32"),
    "epoch": ("timestamp", EPOCH, r"a time \(seconds since 1970\)"),
    "epoch in ms": ("event_time", EPOCH * 1000, r"a time \(milliseconds since 1970\)"),
    "epoch as floats": ("ts", EPOCH + 0.5, r"a time \(seconds since 1970\)"),
    "sorted epoch": ("x", np.sort(EPOCH), "seconds since 1970, by the range and order"),
    "another time": ("last_seen", EPOCH, "standard"),
    "a time by its range": ("x", EPOCH, "standard"),
    "days as numbers": ("date", 20240100 + DAYS, r"a time \(days as YYYYMMDD\)"),
    "text of days": ("day", [f"2024-01-{d:02}" for d in DAYS], r"a time \(text that sorts by time"),
    "text of days without a name": ("x", [f"2024-01-{d:02}" for d in DAYS], r"a time \(text that sorts"),
    "text of times": ("created_at", [f"{t}" for t in MINUTES], r"a time \(text that sorts by time"),
    "days first": ("x", [f"{d}/12/2024" for d in DAYS], r"a time \(text of dates as %d/%m/%Y\)"),
    "months first": ("x", [f"12/{d}/24 3:05 PM" for d in DAYS], r"a time .* as %m/%d/%y %I:%M %p\)"),
    "days or months first": ("x", [f"{d}/{d % 7 + 1}/2024" for d in RNG.integers(1, 13, N)], "ambiguous day and month"),
    "months by name": ("x", [f"{d} Dec 2024" for d in DAYS], r"a time \(text of dates as %d %b %Y\)"),
    "addresses and versions": ("x", [f"10.1.{d}" for d in DAYS], "ids"),
    "sorted ids like times": ("user_id", 1_500_000_000 + np.arange(N) // 4, "ids"),
    "weights that are none": ("weight", RNG.normal(0, 1, N), "as_is"),
    "ids of 8 digits": ("x", 14_102_100 + RNG.integers(0, 90, N), "ids"),
    "named ids of 8 digits": ("user_id", 17_111_104 + RNG.integers(0, 9, N), "ids"),
    "hours of the day": ("hour", RNG.integers(0, 24, N), "ids"),
    "months of the year": ("month", RNG.integers(1, 13, N), "ids"),
    "ids of 6 digits": ("x", 201_400 + RNG.integers(1, 13, N), "ids"),
    "constant": ("x", [7] * N, r"all rows have the same value \('7'\)"),
    "empty": ("x", pa.array([None] * N, pa.int64()), "it is empty"),
    "null": ("x", pa.nulls(N), "it is empty"),
    "nan": ("x", [float("nan")] * N, "it is empty"),
    "row numbers": ("Unnamed: 0", np.arange(N), "it numbers the rows"),
    "index of pandas": ("__index_level_0__", np.arange(N), "it numbers the rows"),
    "unique": ("session", [f"{i:x}" for i in RNG.permutation(N)], "nearly every row has its own value"),
    "free text": ("x", [f"words {i % 3999}" * 12 for i in range(N)], r"free text|nearly every row"),
    "embeddings": ("x", pa.array([[0.5, 0.25]] * N), "lists of floats, e.g. embeddings"),
    "structs": ("x", pa.array([{"a": 1}] * N), r"columns of type struct<a: int64>"),
    "lists of lists": ("x", pa.array([[[1]]] * N), r"columns of type list<"),
    "the label": ("stars", CLICK * 4 + 1, r"it alone reveals 'click' \(AUC 1.000\)"),
    "nearly the label": ("x", CLICK + RNG.normal(0, 0.1, N), r"it alone reveals 'click' \(AUC"),
    "known of positives": ("x", pa.array(RNG.random(N), mask=CLICK == 0), "missing values reveal 'click'"),
    "known of some positives": (
        "revenue",
        pa.array(RNG.random(N), mask=HIDDEN),
        r"it reveals 'click': in rows that have a value the label is 1 \(precision 1.000, recall 0.\d+\)",
    ),
    "0 unless positive": (
        "revenue",
        np.where(HIDDEN, 0, RNG.random(N)),
        r"the most common value the label is 1 \(precision 1.0",
    ),
    "text of some positives": ("x", np.where(HIDDEN, "", "card"), "the most common value the label is 1"),
    "missing in positives": (
        "x",
        pa.array(RNG.random(N), mask=(CLICK == 1) & (RNG.random(N) < 0.4)),
        "in rows where it is missing the label is 1",
    ),
    "missing in few negatives": ("x", pa.array(RNG.normal(0, 1, N), mask=FEW_NEGATIVES), "as_is"),
    "another value in few negatives": ("x", np.where(FEW_NEGATIVES, "bot", "phone"), "ids"),
    "missing more often in negatives": ("x", pa.array(RNG.normal(0, 1, N), mask=(USER % 3 > CLICK * 1.5)), "as_is"),
    "no leak": ("x", CLICK + RNG.normal(0, 1, N), "as_is"),
}


@pytest.mark.parametrize("kind", ROLES)
def test_roles_of_columns(tmp_path: Path, kind: str) -> None:
    name, values, expected = ROLES[kind]
    found = role(drafted(tmp_path, values, name), name)
    assert re.search(expected, found), found


def test_columns_of_names_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "nameless.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(CLICK), pa.array(USER), pa.array(USER)], ["click", "a", ""]), path)
    assert role(draft(path), "") == "it has no name"


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_rows_are_sixteen_times_the_values_in_any_order_of_the_rows(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MovieLens in its own order, by user, got 8,192 rows for 6,040 users."""
    n = 60_000
    users = np.sort(RNG.integers(0, 6040, n))
    items = RNG.integers(0, 3700, n)
    shuffled = RNG.permutation(n) if order == "shuffled" else np.arange(n)
    table = pa.table({"click": RNG.integers(0, 2, n), "user": users[shuffled], "item": items})
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=2000)
    assert draft_schema(tmp_path / "log.parquet").rows == {"user": 131_072, "item": 65_536}
    # The same where only a third of the rows can be counted.
    monkeypatch.setattr("hotbed.data.drafting.profile._COUNTED_CELLS", 40_000)
    assert draft_schema(tmp_path / "log.parquet").rows == {"user": 131_072, "item": 65_536}


def test_few_values_get_rows_of_their_own(tmp_path: Path) -> None:
    for names in (["a", "b", "c", "d", "e"], [f"c{i}" for i in range(16)]):
        path = write(tmp_path / "log.parquet", click=CLICK, c=RNG.choice(names, N))
        schema = draft_schema(path)
        source = ParquetSource(path, schema)
        assert len(read_whole(source).sparse["c"].values.unique()) == len(names)
        assert schema.rows["c"] <= 16 * 64


def test_a_history_shares_the_table_of_its_items(tmp_path: Path) -> None:
    items = RNG.integers(1, 500, N)
    lists = pa.array([items[max(0, i - 3) : i].tolist() for i in range(N)])
    path = write(tmp_path / "log.parquet", click=CLICK, user_id=USER, item_id=items, item_history=lists)
    columns = {c.name: c for c in draft_schema(path).sparse}
    assert columns["item_history"].table == "item_id"
    assert columns["item_history"].rows == columns["item_id"].rows == 8192
    assert columns["user_id"].table is None


def label(tmp_path: Path, values: Any, name: str = "label", **options: Any) -> Any:
    schema = draft(write(tmp_path / "log.parquet", **{name: values}, user=USER[: len(values)]), **options).schema
    return schema.to_dict()["labels"]


def test_labels_of_many_kinds(tmp_path: Path) -> None:
    assert label(tmp_path, CLICK) == ["label"]
    assert label(tmp_path, CLICK == 1) == ["label"]
    assert label(tmp_path, CLICK / 2) == ["label"]
    assert label(tmp_path, CLICK * 2 - 1) == [{"column": "label", "positive": "> 0"}]
    assert label(tmp_path, CLICK + 1) == [{"column": "label", "positive": ">= 2"}]
    assert label(tmp_path, np.where(CLICK, "yes", "no")) == [{"column": "label", "positive": "== yes"}]
    assert label(tmp_path, np.where(CLICK, "True", "False")) == [{"column": "label", "positive": "== True"}]
    stars = RNG.choice([1, 2, 3, 4, 5], N, p=[0.1, 0.1, 0.3, 0.3, 0.2])
    assert label(tmp_path, stars, "rating") == [{"column": "rating", "positive": ">= 4"}]
    assert label(tmp_path, stars / 2, "Rating") == [{"column": "Rating", "positive": ">= 2"}]
    assert label(tmp_path, stars, "rating", positive="> 4") == [{"column": "rating", "positive": "> 4"}]
    assert label(tmp_path, stars, "s", label="s", positive="in [1, 5]") == [{"column": "s", "positive": "in [1, 5]"}]


@pytest.mark.parametrize(
    "name",
    ["is_attributed", "was_clicked", "clk", "isClick", "Class", "y", "converted", "Clicked?", "hasConverted", " label"],
)
def test_labels_of_other_names(tmp_path: Path, name: str) -> None:
    assert label(tmp_path, CLICK == 1, name) == [name]


def test_class_is_no_label_beside_one(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.parquet", Class=RNG.integers(0, 2, N), isClick=CLICK, stars=RNG.integers(1, 6, N), user=USER
    )
    assert draft_schema(path).labels == ("isClick",)
    path = write(tmp_path / "log.parquet", Class=RNG.integers(0, 9, N), stars=RNG.integers(1, 6, N), user=USER)
    assert draft_schema(path).labels == ("stars",)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": CLICK}, {}, "no label column.* x, user. .*--label NAME .* 0 and 1: x"),
        ({"Class": ["a", "b"] * 2000}, {}, "no label column.* Class, user. .*--label NAME"),
        ({"bought_": CLICK}, {"label": "bougt_"}, "no column 'bougt_'; did you mean 'bought_'"),
        ({"label": ["a", "b"] * 2000}, {}, r"2 values \('a', 'b'\).*--positive \"== a"),
        ({"label": RNG.random(N) * 9}, {}, r"got 4,000 .*--positive \">= 4"),
        ({"label": pa.array([None] * N, pa.float64())}, {}, "label column 'label': got no values"),
        ({"d": [DAY] * N}, {"label": "d"}, "label column 'd': got date32"),
        ({"label": CLICK}, {"positive": "~ 4"}, "label 'label': positive: got '~ 4'"),
        ({"label": CLICK}, {"drop": ["usr"]}, "--drop, .* got 'usr', .*; did you mean 'user'"),
        ({"label": CLICK}, {"time": "label"}, "--time: got 'label', .* it is the label"),
        ({"label": CLICK, "t": USER}, {"time": "t", "drop": ["t"]}, r"--time: got 't', .* left out \(--drop\)"),
        ({"label": CLICK, "t": ["1/2/2024"] * N}, {"time": "t"}, "--time: got 't', .* its text does not sort"),
        ({"label": CLICK}, {"label": "label", "drop": ["label"]}, "--label and --drop: got 'label'"),
        ({"label": CLICK}, {"drop": ["label"]}, "has no label column"),
        ({"label": [[1]] * N}, {}, r"no label column.* 'label' of type list<"),
        ({"label": CLICK}, {"time": "usr"}, "--time, .* got 'usr', .*; did you mean 'user'"),
    ],
)
def test_what_is_not_clear_is_asked_for(tmp_path: Path, columns: Any, options: Any, message: str) -> None:
    with pytest.raises((DataError, SpecError), match=message):
        draft(write(tmp_path / "log.parquet", **columns, user=USER), **options)


def test_columns_that_give_a_second_label_away_are_left_out(tmp_path: Path) -> None:
    buy, user = RNG.integers(0, 2, N), RNG.integers(0, 9, N)
    revenue = pa.array(RNG.random(N), mask=(buy == 0) | (RNG.random(N) < 0.5))
    path = write(tmp_path / "log.parquet", click=CLICK, buy=buy, user=user, revenue=revenue, paid=buy + 5)
    found = draft(path)
    assert found.schema.labels == ("click", "buy")
    assert role(found, "revenue").startswith("it reveals 'buy': in rows that have a value the label is 1")
    assert role(found, "paid").startswith("it alone reveals 'buy' (AUC 1.000)")
    assert role(draft(path, label="click", drop=["buy"]), "paid") == "ids"


def test_nothing_to_embed(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", label=[0, 1], x=[0.5, 0.6])
    with pytest.raises(DataError, match="no column of ids"):
        draft_schema(path)
    path = write(tmp_path / "log.parquet", label=CLICK, c=[1] * N)
    with pytest.raises(DataError, match=r"no column of ids .*\(left out: 'c': all rows have"):
        draft_schema(path)
    pq.write_table(pa.table({"label": pa.array([], pa.bool_())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty.parquet has no rows"):
        draft_schema(tmp_path / "empty.parquet")


def test_columns_that_are_dropped(tmp_path: Path) -> None:
    found = drafted(tmp_path, RNG.integers(0, 50, N), drop=["x"])
    assert role(found) == "--drop"
    found = drafted(tmp_path, CLICK * (USER % 2), "conversion", drop=["click"])
    assert (role(found, "click"), found.schema.labels) == ("--drop", ("conversion",))


def test_why_rows_are_not_split_by_a_time_is_said(tmp_path: Path) -> None:
    at = np.datetime64("2024-01-01") + np.arange(N)
    assert drafted(tmp_path, at, "seen").splits.reason.startswith("the latest rows by 'seen'")
    assert "'seen' may not be the time of the row" in drafted(tmp_path, at[::-1], "seen").splits.reason
    halves = drafted(tmp_path, at[np.arange(N) % 2], "day").splits.reason
    assert halves.endswith("('day' has no time that 3% to 30% of the rows follow)")
    some = pa.array(at, mask=np.arange(N) % 9 == 0)
    assert drafted(tmp_path, some, "day").splits.reason.endswith("(11.1% of 'day' are missing)")


def test_the_train_split_alone_is_looked_at(tmp_path: Path) -> None:
    for split, high in (("train", 100), ("test", 10_000)):
        write(tmp_path / f"{split}.parquet", label=CLICK, c=RNG.integers(0, high, N))
    assert draft_schema(tmp_path).rows == {"c": 2048}
    (tmp_path / "train.parquet").rename(tmp_path / "valid.parquet")
    with pytest.raises(DataError, match=r"got the splits valid, test, expected .*train"):
        draft_schema(tmp_path)


NORMAL = np.random.default_rng(0).normal(0, 1, N)
KINDS = {
    "normal": NORMAL,
    "price": np.exp(3 + NORMAL),
    "heavy tail": np.exp(3 * NORMAL),
    "tiny": 1e-30 * NORMAL,
    "negative and skewed": -np.exp(3 + 2 * NORMAL),
    "epoch seconds": 1.7e9 + 1e6 * NORMAL,
    "far from 0": 1e12 + NORMAL,
    "counts": np.floor(np.exp(5 + NORMAL)),
    "seldom 1": (NORMAL > 3) + 0.5,
    "mostly missing": np.where(np.arange(N) % 50, np.nan, 5 + NORMAL),
    "infinite": np.where(np.arange(N) % 50, NORMAL, np.inf),
    "an outlier": np.where(np.arange(N) == 7, 1e9, NORMAL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numericals_are_of_about_the_size_of_1(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", click=CLICK, user=USER, count_x=KINDS[kind])
    schema = draft_schema(path)
    assert schema.dense == ("count_x",)
    source = ParquetSource(path, schema)
    normalization = Normalization(schema)
    normalization.measure(source)
    dense = normalization(read_whole(source).dense)[:, 0].numpy()
    given = KINDS[kind]
    kept = np.isfinite(given)
    assert np.isfinite(dense).all() and (dense[~kept] == 0).all()
    assert np.quantile(np.abs(dense), 0.99) < 6 and np.abs(dense).max() < 70
    assert dense[kept].std() > 0.05
    low = given[kept].argmin(), dense[kept].argmin()
    assert given[kept][low[0]] == given[kept][low[1]]  # the order is kept


def test_several_labels_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", liked=CLICK, shared_it=CLICK == 1, stars=RNG.integers(1, 6, N), user=USER)
    schema = draft(path, label=["shared_it", "liked", "shared_it"]).schema
    assert schema.labels == ("shared_it", "liked")
    assert "liked" not in [column.name for column in schema.sparse]
    with pytest.raises(DataError, match=r"has no column 'like'; .*did you mean 'liked'"):
        draft(path, label=["liked", "like"])
    with pytest.raises(SpecError, match=r"--positive: got 2 labels \(liked, shared_it\)"):
        draft(path, label=["liked", "shared_it"], positive="> 0")
    with pytest.raises(SpecError, match="--label and --drop: got 'shared_it'"):
        draft(path, label=["liked", "shared_it"], drop=["shared_it"])


BELOW_2_53 = RNG.integers(2**40, 2**53, 500)[RNG.integers(0, 500, N)]
BEYOND_2_53 = RNG.integers(2**60, 2**62, 500)[RNG.integers(0, 500, N)]


def with_one_missing(ids: Any, kind: Any = np.float64) -> Any:
    """Write integers as pandas does where one is missing."""
    floats = ids.astype(kind)
    floats[3] = np.nan
    return floats


OF_X = Schema(sparse=(SparseColumn(name="x", rows=1 << 20),), labels=())


def encoded(path: Path, schema: Schema = OF_X) -> list[int]:
    return read_whole(ParquetSource(path, schema)).sparse["x"].values.tolist()


@pytest.mark.parametrize("name", ["x", "user_id"])
def test_large_whole_doubles_are_the_ids_that_they_were_as_integers(tmp_path: Path, name: str) -> None:
    assert role(drafted(tmp_path, with_one_missing(BELOW_2_53), name), name) == "ids"
    as_floats = encoded(write(tmp_path / "floats.parquet", x=with_one_missing(BELOW_2_53)))
    as_integers = encoded(write(tmp_path / "integers.parquet", x=BELOW_2_53))
    assert as_floats.pop(3) == 0  # null
    as_integers.pop(3)
    assert as_floats == as_integers
    # What a server gets as JSON.
    encoder = Encoder(OF_X, id_kinds={"x": "integers"})
    plain = [float(i) for i in BELOW_2_53[4:9]]
    assert encoder.batch(encoder.table({"x": plain})).sparse.values.tolist() == as_integers[3:8]


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (with_one_missing(BEYOND_2_53), str(int(float(BEYOND_2_53.max())))),
        (np.where(np.arange(N) % 2000 == 7, 2.0**60, RNG.integers(1, 2000, N)), str(2**60)),
        (np.where(np.arange(N) % 2 == 1, 2.0**60, RNG.integers(1, 2000, N)), str(2**60)),
        (np.where(np.arange(N) % 9 == 7, -(2.0**60), RNG.integers(1, 20, N)), str(-(2**60))),
        (with_one_missing(RNG.integers(1 << 25, 1 << 26, N), np.float32), r"6\d{7} .* expected at most 16,777,216"),
    ],
)
def test_ids_that_lost_digits_as_floats_are_refused(tmp_path: Path, ids: Any, named: str) -> None:
    ids = np.where(np.arange(N) % 4 == 0, ids[1::4].repeat(4), ids)  # some are met several times
    with pytest.raises(DataError, match=rf"column 'x': got the id {named}.*--drop 'x'"):
        drafted(tmp_path, ids)
    assert role(drafted(tmp_path, ids, drop=["x"])) == "--drop"


@pytest.mark.parametrize(("kind", "limit"), [(np.float32, 2**24), (np.float64, 2**53)])
def test_readers_name_the_id_that_lost_digits(tmp_path: Path, kind: Any, limit: int) -> None:
    path = write(tmp_path / "log.parquet", x=np.array([1, limit], kind))
    assert len(encoded(path)) == 2
    path = write(tmp_path / "log.parquet", x=np.array([1, 2 * limit], kind))
    with pytest.raises(DataError, match=rf"column 'x': id {re.escape(str(2.0 * limit))} at row .* up to {limit:,}"):
        encoded(path)


def decimals(values: Any, precision: int = 20, scale: int = 0) -> Any:
    array = pa.array([None if v is None else Decimal(int(v)) for v in values], pa.decimal256(76, 0))
    return array.cast(pa.decimal128(precision, scale))


@pytest.mark.parametrize(
    "values",
    [[1, 2, None, 2**53 + 1], [5, 2**63, 2**64 - 1], [-1, None, 2**62], [-5, -(2**63)]],
)
def test_whole_decimals_are_the_integers_that_they_hold(tmp_path: Path, values: list[Any]) -> None:
    kind = pa.uint64() if max(v or 0 for v in values) >= 2**63 else pa.int64()
    expected = encoded(write(tmp_path / "integers.parquet", x=pa.array(values, kind)))
    assert encoded(write(tmp_path / "decimals.parquet", x=decimals(values))) == expected
    ragged = Schema(sparse=(SparseColumn(name="x", rows=1 << 20, ids=None),), labels=())
    lists = pa.ListArray.from_arrays([0, len(values)], decimals(values))
    assert encoded(write(tmp_path / "lists.parquet", x=lists), ragged) == expected
    encoder = Encoder(OF_X, id_kinds={"x": "integers"})
    assert encoder.batch(pa.table({"x": decimals(values)})).sparse.values.tolist() == expected


def test_decimals_are_ids_or_numbers_by_their_scale(tmp_path: Path) -> None:
    keys = RNG.integers(2**40, 2**60, 500)[RNG.integers(0, 500, N)]
    assert role(drafted(tmp_path, decimals(keys))) == "ids"
    assert role(drafted(tmp_path, pa.array([[Decimal(int(k))] for k in keys], pa.list_(pa.decimal128(38, 0))))) == "ids"
    assert role(drafted(tmp_path, decimals(RNG.integers(18, 90, N), 3), "age"), "age") == "standard"
    assert role(drafted(tmp_path, decimals(RNG.integers(18, 90, N), 10, 2))) == "standard"
    found = draft(write(tmp_path / "log.parquet", label=decimals(RNG.integers(0, 2, N), 1), user=decimals(keys)))
    assert (found.schema.labels, found.schema.positives, found.schema.dense) == (("label",), (), ())


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            pa.array([Decimal(1), Decimal(10**30)], pa.decimal128(38, 0)),
            DataError,
            rf"column 'x' is decimal128.*: got values from 1 to {10**30}, expected at most 64 bits",
        ),
        (decimals([1, 2], 10, 2), SpecError, r"log\.parquet: sparse column 'x': got decimal128\(10, 2\)"),
    ],
)
def test_decimals_that_are_no_ids_are_refused(tmp_path: Path, values: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        encoded(write(tmp_path / "log.parquet", x=values))


def test_columns_of_decimals_beyond_64_bits_are_left_out(tmp_path: Path) -> None:
    wide = pa.array([Decimal(10**25 + i % 50) for i in range(N)], pa.decimal128(38, 0))
    rng = np.random.default_rng(0)
    columns = {"click": rng.integers(0, 2, N), "user": rng.integers(0, 300, N), "x": wide, "more": wide}
    found = draft(write(tmp_path / "log.parquet", **columns))
    for name in ("x", "more"):
        assert re.search(rf"decimal128.*got values from {10**25} to .*expected at most 64 bits", role(found, name))
    assert ParquetSource(tmp_path / "log.parquet", found.schema).samples("train") == N
    assert role(draft(tmp_path / "log.parquet", drop=["x", "more"])) == "--drop"
    with pytest.raises(DataError, match=r"label column 'x': it is decimal128"):
        draft(tmp_path / "log.parquet", label="x")


@pytest.mark.parametrize("name", ["uid", "product_id"])
def test_decimals_with_a_scale_that_are_named_like_ids_are_left_out(tmp_path: Path, name: str) -> None:
    found = drafted(tmp_path, decimals(RNG.integers(0, 500, N), 20, 2), name)
    assert re.search(r"decimal128\(20, 2\)\. Write integers", role(found, name))
    source = ParquetSource(tmp_path / "log.parquet", found.schema)  # raises if the draft cannot be read
    assert len(source.read("train", 0)) > 0


SIGNED_32 = RNG.integers(-(2**31), 2**31, 500)[RNG.integers(0, 500, N)]
SIGNED_64 = RNG.integers(-(2**62), 2**62, 500)[RNG.integers(0, 500, N)]


def test_signed_hashes_are_ids(tmp_path: Path) -> None:
    for hashes in (SIGNED_32, with_one_missing(SIGNED_32), SIGNED_64, -np.abs(SIGNED_64), decimals(SIGNED_64)):
        assert role(drafted(tmp_path, hashes)) == "ids"
    for floats in (with_one_missing(SIGNED_64), with_one_missing(-np.abs(SIGNED_64))):
        with pytest.raises(DataError, match=r"column 'x': .*double.*expected at most 9,007,199,254,740,992"):
            drafted(tmp_path, floats)
    profits = np.floor(RNG.standard_t(1.5, 500) * 1e6)[RNG.integers(0, 500, N)].astype(int)
    assert abs(profits).max() > 2**24
    assert role(drafted(tmp_path, profits)) == "asinh"


START = datetime.datetime(2017, 11, 11, 4, 0)
MINUTE_OF_ROW = RNG.permutation(N)
TIMES = [START + datetime.timedelta(minutes=int(m)) for m in MINUTE_OF_ROW]
SECONDS = 1_510_372_800 + MINUTE_OF_ROW * 60
OF_ROWS = Schema(sparse=(SparseColumn(name="row", rows=1 << 20),), labels=())


def digits(layout: str) -> Any:
    return np.array([int(t.strftime(layout)) for t in TIMES])


def texts(layout: str) -> list[str]:
    return [t.strftime(layout) for t in TIMES]


def some_missing(values: Any) -> Any:
    return np.where(np.arange(N) % 500 == 7, np.nan, values)


LAYOUTS: dict[str, tuple[str, Any]] = {
    "YYMMDDHH": ("hour", digits("%y%m%d%H")),
    "YYMMDDHH as floats": ("hour", some_missing(digits("%y%m%d%H"))),
    "YYMMDDHH as text": ("hour", texts("%y%m%d%H")),
    "YYYYMMDDHH": ("hour", digits("%Y%m%d%H")),
    "YYYYMMDDHHMM": ("minute", digits("%Y%m%d%H%M")),
    "YYYYMMDDHHMMSS": ("ts", digits("%Y%m%d%H%M%S")),
    "seconds": ("ts", SECONDS),
    "milliseconds": ("event_time", SECONDS * 1_000),
    "microseconds": ("event_time", SECONDS * 1_000_000),
    "nanoseconds": ("event_time", SECONDS * 1_000_000_000),
    "nanoseconds as floats": ("event_time", some_missing(SECONDS * 1e9)),
    "hours not padded": ("ts", texts("%Y-%m-%d %-H:%M")),
    "nothing padded": ("ts", texts("%Y-%-m-%-d %-H:%M:%S")),
    "days first": ("ts", texts("%d/%m/%Y %H:%M")),
    "months first": ("ts", texts("%m/%d/%Y %I:%M %p")),
    "months by name": ("ts", pa.array(texts("%d %b %Y %H:%M")).dictionary_encode()),
    "padded": ("ts", texts("%Y-%m-%d %H:%M")),
    "slashes": ("ts", texts("%Y/%m/%d %H:%M")),
}


def check_order(tmp_path: Path, name: str, values: Any, order: Any) -> None:
    """Check that a draft splits by this column, and that each split begins after the one before."""
    path = write(tmp_path / "log.parquet", click=CLICK, user=USER, row=np.arange(N), **{name: values})
    found = draft(path)
    assert role(found, name).startswith("a time (")
    split = found.splits.init_args["split"]
    assert isinstance(split, dict) and (split["by"], split["column"]) == ("time", name)
    source = ParquetSource(path, OF_ROWS, ids="raw", split=split)
    spans: list[tuple[int, int]] = []
    for part in ("train", "valid", "test"):
        rows = read_whole(source, part).sparse.values.numpy()
        if isinstance(values, np.ndarray):
            rows = rows[~np.isnan(values[rows])]
        spans.append((order[rows].min(), order[rows].max()))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_splits_by_time_are_in_the_order_of_time(tmp_path: Path, kind: str) -> None:
    check_order(tmp_path, *LAYOUTS[kind], SECONDS)


def test_months_and_sorted_hours_without_a_name_are_times(tmp_path: Path) -> None:
    months = 201_700 + RNG.integers(1, 13, N)
    check_order(tmp_path, "month", months, months)
    check_order(tmp_path, "x", np.sort(digits("%Y%m%d%H")), np.sort(SECONDS))


def test_text_that_does_not_sort_is_split_by_its_format(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(N), ts=texts("%Y-%m-%d %-H:%M"))
    split = {"by": "time", "column": "ts", "test_from": "2017-11-12 04:00", "format": "%Y-%m-%d %H:%M"}
    source = ParquetSource(path, OF_ROWS, ids="raw", split=split)
    assert source.samples("test") == sum(t >= datetime.datetime(2017, 11, 12, 4) for t in TIMES)


OFFSETS = ("-0800", "+0000", "+0900")


def zoned(time: datetime.datetime, offset: str) -> str:
    return (time + datetime.timedelta(hours=int(offset[:3]))).strftime("%Y-%m-%dT%H:%M:%S") + offset


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([zoned(t, OFFSETS[i % 3]) for i, t in enumerate(TIMES)], "%Y-%m-%dT%H:%M:%S%.f%z"),
        (
            [f"{t:%Y-%m-%dT%H:%M:%S}" + (".5Z" if i % 2 else "Z") for i, t in enumerate(TIMES)],
            "%Y-%m-%dT%H:%M:%S%.f%#z",
        ),
        ([zoned(t, "+0900") for t in TIMES], None),
        ([f"{t:%Y-%m-%dT%H:%M:%S}.000Z" for t in TIMES], None),
    ],
)
def test_text_times_with_zones_are_split_in_the_order_of_time(tmp_path: Path, values: Any, expected: Any) -> None:
    check_order(tmp_path, "ts", values, SECONDS)
    split: Any = draft(tmp_path / "log.parquet").splits.init_args["split"]
    assert split.get("format") == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([zoned(t, OFFSETS[i % 3]) for i, t in enumerate(TIMES)], r"2017-.*\+0000"),
        (["2024-05-01T10:00:00Z", "2024-05-01T10:00:00.5Z"] * (N // 2), r"2024-05-01T10:00:00\.5Z"),
        (["2024-05-01T10:00:00Z", "2024-05-01T10:00:00"] * (N // 2), "2024-05-01T10:00:00"),
        (texts("%Y-%m-%d %-H:%M"), r"2017-11-1. \d:\d\d"),
        (texts("%d/%m/%Y"), r"1./11/2017"),
        (texts("%-d.%-m.%Y %H:%M"), r"1.\.11\.2017 ..:.."),
        (texts("%d %b %Y"), "1. Nov 2017"),
    ],
)
def test_splits_by_text_that_does_not_sort_are_refused(tmp_path: Path, values: Any, named: str) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(N), ts=values)
    split = {"by": "time", "column": "ts", "test_from": "20/3/2024"}
    with pytest.raises(DataError, match=rf"column 'ts': got '{named}' at row .*Add format"):
        ParquetSource(path, OF_ROWS, ids="raw", split=split)


@pytest.mark.parametrize(
    ("column", "change", "error", "message"),
    [
        ("ts", {"format": "%d.%m.%Y"}, DataError, r"got '2017-.* expected times as '%d\.%m\.%Y'"),
        ("row", {"format": "%Y"}, SpecError, "'%Y', but column 'row' is int64"),
        ("ts", {"format": "%Y-%m-%d %H"}, SpecError, "format of times: got '%Y-%m-%d %H'"),
        ("ts", {"format": 7}, SpecError, "split by time: format: got 7"),
        (
            "ts",
            {"format": "%Y-%m-%d %H:%M", "test_from": "May"},
            SpecError,
            r"split by time: start time of column 'ts' \(timestamp\[us\]\): got 'May'",
        ),
    ],
)
def test_formats_that_do_not_fit(tmp_path: Path, column: str, change: Any, error: Any, message: str) -> None:
    path = write(tmp_path / "log.parquet", row=np.arange(N), ts=texts("%Y-%m-%d %-H:%M"))
    split = {"by": "time", "column": column, "test_from": "2017-11-12 04:00", **change}
    with pytest.raises(error, match=message):
        ParquetSource(path, OF_ROWS, ids="raw", split=split)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timestamp", RNG.integers(0, 90_000, N)),
        ("event_time", RNG.random(N)),
        ("date", [f"{d}/{d % 7 + 1}/2024" for d in RNG.integers(1, 13, N)]),
        ("day", RNG.integers(0, 7, N)),
        ("created_at", [f"week {w}" for w in RNG.integers(0, 50, N)]),
        ("week", 202_301 + RNG.integers(0, 52, N)),
        ("month", [f"2023-{m:02}" for m in RNG.integers(1, 13, N)]),
    ],
)
def test_columns_that_are_named_like_times_and_are_none_are_told(
    tmp_path: Path, name: str, values: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = drafted(tmp_path, values, name)
    assert f"Column '{name}' has the name of a time, but its values have no known layout" in caplog.text
    assert any(f"Column '{name}'" in note for note in found.splits.notes)
