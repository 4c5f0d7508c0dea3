"""Define `Source`: what a `Loader` needs from stored samples; the contract of a data format.

A source is cut into chunks that can be read alone, in any order and from several threads. Order, shuffling, batching
and resuming belong to the loader, so they work alike for every source.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotbed.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean

if TYPE_CHECKING:  # it needs pyarrow
    from hotbed.data.encode import Encoder


ROWS = "the rows"
"""Name of rows that come from no file, in messages."""


def place_of_row(at: int) -> str:
    """Return the name of a row that comes from no file."""
    return f"row {at:,}"


@dataclass(frozen=True)
class Place:
    """Where values are stored, for messages. `refuse` raises `DataError` at the first bad value."""

    name: str = ROWS  # file, row group or request
    row_of: Callable[[int], str] = place_of_row

    def refuse(
        self,
        column: str,  # empty if the name of the place includes it
        problem: str,  # one or two words, equal for all values with this fault
        bad: NDArray[np.bool_],  # [N]
        values: Any,  # [N], an array of NumPy or Arrow
        shown: str,  # format of a value
        fix: str | Callable[[object], str],  # the limit and the fix, or a function that returns them for a value
    ) -> None:
        """Raise `DataError` if any value is bad; the message names the first."""
        if bad.any():
            raise DataError(self.message(column, int(bad.argmax()), values, shown, fix))

    def message(self, column: str, at: int, values: Any, shown: str, fix: str | Callable[[object], str]) -> str:
        """Describe the value at a position."""
        value: Any = values[at]
        if hasattr(value, "as_py"):
            try:
                value = value.as_py()
            except UnicodeDecodeError as error:  # Parquet's readers do not check that text is UTF-8
                value = error.object
        elif isinstance(value, np.generic):
            value = value.item()
        text = shown.format("null" if value is None else value)
        where = f"{self.name}, column '{column}'" if column else self.name
        return f"{where}: {text} at {self.row_of(at)}; {fix if isinstance(fix, str) else fix(value)}"

    def of_lists(self, lengths: NDArray[np.int64]) -> Self:
        """The place of the values of lists with these lengths ``[n]``."""
        ends = np.cumsum(lengths)

        def row_of(at: int) -> str:
            return self.row_of(int(np.searchsorted(ends, at, side="right")))

        return replace(self, row_of=row_of)


def refuse_labels(
    labels: NDArray[Any],  # [n]
    column: str,
    place: Place,
    *,
    values: Any = None,  # [n], the labels as they are stored, if that differs
    can_map: bool = False,  # whether the source maps labels as its schema says
) -> None:
    """Raise `DataError` unless all labels are from 0 to 1."""

    def fix(value: Any) -> str:
        if value is None or value != value:  # NaN
            fix = "it is missing, so drop these samples"
        elif not can_map:
            fix = "this format stores them as 0 and 1; write it anew, or use Parquet, whose labels can be mapped"
        else:
            condition = "'> 0'" if value == -1 else "'>= 4'"
            when = "where they are -1 and 1" if value == -1 else "say from which value on a sample is positive"
            fix = f"{when}, with labels: [{{column: {column!r}, positive: {condition}}}] in the schema"
        return (
            f"labels must be from 0 to 1: {fix}; or name another column (hotbed init --label NAME, `labels` of the "
            "schema)"
        )

    bad = ~((labels >= 0) & (labels <= 1))
    place.refuse(column, "labels out of range", bad, labels if values is None else values, "label {}", fix)


def label_ranges(parts: Iterable[tuple[Place, str, NDArray[Any]]]) -> dict[str, tuple[float, float]]:
    """Check the labels ``[n]`` of parts of columns, and return the smallest and the largest by column."""
    found: dict[str, tuple[float, float]] = {}
    for place, column, labels in parts:
        least, most = float(labels.min()), float(labels.max())  # NaN if one label is
        if not (least >= 0 and most <= 1):
            refuse_labels(labels, column, place)
        low, high = found.get(column, (math.inf, -math.inf))
        found[column] = min(low, least), max(high, most)
    return found


def refuse_other_kind(what: str, column: str, kind: str, trained: str) -> None:
    """Raise `DataError` if ids are stored otherwise than in training: they would be hashed to other rows.

    Kinds are those of `Source.id_kinds`; "" is one that nothing is known of.
    """
    if kind and trained and kind != trained:
        raise DataError(
            f"{what}, column '{column}': its values are {kind}, and the model was trained with {trained}, which are "
            f"other ids (5 and '5' are hashed to different rows); write the column as {trained}"
        )


class Source(ABC):
    """Stored samples in splits (``"train"``, ``"valid"``, ``"test"``), each a list of chunks in time order.

    A subclass sets ``schema`` and ``splits`` and defines ``_chunks`` and ``_read``; ``_check_labels`` and
    ``_read_numericals`` if it can read labels and numericals alone; ``_read_columns`` if it has columns besides its
    schema's. Numbers of `Schema.numericals` it hands as they are stored, with NaN where one is missing, in float64.
    """

    schema: Schema
    splits: tuple[str, ...]

    def chunks(self, split: str) -> list[int]:
        """Count the samples of each chunk of a split, without reading them.

        Raises
        ------
        SpecError
            If the source has no such split.
        """
        self._check(split)
        return list(self._chunks(split))

    def samples(self, split: str) -> int:
        """Count the samples of a split."""
        return sum(self.chunks(split))

    def read(self, split: str, i: int) -> Batch:
        """Chunk ``i`` of a split as one batch in CPU memory. May be called from several threads at once.

        Loaders give a chunk that is exactly a batch away as it is: what changes a batch in place changes what a source
        keeps of it.

        Raises
        ------
        SpecError
            If the source has no such split or chunk.
        DataError
            If what is stored is not what its description says.
        """
        self._check(split)
        count = len(self._chunks(split))
        if not 0 <= i < count:
            raise SpecError(f"split '{split}' has {count:,} chunks, there is no chunk {i:,}")
        return self._read(split, i)

    def read_numericals(self, split: str, i: int) -> Tensor | None:
        """Dense columns of a chunk ``[n, I]``, as `read` has them; None where there are none.

        Statistics are measured by it. A source that can read them alone does.
        """
        self._check(split)
        return self._read_numericals(split, i)

    def read_columns(self, split: str, i: int, names: Sequence[str]) -> Any:
        """Stored columns of a chunk as a `pyarrow.Table`, also those that the schema does not name.

        Raises
        ------
        SpecError
            If this source has no such columns.
        """
        self._check(split)
        return self._read_columns(split, i, names)

    def files(self) -> Sequence[Path]:
        """The files that samples are read from; a preparation that was killed goes on where none has changed."""
        return ()

    def id_kinds(self) -> dict[str, str]:
        """By sparse column what its stored values are, ``"integers"`` or ``"text"``; empty where they are rows.

        A value and its text are different ids where ids are hashed, so these must be what they were in training.
        """
        return {}

    def is_missing(self, column: str) -> bool:
        """Whether no sample has a value of a stored column, so that its kind in `id_kinds` means nothing."""
        return False

    def measure(  # noqa: B027 (most sources have nothing to measure)
        self, splits: str | Sequence[str] = "train", *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Measure what derived columns need and is not known yet, in one pass over these splits.

        Parameters
        ----------
        splits
            One split, or several one after the other.
        progress
            Called with the samples done and those there are.
        """

    @property
    def encoder(self) -> Encoder | None:
        """What turns raw rows into batches, as `read` does; None where a source's samples are batches already."""
        return None

    def check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        """Check that the labels of a split are from 0 to 1, as binary cross-entropy needs, before any is trained on.

        No more than the labels is read. A source that cannot read them alone leaves it to the trainer, which checks
        every batch before the step.

        Returns
        -------
        dict
            The smallest and the largest label by column; empty where nothing was looked at.

        Raises
        ------
        SpecError
            If the source has no such split.
        DataError
            If a label is another number, NaN or absent; names the value, where it is stored, and what to do.
        """
        self._check(split)
        return self._check_labels(split)

    def streamed(self) -> Self:
        """The same samples in smaller chunks, for reading once and in order; as they are, where a format has none."""
        return self

    def only(self, features: Collection[str]) -> Self:
        """The same samples with these sparse columns only; what is left out is not read."""
        fewer = copy.copy(self)
        fewer.schema = self.schema.only(features)
        return fewer

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        return {}

    def _read_numericals(self, split: str, i: int) -> Tensor | None:
        return self._read(split, i).dense

    def _read_columns(self, split: str, i: int, names: Sequence[str]) -> Any:
        raise SpecError(
            f"{type(self).__name__} has no columns but those of its schema, so {', '.join(names)} cannot be kept"
        )

    @abstractmethod
    def _chunks(self, split: str) -> Sequence[int]: ...

    @abstractmethod
    def _read(self, split: str, i: int) -> Batch: ...

    def _check(self, split: str) -> None:
        if split not in self.splits:
            raise SpecError(
                f"there is no split '{split}'; there are {', '.join(self.splits)}{did_you_mean(split, self.splits)}"
            )
