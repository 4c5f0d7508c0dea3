"""A named scheme cuts like its `Cut`."""

import hotbed as hb


def test_halves() -> None:
    plan = hb.make_plan([hb.Table("users", rows=1000, dim=64)], 4, "halves")
    assert [tile.cols for tile in plan.tiles] == [range(32), range(32, 64)]
    assert plan == hb.make_plan([hb.Table("users", rows=1000, dim=64)], 4, hb.Cut(cols=2))
