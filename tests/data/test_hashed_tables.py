"""Protects that values without a vocabulary are hashed alike when they are prepared, predicted and served."""

from pathlib import Path
from typing import Any

import derived_cases
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import log_line, write_log
from hypothesis import given
from hypothesis import strategies as st
from prepare_cases import SMALL, dataset, open_prepared

from hotbed.data import Encoder, SplitBinarySource
from hotbed.data.hashing import hash_integers, hash_strings, hashes_to_rows, mix
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


# -- hashes ----------------------------------------------------------------------------------------------------------


MASK = 2**64 - 1


def plain_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_string(text: bytes) -> int:
    h = plain_mix(len(text))
    for at in range(0, len(text), 8):
        h = plain_mix(h ^ int.from_bytes(text[at : at + 8], "little"))
    return h


def hashes(texts: list[bytes]) -> list[int]:
    offsets = np.cumsum([0, *map(len, texts)])
    return hash_strings(offsets, np.frombuffer(b"".join(texts), dtype=np.uint8)).tolist()


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_strings_against_plain_python(texts: list[bytes]) -> None:
    assert hashes(texts) == [plain_string(t) for t in texts]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_integers_against_plain_python(values: list[int]) -> None:
    assert hash_integers(np.array(values, dtype=np.int64)).tolist() == [plain_mix(v & MASK) for v in values]


def test_values_that_must_never_change() -> None:
    """Models are trained on these rows: a change of one number here breaks every checkpoint."""
    assert mix(np.array([0, 1], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert hashes_to_rows(hash_integers(np.array([0, 1, -1, 10**12])), 1000).tolist() == [737, 546, 459, 980]
    texts = [b"", b"a", b"item-17", "caf\u00e9 au lait".encode()]
    assert hashes_to_rows(np.array(hashes(texts), dtype=np.uint64), 1000).tolist() == [737, 348, 883, 47]


def test_integers_hash_alike_in_all_widths() -> None:
    for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint64):
        assert hash_integers(np.array([7], dtype=dtype)) == hash_integers(np.array([7]))


def test_rows_are_even_and_leave_row_0() -> None:
    rows = hashes_to_rows(hash_integers(np.arange(99_000)), 100)
    counts = np.bincount(rows, minlength=100)
    assert counts[0] == 0
    assert 800 < counts[1:].min() <= counts.max() < 1200
