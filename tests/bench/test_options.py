from typing import Any

import pytest
import torch

from hotbed import optim
from hotbed.bench import limits
from hotbed.bench.limits import check_memory
from hotbed.bench.options import OpsOptions, StepOptions, sparse_optimizers
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BackendError, HotbedError, RecipeError
from hotbed.plan.cost import table_bytes
from hotbed.store import DenseStore, Span

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tables": 0}, "tables is 0, must be at least 1"),
        ({"repeats": -1}, "repeats is -1, must be at least 1"),
        ({"zipf": -0.5}, "zipf is -0.5, must not be negative"),
        ({"zipf": float("nan")}, "zipf is nan, must not be negative"),
        ({"zipf": 16.5}, "zipf is 16.5, must be at most 16, where all ids are the same row"),
        ({"rows": [5, 6]}, "rows has 2 entries, but there are 26 tables; give one number per table"),
        ({"rows": 0}, "rows is 0, must be at least 1"),
        ({"tables": 2, "rows": [3, 0]}, "rows is 0, must be at least 1"),
        ({"rows": 3_000_000_000, "ids": "int32"}, "rows is 3,000,000,000, more than int32 ids can count"),
        ({"dim": 6, "dtype": "bf16"}, "dim is 6, must be a multiple of 4 for bf16 rows"),
        ({"dense_features": -1}, "dense_features is -1, must not be negative"),
    ],
)
def test_what_cannot_be_right_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        StepOptions(**values)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
@pytest.mark.parametrize("name", sparse_optimizers())
def test_table_bytes_are_those_of_the_store(name: str, dtype: Any) -> None:
    options = OpsOptions(tables=2, rows=[7, 300], dim=8, dtype=dtype, fp32_rows=20, optimizer=name)
    tables, features = options.specs(rows=1)
    rule = options.make_optimizer(EmbeddingCollection(tables, features)).rule
    store = DenseStore([Span(t.rows, t.fp32_rows) for t in options.specs()[0]], 8, dtype=dtype)
    for moment in rule.moments:
        store.add_moment(moment)
    assert sum(table_bytes(t, rule.moments) for t in options.specs()[0]) == store.nbytes


def test_every_optimizer_is_known_by_its_name() -> None:
    names = {"SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "PartialRowWiseAdam", "LAMB", "FTRL"}
    assert names <= set(sparse_optimizers())
    assert "SparseOptimizer" not in sparse_optimizers()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RowWiseAdagrd", r"optimizer is 'RowWiseAdagrd', must be one of .*; did you mean 'RowWiseAdagrad'\?"),
        ("hotbed.optim.Adm", r"optimizer: module 'hotbed.optim' has no class 'Adm'; did you mean 'Adam'\?"),
        ("torch.nn.Linear", "optimizer is torch.nn.Linear, which is not a hotbed.optim.SparseOptimizer"),
    ],
)
def test_a_misspelt_optimizer_gets_the_closest_name(name: str, message: str) -> None:
    tables, features = OpsOptions(rows=1).specs()
    with pytest.raises(HotbedError, match=message):
        OpsOptions(optimizer=name).make_optimizer(EmbeddingCollection(tables, features))


def test_an_import_path_will_do() -> None:
    options = OpsOptions(rows=1, optimizer="hotbed.optim.adam.AdamW")
    assert type(options.make_optimizer(EmbeddingCollection(*options.specs()))) is optim.AdamW


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    options = OpsOptions()
    rule = optim.RowWiseAdagrad.rule
    check_memory(OpsOptions(rows=10), rule, CPU, 0)
    monkeypatch.setattr(limits, "available_bytes", lambda _: 8 << 30)
    monkeypatch.setattr(limits, "COPY_BYTES", 256 << 20)
    with pytest.raises(RecipeError) as caught:
        check_memory(options, rule, CPU, 1 << 30)
    assert "26 tables of 26,000,000 rows in all × 128 columns (fp32)" in str(caught.value)
    assert "take 12.5 GiB, and measuring 2.0 GiB more, but 8.0 GiB of cpu memory is free" in str(caught.value)
    assert "lower --rows or --tables, or choose a narrower --dtype" in str(caught.value)
    monkeypatch.setattr(limits, "available_bytes", lambda _: None)
    check_memory(options, rule, CPU, 0)


def test_a_backend_that_cannot_run_is_refused_before_anything_is_allocated() -> None:
    from hotbed.bench.ops import bench_ops
    from hotbed.bench.step import bench_step

    for run, options in ((bench_ops, OpsOptions), (bench_step, StepOptions)):
        with pytest.raises(BackendError, match="backend 'cpt' does not exist"):
            run(options(backend="cpt"), print)  # pyright: ignore[reportArgumentType]
