"""The contract of a row store.

A store holds ``slots`` rows of ``dim`` float32 columns and, beside each row, the moments an optimizer asked for. It
knows neither tables nor hyperparameters: callers say which slots, and pass rule and hyperparameters with each update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Self

import torch
from torch import Tensor

from hotbed.ops import BagLayout, Occurrences, RuleStep
from hotbed.optim import Moment

Tier = Literal["device", "host"]


class RowStore(ABC):
    """Rows and their moments, addressed by slot."""

    slots: int
    dim: int

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where lookups deliver and updates take their tensors."""

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """Which memory holds the rows: the accelerator's (``device``) or the host's (``host``)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held: rows and moments."""

    @abstractmethod
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        """Give ``len(rows)`` slots from ``slot`` on the initial values of these cells of a table."""

    @abstractmethod
    def occurrences(self, bags: BagLayout) -> Occurrences:
        """Slot, bag and gradient factor of every id, as `update` takes them."""

    @abstractmethod
    def lookup(self, bags: BagLayout) -> Tensor:
        """Pooled vectors ``[B, F, D]``."""

    @abstractmethod
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        """Apply a rule once to each distinct slot of the occurrences; see `hotbed.ops.reference.update`."""

    @abstractmethod
    def add_moment(self, moment: Moment) -> None:
        """Make room for a moment, filled with 0; nothing happens if it is there already."""

    @abstractmethod
    def read(self, slots: Tensor, moment: str | None = None) -> Tensor:
        """Copy of the rows ``[n, D]`` (or of a moment, ``[n]`` or ``[n, D]``) at these slots ``[n]`` int64."""

    @abstractmethod
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None) -> None:
        """Overwrite the rows (or a moment) at these distinct slots."""

    @abstractmethod
    def to(self, device: torch.device) -> Self:
        """The same rows and moments on another device; the store itself if it is there already."""

    @abstractmethod
    def view(self, slots: slice, moment: str | None = None) -> Tensor:
        """The rows (or a moment) of a range of slots as one tensor that shares the store's memory."""
