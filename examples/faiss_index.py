"""Find the nearest items of users with Faiss, from the towers of a two-tower model.

    pip install faiss-cpu
    hotbed export runs/log towers/ --towers
    python examples/faiss_index.py towers/ users.parquet --out found.parquet --k 10

`users.parquet` needs the columns of the user's tower, with values as in the training data. `found.parquet` has a row
for each user: the items with the largest scores, and these scores. The index is written to `towers/items.faiss`.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
from pyarrow import dataset, parquet

from hotbed.train.workflows.towers import VECTOR, VECTORS, UserTower

GRAPH_FROM = 1_000_000
"""Number of items from which on a graph (HNSW) replaces exact search; it compares only a part of the items."""
USERS = 65_536
"""Number of users that are searched at once; it bounds the memory."""


def build_index(vectors: np.ndarray) -> faiss.Index:
    """Build an index by inner product; the vectors have norm 1, so the largest products are the nearest items."""
    dim = vectors.shape[1]
    graph = len(vectors) >= GRAPH_FROM
    index = faiss.IndexHNSWFlat(dim, 32, faiss.METRIC_INNER_PRODUCT) if graph else faiss.IndexFlatIP(dim)
    index.add(vectors)
    return index


def search(index: faiss.Index, users: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and positions of the best items `[n, k]`; the position is -1 where a graph found fewer items."""
    if isinstance(index, faiss.IndexHNSW):
        return index.search(users, k, params=faiss.SearchParametersHNSW(efSearch=max(128, 2 * k)))
    return index.search(users, k)


def find(
    tower: UserTower, items: pa.ChunkedArray, index: faiss.Index, users: Iterable[pa.RecordBatch], k: int
) -> Iterator[pa.RecordBatch]:
    """Return the best items of each user, and their scores, as two columns of lists."""
    for batch in users:
        vectors = tower.vectors(pa.Table.from_batches([batch]))
        scores, at = search(index, vectors, min(k, len(items)))
        found = at >= 0
        offsets = pa.array(np.concatenate([[0], found.sum(1).cumsum()]), pa.int32())
        best = pa.concat_arrays(items.take(pa.array(at[found])).chunks)
        lists = [pa.ListArray.from_arrays(offsets, values) for values in (best, pa.array(scores[found]))]
        yield pa.RecordBatch.from_arrays(lists, names=[tower.item, "score"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("towers", type=Path, help="directory that `hotbed export --towers` wrote")
    parser.add_argument("users", type=Path, help="Parquet file of users")
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--k", type=int, default=10, help="number of items for each user")
    args = parser.parse_args(argv)
    tower, items = UserTower(args.towers), parquet.read_table(args.towers / VECTORS)
    vectors = items[VECTOR].combine_chunks()
    index = build_index(vectors.flatten().to_numpy().reshape(len(vectors), -1))
    faiss.write_index(index, str(args.towers / "items.faiss"))
    users = dataset.dataset(args.users)
    batches = users.to_batches(columns=tower.columns, batch_size=USERS)
    schema = pa.schema({tower.item: pa.list_(items[tower.item].type), "score": pa.list_(pa.float32())})
    with parquet.ParquetWriter(args.out, schema) as writer:
        for found in find(tower, items[tower.item], index, batches, args.k):
            writer.write_batch(found)
    print(f"{args.out}: {args.k} items for each of {users.count_rows():,} users")


if __name__ == "__main__":
    main()
