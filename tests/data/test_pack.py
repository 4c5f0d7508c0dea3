import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data_cases import mixed_batch

from hotbed.batch import Batch
from hotbed.data import Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter
from hotbed.data.skew.hot_cold import hot_inputs, pack
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.testing.source_contract import assert_same

SCHEMA = Schema(
    sparse=(SparseColumn(name="a", rows=40, table="t"), SparseColumn(name="b", rows=40, table="t"),
            SparseColumn(name="c", rows=300)),
    dense=("x", "y"),
)  # fmt: skip
HOT = {"t": 20, "c": 150}
SIZES = {"train": 1000, "test": 70}


def made(n: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    ids = {c.name: torch.randint(0, c.rows, (n,), generator=random, dtype=torch.int32) for c in SCHEMA.sparse}
    dense = torch.randn(n, 2, generator=random).half().float()
    return Batch(sparse=Jagged.from_dict(ids), dense=dense, labels=(dense[:, :1] > 0).float())


@pytest.fixture(name="data")
def data_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    with SplitBinaryWriter(path, SCHEMA, list(SIZES)) as writer:
        for seed, (split, n) in enumerate(SIZES.items()):
            writer.append(split, made(n, seed))
    return path


def whole(path: Path, split: str) -> Batch:
    source = SplitBinarySource(path)
    return Batch.concatenate([source.read(split, i) for i in range(len(source.chunks(split)))])


def by_hand(sparse: Jagged, hot_rows: dict[str, int]) -> list[bool]:
    bags = {name: sparse.to_dict()[name] for name in sparse.names}
    hot: list[bool] = []
    for i in range(len(sparse)):
        ids = {n: b[i] if torch.is_tensor(b) else b[0][b[1][i] : b[1][i + 1]] for n, b in bags.items()}
        hot.append(all((row < hot_rows[n]).all().item() for n, row in ids.items()))
    return hot


@pytest.mark.parametrize("limits", [(500, 25, 25), (800, 40, 30), (1000, 50, 50), (0, 0, 0), (1000, 50, 0)])
def test_an_input_is_hot_if_all_ids_of_all_bags_are(limits: tuple[int, ...]) -> None:
    batch = mixed_batch(400)  # one-hot, two-hot, and ragged with empty bags
    hot_rows = dict(zip(("user", "pair", "history"), limits, strict=True))
    assert hot_inputs(batch.sparse, hot_rows).tolist() == by_hand(batch.sparse, hot_rows)


def test_an_id_that_is_no_row_is_not_hot() -> None:
    sparse = Jagged.from_dict({"a": torch.tensor([-1, 0, 7])})
    assert hot_inputs(sparse, {"a": 7}).tolist() == [False, True, False]


def test_hot_and_cold_are_the_data_and_disjoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SplitBinarySource.__init__, "__kwdefaults__", {"chunk_samples": 130})  # several chunks
    seen: list[tuple[int, int]] = []
    packed = pack(data, tmp_path / "out", HOT, about={"budget": 7}, progress=lambda *done: seen.append(done))
    assert seen[0] == (130, 1000)
    assert seen[-1] == (1000, 1000)
    train = whole(data, "train")
    hot = hot_inputs(train.sparse, {"a": 20, "b": 20, "c": 150})
    assert 50 < hot.sum() == packed.hot == 1000 - packed.cold
    for split, mask in (("train_hot", hot), ("train_cold", ~hot)):
        assert_same(whole(tmp_path / "out", split), train.take(torch.from_numpy(np.flatnonzero(mask))))
    for split in SIZES:
        assert_same(whole(tmp_path / "out", split), whole(data, split))
    found = json.loads((tmp_path / "out" / "hot_rows.json").read_text())
    assert found["budget"] == 7
    assert (found["samples"], found["hot_samples"]) == (1000, packed.hot)
    assert {t["table"]: t["hot_rows"] for t in found["tables"]} == HOT


def test_other_splits_take_no_room(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "out", HOT)
    for file in ("train/cat_0.bin", "test/numerical.bin"):
        assert (tmp_path / "out" / file).samefile(data / file)


def test_where_files_cannot_be_linked_they_are_copied(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    pack(data, tmp_path / "out", HOT)
    assert_same(whole(tmp_path / "out", "test"), whole(data, "test"))
    assert not (tmp_path / "out" / "test/label.bin").samefile(data / "test/label.bin")


@pytest.mark.parametrize(
    ("hot", "share"), [({"t": 0, "c": 0}, 0.0), ({"t": 40, "c": 300}, 1.0), ({"t": 40, "c": 0}, 0)]
)
def test_no_row_hot_and_all_rows_hot(hot: dict[str, int], share: float, data: Path, tmp_path: Path) -> None:
    packed = pack(data, tmp_path / "out", hot)
    assert packed.hot == share * 1000
    source = SplitBinarySource(tmp_path / "out")
    assert source.samples("train_hot") == packed.hot
    assert source.samples("train_cold") == packed.cold
    assert_same(whole(tmp_path / "out", "train_hot" if share else "train_cold"), whole(data, "train"))


def test_what_is_packed_can_be_packed_again(data: Path, tmp_path: Path) -> None:
    pack(data, tmp_path / "first", {"t": 5, "c": 5})
    pack(tmp_path / "first", tmp_path / "second", HOT)
    pack(data, tmp_path / "direct", HOT)
    for split in ("train", "test", "train_hot", "train_cold"):
        assert_same(whole(tmp_path / "second", split), whole(tmp_path / "direct", split))


def test_stored_values_are_kept_as_they_are(data: Path, tmp_path: Path) -> None:
    """Also in dtypes that hotbed does not write."""
    spec = yaml.safe_load((data / "feature_spec.yaml").read_text())
    for name in SCHEMA.dense:
        spec["feature_spec"][name]["dtype"] = "float32"
    (data / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    values = np.random.default_rng(0).random((1000, 2), dtype=np.float32)
    values.tofile(data / "train/numerical.bin")
    values[:70].tofile(data / "test/numerical.bin")
    pack(data, tmp_path / "out", HOT)
    hot = hot_inputs(whole(data, "train").sparse, {"a": 20, "b": 20, "c": 150})
    assert np.array_equal(np.fromfile(tmp_path / "out/train_hot/numerical.bin", np.float32), values[hot].ravel())


@pytest.mark.parametrize(
    ("hot", "split", "message"),
    [
        ({"t": 1}, "train", "hot_rows leaves out table 'c'; give every table a number"),
        ({"t": 1, "c": 1, "d": 1}, "train", "hot_rows names table 'd', which does not exist"),
        ({"t": 1, "c": 1}, "tarin", "split: got 'tarin'"),
    ],
)
def test_mistakes_leave_nothing_behind(
    hot: dict[str, int], split: str, message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        pack(data, tmp_path / "out", hot, split=split)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_files_of_one_name_are_refused(data: Path, tmp_path: Path) -> None:
    spec = (data / "feature_spec.yaml").read_text()
    assert "train/numerical.bin" in spec and "train/label.bin" in spec
    for folder in ("x", "y"):
        (data / "train" / folder).mkdir()
    (data / "train/numerical.bin").rename(data / "train/x/0.bin")
    (data / "train/label.bin").rename(data / "train/y/0.bin")
    moved = spec.replace("train/numerical.bin", "train/x/0.bin").replace("train/label.bin", "train/y/0.bin")
    (data / "feature_spec.yaml").write_text(moved)
    with pytest.raises(SpecError, match=r"split 'train' has several files named 0\.bin, which would share a folder"):
        pack(data, tmp_path / "out", HOT)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_nothing_half_written_is_left(data: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(data, tmp_path / "out", HOT, progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    pack(data, tmp_path / "out", HOT)
    with pytest.raises(DataError, match="exists already"):
        pack(data, tmp_path / "out", HOT)
    pack(data, tmp_path / "out", {"t": 0, "c": 0}, overwrite=True)
    assert SplitBinarySource(tmp_path / "out").samples("train_hot") == 0
