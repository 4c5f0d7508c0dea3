"""Which rows are worth a budget of bytes."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import PlanError
from hotbed.optim import Moment
from hotbed.plan.hit_rates import Counted
from hotbed.plan.tier_choice import hot_rows
from hotbed.specs import Table


@dataclass(frozen=True)
class Case:
    tables: list[Table]
    popularity: dict[str, Counted]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    tables = [
        Table(str(i), n, draw(st.sampled_from([4, 16, 128])), fp32_rows=draw(st.integers(0, n)), dtype=dtype)
        for i, n in enumerate(rows)
        for dtype in [draw(st.sampled_from(["fp32", "int8"]))]
    ]
    counts = [draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)) for n in rows]
    return Case(tables, {t.name: Counted(torch.tensor(c), 10) for t, c in zip(tables, counts, strict=True)})


def taken(tables: list[Table], rows: dict[str, int], moments: tuple[Moment, ...] = ()) -> int:
    from hotbed.plan.cost import tile_bytes
    from hotbed.plan.tiling import Tile

    return sum(
        tile_bytes(t, Tile(t.name, range(rows[t.name]), range(t.dim), 0), moments) for t in tables if rows[t.name]
    )


ROW_WISE = (Moment("sum_of_squares", "row"),)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 20_000), st.integers(0, 20_000), st.sampled_from([0, 300, 10**6]))
def test_bytes_fit_and_a_larger_budget_takes_no_row_away(case: Case, first: int, second: int, whole: int) -> None:
    found: list[dict[str, int]] = []
    for budget in sorted((first, second)):
        try:
            rows = hot_rows(case.tables, budget, popularity=case.popularity, moments=ROW_WISE, whole_bytes=whole)
        except PlanError:
            rows = dict.fromkeys((t.name for t in case.tables), 0)
        assert taken(case.tables, rows, ROW_WISE) <= budget
        found.append(rows)
    assert all(found[0][t.name] <= found[1][t.name] for t in case.tables)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_no_budget_and_a_boundless_one(case: Case) -> None:
    assert set(hot_rows(case.tables, 0, popularity=case.popularity).values()) == {0}
    everything = hot_rows(case.tables, 10**9, popularity=case.popularity)
    assert everything == {t.name: t.rows for t in case.tables}


def test_rows_that_tie_fill_the_budget_in_the_order_of_tables() -> None:
    tables = [Table("a", 5, 4), Table("b", 5, 4)]
    popularity = {"a": Counted(torch.tensor([9, 1, 1, 1, 1]), 10), "b": Counted(torch.tensor([8, 8, 1, 1, 0]), 10)}
    for rows, expected in {1: (1, 0), 3: (1, 2), 5: (3, 2), 7: (5, 2), 8: (5, 3), 9: (5, 4)}.items():
        found = hot_rows(tables, rows * 16 + 7, popularity=popularity)
        assert (found["a"], found["b"]) == expected, rows


def test_small_tables_come_first_and_whole() -> None:
    tables = [Table("large", 100, 4), Table("small", 10, 4)]
    popularity = {"large": Counted(torch.arange(100).flip(0) + 1000, 10), "small": Counted(torch.ones(10), 10)}
    assert hot_rows(tables, 20 * 16, popularity=popularity) == {"large": 20, "small": 0}
    found = {b: hot_rows(tables, b * 16, popularity=popularity, whole_bytes=160) for b in (4, 10, 30)}
    assert found == {4: {"large": 0, "small": 4}, 10: {"large": 0, "small": 10}, 30: {"large": 20, "small": 10}}


def test_a_budget_below_one_row_is_refused() -> None:
    with pytest.raises(PlanError, match="a budget of 15 bytes"):
        hot_rows([Table("a", 5, 4)], 15)
