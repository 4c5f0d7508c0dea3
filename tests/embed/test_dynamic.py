"""Dynamic tables assign rows to ids of any size and evict the right ones, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hotbed as hb
from hotbed.checkpoint import init_from, load_checkpoint, save_checkpoint
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, CheckpointError, SpecError
from hotbed.optim import Adam, SparseOptimizer
from hotbed.specs import DYNAMIC_WAYS, Dynamic
from tests.matrix import full
from tests.ranks import Ranks

DIM = 32
ROWS = 3 * DYNAMIC_WAYS
BYTES = ROWS * DIM * 4


def dynamic_table(**options: Any) -> hb.Table:
    return hb.Table("t", "dynamic", DIM, init_bound=0.1, dynamic=Dynamic(BYTES, **options))


FEATURES = [hb.Feature("f", table="t"), hb.Feature("g", table="t", pooling="mean")]


def where(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def made(group: dist.ProcessGroup | None, table: hb.Table, cut: hb.Cut | None) -> tuple[Any, SparseOptimizer]:
    model: Any = torch.nn.ModuleDict({"e": EmbeddingCollection([table], FEATURES, seed=3)})
    if cut is not None:
        model = hb.distribute(model, hb.make_plan([table], where(group)[1], cut), group=group)
    return model, Adam(model, lr=0.1)


def collection(model: Any) -> EmbeddingCollection:
    return getattr(model, "module", model)["e"]


def step(model: Any, optimizer: SparseOptimizer, f: list[int], g: list[list[int]], *, update: bool = True) -> float:
    ids = hb.Jagged.from_dict({"f": torch.tensor(f), "g": g})
    found = collection(model)(ids)
    loss = (found["f"] - 1).square().mean() + (found["g"] + 1).square().mean()
    loss.backward()
    if update:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def batch(seed: int, most: int, rank: int = 0, size: int = 1) -> tuple[list[int], list[list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    f = (torch.rand(24, generator=draw) ** 2 * most).long().tolist()
    g = (torch.rand(24, 2, generator=draw) ** 2 * most).long().tolist()
    part = slice(24 * rank // size, 24 * (rank + 1) // size)
    return f[part], g[part]


def losses(group: dist.ProcessGroup | None, table: hb.Table, cut: hb.Cut | None, most: int, steps: int = 6) -> Any:
    model, optimizer = made(group, table, cut)
    rank, size = where(group)
    found = [step(model, optimizer, *batch(seed, most, rank, size)) for seed in range(steps)]
    directory = {name: t.tolist() for name, t in model.state_dict().items() if ".dynamic_" in name}
    rows = collection(model).weight("t").tolist()
    return found, directory, rows, dict(collection(model).unadmitted_ids)


CUTS = [
    hb.Cut(rows=0),
    hb.Cut(cols=0),
    hb.Cut(rows=0, tier="disk", cache_rows=10),
    hb.Cut(replicated=True),
]


def test_losses_are_those_of_a_table_of_the_same_ids() -> None:
    plain = hb.Table("t", 200, DIM, init_bound=0.1)
    expected = losses(None, plain, None, 200)[0]
    assert losses(None, dynamic_table(), None, 200)[0] == expected
    assert losses(None, dynamic_table(), CUTS[2], 200)[0] == expected


@pytest.mark.parametrize("options", [full({}), {"evict": "lfu"}, full({"admit_after": 2}), {"ttl_steps": 2}], ids=str)
def test_any_plan_evicts_the_same(ranks: Ranks, options: dict[str, Any]) -> None:
    table = dynamic_table(**options)
    first = ranks.run(3, losses, table, CUTS[0], 3000, 10)
    assert all(found[1:3] == first[0][1:3] for found in first)
    for cut in CUTS[1:]:
        for found, expected in zip(ranks.run(3, losses, table, cut, 3000, 10), first, strict=True):
            assert found == expected, cut
    alone = losses(None, table, None, 3000, 10)
    assert alone[1]["e.t.dynamic_ids"] == first[0][1]["e.t.dynamic_ids"]
    assert torch.allclose(torch.tensor(alone[2]), torch.tensor(first[0][2]), atol=1e-4)


def one_set(**options: Any) -> tuple[Any, SparseOptimizer]:
    table = hb.Table("t", "dynamic", DIM, init_bound=0.1, dynamic=Dynamic(DYNAMIC_WAYS * DIM * 4, **options))
    return made(None, table, None)


def known(model: Any) -> set[int]:
    return set(model.state_dict()["e.t.dynamic_ids"].tolist()) - {-1}


def fill(model: Any, optimizer: SparseOptimizer, ids: range) -> None:
    step(model, optimizer, list(ids), [[i] for i in ids])


def test_the_least_recently_seen_ids_give_way_and_begin_anew() -> None:
    model, optimizer = one_set()
    fill(model, optimizer, range(64))
    fill(model, optimizer, range(64, 128))
    fill(model, optimizer, range(8))  # so that 8 … 63 were not seen for longest
    fill(model, optimizer, range(1000, 1056))
    assert known(model) == {*range(8), *range(64, 128), *range(1000, 1056)}
    fill(model, optimizer, range(64))  # 8 … 63 again: their rows begin anew
    assert known(model) >= set(range(64))
    rows, directory = collection(model).weight("t"), model.state_dict()["e.t.dynamic_ids"]
    fresh, fresh_optimizer = one_set()
    fill(fresh, fresh_optimizer, range(64))
    fresh_rows, fresh_directory = collection(fresh).weight("t"), fresh.state_dict()["e.t.dynamic_ids"]
    at = [int((directory == i).nonzero()) for i in (8, 63)]
    there = [int((fresh_directory == i).nonzero()) for i in (8, 63)]
    # As after a first step, but that Adam has counted others; its moments began anew.
    moments = optimizer.state_dict()["state"][0]["exp_avg"][at]
    assert torch.equal(moments, fresh_optimizer.state_dict()["state"][0]["exp_avg"][there])
    assert not torch.equal(rows[at], fresh_rows[there])


def test_the_least_often_seen_ids_give_way_and_are_seen_as_often_as_a_batch_has_them() -> None:
    model, optimizer = one_set(evict="lfu")
    often, seldom = list(range(64)), list(range(64, 128))
    fill(model, optimizer, range(128))
    step(model, optimizer, often * 6, [[]] * (64 * 6))
    for _ in range(2):  # more batches, fewer ids
        step(model, optimizer, seldom, [[]] * 64)
    fill(model, optimizer, range(500, 564))
    assert known(model) == {*often, *range(500, 564)}


def test_ids_that_begin_anew_were_seen_as_often_as_since_then() -> None:
    model, optimizer = one_set(evict="lfu", ttl_steps=2)
    for _ in range(5):
        fill(model, optimizer, range(10))
    for _ in range(3):
        fill(model, optimizer, range(10, 128))
    fill(model, optimizer, range(10))  # too late
    fill(model, optimizer, range(500, 510))
    assert known(model) == {*range(10, 128), *range(500, 510)}


def test_ids_are_admitted_when_they_were_seen_often_enough() -> None:
    model, optimizer = one_set(admit_after=3)
    step(model, optimizer, [5, 6], [[6], []])
    assert known(model) == set()
    assert collection(model).unadmitted_ids == {"f": 2, "g": 1}
    step(model, optimizer, [6, 7], [[], []])
    assert known(model) == {6}
    step(model, optimizer, [5, 5], [[], []])
    assert known(model) == {5, 6}


def test_ids_that_were_not_seen_for_long_begin_anew() -> None:
    model, optimizer = one_set(ttl_steps=2)
    step(model, optimizer, [5, 6], [[], []])
    at = int((model.state_dict()["e.t.dynamic_ids"] == 5).nonzero())
    first = collection(model).weight("t")[at].clone()
    for _ in range(3):
        step(model, optimizer, [6, 6], [[], []])
    model.eval()
    with torch.no_grad():
        found = collection(model)(hb.Jagged.from_dict({"f": torch.tensor([5]), "g": [[]]}))["f"]
    assert not found.any()  # too late
    model.train()
    step(model, optimizer, [5, 6], [[], []], update=False)
    renewed = collection(model).weight("t")[at]
    assert not torch.equal(renewed, first)
    assert renewed.abs().max() <= 0.1


def test_rows_whose_gradients_wait_never_give_way() -> None:
    model, optimizer = one_set()
    step(model, optimizer, list(range(128)), [[i] for i in range(128)], update=False)
    step(model, optimizer, list(range(128, 256)), [[i] for i in range(128, 256)], update=False)
    assert known(model) == set(range(128))
    assert collection(model).unadmitted_ids == {"f": 128, "g": 128}
    optimizer.step()
    step(model, optimizer, list(range(128, 256)), [[i] for i in range(128, 256)])
    assert known(model) == set(range(128, 256))


def test_evaluation_notes_no_ids() -> None:
    model, optimizer = one_set()
    step(model, optimizer, [1, 2], [[], []])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        found = collection(model)(hb.Jagged.from_dict({"f": torch.tensor([1, 9]), "g": [[9, 1], [9]]}))
    assert found["f"][0].any() and not found["f"][1].any()
    assert torch.equal(found["g"][0], found["f"][0])  # the mean of what has a row
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def go_on(group: dist.ProcessGroup | None, cut: hb.Cut | None, load: Path | None, save: Path | None) -> Any:
    table = dynamic_table(admit_after=2)
    model, optimizer = made(group, table, cut)
    rank, size = where(group)
    parts = {"model": model, "sparse": optimizer}
    if load is not None:
        load_checkpoint(load, parts)
    for seed in range(0 if load is None else 5, 10):
        if seed == 5 and save is not None:
            save_checkpoint(save, parts)
        step(model, optimizer, *batch(seed, 2000, rank, size))
    return {name: t.tolist() for name, t in model.state_dict().items()}


def test_checkpoints_go_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(3, go_on, CUTS[0], None, tmp_path / "c")[0]
    for cut in CUTS:
        assert all(found == expected for found in ranks.run(3, go_on, cut, tmp_path / "c", None)), cut
    (alone,) = ranks.run(1, go_on, CUTS[1], tmp_path / "c", None)
    assert alone["e.t.dynamic_ids"] == expected["e.t.dynamic_ids"]


def test_a_checkpoint_of_another_capacity_and_another_model(tmp_path: Path) -> None:
    model, optimizer = one_set()
    step(model, optimizer, [1, 2], [[], []])
    save_checkpoint(tmp_path / "c", {"model": model})
    larger, _ = made(None, dynamic_table(), None)
    with pytest.raises(CheckpointError, match="as in the checkpoint"):
        load_checkpoint(tmp_path / "c", {"model": larger})
    report = init_from(tmp_path / "c", {"model": larger})
    assert [(t.name, t.note) for t in report] == [
        ("e.t", "reinitialized, because a dynamic table's rows belong to ids of a run")
    ]
    assert known(larger) == set()
    with pytest.raises(RuntimeError, match=r"'e\.t\.dynamic_ids' has another capacity"):
        larger.load_state_dict(model.state_dict())


ROOM = Dynamic(1 << 20)
NARROW = {"fp32_rows": 3, "dtype": "int8"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dynamic(0), "a dynamic table: capacity_bytes: got 0, expected at least 1"),
        (lambda: Dynamic(1, admit_after=0), "a dynamic table: admit_after: got 0"),
        (lambda: Dynamic(1, ttl_steps=0), "a dynamic table: ttl_steps: got 0"),
        (lambda: Dynamic(1, evict="fifo"), "a dynamic table: evict: got 'fifo', expected one of lru, lfu"),
        (lambda: hb.Table("t", "dynamic", 4, init_bound=0.1), r"got None, expected dynamic=Dynamic\(…\) for rows"),
        (lambda: hb.Table("t", "dynamic", 4, dynamic=ROOM), "got None, expected a number, because rows 'dynamic' has"),
        (lambda: hb.Table("t", "dynamic", 4, init_bound=0.1, dynamic=ROOM, **NARROW), "fp32_rows: got 3, expected 0"),
        (
            lambda: hb.Table("t", "dynamic", 4, init_bound=0.1, dynamic=Dynamic(100)),
            "got 100, expected at least 2,048 for 128 rows of 16 bytes",
        ),
        (lambda: hb.Table("t", 77, 4, init_bound=0.1, dynamic=ROOM), "rows: got 77, expected 'dynamic'"),
    ],
)
def test_tables_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_rows_of_a_table_are_those_that_its_capacity_has_room_for() -> None:
    assert hb.Table("t", "dynamic", 4, init_bound=0.1, dynamic=ROOM).rows == (1 << 20) // 16


def test_accumulated_batches_are_one_step_of_the_time_to_live() -> None:
    model, optimizer = one_set(ttl_steps=2)
    step(model, optimizer, [5, 6], [[], []])
    first = collection(model).weight("t").clone()
    for _ in range(3):
        step(model, optimizer, [6, 6], [[], []], update=False)
    optimizer.step()
    step(model, optimizer, [5, 6], [[], []], update=False)
    at = int((model.state_dict()["e.t.dynamic_ids"] == 5).nonzero())
    assert torch.equal(collection(model).weight("t")[at], first[at])  # not too late


def test_negative_ids_are_refused_or_hashed() -> None:
    model, optimizer = one_set()
    with pytest.raises(BatchError, match="got id -3 at sample 0, expected at least 0"):
        step(model, optimizer, [-3], [[]])
    features = [hb.Feature("f", table="t", on_bad_id="hash")]
    made_of = EmbeddingCollection([dynamic_table()], features)
    big = hb.Jagged.from_dict({"f": torch.tensor([-(2**63), 2**63 - 2, 2**62])})
    assert made_of(big)["f"].any(1).all()
