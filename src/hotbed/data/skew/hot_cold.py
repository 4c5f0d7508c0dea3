"""Pack hot and cold samples into separate splits (`pack`), and alternate between their batches (`HotColdLoader`).

A sample is *hot* if all of its ids are hot rows (Adnan et al. 2021, arXiv 2103.00686). Rows are numbered by descending
popularity, so the hot rows of a table are its first rows, and one comparison per id decides whether a sample is hot.

*Files of the hot order*, ``DIRECTORY/TABLE.npy``, hold all rows ``[R]`` of a table by descending number of accesses,
then by row number. The dtype is little-endian int32, or int64 above 2³¹ rows. Table names are percent-encoded.

*Rounds.* An epoch consists of rounds. A round at rate r has r % of the epoch's cold batches, then r % of its hot
batches, and at least one batch of each kind if any is left. Each kind has its own `Loader`, with its own order. The
rate of a round may depend on an evaluation after the previous round, but at that time a trainer has already prefetched
the first batch of the round, which is the same for all rates. Therefore the rate is only read when the *second* batch
is requested, or when `HotColdLoader.round_is_over` is called.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.checks import Range, check, check_known
from hotbed.data.formats.split_binary import DESCRIPTION, SplitBinarySource, read_feature_spec
from hotbed.data.loader import Loader
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError
from hotbed.files import new_directory, write_json
from hotbed.jagged import Jagged
from hotbed.parsing import TextError, map_npy, parse_yaml, yaml_text

HOT, COLD = "hot", "cold"
"""Suffixes of the splits that `pack` writes, e.g. ``train_hot``."""
HOT_ROWS = "hot_rows.json"
"""File of a packed dataset that has the number of hot rows by table."""
_NONE = {"cold": 0, "hot": 0}
_STATE = ("cold", "hot", "given", "begin", "end")


# -- hot orders ----------------------------------------------------------------------------------------------------


def hot_order_file(directory: str | Path, table: str) -> Path:
    """Return the path of a table's hot order."""
    return Path(directory) / f"{quote(table, safe=' ')}.npy"


def write_hot_order(directory: str | Path, orders: Mapping[str, NDArray[np.int64]]) -> None:
    """Write the hot orders ``[R]`` of tables by name into an existing directory."""
    for table, order in orders.items():
        np.save(hot_order_file(directory, table), order.astype(_dtype(len(order))))


def read_hot_order(directory: str | Path, table: str, rows: int) -> NDArray[Any]:
    """Read the hot order ``[rows]`` of a table.

    Raises
    ------
    DataError
        If the file does not exist, or does not hold each row of the table once.
    """
    file = hot_order_file(directory, table)
    if not file.is_file():
        raise DataError(f"{file} does not exist. Measure the hot order: hotbed inspect --skew DATA --out DIRECTORY")
    try:
        order = map_npy(file)
    except TextError as error:
        raise DataError(f"{file} {error}. Measure the hot order again (hotbed inspect --skew)") from None
    if order.shape != (rows,) or order.dtype != _dtype(rows):
        raise DataError(
            f"{file}: got {order.dtype} {list(order.shape)}, expected {_dtype(rows)} [{rows}] (the rows of "
            f"table '{table}'). Measure the hot order of this data again"
        )
    seen = np.zeros(rows, dtype=np.bool_)
    seen[order[(order >= 0) & (order < rows)]] = True
    if not seen.all():
        raise DataError(f"{file} lacks row {int(seen.argmin()):,} of table '{table}'. Measure the hot order again")
    return np.array(order)


def _dtype(rows: int) -> np.dtype[Any]:
    return np.dtype("<i4" if rows <= 1 << 31 else "<i8")


# -- packing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A dataset written by `pack`, and its numbers of hot and cold samples."""

    path: Path
    hot: int
    cold: int


def hot_inputs(sparse: Jagged, hot_rows: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return a mask ``[B]`` of hot samples. ``hot_rows`` has numbers of hot rows by feature. Ids must be on the CPU."""
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
    """Convert numbers of hot rows by table to numbers by feature."""
    for name in hot_rows:
        check_known("hot_rows, table", name, schema.rows, SpecError)
    for name in schema.rows:
        check_known("hot_rows, table", name, hot_rows, SpecError, "Set a number for every table (0 for no hot rows).")
    return {column.name: hot_rows[column.table_name] for column in schema.sparse}


def pack(
    data: str | Path,
    out: str | Path,
    hot_rows: Mapping[str, int],  # number of hot rows by table
    *,
    split: str = "train",  # split to divide into ``SPLIT_hot`` and ``SPLIT_cold``
    about: Mapping[str, Any] | None = None,  # further entries of `HOT_ROWS`
    overwrite: bool = False,  # whether to replace ``out`` if it is a dataset
    progress: Callable[[int, int], None] = lambda done, total: None,  # called with processed and all samples
) -> Packed:
    """Write the hot and the cold samples of a split as two new splits, in unchanged order.

    The split is read once, with one chunk in memory at a time. The new dataset also has all splits of the old dataset:
    their files are linked, or copied if links are not supported.
    """
    from hotbed.data.encoding.vocabulary import VOCABULARY  # with pyarrow

    source, spec, root = SplitBinarySource(data), read_feature_spec(Path(data)), Path(data)
    limits, sizes = by_feature(source.schema, hot_rows), source.chunks(split)
    kinds = {f"{split}_{kind}": kind == HOT for kind in (HOT, COLD)}
    counts = dict.fromkeys(kinds, 0)
    for name, of_split in spec.files.items():
        names = Counter(path.name for path in {file.path for file in of_split.values()})
        if twice := [file for file, count in names.items() if count > 1]:
            raise SpecError(
                f"split '{name}': got several files named {twice[0]}, expected unique names. Rename one of them"
            )
    with new_directory(Path(out), marker=DESCRIPTION, overwrite=overwrite) as directory, ExitStack() as stack:
        if (vocabulary := spec.folder / VOCABULARY).is_dir():
            _link(vocabulary.iterdir(), directory / VOCABULARY)
        for other in source.splits:
            if other not in kinds:  # splits of an earlier packing are replaced
                _link({file.path for file in spec.files[other].values()}, directory / other)
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
                stored = np.fromfile(path, np.uint8, size * file.sample_bytes, offset=done * file.sample_bytes)
                samples = stored.reshape(size, file.sample_bytes)
                for made, kind in kinds.items():
                    writers[made, path].write(samples[hot == kind].data)
            for made, kind in kinds.items():
                counts[made] += int((hot == kind).sum())
            done += size
            progress(done, sum(sizes))
        stack.close()
        text = (root if root.is_file() else root / DESCRIPTION).read_text(encoding="utf-8")
        description = _describe_packed(parse_yaml(text), split, counts)
        (directory / DESCRIPTION).write_text(f"{yaml_text(description)}\n", encoding="utf-8")
        hot_samples, cold_samples = counts.values()
        entries = [{"table": t, "rows": r, "hot_rows": hot_rows[t]} for t, r in source.schema.rows.items()]
        found = {"split": split, "samples": done, "hot_samples": hot_samples, **(about or {}), "tables": entries}
        write_json(directory / HOT_ROWS, found)
    return Packed(path=Path(out), hot=hot_samples, cold=cold_samples)


def _link(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir()
    for file in files:
        try:
            os.link(file, folder / file.name)
        except OSError:  # a different file system, or no support for links
            shutil.copyfile(file, folder / file.name)


def _describe_packed(description: dict[str, Any], split: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the description of the packed dataset, which has one folder per split and unchanged file names."""
    source: dict[str, Any] = description["source_spec"]
    origins = {name: name for name in source if name not in counts} | dict.fromkeys(counts, split)
    description["source_spec"] = {
        name: [{**entry, "files": [f"{name}/{Path(f).name}" for f in entry["files"]]} for entry in source[origin]]
        for name, origin in origins.items()
    }
    metadata = description.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("samples"), dict):
        metadata["samples"].update(counts)
    return description


# -- loading -------------------------------------------------------------------------------------------------------


class HotColdLoader:
    """Iterate over hot and cold batches. One iteration is one epoch.

    As with a `Loader`, the next iteration begins a new epoch, even if the epoch before was not finished.
    `load_state_dict` resumes an unfinished epoch.
    """

    def __init__(
        self,
        hot: Loader | None,  # loader of hot batches; None if there are no hot samples
        cold: Loader | None,
        *,
        rate: float = 50,  # percentage of an epoch's hot batches, and of its cold batches, in one round
    ) -> None:
        if hot is None and cold is None:
            raise SpecError("hot and cold samples: got none, expected at least one. Pack a split that has samples")
        check("rate", rate, Annotated[float, Range(above=0, most=100, note=" (percent)")], SpecError)
        self.rate = rate  # rate of later rounds, which may be set at any time; `state_dict` does not include the rate
        self.queue_depth = 0  # queue depth of the loader that returned the last batch
        self._loaders = {kind: loader for kind, loader in (("cold", cold), ("hot", hot)) if loader is not None}
        self._sizes = _NONE | {kind: len(loader) for kind, loader in self._loaders.items()}
        # Numbers of batches by kind in this epoch: so far, before this round, and after it ({} until the rate is read).
        self._given, self._begin, self._end = dict(_NONE), dict(_NONE), dict[str, int]()
        self._fresh = True  # whether the next iteration continues the epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return sum(self._sizes.values())

    def __iter__(self) -> Iterator[Batch]:
        if not self._fresh:
            self._given, self._begin, self._end = dict(_NONE), dict(_NONE), {}
        self._fresh = False
        with ExitStack() as stack:
            batches = {
                kind: stack.enter_context(closing(cast("Generator[Batch]", iter(loader))))
                for kind, loader in self._loaders.items()
                if self._is_left(kind)
            }
            while self._given != self._sizes:
                kind = self._next_kind()
                batch = next(batches[kind])
                self.queue_depth = self._loaders[kind].queue_depth
                self._given[kind] += 1
                yield batch

    def round_is_over(self, batches: int) -> bool:
        """Return whether a round ends after this number of batches of the epoch.

        When this is called, at most one further batch may have been yielded.
        """
        if batches in (sum(self._begin.values()), len(self)):
            return batches > 0
        return batches == sum(self._end_of_round().values())

    def _next_kind(self) -> str:
        if self._given != self._begin:
            for kind, end in self._end_of_round().items():
                if self._given[kind] < end:
                    return kind
            self._begin, self._end = dict(self._given), {}
        return next(filter(self._is_left, self._sizes))

    def _end_of_round(self) -> Mapping[str, int]:
        """Return how many cold and hot batches the epoch will have had when the round ends.

        The first call in a round reads the rate.
        """
        if not self._end:
            self._end = {
                kind: min(self._begin[kind] + math.ceil(size * self.rate / 100), size)
                for kind, size in self._sizes.items()
            }
        return self._end

    def _is_left(self, kind: str) -> bool:
        return self._given[kind] < self._sizes[kind]

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders, and the position in the round, as plain values."""
        counts = (self._given, self._begin, self._end) if self._given != self._sizes else (_NONE, _NONE, {})
        loaders = {kind: self._loaders[kind].state_dict() if kind in self._loaders else None for kind in _NONE}
        return {**loaders, **dict(zip(("given", "begin", "end"), map(dict, counts), strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. If rates are as in the earlier run, the next iteration yields the remaining batches."""
        if set(state) != set(_STATE):
            raise SpecError(
                f"state of hot and cold batches: got {', '.join(state) or 'nothing'}, expected {', '.join(_STATE)}. "
                "Resume with the same hot.batches as in the run before"
            )
        for kind in _NONE:
            if (state[kind] is None) != (kind not in self._loaders):
                got, expected = ("some", "none") if kind in self._loaders else ("none", "some")
                raise SpecError(
                    f"{kind} samples: got {got}, expected {expected} as in the saved state. Use the same data"
                )
        for kind, loader in self._loaders.items():
            loader.load_state_dict(state[kind])
        self._given, self._begin, self._end = (dict(state[key]) for key in ("given", "begin", "end"))
        self._fresh = True
