"""Check that FBGEMM and hotbed return equal outputs, rows and moments from equal weights, ids and gradients.

Every optimizer of FBGEMM on the CPU is tried. Features share a table, bags have 0 to 5 ids, and rows repeat in a batch.
FBGEMM's CPU kernels ignore some options: weight decay for tables of one feature, and ``max_norm``. A variant is
compared for the tables where it changes FBGEMM's result, and the result names the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    """An optimizer of FBGEMM and its class in `hotbed.optim`, with arguments of both and of a variant."""

    fbgemm: str
    hotbed: str
    options: Mapping[str, Any] = {}
    fbgemm_variant: Mapping[str, Any] = {}
    hotbed_variant: Mapping[str, Any] = {}


EPSILON = {"eps": 1e-3}
L2 = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
DECOUPLED = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE}
OUR_L2 = {"weight_decay": 0.1}
ROWWISE = ("EXACT_ROWWISE_ADAGRAD", "RowWiseAdagrad", EPSILON)
CASES = {
    "sgd": Case("EXACT_SGD", "SGD"),
    "sgd_l2": Case("EXACT_SGD", "SGD", {}, L2, OUR_L2),
    "adagrad": Case("EXACT_ADAGRAD", "Adagrad", EPSILON),
    "adagrad_l2": Case("EXACT_ADAGRAD", "Adagrad", EPSILON, L2, OUR_L2),
    "rowwise_adagrad": Case(*ROWWISE),
    "rowwise_adagrad_l2": Case(*ROWWISE, L2, OUR_L2 | {"weight_decay_mode": "l2"}),
    "rowwise_adagrad_decoupled": Case(*ROWWISE, DECOUPLED, OUR_L2 | {"weight_decay_mode": "decoupled"}),
    "rowwise_adagrad_max_norm": Case(*ROWWISE, {"max_norm": 0.5}, {"max_norm": 0.5}),
    "adam": Case("ADAM", "Adam", EPSILON),
    "partial_rowwise_adam": Case("PARTIAL_ROWWISE_ADAM", "PartialRowWiseAdam", EPSILON),
    "lamb": Case("LAMB", "LAMB", EPSILON),
}
NO_COUNTERPART = {
    "EMAINPLACE_ROWWISE_ADAGRAD": "row-wise AdaGrad that also averages one half of a table into the other half"
}
"""Optimizers of FBGEMM on the CPU that hotbed does not have."""
Outcome = dict[str, dict[str, Tensor]]
"""By table: ``pooled`` vectors of all steps, and after the last step ``rows`` and moments (``moment_0`` …)."""


def initial_rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(rows, DIM, generator=generator) - 0.5 for rows in ROWS.values()]


def inputs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return ids (feature-major), lengths of bags and the gradient ``[B, F · D]`` of each step."""
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
    """Train FBGEMM's tables. Raises ``AssertionError`` if it has no such optimizer on the CPU."""
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
    by_feature = torch.stack(pooled).detach().unflatten(2, (len(FEATURES), DIM))
    found: Outcome = {}
    for table, own_rows, own_moments in zip(ROWS, rows, moments, strict=True):
        features = [i for i, name in enumerate(FEATURES.values()) if name == table]
        found[table] = {"pooled": by_feature[:, :, features], "rows": own_rows}
        found[table].update({f"moment_{i}": moment for i, moment in enumerate(own_moments)})
    return found


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs.view_as(ours)).abs().nan_to_num(nan=math.inf).max().item()


def compare(case: Case) -> dict[str, Any]:
    try:
        theirs = run_fbgemm(case.fbgemm, {**case.options, **case.fbgemm_variant})
    except AssertionError as refusal:
        return {"outcome": "not in FBGEMM on the CPU", "why": str(refusal)}
    tables, ignored = list(ROWS), []
    if case.fbgemm_variant:
        without = run_fbgemm(case.fbgemm, case.options)
        ignored = [table for table in ROWS if torch.equal(theirs[table]["rows"], without[table]["rows"])]
        tables = [table for table in ROWS if table not in ignored]
    note = f"FBGEMM ignores {', '.join(case.fbgemm_variant)} for tables {', '.join(ignored)}" if ignored else ""
    if not tables:
        return {"outcome": "ignored by FBGEMM on the CPU", "why": note}
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
        "why": note,
    }


def is_in_fbgemm(optimizer: str) -> bool:
    """Return whether FBGEMM has an optimizer on the CPU, by trying it."""
    try:
        run_fbgemm(optimizer, {})
    except AssertionError:
        return False
    return True


def run() -> dict[str, Any]:
    """Compare all cases. ``passed`` is False if one differs, or an optimizer of FBGEMM has no case."""
    found = [optimizer.name for optimizer in OptimType if is_in_fbgemm(optimizer.name)]
    uncovered = sorted(set(found) - {case.fbgemm for case in CASES.values()} - set(NO_COUNTERPART))
    cases = {name: compare(case) for name, case in CASES.items()}
    return {
        "passed": not uncovered and all(case["outcome"] != "differs" for case in cases.values()),
        "tolerance": TOLERANCE,
        "steps": STEPS,
        "fbgemm_optimizers_on_cpu": found,
        "no_counterpart_in_hotbed": {name: why for name, why in NO_COUNTERPART.items() if name in found},
        "not_compared": uncovered,
        "cases": cases,
    }
