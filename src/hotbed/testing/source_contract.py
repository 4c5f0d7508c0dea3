"""Test a data format: the contract of `hotbed.data.Source`.

::

    class TestCsvSource(SourceContract):
        def make(self, path):
            ...  # write files below path
            return CsvSource(path), {"train": all_samples_of_it}
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.data import Loader, Source
from hotbed.errors import SpecError
from hotbed.specs import check_specs

Made = tuple[Source, dict[str, Batch]]


def _read_all(source: Source, split: str) -> list[Batch]:
    return [source.read(split, i) for i in range(len(source.chunks(split)))]


class SourceContract(ABC):
    """Tests that every source must pass."""

    @abstractmethod
    def make(self, path: Path) -> Made:
        """Make a source in an empty directory. Return the source, and a mapping from splits to all samples in order.

        The split ``"train"`` must exist, and have several chunks.
        """

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """Return the source, and its samples by split."""
        return self.make(tmp_path)

    def test_chunks_are_the_samples_in_order(self, made: Made) -> None:
        source, expected = made
        assert set(source.splits) == set(expected)
        assert len(source.chunks("train")) > 1, "the other tests need several chunks"
        for split, samples in expected.items():
            chunks = _read_all(source, split)
            assert source.samples(split) == sum(source.chunks(split)) == len(samples)
            assert [len(c) for c in chunks] == source.chunks(split)
            assert_same(Batch.concatenate(chunks), samples)

    def test_batches_have_the_columns_of_the_schema(self, made: Made) -> None:
        source = made[0]
        schema, batch = source.schema, source.read("train", 0)
        check_specs(schema.tables(4), schema.features())
        assert batch.sparse.names == tuple(c.name for c in schema.sparse)
        assert batch.sparse.fixed == tuple(c.ids for c in schema.sparse)
        assert (0 if batch.dense is None else batch.dense.shape[1]) == len(schema.dense)
        assert (0 if batch.labels is None else batch.labels.shape[1]) == len(schema.labels)
        assert (batch.weights is not None) == bool(schema.weight_columns)
        assert (batch.sparse.weights is not None) == bool(schema.id_weights)
        assert list(batch.extra) == ([schema.group] if schema.group else [])
        for column in schema.sparse:
            ids = batch.sparse[column.name].values
            assert 0 <= int(ids.min()) <= int(ids.max()) < column.rows

    def test_labels_and_numericals_are_read_alone(self, made: Made) -> None:
        source, expected = made
        for split, samples in expected.items():
            if found := source.check_labels(split):  # empty if the source cannot read labels alone
                assert samples.labels is not None
                spans = zip(samples.labels.amin(0).tolist(), samples.labels.amax(0).tolist(), strict=True)
                assert found == dict(zip(source.schema.labels, spans, strict=True))
            for i, whole in enumerate(batch.dense for batch in _read_all(source, split)):
                numbers = source.read_numericals(split, i)
                assert (numbers is None) == (whole is None)
                if numbers is not None and whole is not None:
                    assert torch.equal(numbers.nan_to_num(), whole.nan_to_num())
                    assert numbers.dtype == whole.dtype and (
                        not source.schema.numericals or whole.dtype == torch.float64
                    )

    def test_only_reads_fewer_columns_and_keeps_the_source(self, made: Made) -> None:
        source, expected = made
        kept = source.schema.sparse[-1].name
        fewer = source.only([kept])
        found, whole = fewer.read("train", 0), source.read("train", 0)
        assert found.sparse.names == tuple(column.name for column in fewer.schema.sparse) == (kept,)
        assert torch.equal(found.sparse[kept].values.long(), whole.sparse[kept].values.long())
        assert len(found) == len(whole)
        assert_same(whole, expected["train"].take(torch.arange(len(whole))))

    def test_threads_and_pickled_copies_read_the_same(self, made: Made) -> None:
        source = made[0]
        copied = pickle.loads(pickle.dumps(source))
        assert all(copied.chunks(split) == source.chunks(split) for split in source.splits)
        for split in source.splits:
            expected = _read_all(source, split)
            order = [*range(len(expected))][::-1] * 4
            with ThreadPoolExecutor(4) as pool:
                for i, batch in zip(order, pool.map(partial(copied.read, split), order), strict=True):
                    assert_same(batch, expected[i])

    def test_loaders_cut_and_shuffle_batches(self, made: Made) -> None:
        source, expected = made
        assert_same(Batch.concatenate(list(Loader(source, "train", 7))), expected["train"])
        assert sum(len(b) for b in Loader(source, "train", 7, shuffle=True)) == len(expected["train"])

    def test_errors_name_unknown_splits_and_chunks(self, made: Made) -> None:
        source = made[0]
        with pytest.raises(SpecError, match=r"'trian'.*train.*did you mean 'train'"):
            source.chunks("trian")
        for bad in (len(source.chunks("train")), -1):
            with pytest.raises(SpecError, match=f"'train'.*{bad}"):
                source.read("train", bad)


def assert_same(actual: Batch, expected: Batch) -> None:
    """Check that two batches have the same columns, and values with the same bits. Ids may be int32 or int64."""
    assert len(actual) == len(expected)
    assert (actual.sparse.names, actual.sparse.fixed) == (expected.sparse.names, expected.sparse.fixed)
    found, wanted = _parts_of(actual), _parts_of(expected)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def _parts_of(batch: Batch) -> dict[str, Tensor]:
    parts = {name: getattr(batch, name) for name in ("dense", "labels", "weights")}
    parts |= {f"extra {name}": values for name, values in batch.extra.items()}
    for name in batch.sparse.names:
        bags = batch.sparse[name]
        parts |= {f"ids of {name}": bags.values.long(), f"lengths of {name}": bags.lengths()}
        parts[f"weights of {name}"] = bags.weights
    return {name: values for name, values in parts.items() if values is not None}
