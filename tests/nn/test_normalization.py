"""Protects that numericals reach a model normalized as the schema says, and that raw ones never pass for inputs."""

import copy
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.config import TrainRecipe
from hotbed.data import Numerical, Schema, SparseColumn
from hotbed.data.columns import Missing, Rule
from hotbed.errors import BatchError, DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import DLRM, Normalization, WideDeep, normalize
from hotbed.nn.normalization import normalization_of
from hotbed.optim import SGD

RULES: tuple[Rule, ...] = ("as_is", "standard", "log", "quantile", "asinh")
SPARSE = (SparseColumn(name="user", rows=50),)


def schema(*dense: Any) -> Schema:
    return Schema.from_dict({"sparse": [{"name": "user", "rows": 50}], "dense": list(dense), "labels": ["y"]})


def log(path: Path, rows_per_group: int = 100, **columns: Any) -> Path:
    n = len(next(iter(columns.values())))
    table = pa.table({"user": np.arange(n) % 40, "y": np.arange(n) % 2, **columns})
    pq.write_table(table, path / "log.parquet", row_group_size=rows_per_group)
    return path / "log.parquet"


def normalized(path: Path, values: Any, **said: Any) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Inputs ``[n, …]`` of a column, by the statistics of itself, and its numbers."""
    source = hb.ParquetSource(log(path, x=values), schema({"name": "x", **said}))
    module = Normalization(source.schema).measure(source)
    raw = Batch.concatenate([source.read("train", i) for i in range(len(source.chunks("train")))]).dense
    assert raw is not None
    assert raw.dtype == torch.float64
    return module(raw), raw[:, 0].numpy()


PRICES = np.random.default_rng(0).lognormal(4, 2, 1000)


def test_rules(tmp_path: Path) -> None:
    found = {rule: normalized(tmp_path, PRICES, rule=rule)[0][:, 0].double().numpy() for rule in RULES}
    logs = np.log1p(PRICES)
    np.testing.assert_array_equal(found["as_is"], PRICES.astype(np.float32))
    np.testing.assert_allclose(found["standard"], (PRICES - PRICES.mean()) / PRICES.std(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["log"], (logs - logs.mean()) / logs.std(), rtol=1e-6, atol=1e-6)
    ranks = (PRICES.argsort().argsort() + 0.5) / 1000
    np.testing.assert_allclose(found["quantile"], (ranks - 0.5) * math.sqrt(12), atol=0.05)
    assert abs(np.median(found["asinh"])) < 1e-3
    for rule in ("standard", "log", "quantile"):
        assert abs(found[rule].mean()) < 0.02
        assert found[rule].std() == pytest.approx(1, abs=0.02)


def test_negative_numbers_have_logarithms_too(tmp_path: Path) -> None:
    found, raw = normalized(tmp_path, np.array([-100.0, -1, 0, 1, 100]), rule="log")
    expected = np.sign(raw) * np.log1p(np.abs(raw))
    np.testing.assert_allclose(found[:, 0], expected / expected.std(), rtol=1e-6)


def test_seconds_since_1970_keep_their_differences(tmp_path: Path) -> None:
    seconds = 1_700_000_000 + np.arange(1000)  # float32 knows every 128th
    found, _ = normalized(tmp_path, seconds, rule="standard")
    assert found.dtype == torch.float32
    assert len(found[:, 0].unique()) == 1000
    np.testing.assert_allclose(found[:, 0], (np.arange(1000) - 499.5) / np.arange(1000).std(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "values",
    [
        pa.array([7.0] * 5),
        pa.array([1e15] * 3),
        pa.array([None, None], pa.float64()),
        pa.array([math.inf, -math.inf, math.nan]),
        pa.array([True, False, None]),
        pa.array([Decimal("1.25"), None], pa.decimal128(9, 2)),
        pa.array([2**63 - 1, -(2**63)]),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([1, 2, 60000], pa.float16()),
        pa.array([1, None, 1], pa.int8()).dictionary_encode(),
        pa.array([0.0] * 90 + [5.0] * 10),
        pa.array([5e-324, 0.0]),
    ],
    ids=lambda array: str(array.type) + str(len(array)),
)
def test_odd_columns_become_finite_inputs(tmp_path: Path, rule: Rule, values: pa.Array) -> None:
    found, raw = normalized(tmp_path, values, rule=rule, missing="indicator")
    missing = ~np.isfinite(raw)
    assert bool(found.isfinite().all())
    np.testing.assert_array_equal(found[:, 1], missing)
    assert not found[missing, 0].any()
    if rule != "as_is":
        assert float(found.abs().max()) < 20
        if len({*raw[~missing]}) == 1:
            assert not found[:, 0].any()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e12, 1e12, width=64), st.sampled_from([math.nan, math.inf])), min_size=1),
    st.sampled_from(RULES),
    st.sampled_from(["center", "indicator"]),
)
def test_inputs_are_finite_and_rise_with_the_numbers(values: list[float], rule: Rule, missing: Missing) -> None:
    numerical = Numerical(name="x", rule=rule, missing=missing)
    plain = Schema(sparse=SPARSE, dense=("x",), numericals=(numerical,))
    module = Normalization(plain).measure(_Columns(plain, np.array(values)[:, None]))
    found = module(torch.tensor(values, dtype=torch.float64)[:, None])
    assert found.shape == (len(values), plain.dense_features)
    assert bool(found.isfinite().all())
    finite = np.isfinite(values)
    order = np.array(values)[finite].argsort()
    assert (np.diff(found[:, 0].numpy()[finite][order]) >= 0).all()


class _Columns(hb.Source):
    """Numbers in memory, in chunks of seven."""

    def __init__(self, schema: Schema, values: np.ndarray[Any, Any]) -> None:
        self.schema, self.splits, self._values = schema, ("train",), values

    def _chunks(self, split: str) -> Sequence[int]:
        n = len(self._values)
        return [min(7, n - i) for i in range(0, n, 7)]

    def _read(self, split: str, i: int) -> Batch:
        dense = torch.from_numpy(self._values[7 * i : 7 * i + 7])
        ids = torch.zeros(len(dense), dtype=torch.int64)
        return Batch(sparse=Jagged.from_dict({"user": ids}), dense=dense, labels=torch.zeros(len(dense), 1))


def test_columns_of_all_kinds_beside_each_other(tmp_path: Path) -> None:
    dense = [
        "plain",
        {"name": "scaled", "center": 2, "scale": 0.5},
        {"name": "given", "rule": "asinh", "center": 2, "scale": 0.5, "missing": "indicator"},
        {"name": "measured", "rule": "standard"},
        {"name": "as_is", "missing": "indicator"},
    ]
    numbers = np.array([1.0, 2, math.nan, 4])
    source = hb.ParquetSource(
        log(tmp_path, **dict.fromkeys(("plain", *(d["name"] for d in dense[1:])), numbers)), schema(*dense)
    )
    assert source.schema.dense_features == 7
    raw = source.read("train", 0).dense
    found = Normalization(source.schema).measure(source)(raw).numpy()
    asinh = np.nan_to_num(np.arcsinh((numbers - 2) / 0.5)).astype(np.float32)
    np.testing.assert_array_equal(found[:, 0], numbers.astype(np.float32))  # a plain column is as it was
    np.testing.assert_array_equal(found[:, 1], asinh)
    np.testing.assert_allclose(found[:, 2], asinh, rtol=1e-6)
    known = numbers[[0, 1, 3]]
    np.testing.assert_allclose(found[[0, 1, 3], 3], (known - known.mean()) / known.std(), rtol=1e-6)
    np.testing.assert_array_equal(found[:, 4], [1, 2, 0, 4])
    np.testing.assert_array_equal(found[:, 5], [0, 0, 1, 0])
    np.testing.assert_array_equal(found[:, 6], [0, 0, 1, 0])


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_missing_error_stops_with_the_place(tmp_path: Path, value: float | None, shown: str) -> None:
    values = pa.array([1.0, 2, 3, 4, 5, value])
    path = log(tmp_path, rows_per_group=4, x=values)
    source = hb.ParquetSource(path, schema({"name": "x", "rule": "standard", "missing": "error"}))
    message = rf"log.parquet, row group 1, column 'x': {shown} at row 1 \(row 5 of the file\)"
    with pytest.raises(DataError, match=message):
        source.read("train", 1)
    with pytest.raises(DataError, match=message):
        Normalization(source.schema).measure(source)


# -- in a model ----------------------------------------------------------------------------------------------------


def model_of(source: hb.Source, kind: type[DLRM | WideDeep] = DLRM) -> DLRM | WideDeep:
    s = source.schema
    widths: dict[str, Any] = {"bottom": [8]} if kind is DLRM else {}
    torch.manual_seed(0)
    return kind(s.tables(8), s.features(), s.dense_features, top=[8, 1], **widths)


def prices(path: Path, *dense: Any) -> hb.ParquetSource:
    return hb.ParquetSource(log(path, price=PRICES), schema(*dense or [{"name": "price", "rule": "log"}]))


def test_a_model_takes_raw_numbers(tmp_path: Path) -> None:
    source = prices(tmp_path)
    plain, model = model_of(source), model_of(source)
    assert normalize(model, source.schema) is model
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    model.normalization.measure(source)
    batch = source.read("train", 0)
    logs = np.log1p(PRICES)
    inputs = torch.from_numpy((logs - logs.mean()) / logs.std()).float()[:100, None]
    expected = plain(Batch(sparse=batch.sparse, dense=inputs))
    torch.testing.assert_close(model(batch), expected)
    torch.testing.assert_close(model(batch=batch), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.normalization(batch.dense).dtype == torch.float32
        assert torch.equal(model.normalization(batch.dense), model.normalization(batch.dense))
    torch.testing.assert_close(copy.deepcopy(model)(batch), expected)
    again = normalize(model_of(source), source.schema)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(batch), expected)
    assert model.half().normalization.state_dict()["price:log"].dtype == torch.float64


@pytest.mark.parametrize("kind", [DLRM, WideDeep])
def test_raw_numbers_are_refused_by_models_that_do_not_normalize(tmp_path: Path, kind: type[DLRM]) -> None:
    source = prices(tmp_path)
    model, batch = model_of(source, kind), source.read("train", 0)
    with pytest.raises(BatchError, match=rf"{kind.__name__}: dense inputs: got float64"):
        model(batch)
    with pytest.raises(RuntimeError, match="dtype"):  # a layer of one's own
        nn.Linear(1, 1)(batch.dense)
    loader = hb.Loader(source, "train", 100)
    recipe = TrainRecipe(batch_size=100, device="cpu")
    trainer = hb.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), SGD(model, lr=0.1), recipe=recipe)
    message = rf"price.*{kind.__name__}.*hotbed.nn.normalize"
    with pytest.raises(SpecError, match=message):
        trainer.fit(loader)
    with pytest.raises(SpecError, match=message):
        hb.evaluate(model, loader)
    normalize(model, source.schema)
    for run in (lambda: trainer.fit(loader), lambda: hb.evaluate(model, loader), lambda: model(batch)):
        with pytest.raises(
            SpecError, match=r"numerical columns price are not measured.*normalization.measure\(source\)"
        ):
            run()
    model.normalization.measure(source)
    trainer.fit(loader)


def test_a_model_is_normalized_once_and_before_it_is_distributed(tmp_path: Path) -> None:
    source = prices(tmp_path)
    model = normalize(model_of(source), source.schema)
    with pytest.raises(SpecError, match=r"DLRM already has an attribute 'normalization'"):
        normalize(model, source.schema)
    distributed = hb.distribute(model_of(source), "table", memory=hb.MemoryOptions(), device="cpu")
    assert normalization_of(distributed) is None
    without = Schema(sparse=SPARSE, dense=("x",))
    assert normalization_of(normalize(model_of(source), without)) is None  # nothing to do, as ever


def test_other_columns_are_refused(tmp_path: Path) -> None:
    source = prices(tmp_path)
    module = Normalization(source.schema)
    with pytest.raises(SpecError, match="got price, expected cost as in the schema that was passed to"):
        Normalization(schema({"name": "cost", "rule": "log"})).measure(source)
    module.measure(source)
    with pytest.raises(BatchError, match="got none, expected 1 to normalize"):
        module.normalize_batch(None)
    with pytest.raises(BatchError, match="got 2, expected 1 to normalize"):
        module.normalize_batch(torch.zeros(3, 2))
    huge = hb.ParquetSource(log(tmp_path, x=np.array([1e308, -1e308])), schema({"name": "x", "rule": "standard"}))
    with pytest.raises(DataError, match=r"column 'x': got values from -1e\+308 to 1e\+308"):
        Normalization(huge.schema).measure(huge)


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    source = prices(tmp_path)
    module = Normalization(source.schema).measure(source)
    before = {name: values.clone() for name, values in module.state_dict().items()}
    log(tmp_path, price=PRICES * 9)
    assert module.unmeasured == []
    module.measure(hb.ParquetSource(tmp_path / "log.parquet", source.schema))
    assert all(torch.equal(values, before[name]) for name, values in module.state_dict().items())


def test_meta(tmp_path: Path) -> None:
    """A model on ``meta`` is materialized by `hotbed.distribute`, and measured after that."""
    source = prices(tmp_path, "price")
    wanted = schema({"name": "price", "rule": "quantile", "missing": "indicator"})
    source = hb.ParquetSource(tmp_path / "log.parquet", wanted)
    with torch.device("meta"):
        module = Normalization(wanted)
    module.to_empty(device="cpu")
    module.reset_parameters()
    expected = Normalization(wanted).measure(source)
    raw = source.read("train", 0).dense
    assert raw is not None
    assert torch.equal(module.measure(source)(raw), expected(raw))


# By torch, of its tracing; the second one up to torch 2.11.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")
@pytest.mark.filterwarnings(r"ignore:[\s\S]*Dynamo detected a call to a `functools\.lru_cache`:UserWarning")
def test_compiled(tmp_path: Path) -> None:
    source = prices(tmp_path, {"name": "price", "rule": "quantile", "missing": "indicator"})
    model = normalize(model_of(source), source.schema)
    model.normalization.measure(source)
    batch = source.read("train", 0)
    with torch.no_grad():  # with gradients torch warns of its own tracing
        expected = model(batch)
        model.compile(backend="eager")
        torch.testing.assert_close(model(batch), expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_nothing_is_learned_from_needs_no_statistics(rule: Rule) -> None:
    module = Normalization(schema({"name": "x", "rule": rule, "missing": "indicator"}))
    module.assume_standard()
    found = module(torch.tensor([[0.5], [math.nan]], dtype=torch.float64))
    assert found.isfinite().all()
    assert found[:, 1].tolist() == [0, 1]
