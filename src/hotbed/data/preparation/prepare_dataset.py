"""Prepare raw logs or tables as a dataset of ids, in four stages.

1. *read* (`raw_inputs`; Criteo logs only): check and parse every field, and write the rows to temporary Parquet files.
2. *count* (`counting`): count the values of each table, and write the counts to files that are sorted by value.
3. *merge* (`counting`): add up the counts, and assign ids to frequent values in a vocabulary.
4. *write* (`encoded_rows`): replace values by ids.

Each stage consists of tasks, and each task writes its own files. So any worker can run any task, and a killed
preparation can resume. All files are in a hidden directory next to the output, which is renamed to the output at the
end.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from hotbed.data import arrow_columns as arrow
from hotbed.data.encoding.prepared_dataset import HashEntry, Kind, PreparationEntry, VocabularyEntry, check_hashed
from hotbed.data.encoding.vocabulary import VOCABULARY, read_vocabulary, vocabulary_file
from hotbed.data.executors import open_tasks
from hotbed.data.preparation.counting import CountJob, MergeJob, count_values, merge_runs
from hotbed.data.preparation.encoded_rows import EncodeJob, assemble, check_format, dataset_schema, encode_group
from hotbed.data.preparation.prepare_options import PrepareOptions
from hotbed.data.preparation.raw_inputs import (
    Piece,
    Progress,
    divide_pieces,
    find_input,
    group_pieces,
    parse_logs,
    splits_of_files,
)
from hotbed.data.preparation.stored_rows import MARKERS, Format
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, WorkerError
from hotbed.files import new_directory

_DONE = ".done"
_VERSION = 3  # of temporary files; a killed preparation resumes only if the version is equal


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """Result of `prepare`."""

    path: Path
    samples: Mapping[str, int]  # by split
    rows: Mapping[str, int]  # number of rows by table, including row 0
    skipped: Mapping[str, int]  # number of skipped lines by fault: fields, label, numerical, categorical
    replaced: Mapping[str, int]  # number of values by column that the option `negatives` replaced (Criteo logs only)
    left_out: Mapping[str, str]  # type and reason by column that the drafted schema omits
    seconds: float


def prepare(
    raw: str | Path | Source | Sequence[str | Path],
    out: str | Path,
    *,
    progress: Progress = lambda stage, done, total: None,
    **options: Any,
) -> PrepareReport:
    """Convert raw Criteo logs, or Parquet, CSV and TSV files with any columns, to a dataset of ids.

    Values with at least ``threshold`` occurrences in a table get ids 1, 2, … by descending count, then by value.
    Missing and rarer values get id 0. A numerical x of a Criteo log becomes ln(x + 3), and a missing numerical becomes
    0. All other columns are stored unchanged. Samples keep their order. By default, samples are assumed to be in time
    order, and the last samples are the test split.

    The output directory has a folder per split, ``vocabulary/``, and ``feature_spec.yaml`` (split-binary format, for
    `SplitBinarySource`) or ``source.yaml`` (Parquet, for `ParquetSource`). The bytes in this directory depend only on
    the data and the options, not on the workers. To resume a killed preparation, repeat the same call.

    Parameters
    ----------
    raw
        Paths or URIs of the input. Criteo logs are a file (plain, gzip or zstd), several files in time order, or a
        directory of ``day_*`` or ``*.tsv[.gz|.zst]`` files. Tables are files or folders that `ParquetSource` reads:
        Parquet, or CSV and TSV with a header. The input may also be a folder that `SplitBinarySource` or `NpySource`
        reads, or any `Source`. The ids of such an input are counted like raw values.
    out
        Directory of the dataset.
    progress
        Function that is called with a stage, the work done, and the total work.
    options
        Fields of `hotbed.data.preparation.prepare_options.PrepareOptions`, e.g. ``threshold=2``.

    Raises
    ------
    DataError
        If a line is bad (the message names file, line, column and value), a file is empty or truncated, or ``out``
        exists.
    SpecError
        If an option is out of range.
    WorkerError
        If workers die repeatedly, or a cluster does not answer. Finished tasks are kept. To resume, repeat the call.
    OSError
        If the disk is full. All written files are removed, as after any failure except `WorkerError`.
    """
    started = time.perf_counter()
    chosen = PrepareOptions(**options)
    found = find_input([raw] if isinstance(raw, str | Path | Source) else list(raw), chosen.schema)
    is_log, schema, kinds = bool(found.logs), found.schema, found.kinds
    if is_log and chosen.split is not None:
        fix = "Set fractions, rows or files of the splits instead"
        raise SpecError(f"split: got a rule for Criteo logs, which works only for files with named columns. {fix}")
    if not is_log and chosen.negatives != "keep":
        raise SpecError(f"negatives: got {chosen.negatives!r}, which works only for Criteo logs. Remove this option")
    form: Format = chosen.format or ("split_binary" if is_log else "parquet")
    hashed = dict(chosen.hash_rows or {})
    check_hashed(hashed, chosen.hash_seed, schema)
    check_format(schema, form, hashed)
    columns = {
        table: tuple(c.name for c in schema.sparse if c.table_name == table)
        for table in schema.rows
        if table not in hashed
    }
    earlier: dict[str, Path] = {}
    if chosen.vocabulary is not None:
        earlier = {table: vocabulary_file(Path(chosen.vocabulary).absolute(), table) for table in columns}
    for file in earlier.values():
        read_vocabulary(file)  # raises an error for a bad file before any work is done
    of_files = splits_of_files(found.names(), chosen)
    content = (
        _VERSION,
        found.state,
        [(str(file), (info := file.stat()).st_size, info.st_mtime_ns) for file in earlier.values()],
        schema.to_dict(),
        chosen.content(),
        form,
        sorted(hashed.items()),
        sorted(of_files.items()),
    )
    key = hashlib.sha256(repr(content).encode()).hexdigest()[:8]
    with (
        open_tasks(chosen.executor, chosen.worker_count()) as tasks,
        new_directory(
            Path(out),
            marker=MARKERS[form],
            overwrite=chosen.overwrite,
            key=key,
            kept_on=(WorkerError, KeyboardInterrupt),
        ) as directory,
    ):
        rmtree(directory / _DONE, ignore_errors=True)
        work, vocabularies = directory / ".work", directory / VOCABULARY
        spool, counts, encoded = work / "spool", work / "counts", work / "encoded"
        for folder in (vocabularies, spool, counts, encoded):
            folder.mkdir(parents=True, exist_ok=True)
        skipped, replaced = Counter[str](), Counter[str]()
        pieces = [
            Piece(rows, split=split or None)
            for split, of_split in found.tables.items()
            for file in of_split
            for rows in file.row_groups()
        ]
        if is_log:
            pieces, skipped, replaced = parse_logs(found.logs, chosen, spool, tasks, progress)
        pieces, splits = divide_pieces(pieces, of_files, chosen)
        groups = group_pieces(pieces)

        def kind(table: str) -> Kind:
            return "hexadecimal" if is_log else "text" if arrow.is_text(kinds[table]) else "integers"

        samples: Counter[str] = Counter()
        each, total = chosen.task_bytes(), len(groups) + len(columns)
        counting = [
            CountJob(group, columns, kinds, splits, chosen.count_on == "train", counts / f"{i:06d}", each)
            for i, group in enumerate(groups)
        ]
        for done, of_group in enumerate(tasks.map(count_values, counting)):
            progress("count", done, total)
            samples.update(of_group)
        if (empty := next((split for split in splits.names if not samples[split]), None)) is not None:
            raise DataError(f"{empty} split: got no samples, expected at least one. Change the options of the splits")
        merging = [
            MergeJob(
                table, counts, kinds[table], chosen.threshold, chosen.top_k, earlier.get(table), vocabularies, each
            )
            for table in columns
        ]
        entries: dict[str, VocabularyEntry] = {}
        for table, (values, sha256) in zip(columns, tasks.map(merge_runs, merging), strict=True):
            progress("count", len(groups) + len(entries), total)
            entries[table] = VocabularyEntry(kind=kind(table), values=values, sha256=sha256)
        rows = {table: hashed.get(table) or entries[table].values + 1 for table in schema.rows}
        progress("count", total, total)
        made = dataset_schema(schema, rows)
        preparation = PreparationEntry(
            vocabularies=entries,
            tables={column.name: column.table_name for column in made.sparse},
            hashed={table: HashEntry(kind=kind(table), rows=n, seed=chosen.hash_seed) for table, n in hashed.items()},
            numericals=("log_zero" if chosen.negatives == "zero" else "log") if is_log else "as_is",
            dtype="float16" if form == "split_binary" else None,
        )
        encoding = [
            EncodeJob(
                group=group,
                index=i,
                schema=made,
                group_column=schema.group,
                kinds=kinds,
                types=found.types,
                lists=found.lists,
                splits=splits,
                vocabularies=vocabularies,
                out=encoded / f"{i:06d}",
                form=form,
                preparation=preparation,
            )
            for i, group in enumerate(groups)
        ]
        for done, _ in enumerate(tasks.map(encode_group, encoding)):
            progress("write", done, len(groups))
        assemble([job.out for job in encoding], directory, made, splits, form, preparation)
        progress("write", len(groups), len(groups))
        work.replace(directory / _DONE)  # a later call must not resume from a partly removed directory
        rmtree(directory / _DONE)
    return PrepareReport(
        path=Path(out),
        samples={split: samples[split] for split in splits.names},
        rows=rows,
        skipped=dict(skipped),
        replaced=dict(replaced),
        left_out=dict(found.left_out),
        seconds=time.perf_counter() - started,
    )
