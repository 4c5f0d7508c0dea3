"""Sweeps and elasticities: every figure is varied or refused, and what nothing reads is told before a search."""

from __future__ import annotations

from typing import Any

import pytest

from hotbed.errors import PlanError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.hardware import DIMENSIONS, Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.simulation.simulate import simulate
from hotbed.plan.simulation.sweep import MOST_RANKS, RANKS, Sweep, elasticities
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40")
CURVE = {1: 1e9, 1 << 30: 1e9}
MEASURED = Hardware.load("epyc-7742x2").with_(
    cores_per_node=4,
    ranks_per_node=4,
    overheads={"step": {1: 1e-3}, "arena": {1: 1e-4}},
    efficiency={1: 0.5},
    mlp={1: {1: 1e9}},
    all_to_all={4: CURVE},
    all_reduce={4: CURVE},
)
VARIED = [name for name in DIMENSIONS if name not in ("price_per_hour", "disk_latency")]
CURVES = ("gather", "scatter", "flops", "overheads", "all_to_all", "all_reduce", "efficiency", "mlp")
UNITS = {"bytes": ("1 TB", "2 TB"), "bytes/s": ("1 GB/s", "2 GB/s"), "s": ("1 us", "1 ms")}
SHARES = ("network_efficiency",)


def found_on(hardware: Hardware, ranks: int = 4) -> Found:
    dense = DenseWork(parameters=300_000, flops=2e5, layers=3)
    tables = [Table("users", 50_000, 64), Table("items", 300, 64)]
    work = Workload.of(tables, moments=RowWiseAdagrad.rule.moments, batch_size=256 * ranks, dense=dense)
    return search(work, ranks, hardware)


@pytest.mark.parametrize("figure", VARIED)
def test_every_figure_makes_a_machine_or_is_refused_before_the_search(figure: str) -> None:
    low, high = ("0.5", "1") if figure in (*CURVES, *SHARES) else UNITS.get(DIMENSIONS[figure], ("4", "8"))
    sweep = Sweep.parse(f"{figure}={low}..{high}")
    machines = [sweep.hardware(MEASURED, value) for value in sweep.values]
    assert [getattr(machine, figure) for machine in machines] != [getattr(MEASURED, figure)] * len(machines)
    assert sweep.format_value(sweep.values[0])
    if figure in CURVES and figure not in ("gather", "scatter", "flops"):
        with pytest.raises(PlanError, match=f"{figure} of a100-40 has no effect with 4 ranks"):
            sweep.check(A100, 4, 1)
        sweep.check(MEASURED, 4, 1)


@pytest.mark.parametrize(
    "text", ["mlp=1TFLOP/s..2TFLOP/s", "overheads=1us..1ms", "gather=1GB/s..2GB/s", "all_to_all=1GB/s..2GB/s"]
)
def test_curves_are_varied_by_factors_only(text: str) -> None:
    figure = text.partition("=")[0]
    with pytest.raises(PlanError, match=rf"expected a number, .* {figure} is a curve, .*{figure}=0.5..2"):
        Sweep.parse(text)


@pytest.mark.parametrize(
    ("text", "hardware", "ranks", "instead"),
    [
        ("network=1GB/s..2GB/s", A100, 8, "all ranks are on one node"),
        ("network=1GB/s..2GB/s", MEASURED.with_(ranks_per_node=2), 4, "measured all_to_all and all_reduce"),
        ("node_link=1GB/s..2GB/s", MEASURED, 4, "measured all_to_all and all_reduce replace it"),
        ("cores_per_node=2..4", A100, 4, "measured overheads or mlp"),
        ("stream=1GB/s..2GB/s", MEASURED, 4, "layers on GPUs"),
        ("launch_s=1us..1ms", MEASURED, 4, "measured overheads include launches"),
    ],
)
def test_figures_that_nothing_reads_are_refused(text: str, hardware: Hardware, ranks: int, instead: str) -> None:
    with pytest.raises(PlanError, match=instead):
        Sweep.parse(text).check(hardware, ranks, 1)


def test_figures_that_something_reads_are_not_refused() -> None:
    Sweep.parse("network=1GB/s..2GB/s").check(A100, 16, 1)
    Sweep.parse("network=1GB/s..2GB/s").check(MEASURED.with_(ranks_per_node=2, all_reduce={}), 4, 1)
    Sweep.parse("cores_per_node=2..4").check(MEASURED, 4, 1)
    Sweep.parse("ranks=6..50").check(A100, 4, 3)
    with pytest.raises(PlanError, match=r"ranks: got 4 first, expected a multiple of parallel.replicas 3"):
        Sweep.parse("ranks=4..50").check(A100, 6, 3)


def test_ranks_around_a_number_end_where_sweeps_do() -> None:
    assert Sweep.around(16, 2) == Sweep(RANKS, (4, 8, 16, 32, 64))
    assert Sweep.around(3, 1).values == (3, 6, 12)
    assert Sweep.around(MOST_RANKS, 1).values[-1] == MOST_RANKS


def test_elasticities_have_what_was_measured() -> None:
    found = found_on(MEASURED)
    shown = elasticities(found)
    assert {"overheads", "mlp", "efficiency", "all_reduce", "all_to_all"} <= shown.keys()
    assert all(value > 0 for value in shown.values()) and sum(shown.values()) == pytest.approx(1, abs=0.15)


def test_curves_count_where_ranks_are_connected_as_the_measured_ones_were() -> None:
    fast: dict[str, Any] = {"all_to_all": {16: {1: 1e15}}, "all_reduce": {16: {1: 1e15}}}
    inside, across = (simulate(f.plan, f.costs, f.model) for f in (found_on(A100.with_(**fast), n) for n in (8, 32)))
    assert inside.closed_form.all_reduce == simulate_all_reduce(A100, 8)
    assert across.closed_form.all_reduce < simulate_all_reduce(A100, 32) / 1000
    assert found_on(A100.with_(**fast), 8).model.wire_s == found_on(A100, 8).model.wire_s
    assert found_on(A100.with_(**fast), 32).model.wire_s == pytest.approx(1e-15)


def simulate_all_reduce(hardware: Hardware, ranks: int) -> float:
    found = found_on(hardware, ranks)
    return simulate(found.plan, found.costs, found.model).closed_form.all_reduce
