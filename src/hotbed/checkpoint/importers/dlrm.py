"""Layers of other libraries' DLRMs as those of `hotbed.nn.DLRM`.

All of them put ``n`` vectors of ``D`` columns, that of the dense inputs first, into a dot interaction: the first
vector, then the products of all pairs. They differ in the order of the vectors, of the pairs, and in padding; so
columns of the first top layer are put into hotbed's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hotbed.checkpoint.importers.arrays import PeerArray
from hotbed.errors import CheckpointError

Triangle = Literal["lower", "upper"]
"""Which pairs a row of the matrix of products gives: those with vectors before, or those with vectors after."""


class Layer(NamedTuple):
    """A fully connected layer: ``weight [out, in]``, ``bias [out]``, and where it comes from."""

    weight: Tensor
    bias: Tensor
    where: str


def dlrm_layers(
    bottom: Sequence[Layer],
    top: Sequence[Layer],
    tables: Sequence[PeerArray],
    *,
    triangle: Triangle = "lower",
    positions: Sequence[int] | None = None,
    paddings: Sequence[int] = (0,),
) -> dict[str, Tensor]:
    """State of the MLPs of `hotbed.nn.DLRM`.

    Parameters
    ----------
    bottom, top
        All layers, with ReLU between them.
    tables
        One for each feature, in the order that hotbed's features are to have.
    triangle, positions
        The peer's order of pairs; and for each feature, the place of its vector among the peer's features (default:
        its own).
    paddings
        By how many columns the peer may have padded the interaction, at its end.

    Raises
    ------
    CheckpointError
        If shapes do not fit each other, or the peer's interaction is another one.
    """
    for name, layers in (("bottom", bottom), ("top", top)):
        _check_chain(name, layers)
    dim, vectors = len(bottom[-1].bias), 1 + len(tables)
    for table in tables:
        if table.matrix().shape[1] != dim:
            raise CheckpointError(
                f"{table.where} has {table.shape[1]} columns, but the bottom MLP ends with {dim}; a DLRM needs one dim"
            )
    first = top[0].weight
    used = dim + vectors * (vectors - 1) // 2
    widths = sorted({used + padding for padding in paddings})
    if first.shape[1] not in widths:
        other = {
            used + vectors: " (this is what products of vectors with themselves, too, would give)",
            vectors * dim: " (this is what vectors side by side would give)",
        }
        raise CheckpointError(
            f"{top[0].where} takes {first.shape[1]} inputs{other.get(first.shape[1], '')}, but {dim} columns and the "
            f"products of {vectors} vectors, of one feature per table, are {' or '.join(map(str, widths))}; hotbed's "
            "DLRM computes no other interaction"
        )
    columns = torch.cat([torch.arange(dim), dim + _pairs(vectors, triangle, positions)])
    permuted = pad(first[:, columns], (0, -used % 8))
    found: dict[str, Tensor] = {}
    for name, layers in (("bottom", bottom), ("top", [top[0]._replace(weight=permuted), *top[1:]])):
        for i, layer in enumerate(layers):
            found[f"{name}.{2 * i}.weight"] = layer.weight.to(torch.float32)
            found[f"{name}.{2 * i}.bias"] = layer.bias.to(torch.float32)
    return found


def padded_to_8(dim: int, features: int) -> int:
    """Columns that are missing to a multiple of 8."""
    return -(dim + features * (features + 1) // 2) % 8


def _pairs(vectors: int, triangle: Triangle, positions: Sequence[int] | None) -> Tensor:
    """Place among the peer's pairs of each of hotbed's, which are the lower triangle by rows."""
    place = torch.tensor([0, *(1 + p for p in (range(vectors - 1) if positions is None else positions))])
    i, j = torch.tril_indices(vectors, vectors, -1)
    later, earlier = torch.maximum(place[i], place[j]), torch.minimum(place[i], place[j])
    if triangle == "lower":
        return later * (later - 1) // 2 + earlier
    return earlier * vectors - earlier * (earlier + 1) // 2 + later - earlier - 1


def _check_chain(name: str, layers: Sequence[Layer]) -> None:
    if not layers:
        raise CheckpointError(f"the {name} MLP has no layers; a DLRM needs at least one")
    width: int | None = None
    for layer in layers:
        if layer.weight.dim() != 2 or layer.bias.shape != layer.weight.shape[:1]:
            raise CheckpointError(
                f"{layer.where}: weight {list(layer.weight.shape)} and bias {list(layer.bias.shape)} must be [out, in] "
                "and [out]"
            )
        if width is not None and layer.weight.shape[1] != width:
            raise CheckpointError(
                f"{layer.where} takes {layer.weight.shape[1]} inputs, but the layer before it gives {width}"
            )
        width = layer.weight.shape[0]
