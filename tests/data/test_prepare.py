import errno
import math
import resource
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import REAL_LOG, log_line, write_log
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.batch import Batch
from hotbed.data import Source, SplitBinarySource, SplitBinaryWriter, write_synthetic_log
from hotbed.data.encoding.vocabulary import read_vocabulary
from hotbed.data.files.criteo import LineChecker, read_blocks
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError
from hotbed.testing.source_contract import SourceContract

VALUES = ["0000000a", "0000000b", "0000000c"]


def c1_log(path: Path, values: str) -> Path:
    """A log of which only C1 is filled; a space is a missing value."""
    return write_log(path, [log_line(i % 2, [i], [f"{v:>08}" if v != " " else ""]) for i, v in enumerate(values)])


def ids_of(out: Path, split: str = "train", column: str = "C1") -> list[int]:
    source = SplitBinarySource(out)
    return [i for c in range(len(source.chunks(split))) for i in source.read(split, c).sparse[column].values.tolist()]


def test_ids_by_falling_count_then_value(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "c b a b c d  ee".replace(" ", "") + " ")
    report = prepare(log, tmp_path / "out", threshold=2, test_fraction=0)
    # b, c and e twice (ties by value), a and d once, one missing
    assert ids_of(tmp_path / "out") == [2, 1, 0, 1, 2, 0, 3, 3, 0]
    assert report.rows["C1"] == 4
    assert report.rows["C2"] == 1
    assert report.samples == {"train": 9}
    assert read_vocabulary(tmp_path / "out/vocabulary/C1.parquet").values.to_pylist() == [0xB, 0xC, 0xE]


def test_a_missing_value_is_not_the_value_zero(tmp_path: Path) -> None:
    prepare(c1_log(tmp_path / "log.tsv", "00  a"), tmp_path / "out", threshold=1, test_fraction=0)
    assert ids_of(tmp_path / "out") == [1, 1, 0, 0, 2]


def test_numericals_and_labels(tmp_path: Path) -> None:
    lines = [log_line(1, [0, -2, ""]), log_line(0, [100, 5, 20_000_000])]
    prepare(write_log(tmp_path / "log.tsv", lines), tmp_path / "out", test_fraction=0)
    batch = SplitBinarySource(tmp_path / "out").read("train", 0)
    assert batch.labels is not None and batch.labels.tolist() == [[1.0], [0.0]]
    expected = torch.zeros(2, 13)
    expected[0, :2] = torch.tensor([math.log(3), 0.0])
    expected[1, :3] = torch.tensor([math.log(103), math.log(8), math.log(20_000_003)])
    assert torch.equal(batch.dense, expected.half().float())  # pyright: ignore[reportArgumentType]


def test_splits_are_in_time_order(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "abcdefabcdefabcdefab")
    report = prepare(log, tmp_path / "out", threshold=1, valid_fraction=0.1, test_fraction=0.25, count_on="all")
    assert report.samples == {"train": 13, "valid": 2, "test": 5}
    ids = [i for split in ("train", "valid", "test") for i in ids_of(tmp_path / "out", split)]
    assert ids == [1, 2, 3, 4, 5, 6] * 3 + [1, 2]


def test_counting_on_train_keeps_the_test_split_out_of_the_vocabulary(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "aaabbbcccc")
    prepare(log, tmp_path / "train", threshold=1, test_fraction=0.4)
    assert (ids_of(tmp_path / "train"), ids_of(tmp_path / "train", "test")) == ([1, 1, 1, 2, 2, 2], [0] * 4)
    prepare(log, tmp_path / "all", threshold=1, test_fraction=0.4, count_on="all")
    assert (ids_of(tmp_path / "all"), ids_of(tmp_path / "all", "test")) == ([2, 2, 2, 3, 3, 3], [1] * 4)


def test_tomorrow_keeps_yesterdays_ids(tmp_path: Path) -> None:
    prepare(c1_log(tmp_path / "1.tsv", "aab"), tmp_path / "one", threshold=1, test_fraction=0)
    old = tmp_path / "one/vocabulary"
    # c is now the most frequent, and b does not occur
    report = prepare(c1_log(tmp_path / "2.tsv", "ccca"), tmp_path / "two", threshold=1, test_fraction=0, vocabulary=old)
    assert ids_of(tmp_path / "two") == [3, 3, 3, 1]
    assert report.rows["C1"] == 4
    assert read_vocabulary(tmp_path / "two/vocabulary/C1.parquet").values.to_pylist() == [0xA, 0xB, 0xC]
    with pytest.raises(DataError, match=r"C1\.parquet does not exist"):
        prepare(tmp_path / "2.tsv", tmp_path / "three", vocabulary=tmp_path / "nowhere")


def set_block_bytes(patch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Make blocks, parts of files and groups of samples so small that lines, counts and splits cross them."""
    patch.setattr("hotbed.data.preparation.raw_inputs.read_blocks", partial(read_blocks, block_bytes=block_bytes))
    patch.setattr("hotbed.data.preparation.raw_inputs.PART_BYTES", 3 * block_bytes)
    patch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", 10)


columns = st.lists(st.sampled_from(["", "0", "1", "2", "0000000a", "ffffffff"]), min_size=1, max_size=60)


@settings(deadline=None, max_examples=20)
@given(values=columns, threshold=st.integers(1, 4), block_bytes=st.integers(100, 3000))
def test_against_a_plain_count(
    values: list[str], threshold: int, block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One column against dictionaries, with blocks so small that lines, counts and splits cross them."""
    tmp_path = tmp_path_factory.mktemp("prepare")
    log = write_log(tmp_path / "log.tsv", [log_line(0, [], [v]) for v in values])
    with pytest.MonkeyPatch.context() as patch:
        set_block_bytes(patch, block_bytes)
        prepare(log, tmp_path / "out", threshold=threshold, test_fraction=0)
    counts = Counter(int(v, 16) for v in values if v)
    kept = sorted((v for v, n in counts.items() if n >= threshold), key=lambda v: (-counts[v], v))
    assert ids_of(tmp_path / "out") == [kept.index(int(v, 16)) + 1 if v and int(v, 16) in kept else 0 for v in values]


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


@pytest.mark.parametrize("kind", BAD_LINES)
@pytest.mark.parametrize("block_bytes", [150, 1 << 20])
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


def test_the_rule_for_negatives_is_for_logs(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", [log_line(0, [-9], ["68fd1e64"]), log_line(1, [], ["68fd1e64"])])
    assert prepare(log, tmp_path / "out", negatives="zero", test_fraction=0, threshold=1).replaced == {"I1": 1}
    with pytest.raises(SpecError, match="negatives: got 'drop'"):
        prepare(log, tmp_path / "other", negatives="drop")  # pyright: ignore[reportArgumentType]
    pq.write_table(pa.table({"click": [0, 1] * 50, "user": [*"abcde"] * 20}), tmp_path / "log.parquet")
    with pytest.raises(SpecError, match="negatives: got 'zero'"):
        prepare(tmp_path / "log.parquet", tmp_path / "other", negatives="zero")


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


@pytest.mark.parametrize(("cut", "line"), [(1, 300), (3000, "[1-9][0-9]*")])
def test_truncated_gzip(tmp_path: Path, cut: int, line: object) -> None:
    rng = np.random.default_rng(0)
    lines = [log_line(0, [], [f"{v:08x}" for v in rng.integers(0, 2**32, 26)]) for _ in range(300)]
    log = write_log(tmp_path / "log.gz", lines)
    log.write_bytes(log.read_bytes()[:-cut])
    with pytest.raises(DataError, match=rf"log.gz: the gzip stream is damaged or truncated after line {line} "):
        prepare(log, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [log]


def test_damaged_gzip(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.gz", [GOOD] * 100)
    data = bytearray(log.read_bytes())
    data[-6] ^= 255  # the checksum
    log.write_bytes(data)
    with pytest.raises(
        DataError,
        match=r"log\.gz: the gzip stream is damaged or truncated after line 0",
    ):
        prepare(log, tmp_path / "out")


def no_room(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "method"), [(pq.ParquetWriter, "write_table"), (SplitBinaryWriter, "_append"), (Path, "write_text")]
)
def test_full_disk_leaves_nothing_behind(
    tmp_path: Path, owner: object, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full while spooling, while writing columns, while writing the description."""
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    monkeypatch.setattr(owner, method, no_room)
    with pytest.raises(OSError, match=r"No space left on device: writing .*out failed with .* bytes free") as caught:
        prepare(log, tmp_path / "deep/out")
    assert caught.value.errno == errno.ENOSPC
    assert "nothing was left behind" in str(caught.value)
    assert list((tmp_path / "deep").iterdir()) == []


def test_full_disk_keeps_what_was_to_be_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    prepare(log, tmp_path / "out", threshold=1)
    before = ids_of(tmp_path / "out")
    monkeypatch.setattr(SplitBinaryWriter, "_append", no_room)
    with pytest.raises(OSError, match="No space left"):
        prepare(log, tmp_path / "out", threshold=1, overwrite=True)
    assert ids_of(tmp_path / "out") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.tsv", "out"]


def test_a_real_limit_on_file_sizes(tmp_path: Path) -> None:
    """What the operating system does when a file cannot grow."""
    log = tmp_path / "log.tsv"
    write_synthetic_log(log, 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="nothing was left behind") as caught:
            prepare(log, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.planted.json", "log.tsv"]


def test_existing_output(tmp_path: Path) -> None:
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    (tmp_path / "empty").mkdir()
    prepare(log, tmp_path / "empty")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").touch()
    with pytest.raises(DataError, match="home exists already; choose another directory, or pass overwrite=True"):
        prepare(log, tmp_path / "home")
    with pytest.raises(DataError, match=r"home holds no feature_spec.yaml, so it is not a dataset and will not be"):
        prepare(log, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home/thesis.txt").exists()
    with pytest.raises(DataError, match="empty exists already"):
        prepare(log, tmp_path / "empty")
    prepare(log, tmp_path / "empty", overwrite=True, test_fraction=0)
    assert SplitBinarySource(tmp_path / "empty").splits == ("train",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0}, "threshold: got 0"),
        ({"test_fraction": 1.0}, "test_fraction: got 1.0"),
        ({"valid_fraction": -0.1}, "valid_fraction: got -0.1"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "valid_fraction . test_fraction: got 0.5 . 0.5"),
        ({"count_on": "test"}, "count_on: got 'test'"),
        ({"on_bad_line": "ignore"}, "on_bad_line: got 'ignore'"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        prepare(tmp_path / "log.tsv", tmp_path / "out", **options)  # pyright: ignore[reportArgumentType]


def test_too_few_lines_for_the_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="test split: got 0 of 3 samples"):
        prepare(c1_log(tmp_path / "log.tsv", "abc"), tmp_path / "out")


def test_progress_goes_up_to_the_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    log = c1_log(tmp_path / "log.tsv", "ab" * 20)
    prepare([log, log], tmp_path / "out", progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["read", "count", "write"]
    for stage in ("read", "count", "write"):
        done = [d for s, d, _ in calls if s == stage]
        total = [t for s, _, t in calls if s == stage]
        assert done == sorted(done)
        assert done[-1] == total[-1]


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log.tsv.gz"
    write_synthetic_log(log, 3000)
    for out in ("one", "two"):
        prepare(log, tmp_path / out, threshold=3)
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert len(files) == 1 + 2 * 28 + 26
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


class TestContract(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        write_synthetic_log(path / "log.tsv", 300)
        prepare(path / "log.tsv", path / "out", threshold=2, valid_fraction=0.1)
        whole = SplitBinarySource(path / "out")
        return SplitBinarySource(path / "out", chunk_samples=64), {s: whole.read(s, 0) for s in whole.splits}


def test_polars_is_imported_only_to_prepare() -> None:
    code = "import sys; sys.modules['polars'] = None; import hotbed.data; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "fine\n"


def test_line_checker_reports_numbers_of_later_blocks(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.tsv", [GOOD] * 10 + [log_line(0, ["x"])])
    checker = LineChecker("error")
    with pytest.raises(DataError, match="line 11, column I1"):
        for block in read_blocks(log, 200):
            checker.parse(block)


@pytest.mark.skipif(not REAL_LOG.is_file(), reason=f"needs the real log {REAL_LOG.name}, which may not be distributed")
def test_real_log(tmp_path: Path) -> None:
    report = prepare(REAL_LOG, tmp_path / "out", threshold=2)
    assert report.samples == {"train": 99_000, "test": 11_000}
    assert report.skipped == {}
    source = SplitBinarySource(tmp_path / "out")
    batch = source.read("train", 0)
    assert batch.labels is not None and 0.2 < float(batch.labels.mean()) < 0.3
    assert batch.dense is not None and bool(batch.dense.isfinite().all())
    first = batch.sparse["C22"].values
    assert 0.7 < float((first == 0).float().mean()) < 0.8  # missing in 76 %


def test_the_largest_integers_stay_finite(tmp_path: Path) -> None:
    prepare(write_log(tmp_path / "log.tsv", [log_line(0, [2**63 - 1])]), tmp_path / "out", test_fraction=0)
    dense = SplitBinarySource(tmp_path / "out").read("train", 0).dense
    assert dense is not None and dense[0, 0] == torch.tensor(math.log(2.0**63)).half()


def test_a_file_without_line_ends_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_bytes((log_line() * 2).encode() + b"1\t" * (1 << 20))
    with pytest.raises(DataError, match=r"log\.tsv, line 3: got more than 1,048,576 bytes"):
        list(read_blocks(tmp_path / "log.tsv", 1 << 18))
