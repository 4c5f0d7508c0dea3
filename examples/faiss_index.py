"""Find the nearest items of users with Faiss, from the towers of a two-tower model.

    pip install faiss-cpu
    hotbed export runs/log towers/ --towers
    python examples/faiss_index.py towers/ users.parquet --out found.parquet --k 10

`users.parquet` needs the columns of the user's tower, with values as in the training data. `found.parquet` has a row
for each user: the items with the largest scores, and these scores. The index is written to `towers/items.faiss`.
"""

import argparse
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hotbed.train.towers import VECTOR, VECTORS, UserTower

GRAPH_FROM = 1_000_000
"""Number of items from which on a graph (HNSW) replaces exact search; it compares only a part of the items."""


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


def find(towers: Path, users: pa.Table, k: int) -> pa.Table:
    """Return the best items of each user, and their scores, as two columns of lists."""
    tower, items = UserTower(towers), parquet.read_table(towers / VECTORS)
    vectors = items[VECTOR].combine_chunks()
    index = build_index(vectors.flatten().to_numpy().reshape(len(vectors), -1))
    faiss.write_index(index, str(towers / "items.faiss"))
    scores, at = search(index, tower.vectors(users.select(tower.columns)), min(k, len(items)))
    found = at >= 0
    offsets = pa.array(np.concatenate([[0], found.sum(1).cumsum()]), pa.int32())
    columns = {tower.item: items[tower.item].take(pa.array(at[found])), "score": pa.array(scores[found])}
    columns = {name: pa.concat_arrays(pa.chunked_array(of).chunks) for name, of in columns.items()}
    return pa.table({name: pa.ListArray.from_arrays(offsets, of) for name, of in columns.items()})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("towers", type=Path, help="directory that `hotbed export --towers` wrote")
    parser.add_argument("users", type=Path, help="Parquet file of users")
    parser.add_argument("--out", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--k", type=int, default=10, help="number of items for each user")
    args = parser.parse_args(argv)
    found = find(args.towers, parquet.read_table(args.users), args.k)
    parquet.write_table(found, args.out)
    print(f"{args.out}: {args.k} items for each of {len(found):,} users")


if __name__ == "__main__":
    main()
