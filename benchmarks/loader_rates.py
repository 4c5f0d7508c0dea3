"""Measure how fast loaders return batches of one dataset: hotbed's, PyTorch's, TorchRec's, and reading alone.

All loaders return the same samples, shaped like Criteo's (26 ids, 13 numericals, a label), from files in the page
cache. They are compared with a loop of ``preadv`` over hotbed's own files into one buffer that stays in the CPU's
caches: no conversion, no batches, no new memory. A second loop reads into memory that batches could have, with as many
threads and chunks as the loader has.
"""

from __future__ import annotations

import importlib.util
import os
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

from hotbed.data import Loader, ParquetSource, Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter
from hotbed.data.formats.zipf_source import ZipfLaw

FEATURES, NUMERICALS, ROWS = 26, 13, 100_000
CHUNK = 65_536
IN_FLIGHT = 6  # chunks of a loader with two threads, and the four batches that it has ready
NAMES = [f"C{i + 1}" for i in range(FEATURES)]
NUMBERS = [f"I{i + 1}" for i in range(NUMERICALS)]
SPARSE = tuple(SparseColumn(name=name, rows=ROWS) for name in NAMES)
SCHEMA = Schema(sparse=SPARSE, dense=tuple(NUMBERS), labels=("label",))
FEW = ("label", "C1", "C2", "I1")
HAS_TORCHREC = importlib.util.find_spec("torchrec") is not None
TORCHREC = "TorchRec, in memory" if HAS_TORCHREC else "TorchRec's algorithm, written anew, in memory"
"""Without TorchRec, a loop follows the description of its loader."""
Step = Callable[[], Iterator[int]]
"""Starts an epoch, which yields the number of samples of each batch."""


def write_data(folder: Path, samples: int) -> None:
    """Write the same samples as split-binary, Parquet, and TorchRec's ``.npy`` files."""
    rng, law = np.random.default_rng(0), ZipfLaw(ROWS, 1.05)
    ids = np.stack([law.draw((0, i + 1), np.arange(samples, dtype=np.uint64)) for i in range(FEATURES)], axis=1)
    ids = ids.astype(np.int32)
    dense = rng.random((samples, NUMERICALS), dtype=np.float32).astype(np.float16)
    labels = rng.integers(0, 2, samples)
    (folder / "binary").mkdir(parents=True)
    with SplitBinaryWriter(folder / "binary", SCHEMA, ["train"]) as writer:
        writer.append_labels("train", labels)
        writer.append_dense("train", dense.astype(np.float32))
        for i in range(FEATURES):
            writer.append_ids("train", i, ids[:, i])
    columns = {"label": labels} | {name: ids[:, i] for i, name in enumerate(NAMES)}
    columns |= {name: dense[:, i].astype(np.float32) for i, name in enumerate(NUMBERS)}
    pq.write_table(pa.table(columns), folder / "log.parquet", row_group_size=CHUNK)
    few = {name: columns[name] for name in FEW}
    pq.write_table(pa.table(few), folder / "few.parquet", row_group_size=CHUNK)
    (folder / "npy").mkdir()
    for name, array in (
        ("dense", dense.astype(np.float32)),
        ("sparse", ids),
        ("labels", labels.astype(np.int32)[:, None]),
    ):
        np.save(folder / "npy" / f"day_0_{name}.npy", array)


def sides(folder: Path, batch: int, workers: int) -> dict[str, Step]:
    """Return all sides by name."""
    binary = SplitBinarySource(folder / "binary", chunk_samples=CHUNK)
    parquet = ParquetSource(folder / "log.parquet", SCHEMA, ids="raw")

    few = ParquetSource(
        folder / "few.parquet",
        Schema(sparse=SCHEMA.sparse[:2], dense=SCHEMA.dense[:1], labels=SCHEMA.labels),
        ids="raw",
    )

    def hotbed(source: Any, *, shuffle: bool) -> Step:
        return lambda: map(len, Loader(source, "train", batch, shuffle=shuffle, workers=workers, pin_memory=False))

    found: dict[str, Step] = {
        "bare preadv": lambda: bare_loop(folder / "binary" / "train"),
        "preadv into memory of batches": lambda: bare_loop(folder / "binary" / "train", workers, IN_FLIGHT),
        "hotbed, split-binary": hotbed(binary, shuffle=False),
        "hotbed, split-binary, shuffled": hotbed(binary, shuffle=True),
        "hotbed, Parquet": hotbed(parquet, shuffle=False),
        "hotbed, Parquet, shuffled": hotbed(parquet, shuffle=True),
        "hotbed, Parquet of four columns": hotbed(few, shuffle=False),
    }
    for processes in (0, workers):
        for shuffle in (False, True):
            name = f"DataLoader, {processes} workers, whole batches" + ", shuffled" * shuffle
            found[name] = data_loader(folder / "npy", batch, processes, shuffle=shuffle)
    found["DataLoader, sample by sample"] = sample_by_sample(folder / "npy", batch)
    for shuffle in (False, True):
        name = TORCHREC + ", batches shuffled in themselves" * shuffle
        found[name] = torchrec(folder / "npy", batch, shuffle=shuffle)
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


def data_loader(folder: Path, batch: int, workers: int, *, shuffle: bool) -> Step:
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


def sample_by_sample(folder: Path, batch: int) -> Step:
    """Return PyTorch's loader with a dataset of samples, as most people write it."""
    loader = DataLoader(NpyRows(folder), batch_size=batch)
    return lambda: (len(dense) for dense, _, _ in loader)


def torchrec(folder: Path, batch: int, *, shuffle: bool) -> Step:
    """Return TorchRec's loader of arrays in memory, or a loop that follows its description."""
    if HAS_TORCHREC:
        from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

        paths = [[str(folder / f"day_0_{name}.npy")] for name in ("dense", "sparse", "labels")]
        loader = InMemoryBinaryCriteoIterDataPipe("train", *paths, batch, 0, 1, shuffle_batches=shuffle)
        return lambda: (len(found.dense_features) for found in loader)
    arrays = [np.load(folder / f"day_0_{name}.npy") for name in ("dense", "sparse", "labels")]
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


def rate(begin: Step, seconds: float) -> float:
    """Return samples per second of repeated epochs for this time, after a part of one."""
    for _ in zip(range(3), begin(), strict=False):
        pass
    start, samples = time.perf_counter(), 0
    while True:
        for batch in begin():
            samples += batch
            if (passed := time.perf_counter() - start) >= seconds:
                return samples / passed
