from typing import Any

import pytest
import torch

from hotbed.bench import limits
from hotbed.bench.options import StepOptions, sparse_optimizers
from hotbed.bench.step import PARTS, WARM_UP, Timeline, _batches, _matmuls, _Step, bench_step, ways_to_multiply
from hotbed.bench.workload import Workload
from hotbed.embed.gradients import TableUpdater
from hotbed.errors import HotbedError, RecipeError
from hotbed.nn import DLRM
from hotbed.nn.linear import has_onednn_linear
from hotbed.ops import launches


def tiny(**values: Any) -> StepOptions:
    small = {"tables": 2, "rows": [50, 7], "dim": 8, "batch_size": 6, "repeats": 2, "bottom": [4, 8], "top": [5, 1]}
    return StepOptions(**{**small, **values})


def model_of(options: StepOptions) -> DLRM:
    torch.manual_seed(0)
    shape = {"bottom": options.bottom_widths, "top": options.top, "dense_features": options.dense_features}
    return DLRM(*options.specs(), **shape, backend=options.backend)


def check(found: dict[str, Any]) -> None:
    assert set(found) == {"step", "parts", "roofline"}
    assert set(found["step"]) == {"samples_per_s", "median_s", "min_s", "max_s"}
    assert [p["part"] for p in found["parts"]] == list(PARTS)
    for part in found["parts"]:
        assert set(part) == {"part", "median_s", "min_s", "max_s"}
        assert part["median_s"] > 0
    shares = {"median_share", "min_share", "max_share"}
    assert set(found["roofline"]) == {"matmul_s", "gather_s", "scatter_s", *shares}
    assert found["step"]["samples_per_s"] == pytest.approx(6 / found["step"]["median_s"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_step_is_measured_part_by_part(backend: Any, precision: Any) -> None:
    launches.clear()
    stages: list[str] = []
    check(bench_step(tiny(backend=backend, precision=precision, weighted=True, pooling=2), stages.append))
    name = "cpu" if backend == "auto" else "reference"
    for kernel in ("lookup", "update", "interaction", "interaction_backward"):
        assert launches[f"{name}.{kernel}"] == WARM_UP + 2
    assert stages[-1] == "step 2 of 2"


@pytest.mark.parametrize("name", sparse_optimizers())
def test_every_optimizer_is_accepted(name: str) -> None:
    check(bench_step(tiny(optimizer=name, repeats=1), lambda _: None))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8", "fp8"])
def test_every_dtype_is_accepted(dtype: Any) -> None:
    check(bench_step(tiny(dtype=dtype, fp32_rows=5, repeats=1, dense_features=0), lambda _: None))


def test_marks_come_in_the_order_that_parts_are_told_apart_by(monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny()
    step = _Step(options, model_of(options))
    marks: list[str] = []
    mark = Timeline.mark

    def noted(self: Timeline, part: str) -> None:
        marks.append(part)
        mark(self, part)

    monkeypatch.setattr(Timeline, "mark", noted)
    receive = TableUpdater.receive
    monkeypatch.setattr(TableUpdater, "receive", lambda *args: (marks.append("received"), receive(*args)))
    seconds = step(next(_batches(options, Workload(options))))
    assert list(dict.fromkeys(m for m in marks if m not in ("", "other"))) == [
        *("lookup", "bottom", "interaction", "top", "top backward", "interaction backward", "bottom backward"),
        *("received", "lookup backward", "dense optimizer", "sparse update"),
    ]
    assert marks.index("received") > max(i for i, m in enumerate(marks) if m == "bottom backward")
    assert sum(seconds.values()) == pytest.approx(step._timeline._marks[-1][1] - step._timeline._marks[0][1])


def test_watching_changes_no_bit() -> None:
    options = tiny(batch_size=50)
    watched, plain = model_of(options), model_of(options)
    batch = next(_batches(options, Workload(options)))
    _Step(options, watched)(batch)
    optimizers = [torch.optim.SGD(plain.parameters(), lr=0.01), options.make_optimizer(plain)]
    torch.nn.functional.binary_cross_entropy_with_logits(plain(batch), batch.labels).backward()
    for optimizer in optimizers:
        optimizer.step()
    expected = plain.state_dict()
    assert expected.keys() == watched.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in watched.state_dict().items())


def test_products_are_those_of_every_layer_forward_and_backward() -> None:
    options = tiny(precision="bf16")
    products = _matmuls(options, model_of(options))
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in products]
    # width of the interaction: 8 + 3 pairs, padded to 16
    assert shapes == [
        *[((6, 13), (13, 4)), ((4, 6), (6, 13))],  # its input needs no gradient
        *[((6, 4), (4, 8)), ((8, 6), (6, 4)), ((6, 8), (8, 4))],
        *[((6, 16), (16, 5)), ((5, 6), (6, 16)), ((6, 5), (5, 16))],
        *[((6, 5), (5, 1)), ((1, 6), (6, 5)), ((6, 1), (1, 5))],
        *[((6, 3, 8), (6, 8, 3)), ((6, 3, 3), (6, 3, 8))],
    ]
    assert {t.dtype for product in products for t in product} == {torch.bfloat16}


@pytest.mark.parametrize("shapes", [((8, 6), (6, 4)), ((3, 8, 6), (3, 6, 4))])
def test_all_libraries_compute_the_same_product(shapes: Any) -> None:
    a, b = (torch.randn(shape) for shape in shapes)
    torch_way, *onednn_ways = ways_to_multiply(a, b)
    expected = torch_way()
    assert isinstance(expected, torch.Tensor)
    assert len(onednn_ways) == (2 if a.dim() == 2 and has_onednn_linear() else 0)
    for way, shown in zip(onednn_ways, (expected, expected.mT), strict=False):
        torch.testing.assert_close(way(), shown)


def test_every_step_has_a_batch_of_its_own() -> None:
    options = tiny(batch_size=50)
    first, second, *others = _batches(options, Workload(options))
    assert len(others) == WARM_UP
    assert not torch.equal(first.sparse.values, second.sparse.values)


def test_models_that_cannot_be_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    with pytest.raises(HotbedError, match="has dim 8 but the bottom MLP ends with 16"):
        bench_step(tiny(bottom=[16]), stages.append)
    monkeypatch.setattr(limits, "available_bytes", lambda _: 1000)
    with pytest.raises(RecipeError, match="1,000 B of cpu memory is free"):
        bench_step(tiny(), stages.append)
    assert not stages
