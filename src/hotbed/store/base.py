"""Define what a row store must do.

A row store (`RowStore`) has ``slots`` rows of ``dim`` columns in one dtype (the first rows of a span may be float32),
and beside each row the moments an optimizer asked for. It knows no hyperparameters: callers pass rule and
hyperparameters with each update.

Where rows are in the memory of the host or in files they are in *records* (`hotbed.store.records`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hotbed.ops import BagLayout, Occurrences, RuleStep
from hotbed.optim import Moment
from hotbed.specs import Tier
from hotbed.store.records import Traffic, Use
from hotbed.store.rising import RisingSlots
from hotbed.store.touched import Changes, Touched, TouchedSlots


class Span(NamedTuple):
    """Describe consecutive slots that hold rows of one table, all of them or some.

    Attributes
    ----------
    rows
        Number of rows.
    fp32_rows
        How many of them, from the first on, are float32.
    first_row, row_step, first_col
        Which row of the table the first slot holds, how many rows further the next one, and which column column 0 is.
    """

    rows: int
    fp32_rows: int = 0
    first_row: int = 0
    row_step: int = 1
    first_col: int = 0


class Extent(NamedTuple):
    """Name rows ``start … stop − 1`` of one of a store's `DenseStore.arrays`."""

    array: str
    start: int
    stop: int


class Values(NamedTuple):
    """Hold all that a store keeps of some rows.

    Attributes
    ----------
    rows
        Float32 ``[n, D]``.
    moments
        By name ``[n]`` or ``[n, D]``.
    scales
        Exponents ``[n, blocks]`` int8 of the scales of int8 rows, the least of all where rows are float32; None where
        no rows are int8.
    """

    rows: Tensor
    moments: dict[str, Tensor]
    scales: Tensor | None


class RowStore(ABC):
    """Keep rows and their moments, addressed by slot.

    Attributes
    ----------
    slots, dim
        Number of rows, and of columns.
    on_change
        Called with what `changing` is, so that a checkpoint can be written while training goes on.
    changes
        What has changed since `track` was called; None where it was not.
    """

    slots: int
    dim: int
    on_change: Callable[[Tensor], None] | None = None
    changes: Changes | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where lookups deliver and updates take their tensors."""

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """What holds the rows: the accelerator's memory (``device``), the host's (``host``), or files (``disk``)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory: rows and moments."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of files."""
        return 0

    @property
    def traffic(self) -> Traffic:
        """What caches, staging and files did so far."""
        return Traffic()

    @property
    def served(self) -> list[list[int]]:
        """By span, lookups that a cache on the host served, and those that it did not; empty without a cache."""
        return []

    def track(self, since: str) -> None:
        """Note which rows change from now on, after the moment of the checkpoint that this token is of."""
        self.changes = Changes(since, self._touched())

    def _touched(self) -> Touched:
        return TouchedSlots()

    def changed(self) -> RisingSlots:
        """List the slots that have changed since `track` was called."""
        assert self.changes is not None
        return self.changes.slots()

    def changing(self, slots: Tensor) -> None:
        """Tell who wants to know that `update`, `write` or `put` is about to change these slots ``[n]``, some twice."""
        if self.changes is not None:
            self.changes.add(slots.long())
        if self.on_change is not None:
            self.on_change(slots.long())

    def replaced(self) -> None:
        """Tell that any rows may be overwritten now; who writes into what `raw` or `moment` share calls this, too."""
        if self.changes is not None:
            self.changes.lose()

    @abstractmethod
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        """Give ``len(rows)`` slots from ``slot`` on the initial values of these cells of a table.

        Narrow rows are rounded to the nearest.
        """

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor for `lookup` to write to."""

    def grouped(self, bags: BagLayout) -> BagLayout:
        """Group the occurrences of bags, if `lookup` and `update` both need that; another thread may call this."""
        return bags

    @abstractmethod
    def occurrences(self, bags: BagLayout) -> Occurrences:
        """List slot, bag and gradient factor of every id, as `update` takes them."""

    @abstractmethod
    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Write pooled vectors into ``out [B, width, D]``; see `hotbed.ops.reference.lookup`."""

    @abstractmethod
    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Write the gradient of the per-id weights into ``out [N]``; see `hotbed.ops.reference.weight_gradient`."""

    @abstractmethod
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        """Apply a rule once to each distinct slot of the occurrences; see `hotbed.ops.reference.update`."""

    def prefetch(self, slots: Tensor) -> None:
        """Read ahead the slots that the next `read` or `lookup` asks for; may be called by another thread."""
        return

    @abstractmethod
    def add_moment(self, moment: Moment) -> None:
        """Make room for a moment, filled with 0; nothing happens if it is there already."""

    @abstractmethod
    def fill(self, span: int, moment: str, value: float) -> None:
        """Give all rows of a span this value of a moment."""

    @property
    @abstractmethod
    def moment_names(self) -> list[str]:
        """Moments that there is room for."""

    @abstractmethod
    def moment_is_per_row(self, moment: str) -> bool:
        """Whether there is one value per row of a moment, and not one per element."""

    @abstractmethod
    def read(
        self, slots: Tensor, moment: str | None = None, *, out: Tensor | None = None, use: Use = "lookup"
    ) -> Tensor:
        """Copy the rows as float32 ``[n, D]`` (or a moment, ``[n]`` or ``[n, D]``) at these slots ``[n]`` int64.

        ``out`` is contiguous memory to copy to; it is returned then. ``use`` is passed to caches and files.
        """

    @abstractmethod
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None, *, random: Tensor | None = None) -> None:
        """Overwrite the rows (or a moment) at these distinct slots.

        Narrow rows are rounded to the nearest, or stochastically with these bits ``[n, D]`` (see `random_bits`).
        """

    @abstractmethod
    def values(self, slots: Tensor) -> Values:
        """Copy all that is kept of the rows at these slots, to be changed; caches do not count it as a lookup."""

    @abstractmethod
    def put(self, slots: Tensor, values: Values, *, random: Tensor | None = None) -> None:
        """Overwrite the rows at these distinct slots, rounded as by `write`, and every moment of theirs.

        Scales of int8 rows grow to what the values need; those given may be no smaller than those that are there.
        """

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return the same rows and moments on another device; the store itself if it is there already."""

    @abstractmethod
    def moment(self, span: int, name: str) -> Tensor:
        """Return a moment of the slots of a span ``[R]`` or ``[R, D]``; shares memory with a `DenseStore`."""

    @abstractmethod
    def load_moment(self, span: int, name: str, values: Tensor) -> None:
        """Overwrite a moment of the slots of a span."""

    @abstractmethod
    def raw(self, span: int) -> dict[str, Tensor]:
        """Return what the rows of a span are stored as; shares memory with a `DenseStore`.

        ``weight`` ``[R, D]`` float32 where all rows are; else ``weight`` (narrow rows), ``exponents`` of int8 rows, and
        ``fp32_weight`` of the rows that are float32, if any.
        """

    @abstractmethod
    def load_raw(self, span: int, raw: Mapping[str, Tensor]) -> None:
        """Overwrite the rows of a span with what `raw` gave."""
