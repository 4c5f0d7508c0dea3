"""List the terms of a step's time: what each does, in how many kernels, at which rate, and where both are from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotbed.plan.cost import (
    COPIES,
    DISK,
    GRADIENTS,
    GROUPING,
    HOST,
    IDS,
    LOOKUP,
    PARTS,
    POOLING,
    REPLICAS,
    ROWS,
    SUMS,
    UPDATE,
    CostModel,
    RankCosts,
)
from hotbed.plan.step import StepEstimate, estimate_step, flops_rate, kernel_s, table_launches
from hotbed.plan.tiling import Plan

CENSUS = "kernels of the step: tests/census"
FORMULA = "formula: docs/planning.md"
_FIGURES = {
    LOOKUP: ("gather",),
    POOLING: ("gather",),
    UPDATE: ("scatter",),
    HOST: ("host_link", "host_stream"),
    DISK: ("disk_read",),
    GROUPING: ("overheads",),
    **dict.fromkeys((IDS, ROWS, GRADIENTS, COPIES, SUMS, REPLICAS), ("node_link", "network")),
}
"""By part of `hotbed.plan.cost`, the figures of the machine that its bytes are divided by."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of a step of the busiest rank."""

    name: str  # what is done
    seconds: float  # of a step
    amount: float  # what is counted: operations, bytes, or things that each take as long
    unit: Literal["FLOP", "B", "s"] = "B"
    kernels: int = 0  # of how many, where that is counted
    figures: tuple[str, ...]  # of the machine, by which the amount becomes seconds
    counted: str = FORMULA  # where the amount is from
    hidden: bool = False  # whether it is beside the others, and not added to them


def terms_of(plan: Plan, costs: RankCosts, model: CostModel) -> list[Term]:
    """List the terms of `hotbed.plan.step.estimate_step`, largest first, those that are hidden last.

    Those that are not hidden add up to the step, but for what of an all-reduce the backward pass hides.
    """
    estimate = estimate_step(plan, costs, model)
    found = [*_dense(model, estimate), *_tables(costs), *_fixed(plan, model, estimate)]
    return sorted((term for term in found if term.seconds > 0), key=lambda term: (term.hidden, -term.seconds))


def _dense(model: CostModel, estimate: StepEstimate) -> list[Term]:
    """Kernels of the dense part by what they belong to and which of their two times is longer; else all as one."""
    work, here = model.workload, model.hardware
    assert here is not None
    dense, samples = work.dense, model.local_batch
    launches = dense.launches * here.launch_s
    fixed = Term(name="launches, dense part", seconds=launches, amount=launches, unit="s", kernels=dense.launches,
                 figures=("launch_s",), counted=CENSUS)  # fmt: skip
    if not dense.kernels or here.mlp:
        figures = ("mlp",) if here.mlp else ("flops", "stream")
        rest = estimate.dense - launches
        return [Term(name="dense part", seconds=rest, amount=3 * dense.flops * samples, unit="FLOP", figures=figures),
                fixed]  # fmt: skip
    grouped: dict[tuple[str, bool], list[float]] = {}
    for kernel in dense.kernels:
        computes = kernel.flops * samples / flops_rate(model) > kernel.nbytes(samples) / here.stream
        sums = grouped.setdefault((kernel.part, computes), [0.0, 0.0, 0.0])
        sums[0] += kernel_s(kernel, model)
        sums[1] += kernel.flops * samples if computes else kernel.nbytes(samples)
        sums[2] += 1
    both = {part for part, computes in grouped if (part, not computes) in grouped}
    return [
        Term(
            name=part + (" (bound by bytes)" if part in both and not computes else ""),
            seconds=seconds,
            amount=amount,
            unit="FLOP" if computes else "B",
            kernels=int(count),
            figures=("flops" if computes else "stream",),
            counted=CENSUS,
        )
        for (part, computes), (seconds, amount, count) in grouped.items()
    ] + [fixed]


def _tables(costs: RankCosts) -> list[Term]:
    busiest = int(costs.load.argmax())
    return [
        Term(
            name={LOOKUP: "lookup", HOST: "rows from and to the host", DISK: "rows from and to disks"}.get(part, name),
            seconds=float(costs.parts[busiest, part]),
            amount=float(costs.parts_bytes[busiest, part]),
            figures=_FIGURES[part],
        )
        for part, name in enumerate(PARTS)
    ]


def _fixed(plan: Plan, model: CostModel, estimate: StepEstimate) -> list[Term]:
    here, work = model.hardware, model.workload
    assert here is not None
    measured = "step" in here.overheads
    shown = max(estimate.all_reduce - estimate.hiding * estimate.dense, 0.0)

    def alike(name: str, seconds: float, figure: str, **options: object) -> Term:
        found: dict[str, object] = {"amount": seconds, "unit": "s", "figures": (figure,), **options}
        return Term(name=name, seconds=seconds, **found)  # pyright: ignore[reportArgumentType]

    return [
        alike("fixed costs of the step" if measured else "launches, tables", estimate.launches,
              "overheads" if measured else "launch_s", kernels=0 if measured else table_launches(plan.tiles, work),
              counted=CENSUS if work.arena_launches and not measured else FORMULA),
        alike("messages", estimate.messages, "overheads" if measured else "message_s"),
        alike("all-reduce of dense gradients, what backward does not hide", shown, "node_link"),
        alike("input of the next batch", estimate.input, "host_link", unit="B", hidden=True,
              amount=work.dense.input_bytes * model.local_batch),
    ]  # fmt: skip
