"""TorchRec's ``DLRM_DCN`` with the sizes of `benchmarks.models.rates`, in the environment of ``make bench-peers``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

import hotbed as hb
from benchmarks.models.rates import DENSE, LAYERS, LOW_RANK, TOP
from benchmarks.peers.torchrec_side import bags, distributed


def torchrec_step(
    args: argparse.Namespace, names: Sequence[str], batches: Sequence[hb.Batch], labels: Tensor
) -> Callable[[int], None]:
    """A training step, with row-wise AdaGrad in backward and Adam."""
    collection = bags(dict.fromkeys(names, (args.rows, args.dim)), {name: name for name in names}, 0.05, 1e-8)
    made = DLRM_DCN(collection, DENSE, [512, 256, args.dim], [*TOP], LAYERS, LOW_RANK)
    model = distributed(made, collection, names, "sparse_arch.embedding_bag_collection", None)
    tables = "embedding_bags"
    dense = torch.optim.Adam([p for name, p in model.named_parameters() if tables not in name], lr=1e-3)
    lengths = torch.ones(len(names) * args.batch, dtype=torch.int64)
    ids = [KeyedJaggedTensor(keys=[*names], values=batch.sparse.values, lengths=lengths) for batch in batches]

    def step(number: int) -> None:
        F.binary_cross_entropy_with_logits(model(batches[number].dense, ids[number]), labels).backward()
        dense.step()
        dense.zero_grad()

    return step
