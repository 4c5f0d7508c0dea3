"""Small DLRMs of other libraries in plain torch: random weights, and what each computes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, pad, relu

from hotbed.batch import Batch
from hotbed.checkpoint import load_checkpoint, verify_checkpoint
from hotbed.checkpoint.importers import Peer, import_checkpoint
from hotbed.errors import CheckpointError
from hotbed.jagged import Jagged
from hotbed.nn import DLRM
from hotbed.specs import Feature, Table

DENSE = 13
SAMPLES = 7
Layers = list[tuple[Tensor, Tensor]]


class Reference(NamedTuple):
    """Weights of a DLRM; ``top`` takes ``columns`` of the interaction, padding included."""

    tables: list[Tensor]
    bottom: Layers
    top: Layers

    @property
    def vectors(self) -> int:
        return 1 + len(self.tables)

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        draw = torch.Generator().manual_seed(4)
        ids = [torch.randint(0, len(table), (SAMPLES,), generator=draw) for table in self.tables]
        return torch.randn(SAMPLES, DENSE, generator=draw), ids

    def vectors_of(self, order: Sequence[int] | None = None) -> Tensor:
        """``[B, n, D]``: the bottom's output, and the features in some order."""
        dense, ids = self.inputs()
        first = run(self.bottom, pad(dense, (0, self.bottom[0][0].shape[1] - DENSE)), last_relu=True)
        looked_up = [table[i] for table, i in zip(self.tables, ids, strict=True)]
        return torch.stack([first, *(looked_up[f] for f in (range(len(ids)) if order is None else order))], 1)

    def logits(self, interaction: Tensor) -> Tensor:
        return run(self.top, interaction, last_relu=False)


def random_reference(
    rows: Sequence[int] = (20, 5, 9), dim: int = 16, *, inputs: int = DENSE, padding: int = 0
) -> Reference:
    draw = torch.Generator().manual_seed(len(rows) + dim)

    def layers(widths: Sequence[int]) -> Layers:
        return [
            (torch.randn(o, i, generator=draw) / i**0.5, torch.randn(o, generator=draw)) for i, o in pairwise(widths)
        ]

    n = 1 + len(rows)
    return Reference(
        [torch.randn(r, dim, generator=draw) for r in rows],
        layers([inputs, 24, dim]),
        layers([dim + n * (n - 1) // 2 + padding, 32, 8, 1]),
    )


def run(layers: Layers, x: Tensor, *, last_relu: bool) -> Tensor:
    for i, (weight, bias) in enumerate(layers):
        x = linear(x, weight, bias)
        x = relu(x) if last_relu or i < len(layers) - 1 else x
    return x


def lower(vectors: Tensor, padding: int = 0) -> Tensor:
    """Interaction with pairs (1, 0), (2, 0), (2, 1), …."""
    n = vectors.shape[1]
    i, j = zip(*((i, j) for i in range(n) for j in range(i)), strict=True)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat((vectors[:, 0], products[:, i, j], torch.zeros(len(vectors), padding)), 1)


def upper(vectors: Tensor) -> Tensor:
    """Interaction with pairs (0, 1), (0, 2), …, (1, 2), …."""
    n = vectors.shape[1]
    i, j = torch.triu_indices(n, n, offset=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat((vectors[:, 0], products[:, i, j]), 1)


def pad8(reference: Reference) -> int:
    n = reference.vectors
    return -(reference.tables[0].shape[1] + n * (n - 1) // 2) % 8


def imported_logits(checkpoint: Path, reference: Reference, names: Sequence[str]) -> Tensor:
    """What hotbed's DLRM gives of a checkpoint, whose tables must be the reference's, bit for bit."""
    verify_checkpoint(checkpoint)
    dim = reference.tables[0].shape[1]
    model = DLRM(
        [Table(name, len(table), dim) for name, table in zip(names, reference.tables, strict=True)],
        [Feature(name, name) for name in names],
        DENSE,
        bottom=[len(bias) for _, bias in reference.bottom],
        top=[len(bias) for _, bias in reference.top],
        seed=9,
    )
    load_checkpoint(checkpoint, {"model": model})
    for name, table in zip(names, reference.tables, strict=True):
        assert torch.equal(model.embeddings.weight(name), table), name
    dense, ids = reference.inputs()
    with torch.no_grad():
        return model(Batch(sparse=Jagged.from_dict(dict(zip(names, ids, strict=True))), dense=dense))


def refused(source: Path, peer: Peer, **options: Any) -> str:
    """Return why an import is refused, which leaves nothing behind."""
    target = source.parent / "refused"
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(source, target, peer, **options)
    assert not target.exists()
    return str(caught.value)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
