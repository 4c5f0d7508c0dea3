"""Same weights, ids and gradients into TorchRec and hotbed on several ranks: same pooled vectors, rows and moments out?

python -m benchmarks.peers.numerics_world2, once per rank, in the environment that `benchmarks.peers.ranks` gives them;
rank 0 prints a line of JSON.

Tables, features, steps and tolerance are those of `benchmarks.peers.numerics`, the optimizer is row-wise AdaGrad; each
rank has its part of every batch and of every table. Both sides get the gradient of a rank's own loss, and take that of
all to be the mean over ranks, see `benchmarks.peers.torchrec_side`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

import hotbed as hb
from benchmarks.peers import ranks, torchrec_side
from benchmarks.peers.numerics import (
    BATCH,
    DIM,
    EPSILON,
    FEATURES,
    LR,
    ROWS,
    STEPS,
    TOLERANCE,
    initial_rows,
    inputs,
    largest_difference,
)

SCHEMES: Mapping[str, Mapping[str, bool]] = {"table": {}, "row": {}, "column": {"per_shard_statistics": True}}
"""Schemes, with what makes hotbed compute what TorchRec does: column-wise, it keeps a moment per row and shard."""

Shard = tuple[tuple[slice, ...], Tensor]
"""Which rows (and columns) of a table, and their values; those that one rank holds."""


def own_inputs(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """This rank's ids, lengths of bags and gradient ``[B, F · D]`` of each step."""
    samples = slice(rank * BATCH // count, (rank + 1) * BATCH // count)
    for ids, lengths, grad in inputs():
        bags = ids.split(lengths.tolist())
        own = [bag for i in range(len(FEATURES)) for bag in bags[i * BATCH : (i + 1) * BATCH][samples]]
        yield torch.cat(own), lengths.view(-1, BATCH)[:, samples].flatten(), grad[samples]


def shards_of(sharded: Any) -> list[Shard]:
    """What this rank holds of a tensor that TorchRec has sharded."""
    found: list[Shard] = []
    for shard in sharded.local_shards():
        bounds = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        found.append((tuple(slice(first, first + size) for first, size in bounds), shard.tensor.detach()))
    return found


def run_torchrec(scheme: str, rank: int, count: int) -> tuple[Tensor, dict[str, dict[str, list[Shard]]]]:
    """Pooled vectors ``[steps, B, F · D]`` of this rank; by table, its ``rows`` and, but for columns, ``moments``."""
    bags = torchrec_side.bags({name: (rows, DIM) for name, rows in ROWS.items()}, FEATURES, LR, EPSILON["eps"])
    model = torchrec_side.distributed(bags, bags, list(ROWS), "", scheme)
    weights = {name: model.state_dict()[f"embedding_bags.{name}.weight"] for name in ROWS}
    for start, weight in zip(initial_rows(), weights.values(), strict=True):
        for where, values in shards_of(weight):
            values.copy_(start[where])
    pooled: list[Tensor] = []
    for ids, lengths, grad in own_inputs(rank, count):
        found = model(KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths))
        pooled.append(torch.cat([found[feature] for feature in FEATURES], 1))
        pooled[-1].backward(grad)
    held = {name: {"rows": shards_of(weight)} for name, weight in weights.items()}
    state = model.fused_optimizer.state_dict()["state"]  # of tables that this rank holds something of
    for name, of_table in held.items():
        if scheme != "column" and of_table["rows"]:
            of_table["moments"] = shards_of(state[f"embedding_bags.{name}.weight"][f"{name}.momentum1"])
    return torch.stack(pooled).detach(), held


def run_hotbed(scheme: str, rank: int, count: int) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Pooled vectors ``[steps, B, F · D]`` of this rank; by table, whole, ``rows`` and ``moments``."""
    collection = hb.EmbeddingCollection(
        [hb.Table(name, rows=rows, dim=DIM) for name, rows in ROWS.items()],
        [hb.Feature(name, table=table) for name, table in FEATURES.items()],
    )
    tables: Any = hb.distribute(collection, scheme, hb.ParallelOptions(**SCHEMES[scheme]))
    tables.load_state_dict({f"{name}.weight": start for name, start in zip(ROWS, initial_rows(), strict=True)})
    sparse = hb.optim.RowWiseAdagrad(tables, lr=LR, **EPSILON)
    pooled: list[Tensor] = []
    for ids, lengths, grad in own_inputs(rank, count):
        pooled.append(tables(hb.Jagged.from_keyed(list(FEATURES), ids, lengths)).concatenate())
        pooled[-1].backward(grad)
        sparse.step()
    state = sparse.state_dict()["state"]
    found = {
        name: {"rows": tables.weight(name), "moments": next(iter(state[i].values()))} for i, name in enumerate(ROWS)
    }
    return torch.stack(pooled).detach(), found


def compare(scheme: str, rank: int, count: int) -> dict[str, Any]:
    """Run one scheme on both sides and say how it ended, on all ranks together."""
    their_pooled, theirs = run_torchrec(scheme, rank, count)
    our_pooled, ours = run_hotbed(scheme, rank, count)
    differences = {"pooled": largest_difference(our_pooled, their_pooled), "rows": 0.0, "moments": 0.0}
    elements = dict.fromkeys(differences, 0)
    elements["pooled"] = our_pooled.numel()
    for table, held in theirs.items():
        for what, shards in held.items():
            for where, values in shards:
                differences[what] = max(differences[what], largest_difference(ours[table][what][where], values))
                elements[what] += values.numel()
    (worst,), (compared,) = ranks.largest([list(differences.values())]), ranks.total([list(elements.values())])
    of_what = {what: value for what, value, size in zip(differences, worst, compared, strict=True) if size}
    whole = sum(ROWS.values())
    expected = {"pooled": STEPS * BATCH * len(FEATURES) * DIM, "rows": whole * DIM}
    expected |= {"moments": 0 if scheme == "column" else whole}
    if dict(zip(differences, compared, strict=True)) != expected:
        raise RuntimeError(f"compared {compared} elements of {list(differences)}, must be {expected}")
    return {
        "outcome": "equal" if max(worst) <= TOLERANCE else "differs",
        "max_abs_diff": max(worst),
        "max_abs_diff_of": of_what,
        **({"why": "hotbed with per_shard_statistics=True"} if SCHEMES[scheme] else {}),
    }


def main() -> None:
    """All schemes; ``passed`` is False where one differs."""
    warnings.simplefilter("ignore")  # TorchRec announces deprecations of its own parts
    rank, count = ranks.join()
    cases = {scheme: compare(scheme, rank, count) for scheme in SCHEMES}
    ranks.leave()
    passed = all(case["outcome"] == "equal" for case in cases.values())
    print(json.dumps({"passed": passed, "tolerance": TOLERANCE, "steps": STEPS, "ranks": count, "cases": cases}))


if __name__ == "__main__":
    main()
