import pytest

from hotbed.errors import SpecError
from hotbed.specs import Feature, Table, check_specs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Table("", rows=1, dim=1), "a table needs a non-empty name"),
        (lambda: Table("t", rows=0, dim=4), "table 't': rows is 0, must be at least 1"),
        (lambda: Table("t", rows=-5, dim=4), "table 't': rows is -5, must be at least 1"),
        (lambda: Table("t", rows=1e3, dim=4), "table 't': rows is 1000.0, must be an integer"),
        (lambda: Table("t", rows=5, dim="4"), "table 't': dim is '4', must be an integer"),
        (lambda: Table("t", rows=5, dim=0), "dim is 0, must be between 1 and 1,024"),
        (lambda: Table("t", rows=5, dim=2000), "dim is 2,000, must be between 1 and 1,024"),
        (lambda: Table("t", rows=5, dim=4, init_bound=float("nan")), "init_bound is nan, must be finite"),
        (lambda: Table("t", rows=5, dim=4, init_version=2), "this release knows only 1"),
        (lambda: Feature("", table="t"), "a feature needs a non-empty name"),
        (lambda: Feature("f", table="t", pooling="max"), "feature 'f': pooling is 'max', must be one of sum, mean"),
        (lambda: Feature("f", table="t", on_bad_id="clamp"), "must be one of error, drop, hash"),
    ],
)
def test_a_spec_that_cannot_be_right_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


@pytest.mark.parametrize(
    ("tables", "features", "message"),
    [
        (["a"], [], "needs at least one feature"),
        (["a", "a"], [("f", "a")], "table 'a' is defined 2 times"),
        (["a"], [("f", "a"), ("f", "a")], "feature 'f' is defined 2 times"),
        (["items"], [("f", "item")], "uses table 'item', which is not among the tables .items.; did you mean 'items'?"),
        (["a", "b"], [("f", "a")], "table 'b' has no feature"),
    ],
)
def test_tables_and_features_must_fit(tables, features, message):
    with pytest.raises(SpecError, match=message):
        check_specs([Table(t, rows=3, dim=4) for t in tables], [Feature(f, table=t) for f, t in features])


def test_initial_bound_defaults_to_one_over_root_rows():
    assert Table("t", rows=400, dim=4).bound == pytest.approx(0.05)
    assert Table("t", rows=400, dim=4, init_bound=0.0).bound == 0.0


def test_table_seed_depends_on_name_and_collection_seed_only():
    seeds = {Table(name, rows=rows, dim=4).seed(s) for name in "ab" for s in (0, 1) for rows in (5, 50)}
    assert len(seeds) == 4
    assert Table("a", rows=5, dim=4).seed(0) == 1160917675
