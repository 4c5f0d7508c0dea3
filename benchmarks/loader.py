"""Measure how fast loaders return batches: hotbed's, PyTorch's, TorchRec's, and reading alone.

    python -m benchmarks.loader [--samples 4000000] [--rounds 3] [--json FILE]

All loaders return the same samples, shaped like Criteo's (26 ids, 13 numericals, a label), from files in the page
cache. They are compared with a loop of ``preadv`` over hotbed's own files into one buffer that stays in the CPU's
caches: no conversion, no batches, no new memory. A second loop reads into memory that batches could have, with as many
threads and chunks as the loader has. Sides take turns. The machine must be idle. ``make bench-peers`` makes an
environment with TorchRec.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from benchmarks import runner
from hotbed.data import Loader, ParquetSource, Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.files import write_json

BATCHES = (1_024, 65_536)
WORKERS = 2
SECONDS = 3.0
FEATURES, NUMERICALS, ROWS = 26, 13, 100_000
CHUNK = 65_536
IN_FLIGHT = 6  # chunks of a loader with two threads, and the four batches that it has ready
NAMES = [f"C{i + 1}" for i in range(FEATURES)]
NUMBERS = [f"I{i + 1}" for i in range(NUMERICALS)]
SPARSE = tuple(SparseColumn(name=name, rows=ROWS) for name in NAMES)
SCHEMA = Schema(sparse=SPARSE, dense=tuple(NUMBERS), labels=("label",))
FEW = Schema(sparse=SPARSE[:2], dense=SCHEMA.dense[:1], labels=SCHEMA.labels)
HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
TORCHREC = "TorchRec, in memory" if HAS_TORCHREC else "TorchRec's algorithm, written anew, in memory"
"""Without TorchRec, a loop follows the description of its loader."""
Epoch = Callable[[], Iterator[int]]
"""Starts an epoch, which yields the number of samples of each batch."""


def write_data(folder: Path, samples: int) -> None:
    """Write the same samples as split-binary, Parquet, and TorchRec's ``.npy`` files."""
    rng, law = np.random.default_rng(0), ZipfLaw(ROWS, 1.05)
    ids = np.stack([law.draw((0, i + 1), np.arange(samples, dtype=np.uint64)) for i in range(FEATURES)], axis=1)
    ids = ids.astype(np.int32)
    dense = rng.random((samples, NUMERICALS), dtype=np.float32).astype(np.float16).astype(np.float32)
    labels = rng.integers(0, 2, samples)
    (folder / "binary").mkdir(parents=True)
    with SplitBinaryWriter(folder / "binary", SCHEMA, ["train"]) as writer:
        writer.append_labels("train", labels)
        writer.append_dense("train", dense)
        for i in range(FEATURES):
            writer.append_ids("train", i, ids[:, i])
    columns = {"label": labels} | {name: ids[:, i] for i, name in enumerate(NAMES)}
    columns |= {name: dense[:, i] for i, name in enumerate(NUMBERS)}
    pq.write_table(pa.table(columns), folder / "log.parquet", row_group_size=CHUNK)
    few = {name: columns[name] for name in ("label", "C1", "C2", "I1")}
    pq.write_table(pa.table(few), folder / "few.parquet", row_group_size=CHUNK)
    for name, array in (("dense", dense), ("sparse", ids), ("labels", labels.astype(np.int32)[:, None])):
        np.save(folder / f"day_0_{name}.npy", array)


def sides(folder: Path, batch: int) -> dict[str, Epoch]:
    split = folder / "binary" / "train"

    def hotbed(source: Any, *, shuffle: bool) -> Epoch:
        return lambda: map(len, Loader(source, "train", batch, shuffle=shuffle, workers=WORKERS, pin_memory=False))

    found: dict[str, Epoch] = {
        "bare preadv": lambda: bare_loop(split),
        "preadv into memory of batches": lambda: bare_loop(split, WORKERS, IN_FLIGHT),
    }
    sources = {
        "split-binary": SplitBinarySource(folder / "binary", chunk_samples=CHUNK),
        "Parquet": ParquetSource(folder / "log.parquet", SCHEMA, ids="raw"),
    }
    for name, source in sources.items():
        for shuffle in (False, True):
            found[f"hotbed, {name}" + ", shuffled" * shuffle] = hotbed(source, shuffle=shuffle)
    few = ParquetSource(folder / "few.parquet", FEW, ids="raw")
    found["hotbed, Parquet of four columns"] = hotbed(few, shuffle=False)
    for processes in (0, WORKERS):
        for shuffle in (False, True):
            name = f"DataLoader, {processes} workers, whole batches" + ", shuffled" * shuffle
            found[name] = data_loader(folder, batch, processes, shuffle=shuffle)
    samples = DataLoader(NpyRows(folder), batch_size=batch)  # as most people write it
    found["DataLoader, sample by sample"] = lambda: (len(dense) for dense, _, _ in samples)
    for shuffle in (False, True):
        name = TORCHREC + ", batches shuffled in themselves" * shuffle
        found[name] = torchrec(folder, batch, shuffle=shuffle)
    return found


def bare_loop(folder: Path, threads: int = 1, buffers: int = 1) -> Iterator[int]:
    """Read all files of a split with ``preadv``, a chunk of samples of each file at a time.

    With one buffer, each file is read to the same bytes. With more, all files of a chunk have bytes of their own, as
    in memory of batches.
    """
    files = sorted(folder.glob("*.bin"))
    samples = (folder / "label.bin").stat().st_size
    widths = [file.stat().st_size // samples for file in files]
    opened = [os.open(file, os.O_RDONLY) for file in files]
    size = max(widths) if buffers == 1 else sum(widths)
    memory = [bytearray(size * CHUNK) for _ in range(buffers)]

    def read(number: int) -> int:
        start = number * CHUNK
        count, at = min(CHUNK, samples - start), 0
        for descriptor, width in zip(opened, widths, strict=True):
            view, first = memoryview(memory[number % buffers])[at : at + count * width], start * width
            while view:
                found = os.preadv(descriptor, [view], first)
                view, first = view[found:], first + found
            at += count * width if buffers > 1 else 0
        return count

    numbers = range(-(-samples // CHUNK))
    try:
        if threads == 1:
            yield from map(read, numbers)
            return
        with ThreadPoolExecutor(threads) as pool:
            for first in numbers[::buffers]:
                yield from pool.map(read, numbers[first : first + buffers])
    finally:
        for descriptor in opened:
            os.close(descriptor)


class NpyRows(Dataset[Any]):
    """Rows of TorchRec's mapped files, by an index or by the indices of a whole batch."""

    def __init__(self, folder: Path) -> None:
        self.arrays = [np.load(folder / f"day_0_{name}.npy", mmap_mode="r") for name in ("dense", "sparse", "labels")]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, at: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(np.array(array[at])) for array in self.arrays]


def data_loader(folder: Path, batch: int, workers: int, *, shuffle: bool) -> Epoch:
    """Return PyTorch's loader at its best: a batch is one index, so no Python runs per sample, and workers stay."""
    rows = NpyRows(folder)
    order = RandomSampler(rows) if shuffle else SequentialSampler(rows)
    loader = DataLoader(
        rows,
        sampler=BatchSampler(order, batch, drop_last=False),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
    )
    return lambda: (len(dense) for dense, _, _ in loader)


def torchrec(folder: Path, batch: int, *, shuffle: bool) -> Epoch:
    """Return TorchRec's loader of arrays in memory, or a loop that follows its description."""
    paths = [str(folder / f"day_0_{name}.npy") for name in ("dense", "sparse", "labels")]
    if HAS_TORCHREC:
        criteo: Any = importlib.import_module("torchrec.datasets.criteo")
        files = ([path] for path in paths)
        loader = criteo.InMemoryBinaryCriteoIterDataPipe("train", *files, batch, 0, 1, shuffle_batches=shuffle)
        return lambda: (len(found.dense_features) for found in loader)
    arrays = list(map(np.load, paths))
    return lambda: _in_memory(arrays, batch, shuffle=shuffle)


def _in_memory(arrays: list[NDArray[Any]], batch: int, *, shuffle: bool) -> Iterator[int]:
    for start in range(0, len(arrays[0]), batch):
        dense, sparse, labels = (array[start : start + batch] for array in arrays)
        if shuffle:
            order = np.random.default_rng(start).permutation(len(dense))
            dense, sparse, labels = dense[order], sparse[order], labels[order]
        found = torch.from_numpy(dense.copy())
        torch.from_numpy(sparse.T.reshape(-1))
        torch.from_numpy(labels.reshape(-1).copy())
        yield len(found)


def rate(begin: Epoch) -> float:
    """Return samples per second of repeated epochs, after a part of one."""
    for _ in zip(range(3), begin(), strict=False):
        pass
    start, samples = time.perf_counter(), 0
    while True:
        for batch in begin():
            samples += batch
            if (passed := time.perf_counter() - start) >= SECONDS:
                return samples / passed


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--samples", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, args.samples)
        all_sides = {(name, batch): begin for batch in BATCHES for name, begin in sides(folder, batch).items()}
        turns = {side: lambda begin=begin: rate(begin) for side, begin in all_sides.items()}
        found = runner.in_turns(turns, args.rounds, title="rates")
    medians = {side: statistics.median(of) for side, of in found.items()}
    rows = [
        {"loader": name, "batch": batch, "samples/s": of, "of bare preadv": of / medians["bare preadv", batch]}
        for (name, batch), of in medians.items()
    ]
    runner.show("rates", rows)
    if args.json:
        data = runner.read_json(args.json) or {"results": {}, "measured": {}}
        results = [{"loader": name, "batch_size": batch, "samples_per_s": of} for (name, batch), of in found.items()]
        data["results"]["rates"] = results
        data["measured"]["rates"] = runner.about(samples=args.samples, workers=WORKERS, torchrec=HAS_TORCHREC)
        write_json(args.json, data)


if __name__ == "__main__":
    main()
