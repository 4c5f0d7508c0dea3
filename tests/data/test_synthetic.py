import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_cases import write_log

from hotbed.auc import auc
from hotbed.data import SplitBinarySource, write_synthetic_log
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import SpecError


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


def test_attainable_scores(tmp_path: Path) -> None:
    log = write_synthetic_log(tmp_path / "log.tsv.gz", 60_000)  # crosses a piece
    assert abs(log.all.positive_rate - 0.26) < 0.01
    assert log.all.samples == 60_000
    assert log.test.samples == 6000
    assert 0.78 < log.test.auc < 0.85
    assert 0.40 < log.test.logloss < 0.48
    assert json.loads((tmp_path / "log.planted.json").read_text()) == log.to_dict()
    clicks = np.array([line[0] == "1" for line in fields(tmp_path / "log.tsv.gz")[-6000:]])
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
