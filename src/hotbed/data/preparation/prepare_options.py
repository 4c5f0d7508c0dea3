"""Define the options of `hotbed.prepare`, which are checked when they are created."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from hotbed.checks import Count, Probability, Range, Section, Size
from hotbed.data.executors import STARTED_HERE
from hotbed.data.files.criteo import Negatives, OnBadLine
from hotbed.data.files.row_split import RowSplit, parse_row_split
from hotbed.data.preparation.stored_rows import Format
from hotbed.data.schema import Schema
from hotbed.errors import SpecError
from hotbed.machine import usable_cores

MEMORY_BYTES = 2 << 30
_BASE_BYTES, _TASK_BYTES = 512 << 20, 384 << 20
_TEST_FRACTION = 0.1
_NOT_CONTENT = {
    *("executor", "workers", "memory", "overwrite"),  # these do not change the dataset
    *("schema", "hash_rows", "valid_files", "test_files", "vocabulary", "format"),  # `prepare` adds these itself
}


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Section, error=SpecError):
    """Options of `hotbed.prepare`.

    Parameters
    ----------
    schema
        Roles of the columns of Parquet, CSV or TSV files (default: drafted from the data). Columns with the
        same ``table`` share a vocabulary. ``rows`` of columns is ignored, because the size of the vocabulary
        determines the number of rows.
    threshold
        Minimum number of occurrences for a value to get an id (e.g. 15, as in NVIDIA's scripts).
    top_k
        Maximum number of values per table that get ids (default: no limit).
    hash_rows
        Number of rows by table, for tables that hash values instead of counting them, e.g. ``{user: 1000000}``. Hash
        a table if new values appear all the time, e.g. users or queries.
    hash_seed
        Seed of the hash. See `hotbed.data.encoding.prepared_dataset.HashEntry`.
    valid_fraction, test_fraction
        Share of the samples in the split. 0 omits the split. The default of ``test_fraction`` is 0.1, or 0 if rows,
        files or ``split`` are set.
    valid_rows, test_rows
        Number of samples in the split, instead of a fraction.
    valid_files, test_files
        Files of the split, e.g. ``day_23`` or ``week_1/day_23``. All of their samples are in the split.
    split
        Rule that divides Parquet, CSV and TSV files by row, e.g. ``{by: time, column: ts, test_from: 2024-06-01}``.
        See `hotbed.data.files.row_split`.
    count_on
        ``"train"`` counts values in the train split only, so that the vocabulary does not depend on the test split.
        ``"all"`` counts all samples, as NVIDIA's scripts do.
    vocabulary
        ``vocabulary/`` directory of an earlier dataset. The values in this vocabulary keep their ids, and new values
        get the ids that follow.
    on_bad_line
        ``"error"`` stops at the first bad line of a log. ``"skip"`` omits bad lines and counts them.
    negatives
        Rule for negative numericals x of Criteo logs. ``"keep"`` computes ln(x + 3), where -3 is treated as -2, and
        values below -3 are errors. ``"zero"`` replaces x by 0, as the scripts of Facebook's DLRM do.
    format
        Format of the dataset: ``"split_binary"`` (default for Criteo logs; for columns with one id per sample), or
        ``"parquet"`` (default for all other inputs).
    executor
        Executor of the tasks: ``"threads"``, ``"processes"``, ``"dask:ADDRESS"``, ``"ray:ADDRESS"``, or any
        `concurrent.futures.Executor`. Workers need hotbed, and all files at the same paths.
    workers
        Number of threads or processes (default: one per core, limited by ``memory``).
    memory
        Memory limit in bytes, for all threads and processes together, or for each worker of a cluster. Counts that
        exceed the limit are written to disk.
    overwrite
        Replace an existing dataset at the same path.
    """

    schema: Schema | Mapping[str, object] | None = None
    threshold: Count = 15
    top_k: Count | None = None
    hash_rows: Mapping[str, int] | None = None
    hash_seed: int = 0
    valid_fraction: Probability | None = None
    test_fraction: Probability | None = None
    valid_rows: Size = 0
    test_rows: Size = 0
    valid_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    split: Mapping[str, object] | None = None
    count_on: Literal["train", "all"] = "train"
    vocabulary: str | Path | None = None
    on_bad_line: OnBadLine = "error"
    negatives: Negatives = "keep"
    format: Format | None = None
    executor: str | Executor = "threads"
    workers: Count | None = None
    memory: Annotated[int, Range(least=_BASE_BYTES + _TASK_BYTES, note=" (the memory of one task)")] = MEMORY_BYTES
    overwrite: bool = False

    def contradictions(self) -> Iterator[str]:
        """Yield a message for each contradiction between the options of splits."""
        shares = (self.valid_fraction or 0.0) + (self.test_fraction or 0.0)
        if shares >= 1:
            yield (
                f"valid_fraction + test_fraction: got {self.valid_fraction} + {self.test_fraction}, expected below 1. "
                "Decrease one fraction, so that samples are left for training"
            )
        ways = {
            "fractions": shares,
            "rows": self.valid_rows or self.test_rows,
            "files": self.valid_files or self.test_files,
            "split": self.split is not None,
        }
        if len(chosen := [way for way, is_chosen in ways.items() if is_chosen]) > 1:
            yield f"splits: got {' and '.join(chosen)}, expected only one of these. Remove the options of the others"

    @cached_property
    def by(self) -> RowSplit | None:
        """The option ``split`` as a rule that assigns rows to splits."""
        return None if self.split is None else parse_row_split(self.split)

    @property
    def has_splits(self) -> bool:
        """Whether fractions, rows or a rule of the splits are set."""
        return bool(self.valid_fraction or self.test_fraction or self.valid_rows or self.test_rows or self.by)

    def test_share(self) -> float:
        """Return ``test_fraction``, or its default."""
        if self.test_fraction is not None:
            return self.test_fraction
        return 0.0 if self.valid_rows or self.test_rows else _TEST_FRACTION

    def content(self) -> list[tuple[str, Any]]:
        """Return options that determine the dataset's content, for its hash. `prepare` adds other such options."""
        names = [f.name for f in fields(self) if f.name not in _NOT_CONTENT]
        return [(name, self.by if name == "split" else getattr(self, name)) for name in names]

    def worker_count(self) -> int | None:
        """Return the number of workers, or None if the executor determines it."""
        if self.workers is not None or self.executor not in STARTED_HERE:
            return self.workers
        return max(1, min(usable_cores(), (self.memory - _BASE_BYTES) // _TASK_BYTES))

    def task_bytes(self) -> int:
        """Return the memory that one task may use for counts or vocabularies."""
        return max(1 << 20, (self.memory - _BASE_BYTES) // (2 * (self.worker_count() or 1)))
