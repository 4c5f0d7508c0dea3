import io
from typing import Any

import pytest
from rich.console import Console

from hotbed.bench import limits
from hotbed.bench.ops import bench_ops
from hotbed.bench.options import OpsOptions, sparse_optimizers
from hotbed.bench.run import bench
from hotbed.errors import RecipeError
from hotbed.ops import launches

KEYS = {
    *("kernel", "ids", "distinct_rows", "bytes", "median_s", "min_s", "max_s", "gb_s", "limit", "limit_s"),
    *("median_share", "min_share", "max_share", "share_of_copy"),
}
BY_IDS = ("lookup", "occurrences", "group", "update")


def tiny(**values: Any) -> OpsOptions:
    return OpsOptions(**{"tables": 2, "rows": [50, 7], "dim": 8, "batch_size": 6, "repeats": 1, **values})


def measured(**values: Any) -> dict[tuple[str, str | None], dict[str, Any]]:
    found = bench_ops(tiny(**values), lambda _: None)
    assert found["copy_gb_s"] > 0
    return {(k["kernel"], k["ids"]): k for k in found["kernels"]}


def check(kernels: dict[tuple[str, str | None], dict[str, Any]]) -> None:
    for k in kernels.values():
        assert set(k) == KEYS
        assert 0 < k["min_s"] <= k["median_s"] <= k["max_s"]
        assert 0 < k["min_share"] <= k["median_share"] <= k["max_share"]
        assert k["gb_s"] == pytest.approx(k["bytes"] / k["median_s"] / 1e9)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_every_kernel_is_measured_by_the_backend_that_was_asked_for(backend: Any) -> None:
    launches.clear()
    kernels = measured(backend=backend, weighted=True)
    check(kernels)
    apart = [(name, kind) for kind in ("uniform", "zipf") for name in (*BY_IDS, "weight_gradient")]
    assert list(kernels) == [
        ("initial_values", None),
        *apart,
        ("interaction", None),
        ("interaction_backward", None),
    ]
    name = "cpu" if backend == "auto" else "reference"
    assert all(launches[f"{name}.{kernel}"] >= 2 for kernel, _ in kernels)
    limits = {kernel: k["limit"] for (kernel, _), k in kernels.items()}
    assert {kernel for kernel, limit in limits.items() if limit == "gather"} == {"lookup", "weight_gradient"}
    assert {kernel for kernel, limit in limits.items() if limit == "scatter"} == {"update"}


def test_only_weighted_ids_have_a_gradient() -> None:
    kernels = measured()
    check(kernels)
    assert ("weight_gradient", "zipf") not in kernels
    assert kernels["lookup", "zipf"]["distinct_rows"] <= 12
    assert kernels["interaction", None]["distinct_rows"] is None


@pytest.mark.parametrize("name", sparse_optimizers())
def test_every_optimizer_is_accepted(name: str) -> None:
    check(measured(optimizer=name))


@pytest.mark.parametrize("fp32_rows", [0, 5])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8", "fp8"])
def test_every_dtype_is_accepted(dtype: Any, fp32_rows: int) -> None:
    check(measured(dtype=dtype, fp32_rows=fp32_rows, pooling=3, optimizer="Adam", ids="int32"))


def test_tables_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda _: 1000)
    stages: list[str] = []
    with pytest.raises(RecipeError, match="1,000 B of cpu memory is free"):
        bench_ops(tiny(), stages.append)
    assert not stages


def test_rows_of_every_dtype_are_measured_each_against_the_limit_of_its_own_bytes() -> None:
    found = bench_ops(tiny(dtype="int8"), lambda _: None)
    dtypes = {(k["kernel"], k["dtype"]): k for k in found["dtypes"]}
    names = ("fp32", "bf16", "fp16", "int8", "fp8")
    assert set(dtypes) == {(kernel, dtype) for kernel in ("lookup", "update") for dtype in names}
    assert all(set(k) == {*KEYS, "dtype"} and k["ids"] == "zipf" for k in dtypes.values())
    for kernel, times in (("lookup", 1), ("update", 2)):  # read; read and written
        nbytes = {dtype: dtypes[kernel, dtype]["bytes"] for dtype in names}
        for dtype, row in (("bf16", 16), ("fp16", 16), ("fp8", 8), ("int8", 9)):
            rows = dtypes[kernel, dtype]["distinct_rows"]
            assert nbytes["fp32"] - nbytes[dtype] == times * rows * (32 - row)
    of_kernels = {k["kernel"]: k for k in found["kernels"] if k["ids"] == "zipf"}
    assert all(dtypes[kernel, "int8"] == {"dtype": "int8", **of_kernels[kernel]} for kernel in ("lookup", "update"))
    assert not found["dtypes_left_out"]


def test_dtypes_that_cannot_be_measured_are_left_out_and_said() -> None:
    out = Console(record=True, width=200, file=io.StringIO())
    found = bench("ops", {"tables": 2, "rows": [50, 7], "dim": 6, "batch_size": 6, "repeats": 1}, out, out)
    assert [k["dtype"] for k in found["dtypes"]] == ["fp32", "fp32"]
    assert list(found["dtypes_left_out"]) == ["bf16", "fp16", "int8", "fp8"]
    assert "int8 rows were left out: dim is 6, must be a multiple of 4 for int8 rows" in out.export_text()


def test_the_table_of_dtypes_shows_each_beside_fp32() -> None:
    out = Console(record=True, width=200, file=io.StringIO())
    found = bench("ops", {"tables": 2, "rows": [50, 7], "dim": 8, "batch_size": 6, "repeats": 1}, out, out)
    printed = out.export_text()
    fp32, bf16 = (
        next(k for k in found["dtypes"] if (k["kernel"], k["dtype"]) == ("lookup", dtype)) for dtype in ("fp32", "bf16")
    )
    (line,) = [line for line in printed.splitlines() if line.split()[:1] == ["bf16"]]
    assert f"{bf16['median_s'] / fp32['median_s']:.0%}" in line.split()
    assert f"{bf16['median_share']:.0%}" in line.split()
