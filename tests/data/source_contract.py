"""What every source must do. A test class of a source subclasses `SourceContract` and says how to make one."""

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from data_cases import assert_same

from hotbed.batch import Batch
from hotbed.data import Loader, Source
from hotbed.errors import SpecError
from hotbed.specs import check_specs


class SourceContract(ABC):
    @abstractmethod
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        """A source of several chunks, and all samples by split."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> tuple[Source, dict[str, Batch]]:
        return self.make(tmp_path)

    def test_chunks_are_the_samples_in_order(self, made: tuple[Source, dict[str, Batch]]) -> None:
        source, expected = made
        assert set(source.splits) == set(expected)
        for split, samples in expected.items():
            sizes = source.chunks(split)
            assert source.samples(split) == sum(sizes) == len(samples)
            chunks = [source.read(split, i) for i in range(len(sizes))]
            assert [len(c) for c in chunks] == sizes
            assert_same(Batch.concatenate(chunks), samples)

    def test_train_has_several_chunks(self, made: tuple[Source, dict[str, Batch]]) -> None:
        assert len(made[0].chunks("train")) > 1  # or the other tests say little

    def test_batches_have_the_columns_of_the_schema(self, made: tuple[Source, dict[str, Batch]]) -> None:
        source = made[0]
        schema, batch = source.schema, source.read("train", 0)
        check_specs(schema.tables(4), schema.features())
        assert batch.sparse.names == tuple(c.name for c in schema.sparse)
        assert batch.sparse.fixed == tuple(c.ids for c in schema.sparse)
        assert (0 if batch.dense is None else batch.dense.shape[1]) == len(schema.dense)
        assert (0 if batch.labels is None else batch.labels.shape[1]) == len(schema.labels)
        assert (batch.weights is not None) == (schema.weight is not None)
        assert list(batch.extra) == ([schema.group] if schema.group else [])
        for column in schema.sparse:
            ids = batch.sparse[column.name].values
            assert 0 <= int(ids.min()) <= int(ids.max()) < column.rows

    def test_reads_in_any_order_from_threads(self, made: tuple[Source, dict[str, Batch]]) -> None:
        source = made[0]
        expected = [source.read("train", i) for i in range(len(source.chunks("train")))]
        order = [*range(len(expected))][::-1] * 4
        with ThreadPoolExecutor(4) as pool:
            for i, batch in zip(order, pool.map(lambda i: source.read("train", i), order), strict=True):
                assert_same(batch, expected[i])

    def test_loads(self, made: tuple[Source, dict[str, Batch]]) -> None:
        source, expected = made
        assert_same(Batch.concatenate(list(Loader(source, "train", 7))), expected["train"])
        assert sum(len(b) for b in Loader(source, "train", 7, shuffle=True)) == len(expected["train"])

    def test_unknown_split_and_chunk(self, made: tuple[Source, dict[str, Batch]]) -> None:
        source = made[0]
        with pytest.raises(SpecError, match=r"there is no split 'trian'; there are train.*did you mean 'train'"):
            source.chunks("trian")
        count = len(source.chunks("train"))
        with pytest.raises(SpecError, match=f"split 'train' has {count} chunks, there is no chunk {count}"):
            source.read("train", count)
        with pytest.raises(SpecError, match="there is no chunk -1"):
            source.read("train", -1)
