"""Packed splits hold the hot and cold samples, and batches of both alternate in rounds."""

import json
import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data_cases import ListSource, mixed_batch, numbered_batch, read_whole
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.batch import Batch
from hotbed.data import Loader, Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter
from hotbed.data.skew.hot_cold import HotColdLoader, hot_inputs, pack
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
    return read_whole(SplitBinarySource(path), split)


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


@pytest.mark.parametrize("can_link", [True, False])
def test_files_of_other_splits_are_linked_where_they_can_be(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    if not can_link:
        monkeypatch.setattr("os.link", refuse)
    pack(data, tmp_path / "out", HOT)
    assert_same(whole(tmp_path / "out", "test"), whole(data, "test"))
    for file in ("train/cat_0.bin", "test/numerical.bin"):
        assert (tmp_path / "out" / file).samefile(data / file) == can_link


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
        ({"t": 1}, "train", "hot_rows, table: got 'c'"),
        ({"t": 1, "c": 1, "d": 1}, "train", "hot_rows, table: got 'd'"),
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
    with pytest.raises(SpecError, match=r"split 'train': got several files named 0\.bin"):
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


# -- batches in rounds -----------------------------------------------------------------------------------------------

HOT_BELOW = 1000  # samples of the hot loader have ids 0 …, those of the cold one ids 1000 …


def loader(hot: int, cold: int, *, rate: float = 50, size: int = 4, **options: Any) -> HotColdLoader:
    whole = numbered_batch(HOT_BELOW + cold)

    def of(samples: torch.Tensor) -> Loader | None:
        parts = [-(-len(samples) // 2), len(samples) // 2]
        source = ListSource(whole.take(samples), [n for n in parts if n])
        return Loader(source, "train", size, prefetch=2, **options) if len(samples) else None

    return HotColdLoader(of(torch.arange(hot)), of(HOT_BELOW + torch.arange(cold)), rate=rate)


def kind_of(batch: Batch) -> str:
    (kind,) = {"hot" if i < HOT_BELOW else "cold" for i in batch.sparse["a"].values.tolist()}  # or it is not pure
    return kind


def ids(batches: list[Batch]) -> list[int]:
    return [i for batch in batches for i in batch.sparse["a"].values.tolist()]


@settings(max_examples=25, deadline=None)
@given(
    hot=st.integers(0, 60), cold=st.integers(0, 60), rate=st.sampled_from([1, 7.5, 30, 50, 100]), shuffle=st.booleans()
)
def test_batches_are_pure_and_each_input_comes_once_per_epoch(hot: int, cold: int, rate: float, shuffle: bool) -> None:
    if hot + cold == 0:
        return
    made = loader(hot, cold, rate=rate, shuffle=shuffle)
    sizes = {"cold": math.ceil(cold / 4), "hot": math.ceil(hot / 4)}
    for _ in range(2):
        batches = list(made)
        assert len(batches) == len(made) == sum(sizes.values())
        assert sorted(ids(batches)) == [*range(hot), *range(HOT_BELOW, HOT_BELOW + cold)]
        kinds = [kind_of(batch) for batch in batches]
        left, runs = dict(sizes), [(kind, len(list(run))) for kind, run in groupby(kinds)]
        if 0 not in sizes.values():
            for kind, count in runs[:-1]:
                assert count == min(math.ceil(sizes[kind] * rate / 100), left[kind])
                left[kind] -= count
            assert runs[0][0] == "cold"
            assert runs[-1][1] == left[runs[-1][0]]


def ahead(batches: HotColdLoader) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """As a trainer takes them: one more is fetched before a batch is used."""
    coming = None
    for batch in batches:
        now = batch, batches.state_dict()
        if coming is not None:
            yield coming
        coming = now
    if coming is not None:
        yield coming


def rounds(made: HotColdLoader, rates: list[float], *, look_ahead: bool) -> list[tuple[int, int]]:
    """Cold and hot batches of every round, where each sets the rate of the next."""
    found, coming = [[0, 0]], iter(rates)
    taken = ahead(made) if look_ahead else ((batch, {}) for batch in made)
    for count, (batch, _) in enumerate(taken, 1):
        found[-1][kind_of(batch) == "hot"] += 1
        if made.round_is_over(count):
            made.rate = next(coming, made.rate)
            found.append([0, 0])
    assert found.pop() == [0, 0]  # the last batch ends a round
    return [(cold, hot) for cold, hot in found]


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_rate_counts_from_the_next_round_on(look_ahead: bool) -> None:
    made = loader(40, 80, rate=50)  # 10 hot and 20 cold batches
    assert rounds(made, [10, 20, 1, 1, 50], look_ahead=look_ahead) == [(10, 5), (2, 1), (4, 2), (1, 1), (1, 1), (2, 0)]
    made.rate = 100
    assert rounds(made, [], look_ahead=look_ahead) == [(20, 10)]


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize(("hot", "cold"), [(0, 40), (40, 0)])
def test_rounds_of_one_kind(hot: int, cold: int, look_ahead: bool) -> None:
    found = rounds(loader(hot, cold, rate=30), [1, 1, 20], look_ahead=look_ahead)
    assert [sum(both) for both in found] == [3, 1, 1, 2, 2, 1]


@pytest.mark.parametrize("stop", range(1, 19))
@pytest.mark.parametrize("shuffle", [False, True])
def test_another_loader_goes_on_from_any_batch(stop: int, shuffle: bool) -> None:
    def run(made: HotColdLoader, batches: int | None, done: int = 0) -> tuple[list[list[int]], dict[str, Any]]:
        found: list[list[int]] = []
        position: dict[str, Any] = {}
        for batch, after in ahead(made):
            found.append(ids([batch]))
            position = after
            if made.round_is_over(done + len(found)):
                made.rate = {50: 20, 20: 7}.get(made.rate, 50)
            if len(found) == batches:
                break
        return found, position

    whole = loader(24, 48, shuffle=shuffle)
    first, _ = run(whole, None)
    second, _ = run(whole, None)
    assert len(first) == len(second) == 18
    stopped = loader(24, 48, shuffle=shuffle)
    before, position = run(stopped, stop)
    other = loader(24, 48, shuffle=shuffle, rate=stopped.rate)
    other.load_state_dict(position)
    after = run(other, None, stop)[0] if stop < 18 else []
    assert before + after == first
    assert run(other, None)[0] == second


def test_an_epoch_that_was_left_is_over() -> None:
    made = loader(24, 48)
    for _ in made:
        break
    assert sorted(ids(list(made))) == [*range(24), *range(HOT_BELOW, HOT_BELOW + 48)]


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match="hot and cold samples: got none"):
        HotColdLoader(None, None)
    for rate in (0, -1, 101):
        with pytest.raises(SpecError, match=f"rate: got {rate}"):
            loader(4, 4, rate=rate)
    made = loader(4, 4)
    with pytest.raises(SpecError, match="got epoch, expected cold, hot, given, begin, end"):
        made.load_state_dict({"epoch": 3})
    with pytest.raises(SpecError, match="hot samples: got some, expected none"):
        made.load_state_dict(loader(0, 4).state_dict())
    with pytest.raises(SpecError, match="hot samples: got none, expected some"):
        loader(0, 4).load_state_dict(made.state_dict())
    with pytest.raises(SpecError, match="the loader's position: samples: got 8"):
        made.load_state_dict(loader(8, 4).state_dict())
