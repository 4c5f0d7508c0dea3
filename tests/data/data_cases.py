"""Small sources, logs and comparisons for the tests of `hotbed.data`."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hotbed.batch import Batch
from hotbed.data import Schema, Source, SparseColumn
from hotbed.jagged import Jagged

REAL_LOG = Path(__file__).parents[2] / "../shared/data/criteo_kaggle_110k.tsv.gz"

MIXED_SCHEMA = Schema(
    sparse=(
        SparseColumn(name="user", rows=1000),
        SparseColumn(name="pair", rows=50, table="items", ids=2),
        SparseColumn(name="history", rows=50, table="items", ids=None, pooling="mean"),
    ),
    dense=("age", "price"),
    labels=("click", "buy"),
    weight="weight",
    group="session",
)


def mixed_batch(n: int, seed: int = 0) -> Batch:
    """Samples with one-hot, two-hot and ragged weighted ids, and every other kind of column; `extra` numbers them."""
    rng = np.random.default_rng((n, seed))
    lengths = rng.integers(0, 4, n)
    ragged = torch.from_numpy(rng.integers(0, 50, int(lengths.sum())))
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    sparse = Jagged.from_dict(
        {
            "user": torch.from_numpy(rng.integers(0, 1000, n)),
            "pair": torch.from_numpy(rng.integers(0, 50, (n, 2))),
            "history": (ragged, offsets),
        },
        weights={"history": torch.from_numpy(rng.random(len(ragged), dtype=np.float32))},
    )
    return Batch(
        sparse=sparse,
        dense=torch.from_numpy(rng.random((n, 2), dtype=np.float32)),
        labels=torch.from_numpy(rng.integers(0, 2, (n, 2)).astype(np.float32)),
        weights=torch.from_numpy(rng.random(n, dtype=np.float32)),
        extra={"session": torch.arange(n)},
    )


def unweighted(batch: Batch) -> Batch:
    """The same without weights per id."""
    return Batch(
        sparse=Jagged.from_dict(batch.sparse.to_dict()),
        dense=batch.dense,
        labels=batch.labels,
        weights=batch.weights,
        extra=batch.extra,
    )


def numbered_batch(n: int) -> Batch:
    """One-hot samples whose ids are their positions."""
    ids = torch.arange(n, dtype=torch.int32)
    return Batch(
        sparse=Jagged.from_dict({"a": ids, "b": ids + 1}),
        dense=ids.float().reshape(n, 1),
        labels=(ids % 2).float().reshape(n, 1),
    )


NUMBERED_SCHEMA = Schema(
    sparse=(SparseColumn(name="a", rows=10_000), SparseColumn(name="b", rows=10_000)), dense=("x",)
)


class ListSource(Source):
    """One batch in memory, cut into chunks."""

    def __init__(self, batch: Batch, sizes: Sequence[int], schema: Schema = NUMBERED_SCHEMA) -> None:
        assert sum(sizes) == len(batch)
        self.schema = schema
        self.splits = ("train",)
        self.sizes = list(sizes)
        self.batch = batch

    def _chunks(self, split: str) -> Sequence[int]:
        return self.sizes

    def _read(self, split: str, i: int) -> Batch:
        start = sum(self.sizes[:i])
        return self.batch.take(torch.arange(start, start + self.sizes[i]))


def divide(total: int, parts: int) -> list[int]:
    """Sizes of parts that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def numbered(total: int = 100, parts: int = 7) -> ListSource:
    return ListSource(numbered_batch(total), divide(total, parts))


MIXED = mixed_batch(40)


def mixed(parts: int = 5) -> ListSource:
    return ListSource(MIXED, divide(len(MIXED), parts), MIXED_SCHEMA)


def read_whole(source: Source, split: str = "train") -> Batch:
    """All samples of a split, in order."""
    return Batch.concatenate([source.read(split, i) for i in range(len(source.chunks(split)))])


def log_line(label: object = 0, dense: Sequence[object] = (), sparse: Sequence[str] = ()) -> str:
    fields = [str(label), *map(str, dense), *[""] * (13 - len(dense)), *sparse, *[""] * (26 - len(sparse))]
    return "\t".join(fields) + "\n"


def write_log(path: Path, lines: Sequence[str]) -> Path:
    text = "".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def assert_same(found: Batch, expected: Batch) -> None:
    """Check equal bits and dtypes, also of NaN as float64."""
    assert found.sparse.names == expected.sparse.names
    for name in expected.sparse.names:
        a, b = found.sparse[name], expected.sparse[name]
        assert a.fixed == b.fixed
        assert torch.equal(a.values, b.values)
        assert (a.offsets is None) == (b.offsets is None)
        if a.offsets is not None and b.offsets is not None:
            assert torch.equal(a.offsets - a.offsets[0], b.offsets - b.offsets[0])
    pairs = [(found.dense, expected.dense), (found.labels, expected.labels), (found.weights, expected.weights)]
    pairs += [(found.extra.get(name), of) for name, of in expected.extra.items()]
    for x, y in pairs:
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert x.dtype == y.dtype
            assert torch.equal(x.view(_BITS.get(x.dtype, x.dtype)), y.view(_BITS.get(y.dtype, y.dtype)))
