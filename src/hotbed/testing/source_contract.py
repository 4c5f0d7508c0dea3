"""Check a data format: the contract of `hotbed.data.Source`, as tests that any implementation can run.

A test class of a source subclasses `SourceContract` and says how to make one::

    class TestCsvSource(SourceContract):
        def make(self, path):
            ...  # write files below path
            return CsvSource(path), {"train": all_samples_of_it}
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hotbed.batch import Batch
from hotbed.data import Loader, Source
from hotbed.errors import SpecError
from hotbed.specs import check_specs

Made = tuple[Source, dict[str, Batch]]


class SourceContract(ABC):
    """What every source must do; the tests of a subclass run for the source that its `make` returns."""

    @abstractmethod
    def make(self, path: Path) -> Made:
        """Make a source below an empty directory; return it and all samples of each of its splits, in order.

        There must be a split ``"train"`` of several chunks.
        """

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """The source, and its samples by split."""
        return self.make(tmp_path)

    def test_chunks_are_the_samples_in_order(self, made: Made) -> None:
        """Of every split; what `Source.chunks` counts is what `Source.read` returns."""
        source, expected = made
        assert set(source.splits) == set(expected)
        for split, samples in expected.items():
            sizes = source.chunks(split)
            assert source.samples(split) == sum(sizes) == len(samples)
            chunks = [source.read(split, i) for i in range(len(sizes))]
            assert [len(c) for c in chunks] == sizes
            assert_same(Batch.concatenate(chunks), samples)

    def test_train_has_several_chunks(self, made: Made) -> None:
        """Or the other tests say little."""
        assert len(made[0].chunks("train")) > 1

    def test_batches_have_the_columns_of_the_schema(self, made: Made) -> None:
        """Names, ids per sample and ranges are those that models are built from."""
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

    def test_labels_can_be_checked_before_training(self, made: Made) -> None:
        """`Source.check_labels` says the range of what is read, or looks at nothing."""
        source, expected = made
        for split, samples in expected.items():
            found = source.check_labels(split)
            if found:
                assert samples.labels is not None
                spans = zip(samples.labels.amin(0).tolist(), samples.labels.amax(0).tolist(), strict=True)
                assert found == dict(zip(source.schema.labels, spans, strict=True))

    def test_numericals_can_be_read_alone(self, made: Made) -> None:
        """`Source.read_numericals` is what `Source.read` has; numbers for a model to normalize are float64."""
        source, expected = made
        for split in expected:
            for i in range(len(source.chunks(split))):
                found, whole = source.read_numericals(split, i), source.read(split, i).dense
                assert (found is None) == (whole is None)
                if found is not None and whole is not None:
                    assert torch.equal(found.nan_to_num(), whole.nan_to_num())
                    assert found.dtype == whole.dtype
                    assert not source.schema.numericals or found.dtype == torch.float64

    def test_columns_that_are_left_out(self, made: Made) -> None:
        """`Source.only` gives the same samples with fewer ids, and leaves the source as it was."""
        source, expected = made
        names = [column.name for column in source.schema.sparse]
        kept = names[-1]
        fewer = source.only([kept])
        assert [column.name for column in fewer.schema.sparse] == [kept]
        found, whole = fewer.read("train", 0), source.read("train", 0)
        assert found.sparse.names == (kept,) and whole.sparse.names == tuple(names)
        assert torch.equal(found.sparse[kept].values.long(), whole.sparse[kept].values.long())
        assert len(found) == len(whole)
        assert_same(whole, expected["train"].take(torch.arange(len(whole))))

    def test_reads_in_any_order_from_threads(self, made: Made) -> None:
        """A loader's threads share a source."""
        source = made[0]
        expected = [source.read("train", i) for i in range(len(source.chunks("train")))]
        order = [*range(len(expected))][::-1] * 4
        with ThreadPoolExecutor(4) as pool:
            reads = [(i, pool.submit(source.read, "train", i)) for i in order]
            for i, batch in reads:
                assert_same(batch.result(), expected[i])

    def test_readers_in_other_processes(self, made: Made) -> None:
        """A pickled copy reads the same; it has paths that hold in any directory."""
        source = made[0]
        sent = pickle.loads(pickle.dumps(source))
        for split in source.splits:
            assert sent.chunks(split) == source.chunks(split)
            for i in range(len(source.chunks(split))):
                assert_same(sent.read(split, i), source.read(split, i))

    def test_loads(self, made: Made) -> None:
        """A `Loader` cuts it into batches of any size, in order or shuffled."""
        source, expected = made
        assert_same(Batch.concatenate(list(Loader(source, "train", 7))), expected["train"])
        assert sum(len(b) for b in Loader(source, "train", 7, shuffle=True)) == len(expected["train"])

    def test_unknown_split_and_chunk(self, made: Made) -> None:
        """Errors name what there is."""
        source = made[0]
        with pytest.raises(SpecError, match=r"split: got 'trian', expected .*train.*did you mean 'train'"):
            source.chunks("trian")
        count = len(source.chunks("train"))
        with pytest.raises(SpecError, match=f"chunk of split 'train': got {count}, expected"):
            source.read("train", count)
        with pytest.raises(SpecError, match="got -1"):
            source.read("train", -1)


def assert_same(actual: Batch, expected: Batch) -> None:
    """Assert that two batches have the same columns and values, to the bit; ids may be int32 or int64."""
    assert len(actual) == len(expected)
    assert actual.sparse.names == expected.sparse.names
    for name in expected.sparse.names:
        a, e = actual.sparse[name], expected.sparse[name]
        assert a.fixed == e.fixed, name
        assert torch.equal(a.values.long(), e.values.long()), name
        assert torch.equal(a.lengths(), e.lengths()), name
        assert (a.weights is None) == (e.weights is None), name
        assert a.weights is None or e.weights is None or torch.equal(a.weights, e.weights), name
    for column in ("dense", "labels", "weights"):
        a, e = getattr(actual, column), getattr(expected, column)
        assert (a is None) == (e is None), column
        assert a is None or torch.equal(a, e), column
    assert actual.extra.keys() == expected.extra.keys()
    for name, e in expected.extra.items():
        assert torch.equal(actual.extra[name], e), name
