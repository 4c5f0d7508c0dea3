"""Score new rows with a checkpoint's model, chunk by chunk: ``hotbed predict``.

The checkpoint has everything that encodes new rows. Its recipe defines the columns and how ids become rows of tables,
and its model has the statistics for normalizing numericals. New data needs no labels. Memory holds the model and a few
chunks of rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hotbed.batch import Batch
from hotbed.checkpoint import find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.storage import exists, new_output, suffix
from hotbed.checks import check_known
from hotbed.data import Loader, Source
from hotbed.data.arrow_columns import NoColumnError
from hotbed.errors import BatchError, DataError, NonFiniteError, RecipeError, SpecError
from hotbed.locations import location
from hotbed.nn.dense_program import DensePart
from hotbed.serve.scorer import Scorer
from hotbed.train.metrics import move_batch
from hotbed.train.numerics import resolve_device
from hotbed.train.runs.build import build_model
from hotbed.train.runs.stored_model import bad_ids, check_id_kinds, open_new_data, stored_recipe

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Predicted:
    """Result of `predict`.

    Attributes
    ----------
    checkpoint
        Checkpoint of the model.
    out
        Output file.
    rows
        Number of rows of the file. They have the order of the data.
    columns
        Columns of the file: first the kept columns, then the scores.
    seconds
        Seconds of scoring, without loading the model.
    ids_out_of_range
        Number of invalid ids by feature.
    """

    checkpoint: str
    out: str | Path
    rows: int
    columns: list[str]
    seconds: float
    ids_out_of_range: dict[str, int] = field(default_factory=dict)


def predict(
    checkpoint: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    keep: Sequence[str] = (),
    split: str | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    trust_recipe: bool = False,
    prepared: str | None = None,
    missing: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predicted:
    """Write the probability of each label for every row of new data.

    The bits of a row's score do not depend on the other rows of its batch. ``hotbed serve`` returns the same bits if it
    runs on the same processor (see `hotbed.serve.scorer`).

    Parameters
    ----------
    checkpoint
        A checkpoint with a recipe, or a run's directory. Of a run, the best checkpoint is used, or the newest one if
        none is marked as best.
    data
        Rows with the input columns of the recipe, in the format of the recipe's data. If ``hotbed prepare`` has written
        the recipe's data, the rows may also be raw (TSV or Parquet). Labels, weights and groups are not needed.
    out
        Path or URI of the file to create, which ends in ``.parquet`` or ``.csv``. The file has a column ``score``, or
        one column ``score_LABEL`` per label if there are several. The file appears when it is complete.
    keep
        Names of columns of the data that are copied to the file.
    split
        Name of the split to score. It is required if the data has several splits.
    batch_size
        Rows per batch (default: ``train.eval_batch_size`` of the recipe).
    device
        ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
    trust_recipe
        Import classes outside of hotbed and torch.optim that the stored recipe names; see
        `hotbed.config.check_trust`.
    prepared
        Dataset written by ``hotbed prepare``, with the vocabularies for raw rows (default: the path in the recipe).
    missing
        Names of input columns that may be absent. If an id column is absent, row 0 is looked up. If a numerical is
        absent, the column's rule for missing values applies.
    progress
        Called with the number of finished rows and the total.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or it has no recipe.
    RecipeError
        If ``out`` exists or has a different suffix, or if the data has several splits and ``split`` is None.
    DataError
        If a column is missing or has a different type than in training, or if the vocabularies for raw rows are missing
        or differ from training.
    SpecError
        If a column's type does not fit the schema.
    """
    target = _new_target(out)
    path = find_checkpoint(checkpoint, best=True)
    manifest = read_manifest(path)
    recipe = stored_recipe(manifest, str(path), trusted=trust_recipe)
    try:
        source, labels = open_new_data(recipe, manifest, data, prepared, missing)
    except NoColumnError as error:
        absent = " ".join(error.columns)
        raise DataError(
            f"{error}. Add the column to the data, or score as if all of its values were missing: --missing {absent}"
        ) from None
    source = source.streamed()
    check_id_kinds(manifest, source, str(data))
    chosen = _split(source, split, str(data))
    names = ["score"] if len(labels) == 1 else [f"score_{label}" for label in labels]
    types: Callable[[], Mapping[str, str]] | None = getattr(source, "column_types", None)
    if keep and types is None:
        raise SpecError(f"--keep: data of a {type(source).__name__} has no further columns to keep. Remove --keep")
    _check_keep(types() if keep and types is not None else {}, keep, names, target, str(data))
    size = recipe.train.eval_batch_size if batch_size is None else batch_size
    model_device = resolve_device(device, "--device")
    model = build_model(recipe, source, model_device)
    load_checkpoint(path, {"model": model})
    part = DensePart(model)
    tables = nn.ModuleList(part.collections.values())
    start, rows = time.perf_counter(), 0
    with (
        new_output(target) as stream,
        _ScoreWriter(stream, suffix(target)) as output,
        Scorer(part, dict(part.collections), part.features, device=model_device) as scorer,
    ):
        batches = Loader(source, chosen, size) if source.samples(chosen) else ()
        on_device = (move_batch(replace(batch, labels=None), tables, model_device) for batch in batches)
        chunks = source.chunks(chosen)
        for i, scores in enumerate(_regroup(_score(scorer, on_device, len(labels)), chunks, len(labels))):
            output.write(source.read_columns(chosen, i, keep) if keep else None, names, scores)
            rows += len(scores)
            progress(rows, sum(chunks))
        if not chunks:
            output.write(None, [*keep, *names], np.empty((0, len(keep) + len(names))))
    return Predicted(str(path), target, rows, [*keep, *names], time.perf_counter() - start, bad_ids(tables))


def _new_target(out: str | Path) -> str | Path:
    """Return the location of the file to create; raise `RecipeError` if it exists or cannot be created."""
    target = location(str(out))
    if suffix(target) not in (".parquet", ".csv"):
        raise RecipeError(f"--out is {out}, expected a path that ends in .parquet or .csv")
    if exists(target):
        raise RecipeError(f"--out is {out}, which exists. Choose a different --out")
    if isinstance(target, Path) and not target.absolute().parent.is_dir():
        raise RecipeError(f"--out is {out}, but the folder {target.parent} does not exist. Create this folder")
    return target


def _split(source: Source, split: str | None, data: str) -> str:
    if split is None and len(source.splits) > 1:
        raise RecipeError(
            f"{data} has the splits {', '.join(source.splits)}. Choose one with --split, or pass the path of one split"
        )
    if split is not None:
        check_known(f"--split of {data}", split, source.splits, RecipeError)
    return next(name for name in source.splits if split in (None, name))


def _check_keep(
    types: Mapping[str, str], keep: Sequence[str], names: Sequence[str], target: str | Path, data: str
) -> None:
    """Raise an error unless the columns to keep exist, are named once, and have types that the file can store."""
    for name, count in Counter(keep).items():
        check_known(f"--keep of {data}", name, types, DataError)
        if count > 1:
            raise RecipeError(f"--keep names '{name}' {count} times, expected once")
        if name in names:
            raise RecipeError(f"--keep names '{name}', but a score column has this name. Rename the column in the data")
        if suffix(target) == ".csv" and "<" in types[name].removeprefix("dictionary<"):
            raise RecipeError(
                f"--keep names '{name}' of type {types[name]}, which CSV cannot store. Use .parquet for --out"
            )


def _score(scorer: Scorer, batches: Iterable[Batch], labels: int) -> Iterator[Scores]:
    """Yield the probabilities ``[B, T]`` of each batch, in the order of the data."""
    row = 0
    for batch in batches:
        scores = scorer(batch)
        if scores.shape != (len(batch), labels):
            raise BatchError(f"the model returned {scores.shape[1]} scores per row, expected {labels}, one per label")
        if not np.isfinite(scores).all():
            at = int(np.flatnonzero(~np.isfinite(scores).all(1))[0])
            raise NonFiniteError(
                f"the score of row {row + at:,} is not a number, because a numerical of this row is not finite or far "
                "outside of the training data. Correct the numerical, or train with a rule for missing values of its "
                "column"
            )
        row += len(batch)
        yield scores


def _regroup(batches: Iterator[Scores], chunks: Iterable[int], labels: int) -> Iterator[Scores]:
    """Regroup the scores of batches, so that each yielded array has the rows of one chunk.

    ``chunks`` has the number of rows of each chunk.
    """
    rest = np.empty((0, labels))
    for count in chunks:
        parts = [rest]
        while sum(map(len, parts)) < count:
            parts.append(next(batches))
        whole = np.concatenate(parts)
        rest = whole[count:]
        yield whole[:count]


class _ScoreWriter(AbstractContextManager["_ScoreWriter"]):
    """Write a Parquet or CSV file chunk by chunk."""

    def __init__(self, stream: BinaryIO, file_type: str) -> None:
        self._stream, self._type, self._writer, self._rows = stream, file_type, cast(Any, None), 0

    def write(self, kept: Any, names: Sequence[str], scores: Scores) -> None:
        """Append rows: the columns of ``kept`` (a `pyarrow.Table` or None), then ``scores`` with these ``names``."""
        import pyarrow as pa
        from pyarrow import csv, parquet

        columns = {} if kept is None else {name: kept[name] for name in kept.column_names}
        if self._type == ".csv":
            columns = {name: _plain_text(column, name, self._rows) for name, column in columns.items()}
        table = pa.table(columns | {name: pa.array(column) for name, column in zip(names, scores.T, strict=True)})
        if self._writer is None:
            make = parquet.ParquetWriter if self._type == ".parquet" else csv.CSVWriter
            self._writer, self._schema = make(self._stream, table.schema), table.schema
        if table.schema != self._schema:  # files of the data may differ in metadata or types
            try:
                table = table.cast(self._schema)
            except (pa.ArrowInvalid, ValueError) as error:
                raise DataError(
                    f"the files of the data have different types for a column: {error}. Convert the column to one type"
                ) from None
        self._writer.write_table(table)
        self._rows += len(table)

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _plain_text(column: Any, name: str, first_row: int) -> Any:
    """Convert a column for CSV: replace dictionary codes by values, and bytes by text."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        return column
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        values = enumerate(column.to_pylist())
        row, value = next((i, v) for i, v in values if v is not None and v.decode(errors="ignore").encode() != v)
        raise DataError(
            f"column '{name}', row {first_row + row:,}: got the bytes {value[:40]!r}, expected UTF-8 text. Use "
            ".parquet for --out"
        ) from None
