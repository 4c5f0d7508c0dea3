"""Prepare a raw Criteo log as a dataset in split-binary format.

Three stages, each with bounded memory:

1. *read*: the log, block by block; every field is checked; parsed blocks are spooled to disk as Parquet.
2. *count*: one column at a time, how often each value occurs; memory is that of one column's distinct values.
3. *write*: one column at a time, values become ids, block by block.

All is written into a hidden directory beside the output, which is renamed when everything is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data.columns import SparseColumn
from hotbed.data.criteo import DENSE, LABEL, SPARSE, LineChecker, OnBadLine, find_files, read_blocks, size_of
from hotbed.data.preparation import PreparationEntry, VocabularyEntry
from hotbed.data.schema import Schema
from hotbed.data.split_binary import SplitBinaryWriter
from hotbed.data.vocabulary import VOCABULARY, Vocabulary, check_exists, vocabulary_file
from hotbed.errors import DataError, SpecError
from hotbed.files import new_directory
from hotbed.locations import RemoteFile

if TYPE_CHECKING:
    import polars as pl

Progress = Callable[[str, int, int], None]
"""Called with the stage (``"read"``, ``"count"``, ``"write"``), what is done of it, and what there is to do."""

CountOn = Literal["train", "all"]


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
    seconds
        Wall-clock time.
    """

    path: Path
    samples: Mapping[str, int]
    rows: Mapping[str, int]
    skipped: Mapping[str, int]
    seconds: float

    @property
    def skipped_lines(self) -> int:
        """Number of lines left out."""
        return sum(self.skipped.values())


def prepare(
    raw: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    threshold: int = 15,
    valid_fraction: float = 0.0,
    test_fraction: float = 0.1,
    count_on: CountOn = "train",
    vocabulary: str | Path | None = None,
    on_bad_line: OnBadLine = "error",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PrepareReport:
    """Turn a raw Criteo log into a dataset for `SplitBinarySource`.

    Per categorical column, values seen at least ``threshold`` times get ids 1, 2, … by falling count, ties by value;
    missing and rarer values are id 0. Numericals become ln(x + 3), missing ones 0. The log is in time order, so the
    last lines are the test split and the lines before them the valid split.

    The directory holds ``feature_spec.yaml``, one directory per split, and ``vocabulary/``.

    Parameters
    ----------
    raw
        The log: a file (plain or gzip), several in time order, or a directory of ``day_*`` or ``*.tsv[.gz]`` files;
        paths or URIs.
    out
        The dataset directory to make.
    threshold
        Smallest count of a value that gets an id of its own. NVIDIA's default is 15.
    valid_fraction, test_fraction
        Share of the lines in these splits; 0 leaves the split out.
    count_on
        ``"train"`` counts values in the train split only, so nothing about the test split leaks into the vocabulary:
        a value that is new there is id 0, as it would be in production. ``"all"`` counts the whole log, as NVIDIA's
        scripts do.
    vocabulary
        ``vocabulary/`` directory of an earlier dataset: its values keep their ids, whatever their counts are now, and
        new values come after them.
    on_bad_line
        ``"error"`` stops at a bad line; ``"skip"`` leaves bad lines out and counts them.
    overwrite
        Replace ``out`` if it is a dataset already.
    progress
        See `Progress`.

    Returns
    -------
    PrepareReport
        Samples by split, rows by table, lines skipped, seconds.

    Raises
    ------
    DataError
        If a line is bad (names file, line, column and value), a file is empty or truncated, or ``out`` exists.
    SpecError
        If an argument is out of range.
    OSError
        If the disk is full. Nothing is left behind after any failure.
    """
    started = time.perf_counter()
    _check_arguments(threshold, valid_fraction, test_fraction, count_on, on_bad_line)
    files, out = find_files(raw), Path(out)
    report = progress or _silent
    old = {} if vocabulary is None else {name: vocabulary_file(vocabulary, name) for name in SPARSE}
    for file in old.values():
        check_exists(file)
    checker = LineChecker(on_bad_line)
    with new_directory(out, marker="feature_spec.yaml", overwrite=overwrite) as directory:
        spool = _Spool(directory / "spool")
        spool.fill(files, checker, report)
        samples = _split_sizes(spool.samples, valid_fraction, test_fraction)
        counted = samples["train"] if count_on == "train" else spool.samples
        vocabularies = directory / VOCABULARY
        vocabularies.mkdir()
        columns: list[SparseColumn] = []
        entries: dict[str, VocabularyEntry] = {}
        for i, name in enumerate(SPARSE):
            report("count", i, len(SPARSE))
            earlier = Vocabulary.load(old[name]) if old else Vocabulary.empty()
            grown = earlier.extended(*spool.counts(name, counted), threshold)
            grown.save(vocabulary_file(vocabularies, name))
            columns.append(SparseColumn(name=name, rows=grown.rows))
            entries[name] = VocabularyEntry.of(pa.array(grown.values), "hexadecimal")
        report("count", len(SPARSE), len(SPARSE))
        schema = Schema(labels=(LABEL,), dense=DENSE, sparse=tuple(columns))
        preparation = PreparationEntry(vocabularies=entries, numericals="log", dtype="float16")
        with SplitBinaryWriter(directory, schema, list(samples), preparation=preparation.model_dump()) as writer:
            _write(spool, samples, vocabularies, writer, report)
        rmtree(spool.path)
    return PrepareReport(
        path=out,
        samples=samples,
        rows=schema.rows,
        skipped=dict(checker.skipped),
        seconds=time.perf_counter() - started,
    )


class _Spool:
    """Parsed blocks on disk, read back column by column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sizes: list[int] = []
        path.mkdir()

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    def fill(self, files: Sequence[Path | RemoteFile], checker: LineChecker, report: Progress) -> None:
        total = sum(map(size_of, files))
        before = 0
        for file in files:

            def seen(done: int, before: int = before) -> None:
                report("read", before + done, total)

            for block in read_blocks(file, seen):
                frame = checker.parse(block)
                if len(frame):
                    # Arrow's writer, because it reports a full disk as an OSError with its errno.
                    pq.write_table(frame.to_arrow(), self._file(len(self.sizes)), compression="lz4")
                    self.sizes.append(len(frame))
            before += size_of(file)
        if not self.sizes:
            raise DataError(f"{files[0]} has no good line ({sum(checker.skipped.values()):,} were skipped)")

    def counts(self, column: str, samples: int) -> tuple[NDArray[np.uint32], NDArray[Any]]:
        """Distinct values of a column in the first samples, and how often each occurs."""
        import polars as pl

        values = pl.scan_parquet(self.path / "*.parquet").select(column).head(samples).drop_nulls()
        counted = values.group_by(column).len("count").collect(engine="streaming")
        return counted[column].to_numpy(), counted["count"].to_numpy()

    def read(self, columns: Sequence[str], samples: Mapping[str, int]) -> Iterator[tuple[str, pl.DataFrame]]:
        """Parts of some columns in order, none of which crosses from one split to the next."""
        import polars as pl

        splits = iter(samples.items())
        split, left = next(splits)
        for i in range(len(self.sizes)):
            frame = pl.read_parquet(self._file(i), columns=list(columns))
            while len(frame):
                if left == 0:
                    split, left = next(splits)
                part = frame.head(left)
                yield split, part
                left -= len(part)
                frame = frame.slice(len(part))

    def _file(self, i: int) -> Path:
        return self.path / f"{i:08d}.parquet"


def _write(
    spool: _Spool,
    samples: Mapping[str, int],
    vocabularies: Path,
    writer: SplitBinaryWriter,
    report: Progress,
) -> None:
    for split, frame in spool.read([LABEL, *DENSE], samples):
        writer.append_labels(split, frame[LABEL].to_numpy())
        writer.append_dense(split, frame.select(DENSE).fill_null(0.0).to_numpy())
    for i, name in enumerate(SPARSE):
        report("write", i, len(SPARSE))
        vocabulary = Vocabulary.load(vocabulary_file(vocabularies, name))
        for split, frame in spool.read([name], samples):
            missing = frame[name].is_null().to_numpy()
            ids = vocabulary.lookup(frame[name].fill_null(0).to_numpy())
            writer.append_ids(split, i, np.where(missing, 0, ids))
    report("write", len(SPARSE), len(SPARSE))


def _split_sizes(samples: int, valid_fraction: float, test_fraction: float) -> dict[str, int]:
    valid, test = round(samples * valid_fraction), round(samples * test_fraction)
    sizes = {"train": samples - valid - test}
    sizes |= {"valid": valid} if valid_fraction else {}
    sizes |= {"test": test} if test_fraction else {}
    for split, size in sizes.items():
        if size < 1:
            raise DataError(
                f"the log has {samples:,} good lines, too few for a {split} split with valid_fraction {valid_fraction} "
                f"and test_fraction {test_fraction}; change the fractions, or set one to 0"
            )
    return sizes


def _check_arguments(threshold: int, valid: float, test: float, count_on: str, on_bad_line: str) -> None:
    if threshold < 1:
        raise SpecError(f"threshold is {threshold:,}, must be at least 1 (1 keeps every value)")
    for name, value in (("valid_fraction", valid), ("test_fraction", test)):
        if not 0 <= value < 1:
            raise SpecError(f"{name} is {value}, must be at least 0 and below 1")
    if valid + test >= 1:
        raise SpecError(f"valid_fraction {valid} and test_fraction {test} leave nothing to train on; lower one")
    for name, value, choices in (
        ("count_on", count_on, get_args(CountOn)),
        ("on_bad_line", on_bad_line, get_args(OnBadLine)),
    ):
        if value not in choices:
            raise SpecError(f"{name} is {value!r}, must be one of {', '.join(choices)}")


def _silent(stage: str, done: int, total: int) -> None: ...
