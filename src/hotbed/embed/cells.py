"""Parts of rows inside a matrix of whole rows: a matrix of narrower rows, its cells, is the same memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """Some columns of some rows of a matrix ``[…, D]``: a unit has ``cols`` columns, which are whole cells.

    Attributes
    ----------
    at
        ``[n · cols / width]`` the cells of each unit, counted through the matrix.
    width
        Columns of a cell; divides D.
    cols
        Columns of a unit.
    """

    at: Tensor
    width: int
    cols: int

    def take(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """The units ``[n, cols]``; ``out`` is contiguous memory to copy to."""
        cells = matrix.reshape(-1, self.width)
        if out is None:
            return torch.index_select(cells, 0, self.at).view(-1, self.cols)
        torch.index_select(cells, 0, self.at, out=out.view(-1, self.width))
        return out

    def put(self, units: Tensor, matrix: Tensor) -> None:
        """Write units ``[n, cols]`` to their places in a contiguous matrix."""
        matrix.view(-1, self.width).index_copy_(0, self.at, units.view(-1, self.width))
