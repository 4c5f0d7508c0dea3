"""Classify inputs as hot or cold, and pack them into splits of their own.

An input is *hot* if and only if every id of all its bags is a hot row of its table (Adnan et al. 2021, arXiv
2103.00686). As rows are numbered by falling popularity, hot rows are the first ones, and the test is one comparison per
id.

*Files of the hot order* hold the rows of each table by falling number of accesses:
``DIRECTORY/TABLE.npy``, in NumPy's format: all rows of the table once, ``[R]``, the most accessed first, ties by row
number; little-endian int32, or int64 where the table has more than 2³¹ rows. Characters of a table's name that a file's
cannot have are percent-encoded.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from hotbed.data.formats.split_binary import SplitBinarySource, StoredFile, read_feature_spec
from hotbed.data.schema import Schema
from hotbed.data.skew.hot_loader import COLD, HOT
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.files import new_directory, write_json
from hotbed.jagged import Jagged
from hotbed.parsing import TextError, map_npy


def hot_order_file(directory: str | Path, table: str) -> Path:
    """The file of a table's hot order."""
    return Path(directory) / f"{quote(table, safe=' ')}.npy"


def write_hot_order(directory: str | Path, orders: Mapping[str, NDArray[np.int64]]) -> None:
    """Write the hot orders of tables by name, ``[R]`` each, into an existing directory."""
    for table, order in orders.items():
        np.save(hot_order_file(directory, table), order.astype(_dtype(len(order))))


def read_hot_order(directory: str | Path, table: str, rows: int) -> NDArray[Any]:
    """Read the hot order ``[rows]`` of a table.

    Raises
    ------
    DataError
        If there is no such file, or it does not hold each row of the table once.
    """
    file = hot_order_file(directory, table)
    if not file.is_file():
        raise DataError(f"{file} does not exist; measure the hot order with hotbed inspect --skew DATA --out DIRECTORY")
    try:
        order = map_npy(file)
    except TextError as error:
        raise DataError(f"{file} {error}; measure the hot order again") from None
    if order.shape != (rows,) or order.dtype != _dtype(rows):
        raise DataError(
            f"{file} holds {order.dtype} {list(order.shape)}, must hold {_dtype(rows)} [{rows}], the rows of table "
            f"'{table}'; measure the hot order of this data again"
        )
    seen = np.zeros(rows, dtype=np.bool_)
    seen[order[(order >= 0) & (order < rows)]] = True
    if not seen.all():
        raise DataError(f"{file} leaves out row {int(seen.argmin()):,} of table '{table}'; measure the hot order again")
    return np.array(order)


def _dtype(rows: int) -> np.dtype[Any]:
    return np.dtype("<i4" if rows <= 1 << 31 else "<i8")


HOT_ROWS = "hot_rows.json"
"""Name of the file that says which rows are hot."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """What `pack` made: the dataset, and the hot and cold samples in it."""

    path: Path
    hot: int
    cold: int


def hot_inputs(sparse: Jagged, hot_rows: Mapping[str, int]) -> NDArray[np.bool_]:
    """Which samples are hot, ``[B]``.

    Parameters
    ----------
    sparse
        Ids by feature, in CPU memory.
    hot_rows
        By feature, how many of the first rows are hot.
    """
    hot = np.ones(len(sparse), dtype=np.bool_)
    for name in sparse.names:
        bags = sparse[name]
        ids = bags.values.numpy()
        cold = (ids < 0) | (ids >= hot_rows[name])
        if bags.fixed is not None:
            hot &= ~cold.reshape(len(hot), bags.fixed).any(axis=1)
        else:
            before = np.concatenate([[0], np.cumsum(cold)])
            ends = np.concatenate([[0], np.cumsum(bags.lengths().numpy())])
            hot &= before[ends[1:]] == before[ends[:-1]]
    return hot


def by_feature(schema: Schema, hot_rows: Mapping[str, int]) -> dict[str, int]:
    """Hot rows by feature, from those by table."""
    for name in hot_rows:
        if name not in schema.rows:
            raise SpecError(f"hot_rows names table '{name}', which does not exist{did_you_mean(name, schema.rows)}")
    for name in schema.rows:
        if name not in hot_rows:
            raise SpecError(f"hot_rows leaves out table '{name}'; give every table a number, 0 where no row is hot")
    return {column.name: hot_rows[column.table_name] for column in schema.sparse}


def pack(
    data: str | Path,
    out: str | Path,
    hot_rows: Mapping[str, int],  # by table, the number of first rows that are hot
    *,
    split: str = "train",  # its new splits are ``SPLIT_hot`` and ``SPLIT_cold``
    about: Mapping[str, Any] | None = None,  # further entries of `HOT_ROWS`
    overwrite: bool = False,  # whether to replace ``out`` if it is a dataset
    progress: Callable[[int, int], None] | None = None,  # called with the samples done and their total
) -> Packed:
    """Write a split once more, as a split of its hot and one of its cold samples, each in the order they had.

    One pass, in memory of one chunk. The new dataset has all splits of the old one, too, whose files are linked
    (copied, where the file system cannot), and `HOT_ROWS`.
    """
    import yaml

    from hotbed.data.encoding.vocabulary import VOCABULARY  # with pyarrow

    source, spec, root = SplitBinarySource(data), read_feature_spec(Path(data)), Path(data)
    limits, sizes = by_feature(source.schema, hot_rows), source.chunks(split)
    kinds = {f"{split}_{kind}": kind == HOT for kind in (HOT, COLD)}
    counts = dict.fromkeys(kinds, 0)
    for name, files_of_split in spec.files.items():
        paths = {file.path for file in files_of_split.values()}
        twice = [file for file, count in Counter(path.name for path in paths).items() if count > 1]
        if twice:
            raise SpecError(
                f"split '{name}' has several files named {twice[0]}, which would share a folder; rename one"
            )
    with new_directory(Path(out), marker="feature_spec.yaml", overwrite=overwrite) as directory, ExitStack() as stack:
        if (vocabulary := spec.folder / VOCABULARY).is_dir():
            (directory / VOCABULARY).mkdir()
            for path in vocabulary.iterdir():
                _link(path, directory / VOCABULARY / path.name)
        for other in source.splits:
            if other not in kinds:  # those of an earlier packing are made anew
                (directory / other).mkdir()
                for path in {file.path for file in spec.files[other].values()}:
                    _link(path, directory / other / path.name)
        files = {file.path: file for file in spec.files[split].values()}
        writers: dict[tuple[str, Path], BinaryIO] = {}
        for made in kinds:
            (directory / made).mkdir()
            for path in files:
                writers[made, path] = stack.enter_context((directory / made / path.name).open("xb"))
        done = 0
        for i, size in enumerate(sizes):
            hot = hot_inputs(source.read(split, i).sparse, limits)
            for path, file in files.items():
                stored = _stored(file, done, size)
                for made, kind in kinds.items():
                    writers[made, path].write(stored[hot == kind].data)
            for made, kind in kinds.items():
                counts[made] += int((hot == kind).sum())
            done += size
            if progress is not None:
                progress(done, sum(sizes))
        stack.close()
        description = _described(root if root.is_file() else root / "feature_spec.yaml", split, counts)
        (directory / "feature_spec.yaml").write_text(yaml.safe_dump(description, sort_keys=False), encoding="utf-8")
        hot_samples, cold_samples = counts.values()
        entries = [{"table": t, "rows": r, "hot_rows": hot_rows[t]} for t, r in source.schema.rows.items()]
        found = {"split": split, "samples": done, "hot_samples": hot_samples, **(about or {}), "tables": entries}
        write_json(directory / HOT_ROWS, found)
    return Packed(path=Path(out), hot=hot_samples, cold=cold_samples)


def _stored(file: StoredFile, first: int, samples: int) -> NDArray[np.uint8]:
    """Samples of a file as they are stored, ``[samples, bytes]``."""
    count, offset = samples * file.sample_bytes, first * file.sample_bytes
    return np.fromfile(file.path, np.uint8, count, offset=offset).reshape(samples, file.sample_bytes)


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, to)


def _described(file: Path, split: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """The description of the new dataset, whose files have the names they had, in a directory for each split."""
    import yaml

    description = cast("dict[str, Any]", yaml.safe_load(file.read_text(encoding="utf-8")))
    source: dict[str, Any] = description["source_spec"]
    places = {name: name for name in source if name not in counts} | dict.fromkeys(counts, split)
    description["source_spec"] = {
        name: [{**entry, "files": [f"{name}/{Path(f).name}" for f in entry["files"]]} for entry in source[origin]]
        for name, origin in places.items()
    }
    metadata = description.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("samples"), dict):
        metadata["samples"].update(counts)
    return description
