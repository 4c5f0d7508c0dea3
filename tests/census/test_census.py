"""Prove what a training step asks of a CUDA device: how many kernels, which copies, how often the host waits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.config import TrainRecipe
from hotbed.plan.cost import (
    ALL_POOLED_EXCHANGES,
    ALL_POOLED_LAUNCHES,
    COMBINED_LAUNCHES,
    POOLED_EXCHANGES,
    POOLED_LAUNCHES,
)
from hotbed.plan.tiling import Tier
from hotbed.plan.workload import Kernel
from hotbed.train import Trainer
from hotbed.train.runs.dense_kernels import arena_launches, dense_kernels
from tests.census.cases import CASES
from tests.census.kernels import multi_tensor_launches
from tests.census.steps import BATCH, ROWS, STEPS, Case, batch_of
from tests.census.streams import Event, Model, Stream

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 500
"""A process is killed after that, on however busy a machine."""

INPUTS = ("batch.py", "jagged.py")
"""Where batches are copied to the device."""
LOSS = "device to host, 4 bytes at train/step.py"
HYPERPARAMETERS = "at store/memory.py"
BUDGET = {
    "RowWiseAdagrad fp32": (60, 0, 1),
    "Adam int8 behind 8 fp32 rows, lr moves": (66, 0, 1),
    "RowWiseAdagrad fp32, ragged": (60, 0, 1),
    "RowWiseAdagrad fp32, dense fp32": (55, 0, 1),
    "RowWiseAdagrad fp32, dense optimizer not fused": (60, 1, 0),
    "RowWiseAdagrad fp32, rows: uva": (115, 0, 2),
    "RowWiseAdagrad fp32, rows: records": (124, 0, 5),
    "RowWiseAdagrad fp32, rows: cache": (264, 0, 9),
    "RowWiseAdagrad fp32, 2 ranks": (159, 0, 2),
    "Adam fp32, ragged, lr moves, 2 ranks": (164, 0, 2),
    "RowWiseAdagrad fp32, ragged, weighted, 2 ranks, one reader": (161, 0, 2),
    "RowWiseAdagrad fp32, ragged, mean": (60, 0, 1),
    "RowWiseAdagrad fp32, ragged, weighted": (60, 0, 1),
    "RowWiseAdagrad fp32, dense tf32": (55, 0, 1),
    "RowWiseAdagrad fp32, dense fp16": (88, 2, 0),
    "RowWiseAdagrad fp32, rows: records, hot rows": (145, 0, 5),
    "RowWiseAdagrad fp32, rows: records, hot rows split": (211, 0, 7),
    "RowWiseAdagrad fp32, rows: records, hot rows turns": (120, 0, 3),
    "RowWiseAdagrad fp32, rows: uva, hot rows": (136, 0, 2),
    "RowWiseAdagrad fp32, ragged, history": (254, 0, 1),
    "RowWiseAdagrad fp32, 2 ranks, cut: row": (173, 0, 2),
    "RowWiseAdagrad fp32, ragged, mean, weighted, 2 ranks, cut: row": (173, 0, 2),
    "Adam int8 behind 8 fp32 rows, 2 ranks, cut: row": (183, 0, 2),
    "RowWiseAdagrad fp32, 2 ranks, cut: row, hot rows": (298, 0, 3),
    "RowWiseAdagrad fp32, 2 ranks, cut: row, hot rows turns": (298, 0, 3),
    "RowWiseAdagrad fp32, rows: uva, 2 ranks": (159, 0, 2),
    "RowWiseAdagrad fp32, 2 ranks, 2 replicas": (252, 0, 5),
    "Adam int8 behind 8 fp32 rows, lr moves, 2 ranks, 2 replicas": (408, 9, 5),
    "RowWiseAdagrad fp32, 2 ranks, cut: column": (194, 0, 3),
    "RowWiseAdagrad fp32, rows: records, 2 ranks": (167, 0, 6),
    "RowWiseAdagrad fp32, rows: records, 2 ranks, cut: row": (181, 0, 6),
    "Adam int8 behind 8 fp32 rows, lr moves, rows: records, 2 ranks, cut: row": (187, 0, 6),
    "RowWiseAdagrad fp32, rows: records, 2 ranks, hot rows": (320, 0, 8),
    "RowWiseAdagrad fp32, rows: records, 2 ranks, hot rows split": (542, 0, 10),
    "RowWiseAdagrad fp32, rows: records, 2 ranks, cut: row, hot rows split": (692, 0, 10),
    "RowWiseAdagrad fp32, rows: cache, 2 ranks": (333, 0, 10),
    "RowWiseAdagrad fp32, 4 ranks, 2 hops": (168, 0, 2),
    "RowWiseAdagrad fp32, 4 ranks": (163, 0, 2),
    "RowWiseAdagrad fp32, 4 ranks, nodes of 2": (225, 0, 3),
    "RowWiseAdagrad fp32, 4 ranks, cut: row, hot rows": (303, 0, 3),
    "RowWiseAdagrad fp32, 4 ranks, nodes of 2, cut: row, hot rows": (420, 6, 4),
    "RowWiseAdagrad fp32, ragged, 2 ranks": (159, 0, 2),
    "RowWiseAdagrad fp32, ragged, 2 ranks, 1 pooled": (404, 24, 2),
    "RowWiseAdagrad fp32, ragged, 2 ranks, 4 pooled": (293, 24, 1),
}
"""Launches of a step, waits of the host for all that the device was given, and for an event, by case."""
MOST_LAUNCHES = 72
"""Of any rule and dtype, on one rank."""


def started(selection: str, folder: Path, rank: int = 0) -> subprocess.Popen[bytes]:
    """A process that counts a selection of cases."""
    command = [sys.executable, "-m", "tests.census", str(folder / f"{rank}.json"), selection]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    env.pop("TRITON_INTERPRET", None)  # its launches are noted, not run
    return subprocess.Popen(command, cwd=ROOT, env=env)


def counted(selection: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank counted, by case."""
    if shutil.which("g++") is None:
        pytest.skip("the pretended device is made by g++, which is not here")
    ranks = CASES[selection][0].ranks
    processes = [started(selection, folder, rank) for rank in range(ranks)]
    try:
        assert [process.wait(LIMIT_S) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return counted("usual", tmp_path_factory.mktemp("census"))[0]


def refuse_waits(found: dict[str, Any]) -> None:
    """Nothing waits, and only inputs, hyperparameters and the loss are copied: one rank, its rows on the device."""
    assert found["waits"] == {}
    for copy in found["copies"]:
        assert copy.startswith(LOSS) or HYPERPARAMETERS in copy or any(f"at {name}" in copy for name in INPUTS), copy
    assert found["hazards"] == []


def names(selection: str, **chosen: Any) -> list[str]:
    """Cases of a selection that have these attributes."""
    return [c.name for c in CASES[selection] if all(getattr(c, name) == value for name, value in chosen.items())]


@pytest.mark.parametrize("case", names("usual", where="device", dense_fused=True))
def test_nothing_waits_on_one_rank(usual: dict[str, Any], case: str) -> None:
    refuse_waits(usual[case])


def refuse_more(found: dict[str, Any]) -> None:
    """A step launches no more, and waits no more often, than its budget."""
    launches, waits, events = BUDGET[found["case"]]
    assert found["launches"] <= launches, found["by_place"]
    assert sum(found["waits"].values()) <= waits, found["waits"]
    assert sum(found["events"].values()) <= events, found["events"]
    assert found["hazards"] == []


@pytest.mark.parametrize("case", names("usual"))
def test_a_step_launches_no_more_than_its_budget(usual: dict[str, Any], case: str) -> None:
    refuse_more(usual[case])


@pytest.mark.full
def test_other_precisions_poolings_and_hot_rows_keep_their_budgets(tmp_path: Path) -> None:
    (found,) = counted("more", tmp_path)
    for case in found.values():
        refuse_more(case)


@pytest.mark.parametrize("case", names("usual", where="device"))
def test_two_batches_of_one_size_class_launch_the_same(usual: dict[str, Any], case: str) -> None:
    """As a CUDA graph of the step needs: the same kernels, in the same grids, on the same shapes in the same memory.

    Nothing is allocated beyond what the step before was given, in the same order: nothing new is asked of the device.
    """
    assert usual[case]["repeats"]


@pytest.mark.parametrize("case", names("usual", where="device", dense_fused=True))
def test_a_step_asks_for_nothing_that_capturing_it_forbids(usual: dict[str, Any], case: str) -> None:
    """But hyperparameters that have changed are written in it, which a graph would have to be given before."""
    moves = case in names("usual", moving=True)
    assert all("at store/memory.py" in place and moves for place in usual[case]["forbidden"])


def test_what_capturing_a_step_forbids_is_found(usual: dict[str, Any]) -> None:
    """Rows in the host's memory are waited for, and so is the loss where an optimizer cannot read it on the device."""
    records, not_fused = "RowWiseAdagrad fp32, rows: records", "RowWiseAdagrad fp32, dense optimizer not fused"
    for case, what in ((records, "wait for an event at store/memory.py"), (not_fused, "device to host")):
        assert any(what in place for place in usual[case]["forbidden"])


def test_the_pretended_device_computes_what_the_cpu_does(usual: dict[str, Any]) -> None:
    """So sizes and branches of the census are those of a real step."""
    tables = [hb.Table(f"t{i}", rows=rows, dim=16) for i, rows in enumerate(ROWS)]
    features = [hb.Feature(f"f{i}", table=t.name) for i, t in enumerate(tables)]
    torch.manual_seed(0)
    model = hb.nn.DLRM(tables, features, bottom=(32, 16), top=(32, 32, 1))
    dense = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    recipe = TrainRecipe(batch_size=96, precision="fp32", device="cpu")
    losses: list[float] = []

    class Losses(hb.Callback):
        def on_step(self, trainer: Trainer, loss: float) -> None:
            losses.append(loss)

    trainer = Trainer(model, dense, hb.optim.RowWiseAdagrad(model, lr=0.01), recipe=recipe, callbacks=[Losses()])
    (case,) = (c for c in CASES["usual"] if c.precision == "fp32")
    trainer.fit([batch_of(case, i, 0, pinned=False) for i in range(STEPS)])
    assert usual[case.name]["losses"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("good", [0, 1])
def test_a_loss_that_is_not_finite_touches_nothing_though_nobody_waited(usual: dict[str, Any], good: int) -> None:
    found = usual["stopped"][good]
    assert "the loss is " in found["error"]
    assert "before this batch updated any parameter or table" in found["error"]
    assert "dense of sample 5 of the batch, column 3 is inf" in found["error"]
    assert found["error"].startswith("NonFiniteError")
    assert found["untouched"]
    assert found["steps"] == found["rates"] == (0, 2)[good]


@pytest.mark.full
@pytest.mark.parametrize("selection", ["rules", "dtypes"])
def test_no_rule_and_no_dtype_makes_the_host_wait(selection: str, tmp_path: Path) -> None:
    for found in counted(selection, tmp_path)[0].values():
        refuse_waits(found)
        assert found["launches"] <= MOST_LAUNCHES, found["by_place"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return counted("two ranks", tmp_path_factory.mktemp("two"))


def refuse_other_orders(of_ranks: list[dict[str, Any]]) -> None:
    """All ranks start the same exchanges in one order, within their budgets."""
    for case in (name for name in of_ranks[0] if name in BUDGET):
        assert all(found[case]["exchanges"] == of_ranks[0][case]["exchanges"] != [] for found in of_ranks)
        for found in of_ranks:
            refuse_more(found[case])


def test_two_ranks_start_the_same_exchanges_in_one_order(two_ranks: list[dict[str, Any]]) -> None:
    refuse_other_orders(two_ranks)


def test_two_ranks_wait_for_numbers_that_were_exchanged_steps_before(two_ranks: list[dict[str, Any]]) -> None:
    """And for the losses of all ranks, when the whole step has been queued: for nothing that was queued after them."""
    for found in two_ranks:
        for case in names("two ranks"):
            of_case = found[case]
            exchanges = [what for what in of_case["exchanges"] if what != "batches"]
            assert exchanges[:3] == ["ids", "numbers of ids", "rows"]  # of later batches; of this one
            assert of_case["waits"] == {}
            assert all(place.startswith(("embed/shard_routing.py", "train/step.py")) for place in of_case["events"])


def test_samples_of_one_reader_go_from_device_to_device(two_ranks: list[dict[str, Any]]) -> None:
    """In the order of all exchanges, and no host waits for them."""
    (case,) = names("two ranks", reader="first")
    for found in two_ranks:
        assert found[case]["exchanges"].count("batches") == 1
        sent = [place for place in found[case]["copies"] if "train/ranks/broadcast.py" in place]
        assert len(sent) == (found is two_ranks[0])  # only the reader has them on its host
        assert all(place.startswith("host to device") and "pageable" not in place for place in sent)


def test_a_loss_that_is_not_finite_on_one_rank_touches_nothing_on_any(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (found["stopped"] for found in two_ranks)
    assert "on a different rank" in first["error"]
    assert "dense of sample 5 of the batch, column 3 is inf" in second["error"]
    for found in (first, second):
        assert found["error"].startswith("NonFiniteError: the loss is nan in step 3")
        assert found["untouched"]
        assert found["steps"] == found["rates"] == 2


@pytest.mark.full
@pytest.mark.parametrize("selection", ["more ranks", "records over ranks", "replicas and columns"])
def test_two_ranks_with_other_plans_and_memories_keep_their_budgets(selection: str, tmp_path: Path) -> None:
    assert set(names(selection)) <= set(BUDGET)
    refuse_other_orders(counted(selection, tmp_path))


@pytest.mark.full
def test_dense_gradients_in_two_hops_are_exchanged_four_times(tmp_path: Path) -> None:
    """There and back between neighbours, and there and back between pairs of them. Each copies what a rank keeps."""
    found = counted("hops", tmp_path)
    refuse_other_orders(found)
    (case,) = names("hops")
    for of_rank in found:
        counts = [n for place, n in of_rank[case]["by_place"].items() if "gradients of dense parameters" in place]
        assert sum(counts) == 4 * 2


@pytest.mark.full
def test_predictions_have_the_launches_of_rows_that_are_combined_inside_nodes(tmp_path: Path) -> None:
    """The host waits for nothing: the numbers of distinct rows of a node are copied to it in another stream."""
    of_ranks = counted("nodes", tmp_path)
    refuse_other_orders(of_ranks)
    one_hop, of_nodes, *_ = names("nodes")
    more = [found[of_nodes]["launches"] - found[one_hop]["launches"] for found in of_ranks]
    assert max(more) == pytest.approx(COMBINED_LAUNCHES, rel=0.02)


@pytest.mark.full
def test_predictions_have_the_launches_waits_and_exchanges_of_pooled_vectors(tmp_path: Path) -> None:
    """Exchanges of gradients, and those of ids with rows, are in other threads than the one that is counted."""
    of_ranks = counted("pooled vectors", tmp_path)
    refuse_other_orders(of_ranks)
    rows, some, every = names("pooled vectors")
    for pooled, launches in ((some, POOLED_LAUNCHES), (every, ALL_POOLED_LAUNCHES)):
        more = [
            found[pooled]["launches"] + sum(found[pooled]["waits"].values()) - found[rows]["launches"]
            for found in of_ranks
        ]
        assert max(more) == pytest.approx(launches, rel=0.02)
    sent = [len(of_ranks[0][case]["exchanges"]) for case in (rows, some, every)]
    assert sent[1] - sent[0] == POOLED_EXCHANGES - 1  # gradients are sent in the backward pass
    assert sent[2] - sent[0] <= ALL_POOLED_EXCHANGES


@pytest.mark.parametrize(
    ("tensors", "depth", "launches"),
    [
        ([10] * 110, 1, 1),
        ([10] * 111, 1, 2),
        ([10] * 64, 2, 1),
        ([10] * 65, 2, 2),
        ([320 * 65_536], 3, 1),
        ([320 * 65_536 + 1], 3, 2),
        ([], 1, 0),
        ([0, 5], 1, 1),
    ],
)
def test_operations_on_lists_of_tensors_are_as_many_kernels_as_their_arguments_fill(
    tensors: list[int], depth: int, launches: int
) -> None:
    assert multi_tensor_launches([tensors], depth) == launches


def test_two_ranks_launch_what_is_predicted(two_ranks: list[dict[str, Any]]) -> None:
    found = two_ranks[0][names("two ranks")[0]]
    launched = found["launches"] + sum(found["waits"].values())
    assert launched == len(predicted_kernels(Case(ranks=2))) + arena_launches(2)["device"]


# -- what predicted steps are made of ----------------------------------------------------------------------------------

VARYING = ("_cross_entropy_kernel", "_total_kernel", "_fused_sgd_", "_relu_backward_kernel", "_add_parts_kernel")
"""Kernels whose bytes are not compared: partial sums, and what an optimizer keeps."""


def predicted_kernels(case: Case) -> list[Kernel]:
    """The kernels of the dense part, as predictions have them."""
    tables = [hb.Table(f"t{i}", rows=rows, dim=16) for i, rows in enumerate(ROWS)]
    features = [hb.Feature(f"f{i}", table=t.name) for i, t in enumerate(tables)]
    with torch.device("meta"):
        model = hb.nn.DLRM(tables, features, bottom=(32, 16), top=(32, 32, 1))
    narrow = case.precision == "bf16"
    return list(dense_kernels(model, narrow=narrow, dense_inputs=13, labels=1, casts_once=case.ranks == 1))


def summary(kernels: Iterable[tuple[str, float, float]]) -> Counter[tuple[str, float, float]]:
    return Counter((op, 0, 0) if op in VARYING else (op, nbytes, flops) for op, nbytes, flops in kernels)


@pytest.mark.parametrize(
    "case", [c for c in CASES["usual"] if c.where == "device" and c.dense_fused], ids=lambda c: c.name
)
def test_predictions_have_the_kernels_of_the_dense_part_and_their_bytes(usual: dict[str, Any], case: Case) -> None:
    """All that is launched outside of tables and optimizers of theirs: the same operations, bytes and products."""
    of_tables = ("store/", "embed/", "optim/", "ops/")
    counted = [k for k in usual[case.name]["kernels"] if not k[1].startswith(of_tables)]
    assert all(count == 1 for _, _, count, _, _ in counted)
    products = ("addmm", "mm")
    expected = [(k.op, k.nbytes(BATCH), k.flops * BATCH * (k.op in products)) for k in predicted_kernels(case)]
    assert summary((op, nbytes, flops) for op, _, _, nbytes, flops in counted) == summary(expected)


@pytest.mark.parametrize(
    ("where", "tier", "cached"), [("device", "device", False), ("records", "host", False), ("cache", "host", True)]
)
def test_predictions_have_the_launches_and_waits_of_arenas(
    usual: dict[str, Any], where: str, tier: Tier, cached: bool
) -> None:
    case = Case(where=where)
    launched = usual[case.name]["launches"] + sum(usual[case.name]["waits"].values())
    launched += sum(n for place, n in usual[case.name]["events"].items() if place.startswith("store/"))  # of this step
    assert launched == len(predicted_kernels(case)) + arena_launches(cached=cached)[tier]


# -- the model of streams ----------------------------------------------------------------------------------------------


def told(model: Model, stream: Stream, **tensors: list[torch.Tensor]) -> None:
    """An operation in a stream."""
    with model.inside(stream):
        model.operation(tensors.get("reads", []), tensors.get("writes", []), tensors.get("new", []))


def test_a_tensor_that_another_stream_writes_is_read_after_its_event() -> None:
    model, copies, step = Model(), Stream(), Stream()
    batch = torch.zeros(4)
    told(model, copies, new=[batch], writes=[batch])
    done = copies.record_event()
    told(model, step, reads=[batch])
    assert [hazard.split(":")[0] for hazard in model.hazards] == [
        f"stream {step.number} reads what stream {copies.number} writes"
    ]
    model.hazards.clear()
    step.wait_event(done)
    told(model, step, reads=[batch])
    assert model.hazards == []


def test_memory_that_a_stream_still_reads_is_not_overwritten_by_another() -> None:
    model, copies, step = Model(), Stream(), Stream()
    batch = torch.zeros(4)
    told(model, copies, new=[batch], writes=[batch])
    step.wait_stream(copies)
    told(model, step, reads=[batch])
    told(model, copies, writes=[batch])
    assert len(model.hazards) == 1
    model.hazards.clear()
    copies.wait_stream(step)
    told(model, copies, writes=[batch])
    assert model.hazards == []


@pytest.mark.parametrize("ordered", [False, True])
def test_memory_is_given_out_again_when_all_streams_are_done_with_it(ordered: bool) -> None:
    model, copies, step = Model(), Stream(), Stream()
    batch = torch.zeros(4)
    told(model, copies, new=[batch], writes=[batch])
    step.wait_stream(copies)
    told(model, step, reads=[batch])
    del batch
    if ordered:
        copies.wait_stream(step)
    following = torch.zeros(4)
    told(model, copies, new=[following], writes=[following])
    assert [hazard.split(":")[0] for hazard in model.hazards] == (
        [] if ordered else [f"stream {copies.number} is given the memory of what stream {step.number} uses"]
    )


def test_a_host_that_has_waited_for_an_event_orders_what_it_gives_later() -> None:
    model, copies, step = Model(), Stream(), Stream()
    batch, event = torch.zeros(4), Event()
    told(model, copies, new=[batch], writes=[batch])
    event.record(copies)
    model.waited(event.clock)
    told(model, step, reads=[batch])
    assert model.hazards == []
