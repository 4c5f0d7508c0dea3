"""Terms of a step: they add up to it, and say by what they are counted."""

from __future__ import annotations

import pytest

from hotbed.optim import RowWiseAdagrad
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import make_plan
from hotbed.plan.step_time import CENSUS, Term, estimate_step, kernel_s, terms_of
from hotbed.plan.workload import DenseWork, Kernel, Workload
from hotbed.specs import Table

H100 = Hardware.load("h100")
LARGE = Kernel(part="products", op="mm", flops=2e6, sample_bytes=4e3)
SMALL = Kernel(part="products", op="mm", flops=2e3, sample_bytes=4e3)
RELU = Kernel(part="activations", op="relu_", sample_bytes=4e3, step_bytes=1e6)
KERNELS = (LARGE, SMALL, RELU)


def terms(hardware: Hardware, ranks: int = 1, **dense: object) -> tuple[list[Term], float, CostModel]:
    tables = [Table("users", 50_000, 64), Table("items", 300, 64)]
    part = DenseWork(parameters=300_000, flops=2e6, layers=3, dtype="bf16", input_bytes=100, **dense)  # pyright: ignore[reportArgumentType]
    moments = RowWiseAdagrad.rule.moments
    work = Workload.of(tables, moments=moments, batch_size=4096, dense=part, arena_launches={"device": 19})
    model = CostModel(work, ranks, hardware)
    plan = make_plan(tables, ranks, "row" if ranks > 1 else "table")
    costs = model.ranks(plan)
    return terms_of(plan, costs, model), estimate_step(plan, costs, model).seconds, model


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kernels", [(), KERNELS])
def test_terms_add_up_to_the_step(ranks: int, kernels: tuple[Kernel, ...]) -> None:
    found, step_s, _ = terms(H100, ranks, kernels=kernels, launches=len(kernels))
    assert sum(term.seconds for term in found if not term.hidden) == pytest.approx(step_s)
    assert [term.name for term in found if term.hidden] == ["input of the next batch"]
    assert all(term.figures for term in found)


def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    found, _, model = terms(H100, kernels=KERNELS, launches=3)
    by_name = {term.name: term for term in found}
    assert by_name["products"].seconds == kernel_s(LARGE, model) == pytest.approx(2e6 * 4096 / H100.flops["bf16"])
    assert by_name["products (bound by bytes)"].seconds == pytest.approx(4e3 * 4096 / H100.stream)
    assert by_name["activations"].amount == RELU.nbytes(4096) == 4e3 * 4096 + 1e6
    assert (by_name["products"].unit, by_name["products"].figures) == ("FLOP", ("flops",))
    assert (by_name["activations"].kernels, by_name["activations"].counted) == (1, CENSUS)
    assert by_name["launches, tables"].kernels == 19
    assert by_name["launches, tables"].seconds == pytest.approx(19 * H100.launch_s)


def test_figures_say_what_they_are_and_changed_ones_do_not() -> None:
    assert H100.said_of("stream") == "3.35 TB/s × 0.9 (h100, assumed)"
    assert H100.with_(stream=1e12).said_of("stream") == "as given, without a source"
    assert H100.scaled("stream", 2).said_of("flops").endswith("× 0.801 (h100, mamf)")
    assert H100.with_(measured=True, stream=1e12).said_of("stream") == "measured on the machine"


def test_measured_overheads_take_the_place_of_launches() -> None:
    measured = H100.with_(overheads={"step": {1: 1e-3}}, mlp={1: {1: 1e12}})
    found, step_s, _ = terms(measured, kernels=KERNELS)
    assert {"fixed costs of the step", "dense part"} <= {term.name for term in found}
    assert sum(term.seconds for term in found if not term.hidden) == pytest.approx(step_s)
