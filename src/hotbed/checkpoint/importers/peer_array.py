"""Define an array in a file of another library, which importers read by rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.errors import CheckpointError


class PeerArray(NamedTuple):
    """An array in a file: ``rows`` returns rows ``start … stop − 1`` as a copy in memory.

    ``where`` is its file and key, for errors.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    where: str
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(tensor: Tensor, where: str) -> PeerArray:
        """A tensor, which may be mapped from a file."""
        flat = torch.atleast_1d(tensor.detach())

        def rows(start: int, stop: int) -> Tensor:
            return flat[start:stop].clone()

        return PeerArray(tuple(tensor.shape), rows, where, tensor.dtype)

    def whole(self) -> Tensor:
        """All of it in memory."""
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1)[0]

    def matrix(self) -> PeerArray:
        """Itself; a `CheckpointError` if it is not a matrix with at least one row and column."""
        if len(self.shape) != 2 or not all(self.shape):
            raise CheckpointError(f"{self.where} has shape {list(self.shape)}; a table must be [rows, dim], not empty")
        if not self.dtype.is_floating_point:
            raise CheckpointError(
                f"{self.where} holds {self.dtype}; a table must be floating point, save it as float32"
            )
        return self


def existing(path: Path) -> Path:
    """The path; a `CheckpointError` if there is no such file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy the whole checkpoint")
    return path
