"""Steps whose overheads were measured: what is added up, and what is not counted twice."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hotbed.errors import RecipeError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Cut, make_plan
from hotbed.plan.cost import GROUPING, LOOKUP, POOLING, ROWS, UPDATE, CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.step_time import StepEstimate, estimate_step
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

CPU = Hardware.load("epyc-7742x2").with_(cores_per_node=2, ranks_per_node=4)
OVERHEADS = {
    "step": {1: 1.0, 4: 5.0},
    "arena": {1: 0.1},
    "table": {1: 0.01},
    "layer": {1: 0.001},
    "copies": {2: 0.5},
    "sums": {2: 0.25},
    "average": {2: 0.125},
    "id": {1: 1e-6},
    "bf16": {1: 1e-3},
}
MEASURED = CPU.with_(overheads=OVERHEADS)
DENSE = DenseWork(parameters=100, flops=1000.0, layers=3)


def step(scheme: Any, ranks: int, hardware: Hardware, **options: Any) -> tuple[StepEstimate, CostModel]:
    tables = [Table(f"t{i}", 1000, 32) for i in range(2)]
    work = Workload.of(tables, moments=RowWiseAdagrad.rule.moments, batch_size=8 * ranks, dense=DENSE, **options)
    group = ranks // work.replicas
    model = CostModel(work, group, hardware)
    plan = make_plan(tables, group, scheme)
    return estimate_step(plan, model.ranks(plan), model), model


def test_overheads_are_added_up() -> None:
    one, _ = step("table", 1, MEASURED)
    assert (one.launches, one.messages) == (pytest.approx(1.0 + 0.1 + 2 * 0.01 + 3 * 0.001), 0.0)
    four, _ = step("row", 4, MEASURED)  # of what was measured of one rank, four on two cores take twice as much
    assert (four.launches, four.messages) == (pytest.approx(5.0 + 2 * (0.1 + 2 * 0.01 + 3 * 0.001)), 0.0)
    assert step("dp", 2, MEASURED)[0].messages == 0.5
    assert step("column", 2, MEASURED)[0].messages == 0.25
    assert step("row", 2, MEASURED, replicas=2, sync_every=5)[0].messages == 0.125 / 5


def test_without_overheads_messages_and_launches_are_counted() -> None:
    one, _ = step("row", 2, CPU)
    assert (one.launches, one.messages) == (12 * CPU.launch_s, 4 * CPU.message_s)


def test_the_search_counts_what_copies_and_sums_take() -> None:
    model = step("row", 2, MEASURED)[1]
    assert (model.copies_s, model.sums_s) == (0.5, 0.25)
    alone = step("row", 1, MEASURED)[1]
    assert (alone.copies_s, alone.sums_s) == (0.0, 0.0)


def test_ids_and_values_of_codecs_take_their_time() -> None:
    plain, coded = (step("row", 2, MEASURED, forward_codec=codec)[1] for codec in ("fp32", "bf16"))
    plan = make_plan([use.table for use in plain.workload.uses], 2, "row")
    fp32, bf16 = (model.ranks(plan) for model in (plain, coded))
    assert fp32.parts[0, GROUPING] == pytest.approx(2 * 8 * 1e-6)
    values = bf16.parts_bytes[0, ROWS] / 2
    assert bf16.parts[0, ROWS] - bf16.parts_bytes[0, ROWS] * coded.wire_s == pytest.approx(values * 1e-3)
    assert fp32.parts[0, ROWS] == pytest.approx(fp32.parts_bytes[0, ROWS] * plain.wire_s)


def test_rows_move_at_the_rate_that_steps_reach() -> None:
    slow, fast = (step("row", 2, MEASURED.with_(efficiency={1: of}))[1] for of in (1.0, 2.0))
    plan = make_plan([use.table for use in slow.workload.uses], 2, "row")
    for part in (LOOKUP, POOLING, UPDATE):
        assert slow.ranks(plan).parts[0, part] == pytest.approx(2 * fast.ranks(plan).parts[0, part])


def test_rows_in_slower_memory_cost_what_a_row_was_measured_to() -> None:
    hardware = MEASURED.with_(overheads=OVERHEADS | {"host_row": {1: 1e-3}, "host": {1: 0.5}})
    found, model = step(Cut(tier="host"), 1, hardware)
    touched = sum(use.expected.distinct(range(1000), 8.0) for use in model.workload.uses)
    assert found.tables == pytest.approx(1e-3 * touched, rel=0.01)
    assert found.launches == pytest.approx(1.0 + 0.1 + 2 * 0.01 + 3 * 0.001 + 0.5)


def test_a_row_that_replicas_average_costs_what_it_was_measured_to() -> None:
    hardware = MEASURED.with_(overheads=OVERHEADS | {"average_row": {2: 1e-3}})
    options = {"replicas": 2, "sync_every": 4}
    cheap, dear = (step("row", 2, of, **options) for of in (MEASURED, hardware))
    changed = sum(use.expected.distinct(range(1000), 8.0 * 2 * 4) for use in dear[1].workload.uses)
    assert dear[0].tables - cheap[0].tables == pytest.approx(1e-3 * changed / 4, rel=0.01)


def test_one_rank_pools_from_its_table_and_passes_no_rows_on() -> None:
    _, model = step("table", 1, CPU)
    plan = make_plan([use.table for use in model.workload.uses], 1, "table")
    nbytes = model.ranks(plan).parts_bytes[0]
    distinct = model.workload.uses[0].expected.distinct(range(1000), 8.0)
    assert nbytes[POOLING] == 0
    assert nbytes[LOOKUP] == pytest.approx(2 * (distinct + 8) * 128)
    assert nbytes[UPDATE] == pytest.approx(2 * (8 * 128 + 2 * distinct * 132))


def test_ranks_that_share_cores_hide_no_all_reduce() -> None:
    gpu = Hardware.load("a100-40")
    for hardware, hidden in ((CPU, 0.0), (gpu, 2 / 3)):
        found, _ = step("row", 2, hardware)
        rest = found.tables + found.messages + found.launches + found.dense
        assert found.seconds == pytest.approx(rest + max(found.all_reduce - hidden * found.dense, 0.0))


def test_dense_layers_take_what_such_layers_were_measured_to() -> None:
    one, _ = step("table", 1, MEASURED.with_(mlp={1: {1: 1e6, 10**9: 1e6}}))
    assert one.dense == pytest.approx(3 * 1000 * 8 / 1e6)
    four, _ = step("row", 4, MEASURED.with_(mlp={1: {1: 1e6}}))  # on two cores
    assert four.dense == pytest.approx(2 * one.dense)


def test_fixed_parts_of_exchanges_are_not_counted_twice() -> None:
    curves: dict[str, Any] = {
        "all_to_all": {2: {1024: 1e6, 1 << 20: 1e9}},
        "all_reduce": {2: {64: 1e3, 1 << 20: 1e9}},
    }
    here = MEASURED.with_(**curves, message_s=1e-3)
    assert step("row", 2, here)[1].wire_s == pytest.approx(1e-9)  # that of large messages, not less
    assert step("row", 2, here)[1].wire_s < step("row", 2, here.with_(overheads={}))[1].wire_s
    assert step("row", 2, here)[0].all_reduce < step("row", 2, here.with_(overheads={}))[0].all_reduce


def test_a_file_may_have_overheads(tmp_path: Any) -> None:
    figures = {"overheads": {"step": {1: "2 ms"}, "id": {1: 0}}, "efficiency": {1: 0.5}, "mlp": {2: {64: "1 GFLOP/s"}}}
    file = tmp_path / "hw.yaml"
    file.write_text(yaml.safe_dump({"extends": "epyc-7742x2", "figures": figures}))
    found = Hardware.load(file)
    assert (found.overheads, found.efficiency) == ({"step": {1: 2e-3}, "id": {1: 0.0}}, {1: 0.5})
    assert found.mlp == {2: {64: 1e9}}
    assert found.scaled("overheads", 2).overheads["step"] == {1: 4e-3}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (
            {"overheads": {"steps": {1: 1}}},
            "overheads: got 'steps', expected one of step, .* did you mean 'step'",
        ),
        ({"overheads": {"step": {0: 1}}}, "overheads.step: got 0, expected at least 1"),
        (
            {"overheads": {"step": "1 s"}},
            "overheads.step: got 1.0, expected a mapping from a number of ranks to a number",
        ),
        ({"overheads": "1 s"}, "overheads: got 1.0, expected a mapping"),
        ({"overheads": {"step": {1: -1}}}, r"overheads.step.1: got -1.0, expected a finite number at least 0"),
        ({"efficiency": {1: 0}}, r"efficiency.1: got 0.0, expected a finite number above 0"),
        ({"mlp": {1: {64: 0}}}, r"mlp.1.64: got 0.0, expected a finite number above 0"),
    ],
)
def test_overheads_that_cannot_be(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Hardware.from_dict({"extends": "epyc-7742x2", "figures": figures}, "hw.yaml")
