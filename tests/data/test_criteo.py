"""Protects that raw Criteo logs of every kind are read alike, and that bad lines and damaged files are named."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from data_cases import log_line, write_log
from prepare_cases import VALUES, c1_log, ids_of, set_block_bytes

from hotbed.data import SplitBinarySource
from hotbed.data.files.criteo import read_blocks
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["log.tsv", "log.gz"])
def test_files_of_every_kind_are_read_alike(tmp_path: Path, name: str, ending: str) -> None:
    lines = [log_line(i % 2, [i], [VALUES[i % 3]]).replace("\n", ending) for i in range(30)]
    lines[-1] = lines[-1].rstrip("\r\n")  # no newline at the end of the file
    prepare(write_log(tmp_path / name, lines), tmp_path / "out", threshold=1, test_fraction=0)
    assert ids_of(tmp_path / "out") == [1, 2, 3] * 10


def test_several_files_in_time_order(tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    for day, value in ((10, "b"), (2, "a")):
        c1_log(tmp_path / f"days/day_{day}", value)
    (tmp_path / "days/readme.txt").write_text("not a log")
    prepare(tmp_path / "days", tmp_path / "out", threshold=1, test_fraction=0)
    assert ids_of(tmp_path / "out") == [1, 2]  # day_2 before day_10
    files = [tmp_path / "days/day_10", tmp_path / "days/day_2"]
    prepare(files, tmp_path / "out", threshold=1, test_fraction=0, overwrite=True)
    assert ids_of(tmp_path / "out") == [2, 1]


def test_gzip_of_several_members(tmp_path: Path) -> None:
    first, second = (c1_log(tmp_path / f"{i}.gz", "ab").read_bytes() for i in range(2))
    (tmp_path / "log.gz").write_bytes(first + second)
    prepare(tmp_path / "log.gz", tmp_path / "out", threshold=1, test_fraction=0)
    assert ids_of(tmp_path / "out") == [1, 2, 1, 2]


def test_zstd_whole_and_cut_short(tmp_path: Path) -> None:
    data = pa.compress(c1_log(tmp_path / "log.tsv", "abab" * 20).read_bytes(), codec="zstd", asbytes=True)
    (tmp_path / "log.tsv.zst").write_bytes(data)
    prepare(tmp_path / "log.tsv.zst", tmp_path / "out", threshold=1, test_fraction=0)
    assert ids_of(tmp_path / "out") == [1, 2] * 40
    (tmp_path / "cut.tsv.zst").write_bytes(data[:-10])
    with pytest.raises(DataError, match=r"cut.tsv.zst: the zstd stream is damaged or truncated after line \d+ "):
        prepare(tmp_path / "cut.tsv.zst", tmp_path / "more")
    assert not list(tmp_path.glob("*more*"))


GOOD = log_line(1, [3], ["68fd1e64"])

BAD_LINES = {
    "fields": (GOOD.replace("\t", "", 1), "39 fields, expected 40"),
    "more fields": (GOOD.replace("\n", "\t\n"), "41 fields, expected 40"),
    "blank": ("\n", "1 fields, expected 40"),
    "label": (log_line(2), r"column label: got '2', expected 0 or 1"),
    "no label": (log_line(""), r"column label: got '', expected 0 or 1"),
    "hex": (log_line(0, [], ["", "68fg1e64"]), "column C2: got '68fg1e64'"),
    "label with a sign": (log_line("+1"), r"column label: got '\+1'"),
    "label with a zero": (log_line("01"), r"column label: got '01'"),
    "hex with a sign": (log_line(0, [], ["+1a"]), r"column C1: got '\+1a'"),
    "padded hex": (log_line(0, [], ["0000000001a"]), "column C1: got '0000000001a'"),
    "long hex": (log_line(0, [], ["168fd1e64"]), "column C1: got '168fd1e64'"),
    "text": (log_line(0, ["", "", "many"]), "column I3: got 'many'"),
    "decimal": (log_line(0, [1.5]), "column I1: got '1.5'"),
    "below -3": (log_line(0, [0, -4]), r"column I2: got -4, expected at least −3"),
    "too large": (log_line(0, [10**30]), f"column I1: got {10**30}"),
    "not text": ("\udcff" + GOOD, "column label: got"),
}


@pytest.mark.parametrize(
    ("kind", "block_bytes"), [*((kind, 1 << 20) for kind in BAD_LINES), *((k, 150) for k in ("fields", "hex"))]
)
def test_bad_line(tmp_path: Path, kind: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_block_bytes(monkeypatch, block_bytes)
    line, message = BAD_LINES[kind]
    log = tmp_path / "log.tsv"
    log.write_bytes("".join([GOOD] * 5 + [line] + [GOOD] * 3 + [line]).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"log.tsv, line 6[:,].*{message}.*on_bad_line='skip'"):
        prepare(log, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [log]
    report = prepare(log, tmp_path / "out", on_bad_line="skip", test_fraction=0, threshold=1)
    assert sum(report.skipped.values()) == 2
    assert report.samples == {"train": 8}
    assert ids_of(tmp_path / "out") == [1] * 8


NUMBERS = [5, 0, -1, -2, -3, ""]


@pytest.mark.parametrize(
    ("negatives", "taken", "replaced"),
    [("keep", [5, 0, -1, -2, -2, None], 1), ("zero", [5, 0, 0, 0, 0, None], 3)],
)
@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_negative_numericals(
    tmp_path: Path, negatives: Any, on_bad_line: Any, taken: list[int | None], replaced: int
) -> None:
    """The published log of Kaggle has -3 in I2."""
    lines = [log_line(0, ["", x], ["68fd1e64"]) for x in NUMBERS]
    lines += [log_line(2, ["", -3])] if on_bad_line == "skip" else []
    log = write_log(tmp_path / "log.tsv", lines)
    options: dict[str, Any] = {"negatives": negatives, "on_bad_line": on_bad_line, "test_fraction": 0, "threshold": 1}
    report = prepare(log, tmp_path / "out", **options)
    assert report.replaced == {"I2": replaced}
    dense = SplitBinarySource(tmp_path / "out").read("train", 0).dense
    assert dense is not None
    expected = [0.0 if x is None else math.log(x + 3) for x in taken]
    torch.testing.assert_close(dense[:, 1], torch.tensor(expected).half().float(), rtol=0, atol=0)
    source = SplitBinarySource(tmp_path / "out")
    assert source.encoder is not None
    preparation = source.encoder.preparation
    assert preparation is not None
    raw = pa.table({"I2": pa.array([None if x == "" else x for x in NUMBERS], pa.int64())})
    served = preparation.convert(raw, ["I2"], RowLocation())["I2"]
    assert served.to_pylist() == dense[:, 1].tolist()


def test_skipped_lines_are_counted_by_what_is_wrong(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", [GOOD, *(line for line, _ in BAD_LINES.values() if line.isascii())])
    report = prepare(log, tmp_path / "out", on_bad_line="skip", test_fraction=0)
    assert report.skipped == {"fields": 3, "label": 4, "categorical": 4, "numerical": 4}


def test_no_good_line(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", ["\n", "\n"])
    with pytest.raises(DataError, match=r"log.tsv: got no good line \(2 skipped\)"):
        prepare(log, tmp_path / "out", on_bad_line="skip")


@pytest.mark.parametrize("name", ["log.tsv", "log.gz"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{name} is empty, expected lines of 40 tab-separated fields"):
        prepare(tmp_path / name, tmp_path / "out")
    with pytest.raises(DataError, match=r"empty\.gz has no lines"):
        prepare(write_log(tmp_path / "empty.gz", []), tmp_path / "out")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.tsv does not exist"):
        prepare(tmp_path / "nothing.tsv", tmp_path / "out")
    with pytest.raises(
        DataError, match=r"test_missing_files\d+: got no day_\*, \*\.tsv, \*\.tsv\.gz or \*\.tsv\.zst file"
    ):
        prepare(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match=r"raw: got \[\]"):
        prepare([], tmp_path / "out")


@pytest.mark.parametrize(("damage", "line"), [("cut 1", 300), ("cut 3000", "[1-9][0-9]*"), ("checksum", 0)])
def test_damaged_gzip(tmp_path: Path, damage: str, line: object) -> None:
    rng = np.random.default_rng(0)
    lines = [log_line(0, [], [f"{v:08x}" for v in rng.integers(0, 2**32, 26)]) for _ in range(300)]
    log = write_log(tmp_path / "log.gz", [GOOD] * 100 if damage == "checksum" else lines)
    data = bytearray(log.read_bytes())
    if damage == "checksum":
        data[-6] ^= 255
    else:
        del data[-int(damage.split()[1]) :]
    log.write_bytes(data)
    with pytest.raises(DataError, match=rf"log.gz: the gzip stream is damaged or truncated after line {line} "):
        prepare(log, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [log]


def test_a_file_without_line_ends_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_bytes((log_line() * 2).encode() + b"1\t" * (1 << 20))
    with pytest.raises(DataError, match=r"log\.tsv, line 3: got more than 1,048,576 bytes"):
        list(read_blocks(tmp_path / "log.tsv", 1 << 18))
