"""Prepare raw logs or tables as a dataset of ids.

Four passes, each of tasks that write what they make under names of their own, so that any workers can run them and a
preparation that was killed goes on where it was:

1. *read* (`hotbed.data.preparation.raw_inputs`; logs only): every field is checked; parsed parts are spooled to disk
as Parquet.
2. *count* (`hotbed.data.preparation.counting`): how often each value of a table occurs, as sorted runs.
3. *merge* (`hotbed.data.preparation.counting`): runs are merged, and frequent values are numbered: vocabularies.
4. *write* (`hotbed.data.preparation.encoded_rows`): values become ids.

All is written into a hidden directory beside the output, which is renamed when everything is there.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Literal, get_args

import pyarrow as pa

from hotbed.data import arrow_columns as arrow
from hotbed.data.encoding.prepared_dataset import HashEntry, Kind, PreparationEntry, VocabularyEntry, check_hashed
from hotbed.data.encoding.vocabulary import VOCABULARY, read_vocabulary, vocabulary_file
from hotbed.data.executors import STARTED_HERE, open_tasks
from hotbed.data.files.criteo import Negatives, OnBadLine
from hotbed.data.files.row_split import parse_row_split
from hotbed.data.preparation.counting import CountJob, MergeJob, count, merge
from hotbed.data.preparation.encoded_rows import (
    MARKERS,
    EncodeJob,
    Format,
    assemble,
    check_format,
    dataset_schema,
    encode,
)
from hotbed.data.preparation.pieces import HeldOut, divided, groups_of, in_order, splits_of_files, with_splits
from hotbed.data.preparation.raw_inputs import Logs, Progress, Tables, find_input
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.files import new_directory
from hotbed.machine import usable_cores

CountOn = Literal["train", "all"]

MEMORY_BYTES = 2 << 30
_BASE_BYTES, _TASK_BYTES = 512 << 20, 384 << 20
_DONE = ".done"
_VERSION = 2  # of what is left of a killed preparation


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What `prepare` made.

    Attributes
    ----------
    path
        The dataset directory.
    samples
        Samples by split.
    rows
        Rows by table, id 0 included.
    skipped
        Lines left out, by what was wrong with them: ``fields``, ``label``, ``numerical``, ``categorical``.
    replaced
        By column, the negative numericals of Criteo logs that the rule ``negatives`` has replaced.
    left_out
        Columns that the drafted schema has left out, with their types and the reasons.
    seconds
        Wall-clock time.
    """

    path: Path
    samples: Mapping[str, int]
    rows: Mapping[str, int]
    skipped: Mapping[str, int]
    replaced: Mapping[str, int]
    left_out: Mapping[str, str]
    seconds: float


def prepare(
    raw: str | Path | Source | Sequence[str | Path],
    out: str | Path,
    *,
    schema: Schema | Mapping[str, object] | None = None,
    threshold: int = 15,
    top_k: int | None = None,
    hash_rows: Mapping[str, int] | None = None,
    hash_seed: int = 0,
    valid_fraction: float | None = None,
    test_fraction: float | None = None,
    valid_rows: int = 0,
    test_rows: int = 0,
    valid_files: Sequence[str] = (),
    test_files: Sequence[str] = (),
    split: Mapping[str, object] | None = None,
    count_on: CountOn = "train",
    vocabulary: str | Path | None = None,
    on_bad_line: OnBadLine = "error",
    negatives: Negatives = "keep",
    format: Format | None = None,
    executor: str | Executor = "threads",
    workers: int | None = None,
    memory: int = MEMORY_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PrepareReport:
    """Turn raw Criteo logs, or Parquet, CSV and TSV files with any columns, into a dataset of ids.

    Per table, values seen at least ``threshold`` times get ids 1, 2, … by falling count, ties by value; missing and
    rarer values are id 0. Of Criteo logs, numericals become ln(x + 3), missing ones 0; of other files, all columns but
    the sparse ones stay as they are. Samples keep their order, which is taken for that of time: the last ones are the
    test split and those before them the valid split, unless files, folders or ``split`` say otherwise.

    The directory holds a folder per split, ``vocabulary/``, and ``feature_spec.yaml`` (split-binary format, for
    `SplitBinarySource`) or ``source.yaml`` (Parquet, for `ParquetSource`). What is in it depends on the data and the
    options alone, to the byte, whoever computes it. A preparation that was killed goes on where it was when the same
    is asked for again.

    Parameters
    ----------
    raw
        Criteo logs: a file (plain, gzip or zstd), several in time order, or a directory of ``day_*`` or
        ``*.tsv[.gz|.zst]`` files. Or files or folders of Parquet, and of CSV or TSV with a header, as `ParquetSource`
        reads them. Paths or URIs. Or a folder as `SplitBinarySource` or `NpySource` read it, or any `Source`, whose
        ids are then taken for values.
    out
        The dataset directory to make.
    schema
        Which columns of Parquet, CSV or TSV files are what; the rows that it says of tables are not used. Default:
        `draft_schema`'s; the report says what that leaves out. Columns that share a table share a vocabulary.
    threshold
        Smallest count of a value that gets an id of its own. NVIDIA's default is 15.
    top_k
        Most values of a table that get ids, the most frequent; all that reach the threshold by default.
    hash_rows
        By table, the rows that its values are hashed to, in the place of a vocabulary: for values that never end, such
        as users or queries.
    hash_seed
        Which hash that is, see `hotbed.data.encoding.prepared_dataset.HashEntry`.
    valid_fraction, test_fraction
        Share of the samples in these splits; 0 leaves the split out. By default the test split has 0.1, unless another
        way to choose it is given.
    valid_rows, test_rows
        Number of samples in these splits, in the place of a share.
    valid_files, test_files
        Names or paths of files that are in these splits, whole: ``day_23``, ``week_1/day_23``.
    split
        Divide Parquet, CSV and TSV files by row: ``{by: time, column: ts, test_from: …}``, ``{by: hash, test: 0.1}``;
        see `hotbed.data.files.row_split`.
    count_on
        ``"train"`` counts values in the train split only, so nothing about the test split leaks into the vocabulary:
        a value that is new there is id 0, as it would be in production. ``"all"`` counts all samples, as NVIDIA's
        scripts do.
    vocabulary
        ``vocabulary/`` directory of an earlier dataset: its values keep their ids, whatever their counts are now, and
        new values come after them.
    on_bad_line
        ``"error"`` stops at a bad line of a log; ``"skip"`` leaves bad lines out and counts them.
    negatives
        Rule for negative numericals x of Criteo logs. ``"keep"``: ln(x + 3), where -3, which the published logs
        contain, is taken as -2; smaller values are bad. ``"zero"``: negative values become 0 first, as in the scripts
        of Facebook's DLRM. The report has the number of replaced values.
    format
        ``"split_binary"`` or ``"parquet"``. Default: split-binary for Criteo logs, and Parquet for all else, as the
        former holds one id per column only.
    executor
        What runs the tasks: ``"threads"``, ``"processes"``, ``"dask:ADDRESS"``, ``"ray:ADDRESS"`` or any
        `concurrent.futures.Executor`. Workers need hotbed, and all files at the same paths.
    workers
        Threads or processes. Default: one per core, or as many as ``memory`` is enough for.
    memory
        Bytes that may be used, by all threads and processes together, or by each worker of a cluster. What does not
        fit waits on the disk.
    overwrite
        Replace ``out`` if it is a dataset already.
    progress
        See `Progress`.

    Returns
    -------
    PrepareReport
        Samples by split, rows by table, lines skipped, columns left out, seconds.

    Raises
    ------
    DataError
        If a line is bad (names file, line, column and value), a file is empty or truncated, or ``out`` exists.
    SpecError
        If an argument is out of range.
    WorkerError
        If workers die again and again, or a cluster does not answer. What was done is kept, so that the same call goes
        on.
    OSError
        If the disk is full. Nothing is left behind after this or any other failure.
    """
    started = time.perf_counter()
    held_out = _held_out(valid_fraction, test_fraction, (valid_rows, test_rows), (valid_files, test_files), split)
    choices = {
        "count_on": (count_on, get_args(CountOn)),
        "on_bad_line": (on_bad_line, get_args(OnBadLine)),
        "negatives": (negatives, get_args(Negatives)),
        "format": (format or "parquet", get_args(Format)),
    }
    _check_arguments(threshold, top_k, choices, workers, memory)
    found = find_input([raw] if isinstance(raw, str | Path | Source) else list(raw), schema, on_bad_line, negatives)
    if held_out.by is not None and isinstance(found, Logs):
        raise SpecError("split is for files with columns of their own; choose splits of Criteo logs by rows or files")
    if negatives != "keep" and not isinstance(found, Logs):
        raise SpecError(
            f"negatives is {negatives!r}, but only Criteo logs have such a rule; leave it out, "
            "because other numbers stay as they are"
        )
    form: Format = format or ("split_binary" if isinstance(found, Logs) else "parquet")
    hashed = dict(hash_rows or {})
    check_hashed(hashed, hash_seed, found.schema)
    check_format(found.schema, form, hashed)
    sparse, names = found.schema.sparse, [table for table in found.schema.rows if table not in hashed]
    columns = {table: tuple(c.name for c in sparse if c.table_name == table) for table in names}
    earlier = (
        {} if vocabulary is None else {table: vocabulary_file(Path(vocabulary).absolute(), table) for table in columns}
    )
    for file in earlier.values():
        read_vocabulary(file)
    of_files = splits_of_files(found.names(), valid_files, test_files)
    said = (
        threshold,
        top_k,
        sorted(hashed.items()),
        hash_seed,
        held_out,
        count_on,
        on_bad_line,
        negatives,
        form,
        sorted(of_files.items()),
    )
    key = _key(found.state, [_state(file) for file in earlier.values()], found.schema.to_dict(), said)
    workers = workers or _workers_within(memory, executor)
    each = max(1 << 20, (memory - _BASE_BYTES) // (2 * (workers or 1)))
    report = progress or _silent
    with (
        open_tasks(executor, workers) as tasks,
        new_directory(
            Path(out), marker=MARKERS[form], overwrite=overwrite, key=key, kept_on=(WorkerError, KeyboardInterrupt)
        ) as directory,
    ):
        rmtree(directory / _DONE, ignore_errors=True)
        work, vocabularies = directory / ".work", directory / VOCABULARY
        spool, counts, encoded = work / "spool", work / "counts", work / "encoded"
        for folder in (vocabularies, spool, counts, encoded):
            folder.mkdir(parents=True, exist_ok=True)
        pieces = with_splits(found.pieces(spool, tasks, report), of_files)
        splits = divided(pieces := in_order(pieces), held_out)
        kinds, types, lists = found.kinds(), found.types(), found.lists()
        groups = groups_of(pieces)
        samples: Counter[str] = Counter()
        counting = [
            CountJob(group, columns, kinds, splits, count_on == "train", counts / f"{i:06d}", each)
            for i, group in enumerate(groups)
        ]
        total = len(groups) + len(columns)
        for done, of_group in enumerate(tasks.map(count, counting)):
            report("count", done, total)
            samples.update(of_group)
        _check_splits(samples, splits.names)
        merging = [
            MergeJob(table, counts, kinds[table], threshold, top_k, earlier.get(table), vocabularies, each)
            for table in columns
        ]
        entries: dict[str, VocabularyEntry] = {}
        for table, (values, sha256) in zip(columns, tasks.map(merge, merging), strict=True):
            report("count", len(groups) + len(entries), total)
            entries[table] = VocabularyEntry(kind=_kind(found, kinds[table]), values=values, sha256=sha256)
        rows = {table: hashed.get(table) or entries[table].values + 1 for table in found.schema.rows}
        report("count", total, total)
        made = dataset_schema(found.schema, rows)
        preparation = PreparationEntry(
            vocabularies=entries,
            tables={column.name: column.table_name for column in made.sparse},
            hashed={
                table: HashEntry(kind=_kind(found, kinds[table]), rows=n, seed=hash_seed) for table, n in hashed.items()
            },
            numericals=("log_zero" if negatives == "zero" else "log") if isinstance(found, Logs) else "as_is",
            dtype="float16" if form == "split_binary" else None,
        )
        encoding = [
            EncodeJob(
                group,
                i,
                made,
                found.schema.group,
                kinds,
                types,
                lists,
                splits,
                vocabularies,
                encoded / f"{i:06d}",
                form,
                preparation,
            )
            for i, group in enumerate(groups)
        ]
        for done, _ in enumerate(tasks.map(encode, encoding)):
            report("write", done, len(groups))
        assemble([job.out for job in encoding], directory, made, splits, form, preparation)
        report("write", len(groups), len(groups))
        work.replace(directory / _DONE)  # so that what is removed in part is not taken for what is there
        rmtree(directory / _DONE)
    return PrepareReport(
        path=Path(out),
        samples={split: samples[split] for split in splits.names},
        rows=rows,
        skipped=dict(found.skipped),
        replaced=dict(found.replaced),
        left_out=dict(found.left_out),
        seconds=time.perf_counter() - started,
    )


def _kind(found: Logs | Tables, values: pa.DataType) -> Kind:
    if isinstance(found, Logs):
        return "hexadecimal"
    return "text" if arrow.is_text(values) else "integers"


def _held_out(
    valid_fraction: float | None,
    test_fraction: float | None,
    rows: tuple[int, int],
    files: tuple[Sequence[str], Sequence[str]],
    split: Mapping[str, object] | None,
) -> HeldOut:
    """Check how splits were asked for; by default the test split has a tenth."""
    for name, share in (("valid_fraction", valid_fraction), ("test_fraction", test_fraction)):
        if share is not None and not 0 <= share < 1:
            raise SpecError(f"{name} is {share}, must be at least 0 and below 1")
    for name, number in zip(("valid_rows", "test_rows"), rows, strict=True):
        if number < 0:
            raise SpecError(f"{name} is {number:,}, must be at least 0")
    valid, test = valid_fraction or 0.0, test_fraction or 0.0
    if valid + test >= 1:
        raise SpecError(f"valid_fraction {valid} and test_fraction {test} leave nothing to train on; lower one")
    ways = {
        "a fraction": valid or test,
        "rows": any(rows),
        "files": any(files),
        "split": split is not None,
    }
    asked = [way for way, is_asked in ways.items() if is_asked]
    if len(asked) > 1:
        raise SpecError(f"splits are chosen by {' and by '.join(asked)}; choose one way")
    return HeldOut(valid, test_fraction, *rows, None if split is None else parse_row_split(split))


def _check_arguments(
    threshold: int,
    top_k: int | None,
    choices: Mapping[str, tuple[object, tuple[str, ...]]],
    workers: int | None,
    memory: int,
) -> None:
    if threshold < 1:
        raise SpecError(f"threshold is {threshold:,}, must be at least 1 (1 keeps every value)")
    for name, number in (("top_k", top_k), ("workers", workers)):
        if number is not None and number < 1:
            raise SpecError(f"{name} is {number:,}, must be at least 1")
    if memory < _BASE_BYTES + _TASK_BYTES:
        least = _BASE_BYTES + _TASK_BYTES
        raise SpecError(f"memory is {memory:,} bytes, must be at least {least:,}, which one task needs")
    for name, (value, known) in choices.items():
        if value not in known:
            raise SpecError(f"{name} is {value!r}, must be one of {', '.join(known)}")


def _check_splits(samples: Mapping[str, int], names: Sequence[str]) -> None:
    for split in names:
        if not samples[split]:
            raise DataError(f"no sample is in the {split} split; choose splits another way")


def _workers_within(memory: int, executor: str | Executor) -> int | None:
    """Workers that memory is enough for; None where the executor has its own."""
    if executor not in STARTED_HERE:
        return None
    return max(1, min(usable_cores(), (memory - _BASE_BYTES) // _TASK_BYTES))


def _key(*said: object) -> str:
    """8 hexadecimal digits of all that decides what is made."""
    return hashlib.sha256(repr((_VERSION, said)).encode()).hexdigest()[:8]


def _state(file: Path) -> object:
    info = file.stat()
    return str(file), info.st_size, info.st_mtime_ns


def _silent(stage: str, done: int, total: int) -> None: ...
