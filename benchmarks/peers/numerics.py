"""Same weights, ids and gradients into FBGEMM and hotbed: same outputs, rows and moments out?

Every optimizer is tried on the CPU. Tables from 7 to 5,000 rows, features that share a table, bags of 0 to 5 ids and
many repeats of a row in a batch; after ten steps the largest absolute difference must be at most 1e-5.

FBGEMM accepts options that its CPU kernels then ignore: weight decay for any table that only one feature uses, and
``max_norm``. A variant is compared for the tables where it changes what FBGEMM computes, and the result says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor

import hotbed as hb

TOLERANCE = 1e-5
STEPS = 10
LR = 0.05
DIM = 32
BATCH = 128
LONGEST_BAG = 5
ROWS = {"small": 7, "middle": 100, "large": 5000}
FEATURES = {"a": "small", "b": "middle", "c": "middle", "d": "large"}
FAILURES = ("differs", "missing in hotbed")
"""Outcomes that fail the run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An optimizer of FBGEMM and its counterpart in `hotbed.optim`.

    Attributes
    ----------
    fbgemm, hotbed
        Member of ``OptimType``; name of the class.
    options
        Arguments of both.
    fbgemm_variant, hotbed_variant
        Further arguments that make it a variant, in the words of each.
    """

    fbgemm: str
    hotbed: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fbgemm_variant: Mapping[str, Any] = field(default_factory=dict)
    hotbed_variant: Mapping[str, Any] = field(default_factory=dict)


EPSILON = {"eps": 1e-3}
L2 = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
DECOUPLED = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE}
ROWWISE = {"fbgemm": "EXACT_ROWWISE_ADAGRAD", "hotbed": "RowWiseAdagrad", "options": EPSILON}
CASES = {
    "sgd": Case(fbgemm="EXACT_SGD", hotbed="SGD"),
    "sgd_l2": Case(fbgemm="EXACT_SGD", hotbed="SGD", fbgemm_variant=L2, hotbed_variant={"weight_decay": 0.1}),
    "adagrad": Case(fbgemm="EXACT_ADAGRAD", hotbed="Adagrad", options=EPSILON),
    "adagrad_l2": Case(
        fbgemm="EXACT_ADAGRAD",
        hotbed="Adagrad",
        options=EPSILON,
        fbgemm_variant=L2,
        hotbed_variant={"weight_decay": 0.1},
    ),
    "rowwise_adagrad": Case(**ROWWISE),
    "rowwise_adagrad_l2": Case(
        **ROWWISE, fbgemm_variant=L2, hotbed_variant={"weight_decay": 0.1, "weight_decay_mode": "l2"}
    ),
    "rowwise_adagrad_decoupled": Case(
        **ROWWISE, fbgemm_variant=DECOUPLED, hotbed_variant={"weight_decay": 0.1, "weight_decay_mode": "decoupled"}
    ),
    "rowwise_adagrad_max_norm": Case(**ROWWISE, fbgemm_variant={"max_norm": 0.5}, hotbed_variant={"max_norm": 0.5}),
    "adam": Case(fbgemm="ADAM", hotbed="Adam", options=EPSILON),
    "partial_rowwise_adam": Case(fbgemm="PARTIAL_ROWWISE_ADAM", hotbed="PartialRowWiseAdam", options=EPSILON),
    "lamb": Case(fbgemm="LAMB", hotbed="LAMB", options=EPSILON),
}
NO_COUNTERPART = {
    "EMAINPLACE_ROWWISE_ADAGRAD": "row-wise AdaGrad that also averages one half of a table into the other half"
}
"""Optimizers that FBGEMM has on the CPU and hotbed has not."""


Outcome = dict[str, dict[str, Tensor]]
"""By table: ``pooled`` vectors of all steps, and after the last step ``rows`` and moments (``moment_0`` …)."""


def initial_rows() -> list[Tensor]:
    """Rows of each table before the first step."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(rows, DIM, generator=generator) - 0.5 for rows in ROWS.values()]


def inputs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids, lengths of bags and gradient ``[B, F · D]`` of each step; ids are feature-major."""
    generator = torch.Generator().manual_seed(1)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(STEPS):
        lengths = torch.randint(0, LONGEST_BAG + 1, (len(FEATURES), BATCH), generator=generator)
        ids = [
            torch.randint(0, ROWS[table], (int(count),), generator=generator)
            for table, count in zip(FEATURES.values(), lengths.sum(1), strict=True)
        ]
        grad = 0.03 * torch.randn(BATCH, len(FEATURES) * DIM, generator=generator)
        steps.append((torch.cat(ids), lengths.flatten(), grad))
    return steps


def run_fbgemm(optimizer: str, options: Mapping[str, Any]) -> Outcome:
    """Train FBGEMM's tables; raises ``AssertionError`` where it has no such optimizer on the CPU."""
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS.values()],
        feature_table_map=[list(ROWS).index(table) for table in FEATURES.values()],
        optimizer=OptimType[optimizer],
        learning_rate=LR,
        **options,
    )
    for own, start in zip(tables.split_embedding_weights(), initial_rows(), strict=True):
        own.copy_(start)
    pooled: list[Tensor] = []
    for ids, lengths, grad in inputs():
        pooled.append(tables(ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])))
        pooled[-1].backward(grad)
    moments = tables.split_optimizer_states() or [()] * len(ROWS)
    return outcome(pooled, tables.split_embedding_weights(), moments)


def run_hotbed(optimizer: str, options: Mapping[str, Any]) -> Outcome:
    """Train hotbed's tables."""
    tables = hb.EmbeddingCollection(
        [hb.Table(name, rows=rows, dim=DIM) for name, rows in ROWS.items()],
        [hb.Feature(name, table=table) for name, table in FEATURES.items()],
    )
    for name, start in zip(ROWS, initial_rows(), strict=True):
        tables.weight(name).copy_(start)
    sparse = getattr(hb.optim, optimizer)(tables, lr=LR, **options)
    pooled: list[Tensor] = []
    for ids, lengths, grad in inputs():
        pooled.append(tables(hb.Jagged.from_keyed(list(FEATURES), ids, lengths)).concatenate())
        pooled[-1].backward(grad)
        sparse.step()
    state = sparse.state_dict()["state"]
    moments = [tuple(state[i].values()) if state else () for i in range(len(ROWS))]
    return outcome(pooled, [tables.weight(name) for name in ROWS], moments)


def outcome(pooled: list[Tensor], rows: Sequence[Tensor], moments: Sequence[Sequence[Tensor]]) -> Outcome:
    """Sort by table what came out: pooled ``[B, F · D]`` of each step; rows and moments in the order of `ROWS`."""
    by_feature = torch.stack(pooled).detach().unflatten(2, (len(FEATURES), DIM))
    found: Outcome = {}
    for table, own_rows, own_moments in zip(ROWS, rows, moments, strict=True):
        features = [i for i, name in enumerate(FEATURES.values()) if name == table]
        found[table] = {"pooled": by_feature[:, :, features], "rows": own_rows}
        found[table].update({f"moment_{i}": moment for i, moment in enumerate(own_moments)})
    return found


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Of two tensors with as many elements; infinite where one is not a number."""
    return (ours - theirs.view_as(ours)).abs().nan_to_num(nan=math.inf).max().item()


def compare(case: Case) -> dict[str, Any]:
    """Run one case on both sides and say how it ended."""
    if not hasattr(hb.optim, case.hotbed):
        return {"outcome": "missing in hotbed", "why": f"hotbed.optim has no {case.hotbed}"}
    try:
        theirs = run_fbgemm(case.fbgemm, {**case.options, **case.fbgemm_variant})
    except AssertionError as refusal:
        return {"outcome": "not in FBGEMM on the CPU", "why": str(refusal)}
    tables, ignored = list(ROWS), []
    if case.fbgemm_variant:
        without = run_fbgemm(case.fbgemm, case.options)
        ignored = [table for table in ROWS if torch.equal(theirs[table]["rows"], without[table]["rows"])]
        tables = [table for table in ROWS if table not in ignored]
    note = (
        {"why": f"FBGEMM ignores {', '.join(case.fbgemm_variant)} for tables {', '.join(ignored)}"} if ignored else {}
    )
    if not tables:
        return {"outcome": "ignored by FBGEMM on the CPU", **note}
    ours = run_hotbed(case.hotbed, {**case.options, **case.hotbed_variant})
    differences = {
        what: max(largest_difference(ours[table][what], theirs[table][what]) for table in tables)
        for what in theirs[tables[0]]
    }
    largest = max(differences.values())
    return {
        "outcome": "equal" if largest <= TOLERANCE else "differs",
        "max_abs_diff": largest,
        "max_abs_diff_of": differences,
        **note,
    }


def optimizers_of_fbgemm() -> list[str]:
    """Names of the optimizers that FBGEMM has on the CPU, found by trying them all."""
    found: list[str] = []
    for optimizer in OptimType:
        try:
            run_fbgemm(optimizer.name, {})
        except AssertionError:
            continue
        found.append(optimizer.name)
    return found


def run() -> dict[str, Any]:
    """All cases; ``passed`` is False where one differs, hotbed lacks a class, or an optimizer of FBGEMM has no case."""
    found = optimizers_of_fbgemm()
    uncovered = sorted(set(found) - {case.fbgemm for case in CASES.values()} - set(NO_COUNTERPART))
    cases = {name: compare(case) for name, case in CASES.items()}
    return {
        "passed": not uncovered and all(case["outcome"] not in FAILURES for case in cases.values()),
        "tolerance": TOLERANCE,
        "steps": STEPS,
        "fbgemm_optimizers_on_cpu": found,
        "no_counterpart_in_hotbed": {name: why for name, why in NO_COUNTERPART.items() if name in found},
        "not_compared": uncovered,
        "cases": cases,
    }
