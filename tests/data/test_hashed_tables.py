"""Protects that values without a vocabulary are hashed alike when they are prepared, predicted and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import derived_cases
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import log_line, write_log
from prepare_cases import SMALL, dataset, open_prepared

from hotbed.data import Encoder, SplitBinarySource
from hotbed.data.hashing import hash_integers, hashes_to_rows, mix
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError, SpecError

OPTIONS: dict[str, Any] = {**SMALL, "hash_rows": {"user": 1000}}


def hash_of(text: str, rows: int, seed: int = 0) -> int:
    h = np.array([derived_cases.hash_of(text)])
    return int(hashes_to_rows(mix(h ^ np.uint64(seed)) if seed else h, rows)[0])


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_values_are_hashed_and_need_no_vocabulary(tmp_path: Path, seed: int) -> None:
    raw = dataset(tmp_path / "raw", files=2)
    report = prepare(raw, tmp_path / "out", **OPTIONS, hash_seed=seed)
    assert report.rows["user"] == 1000
    assert [file.name for file in (tmp_path / "out/vocabulary").iterdir()] == ["tags.parquet"]
    given = pq.read_table(raw / "day_0.parquet")["user"].to_pylist()
    stored = pq.read_table(tmp_path / "out/train")["user"].to_pylist()
    assert stored[: len(given)] == [hash_of(user, 1000, seed) for user in given]


def test_raw_rows_are_hashed_as_those_that_were_prepared(tmp_path: Path) -> None:
    prepare(dataset(tmp_path / "raw", files=2), tmp_path / "out", **OPTIONS, hash_seed=3)
    encoder = open_prepared(tmp_path / "out").encoder.inputs
    rows = {"user": ["u1", None, "never seen"], "tags": [[1], [], [99, None]], "price": [1.0, 2.0, 3.0]}
    expected = [hash_of("u1", 1000, 3), 0, hash_of("never seen", 1000, 3)]
    assert encoder.batch(encoder.table(rows)).sparse["user"].values.tolist() == expected
    # as an exported model does: from plain values and the files of vocabularies
    again = Encoder.from_dict(encoder.to_dict(), {}, lambda name: encoder.preparation.read(name))  # pyright: ignore[reportOptionalMemberAccess]
    assert again.batch(again.table(rows)).sparse["user"].values.tolist() == expected


def test_hexadecimal_values_of_a_log(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", [log_line(i % 2, [i], [f"{i:08x}", "0000000a"]) for i in range(20)])
    prepare(log, tmp_path / "out", threshold=1, hash_rows={"C1": 9}, test_fraction=0)
    source = SplitBinarySource(tmp_path / "out")
    stored = source.read("train", 0).sparse
    assert stored["C1"].values.tolist() == hashes_to_rows(hash_integers(np.arange(20)), 9).tolist()
    assert stored["C2"].values.tolist() == [1] * 20
    assert source.encoder is not None
    columns = {name: pa.array([None] * 2, pa.string()) for name in stored.names}
    columns |= {f"I{i}": pa.array([None] * 2, pa.int64()) for i in range(1, 14)}
    raw = pa.table(columns | {"C1": ["13", "ffffffff"]})
    batch = source.encoder.inputs.batch(raw)
    assert batch.sparse["C1"].values.tolist() == hashes_to_rows(hash_integers(np.array([0x13, 0xFFFFFFFF])), 9).tolist()


def test_another_hash_is_another_model(tmp_path: Path) -> None:
    raw = dataset(tmp_path / "raw", files=2)
    for name, options in {"a": OPTIONS, "b": {**OPTIONS, "hash_seed": 1}, "c": SMALL}.items():
        prepare(raw, tmp_path / name, **options)
    a, b, c = (open_prepared(tmp_path / name).encoder.preparation for name in "abc")
    assert a is not None and b is not None and c is not None
    a.refuse_other(a.state())
    with pytest.raises(DataError, match=r"table 'user': got hashes to 1,000 rows with seed 1 \(text\)"):
        b.refuse_other(a.state(), may_grow=True)
    with pytest.raises(DataError, match="table 'user': got a vocabulary of 73 values"):
        c.refuse_other(a.state(), may_grow=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hash_rows": {"usr": 9}}, "table of hash_rows: got 'usr'"),
        ({"hash_rows": {"user": 1}}, r"hash_rows\.user: got 1"),
        ({"hash_rows": {"user": "9"}}, "hash_rows.user: got '9'"),
        ({"hash_rows": {"user": 9}, "hash_seed": -1}, "hash_seed: got -1"),
        (
            {"hash_rows": {"user": 1 << 33}, "format": "split_binary"},
            "split-binary format: sparse column 'tags': got a varying number of ids per sample",
        ),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    raw = dataset(tmp_path / "raw", files=1)
    with pytest.raises(SpecError, match=message):
        prepare(raw, tmp_path / "out", **{**SMALL, **options})
    assert not (tmp_path / "out").exists()
