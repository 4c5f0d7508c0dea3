"""A single rank looks tables up directly, wherever their rows are, unless a plan cuts them or a codec is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.comm import OneRank
from hotbed.embed import tables_on_meta
from hotbed.embed.local_tables import LocalTables
from hotbed.embed.sharded_tables import ShardedTables
from hotbed.plan import make_plan

TABLES = [hb.Table("a", rows=40, dim=16), hb.Table("b", rows=30, dim=16), hb.Table("c", rows=20, dim=16, dtype="bf16")]
FEATURES = [
    hb.Feature("a", table="a"),
    hb.Feature("b", table="b", pooling="mean"),
    hb.Feature("c", table="c"),
    hb.Feature("s", table="a", pooling="none"),
]
CUTS = {
    "device": hb.Cut(),
    "host": hb.Cut(tier="host"),
    "host, cached": hb.Cut(tier="host", cache_rows=10),
    "disk": hb.Cut(tier="disk"),
    "disk, cached": hb.Cut(tier="disk", cache_rows=100),
}


def collection() -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection(TABLES, FEATURES)


def distributed(cut: hb.Cut, parallel: hb.ParallelOptions | None = None) -> Any:
    with tables_on_meta():
        made = collection()
    return hb.distribute(made, make_plan(TABLES, 1, cut), parallel, device="cpu")


def batch(step: int, size: int = 8) -> hb.Jagged:
    draw = torch.Generator().manual_seed(step)
    ids = {f.name: torch.randint(0, 20, (size, 2), generator=draw) for f in FEATURES}
    return hb.Jagged.from_dict(ids)


def trained(model: Any, call: Any, steps: int = 4) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What lookups gave, and the tables after the steps."""
    optimizer = hb.optim.RowWiseAdagrad(model, lr=0.1)
    seen: list[torch.Tensor] = []
    for step in range(steps):
        found = call(step)
        values = [found[f.name].values() if f.name == "s" else found[f.name] for f in FEATURES]
        seen += [v.detach().clone() for v in values]
        sum((v * v).sum() for v in values).backward()
        optimizer.step()
    return seen, model.state_dict()


def assert_same(found: tuple[list[torch.Tensor], dict[str, Any]], wanted: tuple[list[torch.Tensor], Any]) -> None:
    assert all(map(torch.equal, found[0], wanted[0]))
    for name, value in wanted[1].items():
        assert torch.equal(torch.as_tensor(found[1][name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_whole_tables_are_local_and_have_the_bits_of_those_that_no_plan_places(cut: hb.Cut) -> None:
    whole, model = collection(), distributed(cut)
    groups = model.module._groups
    assert [type(group) for group in groups] == [LocalTables]
    kept = {"device": "host"}.get(cut.tier, cut.tier)  # on a CPU these are one memory
    assert {arena.store.tier for arena in groups[0].arenas} == {kept}
    wanted = trained(whole, lambda step: whole(batch(step)))
    assert_same(trained(model, lambda step: model(batch(step))), wanted)


def test_tables_of_one_dtype_share_a_cache() -> None:
    by_dtype = {arena.tables[0]: arena.store for arena in distributed(CUTS["host, cached"]).module._groups[0].arenas}
    stores: Any = by_dtype
    assert stores["a"].records.rows == 20 and stores["c"].records.rows == 10


@pytest.mark.parametrize(
    ("cut", "parallel"),
    [
        (hb.Cut(hot_rows=4, tier="host"), None),
        (hb.Cut(), hb.ParallelOptions(forward_codec="bf16")),
        (hb.Cut(), hb.ParallelOptions(backward_codec="bf16")),
    ],
    ids=["hot rows", "rows' codec", "gradients' codec"],
)
def test_cut_tables_and_those_with_a_codec_are_not(cut: hb.Cut, parallel: hb.ParallelOptions | None) -> None:
    assert [type(group) for group in distributed(cut, parallel).module._groups] == [ShardedTables]


@pytest.mark.parametrize("cut", [CUTS["disk"], CUTS["host, cached"]], ids=["disk", "host, cached"])
@pytest.mark.parametrize("room", [0, 1])
def test_prefetched_ids_give_the_same_and_read_files_ahead(cut: hb.Cut, room: int) -> None:
    whole, model = collection(), distributed(cut)

    def call(step: int) -> Any:
        ids = batch(step)
        if step % 2:
            model.module.prefetch_ids(ids, OneRank())
        return model.module(ids, room=room)

    wanted = trained(whole, lambda step: whole(batch(step)))
    assert_same(trained(model, call), wanted)
    assert (model.module.traffic.ahead > 0) == (cut.tier == "disk")
