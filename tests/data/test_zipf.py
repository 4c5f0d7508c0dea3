"""Protects generated data: their laws, that any part is made alone, and that a planted model can be learnt."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data_cases import read_whole, write_log

from hotbed.auc import auc
from hotbed.batch import Batch
from hotbed.data import Source, SplitBinarySource, ZipfSource, write_synthetic_log
from hotbed.data.formats.zipf_source import CRITEO_1TB, ZipfLaw, random_uniform, random_words, stream_key
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError, SpecError
from hotbed.testing.source_contract import SourceContract, assert_same

ROWS = [1000, 1, 7, 50, 3, 2, 100_000, 4, 60]


def counters(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint64)


def described(path: Path, **values: object) -> Path:
    file = path / "tables.yaml"
    file.write_text(yaml.safe_dump({"rows": ROWS, **values}))
    return file


# -- the law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0, 0.5, 0.99, 1 - 1e-9, 1, 1 + 1e-15, 1.05, 1.5, 3, 16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 100, 1_000_000])
def test_frequencies_are_those_of_the_law(rows: int, exponent: float) -> None:
    n = 400_000
    drawn = ZipfLaw(rows, exponent).draw((1, 5), counters(n))
    assert drawn.min() >= 0
    assert drawn.max() < rows
    law = np.arange(1, rows + 1) ** -float(exponent)
    expected = n * law / law.sum()
    # Chi-square, with neighbouring ranks put together until 50 or more are expected of each bin.
    bins = np.minimum((np.cumsum(expected) / 50).astype(np.int64), int(n / 50) - 1)
    _, bins = np.unique(bins, return_inverse=True)
    seen = np.bincount(bins, np.bincount(drawn, minlength=rows))
    wanted = np.bincount(bins, expected)
    statistic, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    assert abs(statistic - freedom) <= 4 + 6 * (2 * freedom) ** 0.5


def test_the_largest_table() -> None:
    drawn = ZipfLaw(1 << 52, 0.1).draw((1,), counters(1000))
    assert 1 << 51 < drawn.max() < 1 << 52


def test_any_part_of_a_stream_is_made_alone() -> None:
    law, many = ZipfLaw(1_000_000, 1.05), counters(5000)
    whole = law.draw((3, 4), many)
    assert np.array_equal(np.concatenate([law.draw((3, 4), part) for part in np.array_split(many, 17)]), whole)
    assert np.array_equal(law.draw((3, 4), many[::-1].copy()), whole[::-1])
    assert not np.array_equal(law.draw((3, 5), many), whole)


def test_streams_are_uniform_and_independent() -> None:
    one, two = random_uniform(stream_key(1), counters(100_000)), random_uniform(stream_key(2), counters(100_000))
    assert one.min() >= 0
    assert one.max() < 1
    assert abs(one.mean() - 0.5) < 0.005
    assert abs(one.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.01
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.01
    assert len(np.unique(random_words(stream_key(1), counters(100_000)))) == 100_000


@pytest.mark.parametrize(
    ("rows", "exponent", "message"),
    [
        (0, 1, "rows: got 0"),
        ((1 << 52) + 1, 1, "rows: got 4,503,599,627,370,497"),
        (5, -0.5, r"exponent: got -0\.5"),
        (5, float("nan"), "exponent: got nan"),
    ],
)
def test_laws_that_cannot_be(rows: int, exponent: float, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ZipfLaw(rows, exponent)


# -- the source ----------------------------------------------------------------------------------------------------


class TestContract(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        sizes = {"train_samples": 50, "valid_samples": 8, "test_samples": 5}
        whole = ZipfSource(described(path), **sizes)
        samples = {split: whole.read(split, 0) for split in whole.splits}
        return ZipfSource(described(path), **sizes, chunk_samples=8), samples


def test_splits_are_parts_of_one_sequence(tmp_path: Path) -> None:
    file = described(tmp_path)
    split = ZipfSource(file, train_samples=30, valid_samples=10, test_samples=20, chunk_samples=7)
    parts = [split.read(name, i) for name in split.splits for i in range(len(split.chunks(name)))]
    assert_same(Batch.concatenate(parts), ZipfSource(file, train_samples=60).read("train", 0))
    assert ZipfSource(file, train_samples=30, test_samples=20).splits == ("train", "test")


def test_seeds_give_other_samples(tmp_path: Path) -> None:
    one, two = (ZipfSource(described(tmp_path), train_samples=100, seed=seed).read("train", 0) for seed in (0, 1))
    for name in ("C1", "C7"):
        assert not torch.equal(one.sparse[name].values, two.sparse[name].values)
    assert one.dense is not None and two.dense is not None
    assert not torch.equal(one.dense, two.dense)


def test_columns_are_independent(tmp_path: Path) -> None:
    batch = ZipfSource(described(tmp_path, rows=[1000, 1000]), train_samples=20_000).read("train", 0)
    one, two = batch.sparse["C1"].values.numpy(), batch.sparse["C2"].values.numpy()
    assert abs(np.corrcoef(np.log1p(one), np.log1p(two))[0, 1]) < 0.03
    assert one.dtype == np.int32


def test_ids_are_wide_where_a_table_needs_it(tmp_path: Path) -> None:
    source = ZipfSource(described(tmp_path, rows={"a": 5, "big": (1 << 31) + 1}), train_samples=1000, exponent=0)
    values = source.read("train", 0).sparse["big"].values
    assert values.dtype == torch.int64
    assert values.max() > 1 << 30
    source = ZipfSource(described(tmp_path, rows={"a": 5, "big": 1 << 31}), train_samples=1000, exponent=0)
    values = source.read("train", 0).sparse["big"].values
    assert values.dtype == torch.int32
    assert values.min() >= 0


def test_dense_inputs(tmp_path: Path) -> None:
    batch = ZipfSource(described(tmp_path, dense=2), train_samples=50_000).read("train", 0)
    assert batch.dense is not None
    assert batch.dense.shape == (50_000, 2)
    assert batch.dense.mean(0).abs().max() < 0.02
    assert (batch.dense.var(0) - 1).abs().max() < 0.02
    assert ZipfSource(described(tmp_path, dense=0), train_samples=5).read("train", 0).dense is None


def test_labels_depend_on_what_a_model_sees(tmp_path: Path) -> None:
    """Click rates by row of a column, from one half of the samples, order those of the other."""
    batch = ZipfSource(described(tmp_path), train_samples=60_000).read("train", 0)
    assert batch.labels is not None and batch.dense is not None
    clicked = batch.labels.numpy()[:, 0]
    assert 0.2 < clicked.mean() < 0.32
    rates = [
        [clicked[half][batch.sparse["C5"].values.numpy()[half] == row].mean() for row in range(3)]
        for half in (slice(30_000), slice(30_000, None))
    ]
    assert np.ptp(rates[0]) > 0.02
    assert np.argsort(rates[0]).tolist() == np.argsort(rates[1]).tolist()
    assert abs(np.corrcoef(batch.dense.numpy()[:, 0], clicked)[0, 1]) > 0.05


def test_labels_do_not_depend_on_which_columns_are_read(tmp_path: Path) -> None:
    source = ZipfSource(described(tmp_path), train_samples=500)
    whole, some = source.read("train", 0), source.only(["C2", "C7"]).read("train", 0)
    assert some.sparse.names == ("C2", "C7")
    assert torch.equal(some.sparse["C7"].values, whole.sparse["C7"].values)
    assert some.labels is not None and whole.labels is not None
    assert torch.equal(some.labels, whole.labels)


@pytest.mark.parametrize(
    ("preset", "gib", "rows"),
    [("criteo_1tb_t15", 15.6, None), ("criteo_1tb_t3", 84.9, None), ("criteo_1tb_t0", 421, 882_774_575)],
)
def test_tables_of_criteo_1tb(preset: str, gib: float, rows: int | None) -> None:
    source = ZipfSource(preset, train_samples=1000)
    total = sum(source.schema.rows.values())
    assert total == (rows or total)
    assert total * 128 * 4 / 2**30 == pytest.approx(gib, abs=0.5 if gib == 421 else 0.05)
    assert list(source.schema.rows) == [f"C{i}" for i in range(1, 27)]
    assert len(source.schema.dense) == 13
    assert source.read("train", 0).sparse.values.dtype == torch.int32


def test_a_file_names_columns_or_numbers_them(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_text(json.dumps({"rows": {"user": 9, "item": 4}, "dense": 1}))
    source = ZipfSource(file, train_samples=1)
    assert source.schema.rows == {"user": 9, "item": 4}
    assert source.schema.dense == ("I1",)
    assert list(ZipfSource(described(tmp_path), train_samples=1).schema.rows.items())[:2] == [("C1", 1000), ("C2", 1)]


def test_several_ids_per_sample(tmp_path: Path) -> None:
    one, three = (
        ZipfSource(described(tmp_path, rows=[1000, 50], ids=ids), train_samples=90 // ids).read("train", 0)
        for ids in (1, 3)
    )
    assert three.sparse.fixed == (3, 3)
    assert torch.equal(three.sparse["C2"].values, one.sparse["C2"].values)
    source = ZipfSource(described(tmp_path, rows=[1000, 50], ids=3), train_samples=30, chunk_samples=7)
    assert_same(read_whole(source), three)


def test_each_column_may_have_a_number_of_ids_of_its_own(tmp_path: Path) -> None:
    source = ZipfSource(described(tmp_path, rows=[1000, 50, 7], ids=[3, 1, 2]), train_samples=30, chunk_samples=7)
    assert [column.ids for column in source.schema.sparse] == [3, 1, 2]
    batch = read_whole(source)
    assert batch.sparse.fixed == (3, 1, 2)
    for each, name in ((3, "C1"), (1, "C2"), (2, "C3")):
        alike = ZipfSource(described(tmp_path, rows=[1000, 50, 7], ids=each), train_samples=30).read("train", 0)
        assert torch.equal(batch.sparse[name].values, alike.sparse[name].values)
    twice = ZipfSource(described(tmp_path, rows=[5, 6], ids=[1, 4], times=2), train_samples=1)
    assert [column.ids for column in twice.schema.sparse] == [1, 4, 1, 4]
    only = source.only(["C3"])
    assert torch.equal(only.read("train", 1).sparse["C3"].values, source.read("train", 1).sparse["C3"].values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_samples": 0}, "train_samples: got 0, expected at least 1 and at most 1,099,511,627,776"),
        ({"test_samples": -1}, "test_samples: got -1, expected at least 0 and at most 1,099,511,627,776"),
        ({"valid_samples": -2}, "valid_samples: got -2, expected at least 0 and at most 1,099,511,627,776"),
        ({"seed": -1}, "seed: got -1, expected at least 0"),
        ({"chunk_samples": 0}, "chunk_samples: got 0, expected at least 1 and at most 1,099,511,627,776"),
        ({"exponent": 99}, "exponent: got 99"),
    ],
)
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ZipfSource("criteo_1tb_t15", **{"train_samples": 1, **options})


def test_an_unknown_preset() -> None:
    message = rf"'criteo_1tb_t5' is neither a file nor one of {', '.join(CRITEO_1TB)}; did you mean 'criteo_1tb_t15'\?"
    with pytest.raises(DataError, match=message):
        ZipfSource("criteo_1tb_t5", train_samples=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "tables.yaml is not YAML"),
        ("dense: 3", "rows: got None, expected a list"),
        ("[1, 2]", "rows: got None"),
        ("{rows: [5], dnse: 3}", "key: got 'dnse', expected one of rows, dense, ids, times; did you mean 'dense'?"),
        ("rows: 5", "rows: got 5, expected a list"),
        ("rows: []", "rows: got [], expected at least one"),
        ("{rows: [5], dense: -1}", "dense: got -1, expected at least 0"),
        ("{rows: [5], dense: x}", "dense: got 'x', expected an integer"),
        ("{rows: [5], ids: 0}", "ids: got 0, expected at least 1"),
        ("{rows: [5, 6], ids: [1, 0]}", "ids: got 0, expected at least 1"),
        ("{rows: [5, 6], ids: [1, 2, 3]}", "ids: got 3 numbers, expected 1 or 2"),
        ("{rows: [5], times: 0}", "times: got 0, expected at least 1"),
        ("{rows: {a: 5}, times: 2}", "times: got 2"),
        ("{rows: [5], times: 100001}", "got 100,001 columns, expected at most 100,000"),
    ],
)
def test_files_that_describe_no_tables(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        ZipfSource(file, train_samples=1)
    assert message in str(caught.value)


@pytest.mark.parametrize("rows", ["[5, x]", "{a: 0}", "[2.5]"])
def test_rows_that_cannot_be(tmp_path: Path, rows: str) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(f"rows: {rows}")
    with pytest.raises(SpecError, match="sparse column"):
        ZipfSource(file, train_samples=1)


# -- synthetic logs --------------------------------------------------------------------------------------------------


def fields(path: Path) -> list[list[str]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [line.split("\t") for line in text.decode().splitlines()]


def test_layout(tmp_path: Path) -> None:
    write_synthetic_log(tmp_path / "log.tsv", 2000)
    lines = fields(tmp_path / "log.tsv")
    assert len(lines) == 2000
    assert {len(line) for line in lines} == {40}
    assert {line[0] for line in lines} == {"0", "1"}
    assert min(int(line[2]) for line in lines) == -2
    assert all(line[i] == "" or len(line[i]) == 8 for line in lines for i in range(14, 40))
    assert 0.7 < np.mean([line[35] == "" for line in lines]) < 0.8  # C22


def test_deterministic_by_seed(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one.tsv.gz", "two.tsv.gz", "other.tsv.gz"))
    assert write_synthetic_log(one, 500).all == write_synthetic_log(two, 500).all
    write_synthetic_log(other, 500, seed=1)
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    write_synthetic_log(tmp_path / "plain.tsv", 500)
    assert fields(one) == fields(tmp_path / "plain.tsv")


def test_attainable_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.formats.synthetic._PIECE", 7_000)
    log = write_synthetic_log(tmp_path / "log.tsv.gz", 20_000)
    assert abs(log.all.positive_rate - 0.26) < 0.01
    assert (log.all.samples, log.test.samples) == (20_000, 2_000)
    assert 0.78 < log.test.auc < 0.85
    assert 0.40 < log.test.logloss < 0.48
    assert json.loads((tmp_path / "log.planted.json").read_text()) == log.to_dict()
    clicks = np.array([line[0] == "1" for line in fields(tmp_path / "log.tsv.gz")[-2_000:]])
    assert log.test.positive_rate == clicks.mean()


def test_the_planted_model_can_be_learnt_from_the_prepared_data(tmp_path: Path) -> None:
    """Click rates per value of a single column, learnt on train, beat chance on test; so effects reach the ids."""
    log = write_synthetic_log(tmp_path / "log.tsv", 20_000)
    prepare(tmp_path / "log.tsv", tmp_path / "out")
    source = SplitBinarySource(tmp_path / "out")
    train, test = source.read("train", 0), source.read("test", 0)
    assert train.labels is not None and test.labels is not None
    clicked, score = train.labels.numpy()[:, 0], np.zeros(len(test))
    for column in source.schema.sparse:
        ids = train.sparse[column.name].values.numpy()
        shown, clicks = (np.bincount(ids, w, column.rows) for w in (None, clicked))
        score += np.log((clicks + 2.6) / (shown - clicks + 7.4))[test.sparse[column.name].values.numpy()]
    reached = auc(torch.from_numpy(score), test.labels[:, 0] > 0)
    assert 0.68 < reached < log.test.auc


def test_a_failed_write_keeps_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_log(tmp_path / "log.tsv", ["old"])

    def fail(*args: object) -> bytes:
        raise OSError("No space left on device")

    monkeypatch.setattr("hotbed.data.formats.synthetic._lines", fail)
    with pytest.raises(OSError, match="No space"):
        write_synthetic_log(log, 500)
    assert log.read_text() == "old"
    assert list(tmp_path.iterdir()) == [log]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="samples: got 5"):
        write_synthetic_log(tmp_path / "log.tsv", 5)
    with pytest.raises(SpecError, match="test_fraction: got 0"):
        write_synthetic_log(tmp_path / "log.tsv", test_fraction=0)
