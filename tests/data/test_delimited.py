"""Protects that CSV and TSV files give what is written in them, typed over all rows, or a clear error."""

import datetime
import gzip
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs

from hotbed.data import ParquetSource, Schema, SparseColumn, draft_schema
from hotbed.data.files.criteo import COLUMNS as OF_LOG
from hotbed.data.files.delimited import _convert, convert_to_parquet
from hotbed.data.hashing import hash_integers, hashes_to_rows
from hotbed.errors import DataError
from tests.ranks import Ranks


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))


def converted(path: Path) -> pa.Table:
    return pq.read_table(convert_to_parquet(fs.LocalFileSystem(), str(path)))


def table(tmp_path: Path, text: str | bytes, name: str = "log.csv") -> pa.Table:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return converted(tmp_path / name)


def column(tmp_path: Path, *values: str) -> tuple[str, list[Any]]:
    """Type and values of one column."""
    lines = ["x,y", *(f'"{value}",1' for value in values)]
    found = table(tmp_path, "\n".join(lines) + "\n")["x"]
    return str(found.type), found.to_pylist()


UTC = datetime.UTC
DAYS = (datetime.datetime(2024, 12, 31), datetime.datetime(2024, 2, 1, 9, 5))
COLUMNS = {
    "integers": (["1", "-5", "", "0"], "int64", [1, -5, None, 0]),
    "codes with zeros": (["007", "12"], "string", ["007", "12"]),
    "telephones": (["+49123", "12"], "string", ["+49123", "12"]),
    "floats with signs and spaces": (
        [" 0.123", "+0.5", "-2 ", "+3", "+.5e+1", "  "],
        "double",
        [0.123, 0.5, -2, 3, 5, None],
    ),
    "integers with signs and spaces": ([" 1", "+5", "-3", "\t12", " NA"], "int64", [1, 5, -3, 12, None]),
    "integers with spaces": ([" 1", "0", "1 "], "int64", [1, 0, 1]),
    "codes with spaces": ([" 007", "12", " 12"], "string", [" 007", "12", " 12"]),
    "telephones with spaces": ([" +49123", "+49123"], "string", [" +49123", "+49123"]),
    "truth with spaces": ([" true", "False "], "bool", [True, False]),
    "days with spaces": ([" 2024-01-31"], "date32[day]", [datetime.date(2024, 1, 31)]),
    "decimal commas with signs": (["+1,5", " -0,25"], "double", [1.5, -0.25]),
    "thousands with signs": (["+1,234.5", " 7"], "double", [1234.5, 7]),
    "infinity with a sign": (["+inf", "1.5"], "double", [float("inf"), 1.5]),
    "long digits with a sign": (["+1234567890123456.5", "+12345678901234567"], "string", None),
    "beyond 64 bits": (["1", "12345678901234567890123"], "string", ["1", "12345678901234567890123"]),
    "large": (["9223372036854775807", "1"], "int64", [2**63 - 1, 1]),
    "floats": (["1.5", "2", "-.5", "1e-3", "inf"], "double", [1.5, 2, -0.5, 0.001, float("inf")]),
    "missing numbers": (["1.5", "NA", "nan", "NULL", ""], "double", [1.5, None, None, None, None]),
    "missing text": (["de", "NA", ""], "string", ["de", "NA", None]),
    "truth": (["true", "False", "TRUE", ""], "bool", [True, False, True, None]),
    "days": (["2024-01-31", ""], "date32[day]", [datetime.date(2024, 1, 31), None]),
    "no days": (["2024-01-31", "2024-02-31"], "string", ["2024-01-31", "2024-02-31"]),
    "times": (
        ["2024-01-31 12:00:00", "2024-01-31T12:00:00.5"],
        "timestamp[us]",
        [datetime.datetime(2024, 1, 31, 12), datetime.datetime(2024, 1, 31, 12, 0, 0, 500_000)],
    ),
    "times that are not padded": (
        ["2017-11-07 9:30", "2017-11-7 15:05:00", "2017/1/07T0:00"],
        "timestamp[us]",
        [datetime.datetime(2017, 11, 7, h, m) for h, m in ((9, 30), (15, 5))] + [datetime.datetime(2017, 1, 7)],
    ),
    "days that are not padded": (
        ["2024-1-5", "2024/01/31"],
        "date32[day]",
        [datetime.date(2024, 1, d) for d in (5, 31)],
    ),
    "zones": (
        ["2024-01-31T12:00:00Z", "2024-01-31 13:00:00+01:00"],
        "timestamp[us, tz=UTC]",
        [datetime.datetime(2024, 1, 31, 12, tzinfo=UTC)] * 2,
    ),
    "decimal commas": (["1,5", "1234,25", "7"], "double", [1.5, 1234.25, 7]),
    "thousands": (["1,234.5", "7", "1,234,567"], "double", [1234.5, 7, 1234567]),
    "hexadecimal": (["0x1F", "12"], "string", ["0x1F", "12"]),
    "text": (["a", "1", "1.5", ""], "string", ["a", "1", "1.5", None]),
    "days first": (["31/12/2024", "1/2/2024 9:05"], "timestamp[us]", [DAYS[0], DAYS[1]]),
    "days first, with points": (["31.12.2024", "1.2.2024 9:05:00"], "timestamp[us]", [DAYS[0], DAYS[1]]),
    "months first": (["12/31/2024", "2/1/2024 9:05"], "timestamp[us]", [DAYS[0], DAYS[1]]),
    "days or months first": (["1/2/2024", "3/4/2024"], "string", ["1/2/2024", "3/4/2024"]),
    "days and months first": (["31/12/2024", "12/31/2024"], "string", ["31/12/2024", "12/31/2024"]),
    "nothing": (["", ""], "null", [None, None]),
    "long texts": (["x" * 100_000, "\u2028é"], "string", ["x" * 100_000, "\u2028é"]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_types_of_columns(tmp_path: Path, kind: str) -> None:
    values, expected, read = COLUMNS[kind]
    assert column(tmp_path, *values) == (expected, values if read is None else read)


def test_signs_show_in_any_row_that_a_plus_makes_no_telephone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.files.delimited._BLOCK_BYTES", 1000)
    rows = "".join(f"+{i}\n" for i in range(1, 2000))
    assert str(table(tmp_path, f"change\n{rows}").schema.field("change").type) == "string"
    assert str(table(tmp_path, f"change\n{rows}-1\n").schema.field("change").type) == "int64"


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_in_quotes_are_kept_at_any_border_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    """A border may lie between CR and LF, or between several CR."""
    texts = ["a\r\nb", "\r\n", "c\r\r\r\nd", "e\rf\n", "\r\r\r\r\r\r\r\r\r\r\r\r\r\r\n"] * 9
    text = end.join(["x,y", *(f'{i},"{value}"' for i, value in enumerate(texts))]) + end
    content = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    for block in range(48, 130):
        (tmp_path / name).write_bytes(content)
        monkeypatch.setattr("hotbed.data.files.delimited._BLOCK_BYTES", block)
        made = tmp_path / f"{block}.parquet"
        _convert(fs.LocalFileSystem(), str(tmp_path / name), made, ["y"])
        assert pq.read_table(made).to_pydict() == {"x": [*range(len(texts))], "y": texts}, block


def test_byte_order_marks_are_no_part_of_names(tmp_path: Path) -> None:
    assert table(tmp_path, b"\xef\xbb\xbflabel,a\n1,2\n").column_names == ["label", "a"]


@pytest.mark.parametrize("directive", ["sep=;\n", '"sep=;"\r\n', "\ufeffSEP=;\n"])
def test_a_first_line_that_names_the_separator_is_no_header(tmp_path: Path, directive: str) -> None:
    found = table(tmp_path, f'{directive}label;price;text\n1;1,5;"a;b"\n0;2;c,d\n')
    assert found.to_pydict() == {"label": [1, 0], "price": [1.5, 2.0], "text": ["a;b", "c,d"]}
    with pytest.raises(DataError, match="is empty"):
        table(tmp_path, directive)


def test_spaces_after_separators_are_no_part_of_names_and_text(tmp_path: Path) -> None:
    rows = "".join(f"{i % 50}, {i % 7}, {'yes' if i % 3 else 'no'}, {'a ' * (i % 2)}\n" for i in range(400))
    found = table(tmp_path, "user, x, label, kind\n" + rows + "1, 2, no,\n")
    assert found.column_names == ["user", "x", "label", "kind"]
    assert found["label"].unique().to_pylist() == ["no", "yes"]
    assert found["kind"].unique().to_pylist() == [None, "a "]
    schema = draft_schema(tmp_path / "log.csv").to_dict()
    assert schema["labels"] == [{"column": "label", "positive": "== yes"}]
    some = table(tmp_path, "a,b\n1, x\n2,y\n")
    assert some["b"].to_pylist() == [" x", "y"]
    with pytest.raises(DataError, match=r"columns of .*log\.csv: got 'a' 2 times"):
        table(tmp_path, "a, a\n1, 2\n")


@pytest.mark.parametrize("blank", [b"", b"\n", b"\xef\xbb\xbf \r\n\n"])
@pytest.mark.parametrize("name", ["part-1.csv", "part-0.csv.gz"])
def test_blank_files_of_a_folder_are_ignored(tmp_path: Path, blank: bytes, name: str) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    (folder / name).write_bytes(gzip.compress(blank) if name.endswith("gz") else blank)
    with pytest.raises(DataError, match="is empty"):
        draft_schema(folder)
    (folder / "part-0.csv").write_text("user,label\n" + "".join(f"u{i % 41},{i % 2}\n" for i in range(400)))
    assert ParquetSource(folder, draft_schema(folder)).samples("train") == 400


def test_types_are_those_of_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.files.delimited._BLOCK_BYTES", 1000)
    rows = "".join(f"{i},{i}\n" for i in range(5000))
    found = table(tmp_path, f"a,b\n{rows}5000,x5000\n")
    assert str(found.schema.field("a").type) == "int64"
    assert found["b"].to_pylist() == [*map(str, range(5000)), "x5000"]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["log.csv", "log.tsv", "Log.CSV.GZ", "log.tsv.gz", "log.csv.zst"])
def test_separators_and_compression(tmp_path: Path, name: str, separator: str) -> None:
    text = (
        separator.join(["a", '"b c"', '"d;,|\te"']) + "\r\n" + separator.join(["1", '"x""y"', '"two\nlines"']) + "\r\n"
    )
    data = text.encode()
    if name.lower().endswith(".gz"):
        data = gzip.compress(data)
    elif name.endswith(".zst"):
        data = pa.compress(data, codec="zstd", asbytes=True)
    assert table(tmp_path, data, name).to_pylist() == [{"a": 1, "b c": 'x"y', "d;,|\te": "two\nlines"}]


def test_what_polars_and_pandas_write(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "user": ["ä", "b,c", 'quo"te', None],
            "n": [1, None, 3, 4],
            "x": [0.5, 1e300, -1.0, None],
            "day": [datetime.date(2024, 1, 1)] * 4,
            "at": [datetime.datetime(2024, 1, 1, 1, 2, 3, 4000)] * 4,
            "yes": [True, False, None, True],
        }
    )
    frame.write_csv(tmp_path / "polars.csv")
    assert converted(tmp_path / "polars.csv").to_pylist() == frame.to_dicts()
    frame.with_row_index("").write_csv(tmp_path / "pandas.csv", separator="\t")  # its index has no name
    assert converted(tmp_path / "pandas.csv").column_names == ["", *frame.columns]


ERRORS = {
    "latin-1": ("a,b\nä,1\n".encode("latin-1"), r"is not UTF-8 .*iconv -f LATIN1 -t UTF-8 OLD > NEW"),
    "latin-1, late": (b"a,b\n" + b"x,1\n" * 500_000 + "ä,1\n".encode("latin-1"), r"is not UTF-8 .*iconv -f LATIN1"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), r"log\.csv is UTF-16"),
    "empty": (b"", ".* is empty"),
    "blank": (b"\n\n \n", ".* is empty"),
    "fields": (
        b"a,b\n1,2\n1,2,3\n",
        r"log\.csv cannot be parsed: CSV parse error: Row #3: Expected 2 columns, got 3: 1,2,3",
    ),
    "headerless": (b"1,0.5,x\n0,0.7,y\n", r"log\.csv has no header: its first line is 1, 0\.5, x"),
    "twice": (b"a,b,a\n1,2,3\n", r"columns of .*log\.csv: got 'a' 2 times"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    data, message = ERRORS[kind]
    with pytest.raises(DataError, match=message):
        table(tmp_path, data)
    left = [path.name for path in (tmp_path / "tables").iterdir() if not path.name.endswith(".lock")]
    assert left == []


@pytest.mark.parametrize("kind", ["whole", "none", "empty", "upper"])
def test_rows_of_criteo_need_neither_header_nor_label(tmp_path: Path, log: Path, kind: str) -> None:
    lines = log.read_text().splitlines()[:100]
    change = {
        "whole": str,
        "none": lambda line: line.partition("\t")[2],
        "empty": lambda line: "\t" + line.partition("\t")[2],
        "upper": str.upper,
    }
    texts = [change[kind](line) for line in lines]
    (tmp_path / "day_24").write_text("\n".join(texts) + "\n")
    found = converted(tmp_path / "day_24")
    assert found.column_names == [*(["label"] if kind != "none" else []), *OF_LOG[1:]]
    assert {str(found.schema.field(f"C{i}").type) for i in range(1, 27)} == {"string"}
    assert [value or "" for value in found["C26"].to_pylist()] == [text.split("\t")[-1] for text in texts]


def test_it_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    store = fs.LocalFileSystem()
    first = convert_to_parquet(store, str(tmp_path / "log.csv"))
    state = first.stat().st_ino
    assert convert_to_parquet(store, str(tmp_path / "log.csv")) == first and first.stat().st_ino == state
    (tmp_path / "log.csv").write_text("a,b\n1,2\n3,4\n")
    second = convert_to_parquet(store, str(tmp_path / "log.csv"))
    assert second != first and len(pq.read_table(second)) == 2
    assert first.is_file()  # a run may read it
    os.utime(first, (0, 0))
    (tmp_path / "log.csv").write_text("a,b\n")
    convert_to_parquet(store, str(tmp_path / "log.csv"))
    assert not first.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"log\.csv could not be converted to Parquet in"):
        convert_to_parquet(fs.LocalFileSystem(), str(tmp_path / "log.csv"))


def made_by(rank: int, path: Path) -> tuple[str, int]:
    made: list[Path] = []

    def convert(store: fs.FileSystem, source: str, kept: Path, text: Collection[str]) -> None:
        made.append(kept)
        _convert(store, source, kept, text)

    os.environ["HOTBED_TABLES"] = str(path.parent / "tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.data.files.delimited._convert", convert)
        return str(convert_to_parquet(fs.LocalFileSystem(), str(path))), len(made)


def test_several_processes_make_one_file(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n" + "1,2\n" * 50_000)
    first, second = ranks.run(2, made_by, tmp_path / "log.csv")
    assert first[0] == second[0]
    assert first[1] + second[1] == 1


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(texts, st.integers(), st.floats(allow_nan=False)), min_size=1, max_size=20))
def test_any_text_comes_back_as_polars_writes_it(tmp_path: Path, rows: list[tuple[str, int, float]]) -> None:
    frame = pl.DataFrame({"t": [f"t{r[0]}" for r in rows], "n": [str(r[1]) for r in rows], "x": [r[2] for r in rows]})
    frame.write_csv(tmp_path / "log.csv", quote_style="always")
    os.utime(tmp_path / "log.csv", ns=(0, np.random.default_rng().integers(1 << 60)))
    found = converted(tmp_path / "log.csv")
    assert found["t"].to_pylist() == frame["t"].to_list()
    assert [str(n) for n in found["n"].to_pylist()] == frame["n"].to_list()
    assert found["x"].cast(pa.float64()).to_pylist() == frame["x"].to_list()


def test_a_source_reads_it_as_parquet(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, n in (("train", 6), ("test", 4)):
        rows = "".join(f"{i % 2},{i}\n" for i in range(n))
        (tmp_path / f"data/ratings_{split}.csv").write_text(f"label,item\n{rows}")
    schema = Schema(sparse=(SparseColumn(name="item", rows=100),))
    source = ParquetSource(tmp_path / "data", schema)
    assert {split: source.samples(split) for split in source.splits} == {"train": 6, "test": 4}
    assert source.read("train", 0).sparse.values.tolist() == hashes_to_rows(hash_integers(np.arange(6)), 100).tolist()
    with pytest.raises(DataError, match=r"ratings_train\.csv: column 'itme' is missing"):
        ParquetSource(tmp_path / "data", Schema(sparse=(SparseColumn(name="itme", rows=100),)))


def test_names_may_have_any_characters(tmp_path: Path) -> None:
    found = table(tmp_path, 'a\1b,"q""x",Zürich\n1,2,3\n')
    assert found.to_pydict() == {"a\1b": [1], 'q"x': [2], "Zürich": [3]}
