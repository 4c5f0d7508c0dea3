"""Tables and features that cannot be right are refused with the value, the limit and the fix."""

import pytest

from hotbed.errors import SpecError
from hotbed.specs import Feature, Table, check_specs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("", rows=1, dim=1), "got '', expected text"),
        (lambda: Table("t", rows=0, dim=4), "table 't': rows: got 0, expected at least 1"),
        (lambda: Table("t", rows=-5, dim=4), "table 't': rows: got -5, expected at least 1"),
        (lambda: Table("t", rows=1e3, dim=4), "table 't': rows: got 1000.0, expected an integer"),
        (lambda: Table("t", rows=5, dim="4"), "table 't': dim: got '4', expected an integer"),
        (lambda: Table("t", rows=5, dim=0), "dim: got 0, expected at least 1 and at most 1,024"),
        (lambda: Table("t", rows=5, dim=2000), "dim: got 2,000, expected at least 1 and at most 1,024"),
        (
            lambda: Table("t", rows=5, dim=4, init_bound=float("nan")),
            "init_bound: got nan, expected a finite number at least 0",
        ),
        (lambda: Table("t", rows=5, dim=4, init_version=2), "init_version: got 2, expected 1"),
        (
            lambda: Table("t", rows=5, dim=4, dtype="bf61"),
            "table 't': dtype: got 'bf61', expected one of fp32, bf16, fp16, int8, fp8; did you mean 'bf16'?",
        ),
        (lambda: Table("t", rows=5, dim=4, dtype=8), "dtype: got 8, expected one of fp32, bf16"),
        (lambda: Table("t", rows=5, dim=4, fp32_rows=6), "fp32_rows: got 6, expected at most rows 5"),
        (lambda: Table("t", rows=5, dim=4, fp32_rows=-1), "fp32_rows: got -1, expected at least 0"),
        (lambda: Table("t", rows=5, dim=4, fp32_rows=True), "fp32_rows: got True, expected an integer"),
        (lambda: Table("t", rows=5, dim=4, fp32_rows=0.5), "fp32_rows: got 0.5, expected an integer"),
        (lambda: Feature("", table="t"), "got '', expected text"),
        (
            lambda: Feature("f", table="t", pooling="max"),
            "feature 'f': pooling: got 'max', expected one of sum, mean, none",
        ),
        (lambda: Feature("f", table="t", pooling=None), "pooling: got None, expected one of sum, mean, none"),
        (lambda: Feature("f", table="t", max_len=0), "feature 'f': max_len: got 0, expected at least 1"),
        (lambda: Feature("f", table="t", max_len=True), "max_len: got True, expected an integer"),
        (lambda: Feature("f", table="t", max_len="5"), "max_len: got '5', expected an integer"),
        (lambda: Feature("f", table="t", on_too_long="cut"), "on_too_long: got 'cut', expected one of error, truncate"),
        (
            lambda: Feature("f", table="t", on_bad_id="clamp"),
            "on_bad_id: got 'clamp', expected one of error, drop, hash",
        ),
    ],
)
def test_a_spec_that_cannot_be_right_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(
    ("tables", "features", "message"),
    [
        (["a"], [], "got none, expected at least one"),
        (["a", "a"], [("f", "a")], "table: got 'a' 2 times, expected unique"),
        (["a"], [("f", "a"), ("f", "a")], "feature: got 'f' 2 times, expected unique"),
        (["items"], [("f", "item")], "feature 'f': table: got 'item', expected one of items; did you mean 'items'?"),
        (["a", "b"], [("f", "a")], "got no feature, expected at least one"),
    ],
)
def test_tables_and_features_must_fit(tables, features, message):
    with pytest.raises(SpecError, match=message):
        check_specs([Table(t, rows=3, dim=4) for t in tables], [Feature(f, table=t) for f, t in features])


def test_initial_bound_defaults_to_one_over_root_rows():
    assert Table("t", rows=400, dim=4).bound == pytest.approx(0.05)
    assert Table("t", rows=400, dim=4, init_bound=0.0).bound == 0.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
@pytest.mark.parametrize("fp32_rows", [0, 3, 5])
def test_every_dtype_may_have_float32_rows(dtype, fp32_rows):
    table = Table("t", rows=5, dim=4, dtype=dtype, fp32_rows=fp32_rows)
    assert (table.dtype, table.fp32_rows) == (dtype, fp32_rows)


def test_table_seed_depends_on_name_and_collection_seed_only():
    seeds = {Table(name, rows=rows, dim=4).seed(s) for name in "ab" for s in (0, 1) for rows in (5, 50)}
    assert len(seeds) == 4
    assert Table("a", rows=5, dim=4).seed(0) == 1160917675
