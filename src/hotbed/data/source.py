"""Define `Source`: what a `Loader` needs from stored samples; the contract of a data format.

A source is cut into chunks that can be read alone, in any order and from several threads. Order, shuffling, batching
and resuming belong to the loader, so they work alike for every source.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from hotbed.batch import Batch
from hotbed.data.schema import Schema
from hotbed.errors import SpecError, did_you_mean

if TYPE_CHECKING:  # it needs pyarrow
    from hotbed.data.encoding.encoder import Encoder


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
