"""Define `Source`, the interface of stored samples that a `Loader` needs and that data formats implement.

A source is divided into chunks that can be read independently, in any order and from several threads. A `Loader`
orders, shuffles, batches and resumes samples in the same way for all sources.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from hotbed.batch import Batch
from hotbed.checks import check_known
from hotbed.data.schema import Schema
from hotbed.errors import SpecError

if TYPE_CHECKING:  # imports pyarrow
    from hotbed.data.encoding.encoder import Encoder


class Source(ABC):
    """Stored samples in splits (``"train"``, ``"valid"``, ``"test"``), each a list of chunks in time order.

    A subclass sets ``schema`` and ``splits``, and implements ``_chunks`` and ``_read``. ``_read`` must return only the
    columns of ``self.schema``, because `only` removes columns. If it can read labels or numericals without other
    columns, it overrides ``_check_labels`` or ``_read_numericals``. If it stores columns that are not in the schema, it
    overrides ``_read_columns``. If `Schema.numericals` is not empty, ``dense`` of batches is float64, and these columns
    have the stored values, which are not scaled. Null becomes NaN.
    """

    schema: Schema
    splits: tuple[str, ...]

    def chunks(self, split: str) -> list[int]:
        """Return the number of samples of each chunk of a split, without reading the chunks.

        Raises
        ------
        SpecError
            If the source has no such split.
        """
        self._check(split)
        return list(self._chunks(split))

    def samples(self, split: str) -> int:
        """Return the number of samples of a split."""
        return sum(self.chunks(split))

    def read(self, split: str, i: int) -> Batch:
        """Read chunk ``i`` of a split as one batch in CPU memory. Several threads may call this at once.

        If a chunk is exactly one batch, a loader returns the chunk without a copy. So do not modify batches in place
        if the source caches its chunks.

        Raises
        ------
        SpecError
            If the source has no such split or chunk.
        DataError
            If stored data do not match their description.
        """
        self._check(split)
        count = len(self._chunks(split))
        if not 0 <= i < count:
            raise SpecError(f"chunk of split '{split}': got {i:,}, expected at least 0 and below {count:,}")
        return self._read(split, i)

    def read_numericals(self, split: str, i: int) -> Tensor | None:
        """Return the dense columns ``[n, I]`` of a chunk as `read` does, or None if there are no dense columns."""
        self._check(split)
        return self._read_numericals(split, i)

    def read_columns(self, split: str, i: int, names: Sequence[str]) -> Any:
        """Return stored columns of a chunk as a `pyarrow.Table`, including columns that the schema does not name.

        Raises
        ------
        SpecError
            If the source does not store these columns.
        """
        self._check(split)
        return self._read_columns(split, i, names)

    def files(self) -> Sequence[Path]:
        """Return the files that samples are read from. A killed preparation resumes only if no file has changed."""
        return ()

    def id_kinds(self) -> dict[str, str]:
        """Return the type of stored values, ``"integers"`` or ``"text"``, by hashed column.

        Types must be equal in training and prediction, because an integer and its text are hashed to different rows.
        The mapping is empty if the source stores table rows, which are not hashed.
        """
        return {}

    def is_missing(self, column: str) -> bool:
        """Return whether a stored column has no value in any sample. Then its type in `id_kinds` has no meaning."""
        return False

    def measure(  # noqa: B027 (most sources have nothing to measure)
        self, splits: str | Sequence[str] = "train", *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Measure the statistics that derived columns need and that are not yet known, in one pass.

        Parameters
        ----------
        splits
            The split or splits to measure.
        progress
            Function that is called with the number of measured samples, and the total number of samples.
        """

    @property
    def encoder(self) -> Encoder | None:
        """The encoder that converts raw rows to batches as in `read`, or None if the source has no raw rows."""
        return None

    def check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        """Check before training that all labels of a split are from 0 to 1, as binary cross-entropy requires.

        Only labels are read. A source that always reads all columns checks nothing here. The trainer also checks the
        labels of each batch.

        Returns
        -------
        dict
            The smallest and the largest label by column, or an empty dict if nothing was checked.

        Raises
        ------
        SpecError
            If the source has no such split.
        DataError
            If a label is out of range, NaN or missing. The message names the value, its location and the fix.
        """
        self._check(split)
        return self._check_labels(split)

    def streamed(self) -> Self:
        """Return a source for reading once and in order. Its chunks are smaller if the format supports this."""
        return self

    def only(self, features: Collection[str]) -> Self:
        """Return the source with only these sparse columns. The remaining sparse columns are not read."""
        fewer = copy.copy(self)
        fewer.schema = self.schema.only(features)
        return fewer

    def _check_labels(self, split: str) -> dict[str, tuple[float, float]]:
        return {}

    def _read_numericals(self, split: str, i: int) -> Tensor | None:
        return self._read(split, i).dense

    def _read_columns(self, split: str, i: int, names: Sequence[str]) -> Any:
        raise SpecError(
            f"columns to keep: got {', '.join(names)}, but {type(self).__name__} stores only columns of its schema. "
            "Remove the columns to keep from the command"
        )

    @abstractmethod
    def _chunks(self, split: str) -> Sequence[int]: ...

    @abstractmethod
    def _read(self, split: str, i: int) -> Batch: ...

    def _check(self, split: str) -> None:
        check_known("split", split, self.splits, SpecError)
