"""Define the contract of a row store.

A row store (`RowStore`) has ``slots`` rows of ``dim`` columns in one dtype. The first rows of a span may be float32
instead. Next to each row, the store keeps the moments that an optimizer has added. The store knows no hyperparameters:
callers pass the rule and its hyperparameters with each update.

Stores in the host's memory or in files keep rows as *records* (`hotbed.store.records`).
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
from hotbed.store.slot_lists import Changes, SortedSlots, UpdatedSlotList, UpdatedSlots


class Span(NamedTuple):
    """Consecutive slots that hold all or some rows of one table.

    Attributes
    ----------
    rows
        Number of rows.
    fp32_rows
        Number of float32 rows, which are the first rows of the span.
    first_row, row_step
        The slots hold the rows ``first_row``, ``first_row + row_step``, … of the table.
    first_col
        Column of the table that is column 0 of the span.
    """

    rows: int
    fp32_rows: int = 0
    first_row: int = 0
    row_step: int = 1
    first_col: int = 0


class Extent(NamedTuple):
    """Rows ``start … stop − 1`` of an array in `DenseStore.arrays`."""

    array: str
    start: int
    stop: int


class Values(NamedTuple):
    """The complete state of some rows.

    Attributes
    ----------
    rows
        Float32 ``[n, D]``.
    moments
        Moments by name, ``[n]`` or ``[n, D]`` each.
    scales
        Exponents ``[n, blocks]`` int8 of the scales of int8 rows. Float32 rows have the least exponent. None if the
        store has no int8 rows.
    """

    rows: Tensor
    moments: dict[str, Tensor]
    scales: Tensor | None


class RowStore(ABC):
    """Keep rows and their moments, addressed by slot.

    Attributes
    ----------
    slots, dim
        Number of rows and of columns.
    on_change
        Called with the slots that are about to change, so that a checkpoint can be written during training.
    changes
        Changes since `track` was called. None before the first call.
    """

    slots: int
    dim: int
    on_change: Callable[[Tensor], None] | None = None
    changes: Changes | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the tensors that lookups return and updates receive."""

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """Memory of the rows: the accelerator's (``device``), the host's (``host``), or files (``disk``)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory of rows and moments."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of files."""
        return 0

    @property
    def traffic(self) -> Traffic:
        """Counts of caches, staging and files so far."""
        return Traffic()

    @property
    def served(self) -> list[list[int]]:
        """Hits and misses of a cache on the host, by span. Empty without such a cache."""
        return []

    def track(self, since: str) -> None:
        """Collect the rows that change from now on. ``since`` is the token of the checkpoint that is being saved."""
        self.changes = Changes(since, self._update_collector())

    def _update_collector(self) -> UpdatedSlots:
        return UpdatedSlotList()

    def changed(self) -> SortedSlots:
        """Return the slots that have changed since `track` was called."""
        assert self.changes is not None
        return self.changes.slots()

    def changing(self, slots: Tensor) -> None:
        """Report that `update`, `write` or `put` is about to change slots ``[n]``, which may be repeated."""
        if self.changes is not None:
            self.changes.add(slots.long())
        if self.on_change is not None:
            self.on_change(slots.long())

    def replaced(self) -> None:
        """Report that any row may change now. Callers that write into tensors of `raw` or `moment` must call this."""
        if self.changes is not None:
            self.changes.lose()

    @abstractmethod
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        """Set the slots from ``slot`` on to the initial values of the rows and columns of a table.

        Low-precision rows are rounded to nearest.
        """

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor that `lookup` can write to."""

    def grouped(self, bags: BagLayout) -> BagLayout:
        """Return bags with occurrences grouped by slot, if `lookup` and `update` both need the groups.

        Any thread may call this method.
        """
        return bags

    @abstractmethod
    def occurrences(self, bags: BagLayout) -> Occurrences:
        """Return the slot, bag and gradient factor of every id, for `update`."""

    @abstractmethod
    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        """Write pooled vectors into ``out [B, width, D]``. See `hotbed.ops.reference.lookup`."""

    @abstractmethod
    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Write the gradient of the per-id weights into ``out [N]``. See `hotbed.ops.reference.weight_gradient`."""

    @abstractmethod
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        """Apply a rule once to each distinct slot of the occurrences. See `hotbed.ops.reference.update`."""

    def prefetch(self, slots: Tensor) -> None:
        """Prefetch slots for the next `read` or `lookup`. Any thread may call this method."""
        return

    @abstractmethod
    def add_moment(self, moment: Moment) -> None:
        """Add a moment that is 0 for all rows. If the moment exists, this does nothing."""

    @abstractmethod
    def fill(self, span: int, moment: str, value: float) -> None:
        """Set a moment of all rows of a span to ``value``."""

    @property
    @abstractmethod
    def moment_names(self) -> list[str]:
        """Names of the moments that have been added."""

    @abstractmethod
    def moment_is_per_row(self, moment: str) -> bool:
        """Whether a moment has one value per row, rather than one per element."""

    @abstractmethod
    def read(
        self, slots: Tensor, moment: str | None = None, *, out: Tensor | None = None, use: Use = "lookup"
    ) -> Tensor:
        """Return the rows at slots ``[n]`` int64 as float32 ``[n, D]``, or a moment as ``[n]`` or ``[n, D]``.

        If contiguous memory ``out`` is passed, the values are copied to it. ``use`` is passed to caches and files.
        """

    @abstractmethod
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None, *, random: Tensor | None = None) -> None:
        """Overwrite the rows (or a moment) at distinct slots.

        Low-precision rows are rounded to nearest, or stochastically with the bits ``random [n, D]`` (`random_bits`).
        """

    @abstractmethod
    def values(self, slots: Tensor) -> Values:
        """Return the complete state of the rows at these slots, for an update. Caches do not count it as a lookup."""

    @abstractmethod
    def put(self, slots: Tensor, values: Values, *, random: Tensor | None = None) -> None:
        """Overwrite the complete state of the rows at distinct slots. Rows are rounded as in `write`.

        Scales of int8 rows grow if the values need it. ``values.scales`` must not be smaller than the stored scales.
        """

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """Return a store with these rows and moments on ``device``. If it is on ``device`` already, return itself."""

    @abstractmethod
    def moment(self, span: int, name: str) -> Tensor:
        """Return a moment of a span, ``[R]`` or ``[R, D]``. The tensor of a `DenseStore` shares its memory."""

    @abstractmethod
    def load_moment(self, span: int, name: str, values: Tensor) -> None:
        """Overwrite a moment of a span."""

    @abstractmethod
    def raw(self, span: int) -> dict[str, Tensor]:
        """Return the stored arrays of the rows of a span. The tensors of a `DenseStore` share its memory.

        If all rows are float32, the only array is ``weight [R, D]``. Otherwise ``weight`` holds the low-precision rows,
        ``exponents`` the scales of int8 rows, and ``fp32_weight`` the float32 rows, if any.
        """

    @abstractmethod
    def load_raw(self, span: int, raw: Mapping[str, Tensor]) -> None:
        """Overwrite the rows of a span with the arrays of `raw`."""
