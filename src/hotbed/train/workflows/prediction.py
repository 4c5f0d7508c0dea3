"""Score new rows with a checkpoint's model, chunk by chunk: what ``hotbed predict`` calls.

Everything that turns a stored row into inputs comes out of the checkpoint: the recipe names columns and how ids become
rows of tables, the model's state has the statistics of its numericals. New data need no labels. Memory is that of the
model, and of a few chunks of the data.
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
from hotbed.checkpoint.single_files import exists, new_output, suffix
from hotbed.checks import check_known
from hotbed.data import Loader, Source
from hotbed.data.arrow_columns import NoColumnError
from hotbed.errors import BatchError, DataError, NonFiniteError, RecipeError, SpecError
from hotbed.locations import location
from hotbed.nn.dense_program import DensePart
from hotbed.serve.scorer import Scorer
from hotbed.train.metrics import to_device
from hotbed.train.numerics import resolve_device
from hotbed.train.runs.build import build_model
from hotbed.train.runs.stored_model import bad_ids, new_data, recipe_of, refuse_other_ids

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Predicted:
    """What `predict` wrote.

    Attributes
    ----------
    checkpoint
        Whose model it was.
    out
        The file.
    rows
        Its rows, one per row of the data, in their order.
    columns
        Its columns: those that were kept, then the scores.
    seconds
        How long it took, without loading the model.
    ids_out_of_range
        By feature, how many ids the model's tables have no row for.
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

    A row's score has the same bits whatever rows are beside it, and those that ``hotbed serve`` answers on the same
    processor; see `hotbed.serve.scorer`.

    Parameters
    ----------
    checkpoint
        A checkpoint with a recipe, or a run's directory, whose best or newest is taken.
    data
        Rows with the input columns of the recipe, as stored; of the same format as the data of the recipe, or raw rows
        (TSV or Parquet) if those are a dataset of ``hotbed prepare``. Labels, weights and groups are not needed.
    out
        File to make, a path or a URI, ``.parquet`` or ``.csv``: a column ``score``, or ``score_LABEL`` for each of
        several labels. It appears when it is complete.
    keep
        Columns of the data that are copied in front of the scores.
    split
        Which split, where the data are a folder with several.
    batch_size
        Rows that are computed at once; default: the recipe's ``train.eval_batch_size``.
    device
        ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU where there is one.
    trust_recipe
        Import what the stored recipe names, also if it is of neither hotbed nor torch.optim; see
        `hotbed.config.check_trust`.
    prepared
        Dataset of ``hotbed prepare`` whose vocabularies encode raw rows: the one that the model was trained on, where
        it is elsewhere than the recipe says.
    missing
        Input columns that the data may lack. All of their values are then missing: ids are row 0, and numbers follow
        the rule of their column.
    progress
        Called with the rows done and those there are.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or it holds no recipe.
    RecipeError
        If ``out`` exists, or has another ending; if the data have several splits and none is named.
    DataError
        If the data lack a column, or have one of another kind than in training; if they are raw rows, and the
        vocabularies to encode them are not there or are not those of the training.
    SpecError
        If a column's type cannot be its input.
    """
    target = _new_target(out)
    place = find_checkpoint(checkpoint, best=True)
    manifest = read_manifest(place)
    recipe = recipe_of(manifest, str(place), trusted=trust_recipe)
    try:
        source, labels = new_data(recipe, manifest, data, prepared, missing)
    except NoColumnError as error:
        absent = " ".join(error.columns)
        raise DataError(
            f"{error}. Add the column, or score without it as if all of its values were missing: --missing {absent}"
        ) from None
    source = source.streamed()
    refuse_other_ids(manifest, source, str(data))
    chosen = _split(source, split, str(data))
    names = ["score"] if len(labels) == 1 else [f"score_{label}" for label in labels]
    types: Callable[[], Mapping[str, str]] | None = getattr(source, "column_types", None)
    if keep and types is None:
        raise SpecError(f"{type(source).__name__} has no columns but those of its schema; leave --keep out")
    _refuse_keep(types() if keep and types is not None else {}, keep, names, target, str(data))
    size = recipe.train.eval_batch_size if batch_size is None else batch_size
    place_of_model = resolve_device(device, "--device")
    model = build_model(recipe, source, place_of_model)
    load_checkpoint(place, {"model": model})
    part = DensePart(model)
    tables = nn.ModuleList(part.collections.values())
    start, rows = time.perf_counter(), 0
    with (
        new_output(target) as stream,
        _Output(stream, suffix(target)) as output,
        Scorer(part, dict(part.collections), part.features, device=place_of_model) as scorer,
    ):
        batches = Loader(source, chosen, size) if source.samples(chosen) else ()
        on_device = (to_device(replace(batch, labels=None), tables, place_of_model) for batch in batches)
        scores = _Scores(_scored(scorer, on_device, len(labels)), len(labels))
        chunks = source.chunks(chosen)
        for i, count in enumerate(chunks):
            output.write(source.read_columns(chosen, i, keep) if keep else None, names, scores.take(count))
            rows += count
            progress(rows, sum(chunks))
        if not chunks:
            output.write(None, [*keep, *names], np.empty((0, len(keep) + len(names))))
    return Predicted(str(place), target, rows, [*keep, *names], time.perf_counter() - start, bad_ids(tables))


def _new_target(out: str | Path) -> str | Path:
    """The place of a file to make; a `RecipeError` if it is there, has another ending, or its folder is missing."""
    place = location(str(out))
    if suffix(place) not in (".parquet", ".csv"):
        raise RecipeError(f"--out is {out}, must end in .parquet or .csv")
    if exists(place):
        raise RecipeError(f"{out} exists already and is not overwritten; choose another --out")
    if isinstance(place, Path) and not place.absolute().parent.is_dir():
        raise RecipeError(f"--out is {out}, but there is no folder {place.parent}; make it")
    return place


def _split(source: Source, split: str | None, data: str) -> str:
    if split is None and len(source.splits) > 1:
        raise RecipeError(
            f"{data} has the splits {', '.join(source.splits)}; name one with --split, or give the path of one"
        )
    if split is not None:
        check_known(f"--split of {data}", split, source.splits, RecipeError)
    return next(name for name in source.splits if split in (None, name))


def _refuse_keep(
    there: Mapping[str, str], keep: Sequence[str], names: Sequence[str], target: str | Path, data: str
) -> None:
    """Raise unless the columns to keep are among those that are there, once, and the file can hold them."""
    for name, count in Counter(keep).items():
        check_known(f"--keep of {data}", name, there, DataError)
        if count > 1:
            raise RecipeError(f"--keep names '{name}' {count} times; once will do")
        if name in names:
            raise RecipeError(f"--keep names '{name}', which is the name of a column that is written; rename it")
        if suffix(target) == ".csv" and "<" in there[name].removeprefix("dictionary<"):
            raise RecipeError(f"--keep names '{name}', which is {there[name]} and no value of a CSV; write .parquet")


def _scored(scorer: Scorer, batches: Iterable[Batch], labels: int) -> Iterator[Scores]:
    """Yield probabilities ``[B, T]`` batch by batch, in the order of the data."""
    row = 0
    for batch in batches:
        scores = scorer(batch)
        if scores.shape != (len(batch), labels):
            raise BatchError(f"the model gave {scores.shape[1]} scores for each row, there are {labels} labels")
        if not np.isfinite(scores).all():
            at = int(np.flatnonzero(~np.isfinite(scores).all(1))[0])
            raise NonFiniteError(
                f"the score of row {row + at:,} is not a number; a numerical of this row is not finite or far "
                "beyond those of training: mend it, or give its column a rule for missing values when training"
            )
        row += len(batch)
        yield scores


class _Scores:
    """Scores of batches, to be taken in other numbers."""

    def __init__(self, batches: Iterator[Scores], labels: int) -> None:
        self._batches, self._rest = batches, np.empty((0, labels))

    def take(self, count: int) -> Scores:
        parts = [self._rest]
        while sum(map(len, parts)) < count:
            parts.append(next(self._batches))
        whole = np.concatenate(parts)
        self._rest = whole[count:]
        return whole[:count]


class _Output(AbstractContextManager["_Output"]):
    """A Parquet or CSV file that is written chunk by chunk."""

    def __init__(self, stream: BinaryIO, kind: str) -> None:
        self._stream, self._kind, self._writer, self._rows = stream, kind, cast(Any, None), 0

    def write(self, kept: Any, names: Sequence[str], scores: Scores) -> None:
        """Append rows: columns of a `pyarrow.Table`, and scores by name."""
        import pyarrow as pa
        from pyarrow import csv, parquet

        columns = {} if kept is None else {name: kept[name] for name in kept.column_names}
        if self._kind == ".csv":
            columns = {name: _plain_text(column, name, self._rows) for name, column in columns.items()}
        table = pa.table(columns | {name: pa.array(column) for name, column in zip(names, scores.T, strict=True)})
        if self._writer is None:
            make = parquet.ParquetWriter if self._kind == ".parquet" else csv.CSVWriter
            self._writer, self._schema = make(self._stream, table.schema), table.schema
        if table.schema != self._schema:  # other metadata, or files whose types differ
            try:
                table = table.cast(self._schema)
            except (pa.ArrowInvalid, ValueError) as error:
                raise DataError(f"the files of the data have a column of different types: {error}") from None
        self._writer.write_table(table)
        self._rows += len(table)

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _plain_text(column: Any, name: str, first_row: int) -> Any:
    """Return a column as a CSV file can hold it: without a dictionary, and bytes as text."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        return column
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        row, value = next((i, v) for i, v in enumerate(column.to_pylist()) if v is not None and not _is_utf8(v))
        raise DataError(
            f"column '{name}', row {first_row + row:,}: got the bytes {value[:40]!r}, expected text in UTF-8, which is "
            "all that a CSV file holds. Write .parquet"
        ) from None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
