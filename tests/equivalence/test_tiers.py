"""Where rows lie changes no bit: in memory, materialized on first update, in files, with caches of any size."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hotbed as hb
from hotbed.checkpoint import load_checkpoint, read_manifest, save_checkpoint, verify_checkpoint
from hotbed.embed import EmbeddingCollection, tables_on_meta
from hotbed.errors import SpecError
from hotbed.ops import launches
from hotbed.optim import Adam, SparseOptimizer
from hotbed.specs import RowDtype
from hotbed.store import DenseStore, LazyStore
from tests.checkpoint.test_checkpoint import bits
from tests.matrix import full
from tests.ranks import Ranks

TABLES = [
    hb.Table("a", rows=101, dim=48),
    hb.Table("b", rows=7, dim=48, dtype="bf16", fp32_rows=3),
    hb.Table("c", rows=50, dim=256, dtype="int8", fp32_rows=10),
]
FEATURES = [
    hb.Feature("a", table="a", pooling="mean"),
    hb.Feature("b", table="b"),
    hb.Feature("c", table="c"),
    hb.Feature("walk", table="a", pooling="none"),
]
CUTS: Mapping[str, hb.Cut] = {
    "device": hb.Cut(rows=0),
    "host": hb.Cut(rows=0, tier="host"),
    "disk": hb.Cut(rows=0, tier="disk"),
    "disk, cached": hb.Cut(rows=0, tier="disk", cache_rows=9),
    "columns on disk, cached": hb.Cut(cols=0, tier="disk", cache_rows=40),
    "hot rows on the device, others on disk": hb.Cut(rows=0, hot_rows=5, tier="disk", cache_rows=3),
}


def made(group: dist.ProcessGroup | None, cut: hb.Cut | None, host: Any = "records") -> tuple[Any, SparseOptimizer]:
    def model() -> Any:
        return torch.nn.ModuleDict({"e": EmbeddingCollection(TABLES, FEATURES, seed=4)})

    if cut is None or (group is None and cut.tier == "device"):
        plain = model()
        return plain, Adam(plain, lr=0.1)
    with tables_on_meta():
        meta = model()
    size = 1 if group is None else dist.get_world_size(group)
    plan = hb.make_plan(TABLES, size, cut)
    distributed = hb.distribute(meta, plan, memory=hb.MemoryOptions(host=host), group=group)
    return distributed, Adam(distributed, lr=0.1)


def step(model: Any, optimizer: SparseOptimizer, seed: int, ahead: Any = None) -> None:
    backward(model, torch.Generator().manual_seed(seed), ahead)
    optimizer.step()


def backward(model: Any, draw: torch.Generator, ahead: Any = None, size: int = 6) -> None:
    embeddings = getattr(model, "module", model)["e"]
    rows = {f.name: next(t.rows for t in TABLES if t.name == f.table) for f in FEATURES}
    drawn = {f: torch.randint(0, n, (size, 2), generator=draw) for f, n in rows.items()}
    ids = hb.Jagged.from_dict({f: t.to(embeddings.device) for f, t in drawn.items()})
    if ahead is not None:
        embeddings.prefetch_ids(ids, ahead)
        embeddings.prefetch_rows(ids, ahead)
    found = embeddings(ids)
    losses = [(found[t.name] - 1).square().mean() for t in TABLES]
    losses.append(found["walk"].to_padded_tensor(0.0).square().mean())
    torch.stack(losses).sum().backward()


def everything(model: Any, optimizer: SparseOptimizer) -> Any:
    return bits(model.state_dict()), bits(optimizer.state_dict()["state"])


def run(group: dist.ProcessGroup | None, cut: hb.Cut | None, ahead: bool = False) -> Any:
    model, optimizer = made(group, cut)
    link = model.wire.link.clone() if ahead else None
    for seed in range(5):
        step(model, optimizer, seed, link)
    return everything(model, optimizer)


def accumulated(cut: hb.Cut | None) -> Any:
    model, optimizer = made(None, cut)
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        for _ in range(3):
            backward(model, draw, size=200)
        optimizer.step()
    return everything(model, optimizer)


@pytest.mark.parametrize("cut", [CUTS["host"], CUTS["hot rows on the device, others on disk"]])
def test_gradients_of_many_ids_and_several_batches_are_added_in_one_order(cut: hb.Cut) -> None:
    assert accumulated(cut) == accumulated(None)


def stores(model: Any) -> list[Any]:
    return [held.arena.store for t in TABLES for held in model.module["e"].local_tiles(t.name) if held.owned]


@pytest.mark.parametrize("cut", [c for c in CUTS.values() if c.tier != "device"], ids=list(CUTS)[1:])
def test_one_process_without_a_process_group(cut: hb.Cut) -> None:
    assert run(None, cut) == run(None, None)
    assert run(None, cut, ahead=True) == run(None, None)
    assert all(isinstance(store, LazyStore) for store in stores(made(None, cut)[0])) != bool(cut.hot_rows)


@pytest.mark.parametrize("cut", [hb.Cut(tier="host"), hb.Cut(tier="disk", cache_rows=2)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8", "fp8"])
def test_tables_of_one_column_with_float32_rows(dtype: RowDtype, cut: hb.Cut, tmp_path: Path) -> None:
    tables = [hb.Table("t", rows=20, dim=1, dtype=dtype, fp32_rows=3)]

    def trained(model: torch.nn.Module, ids: list[list[int]]) -> torch.nn.Module:
        optimizer = hb.optim.RowWiseAdagrad(model, lr=0.1)
        for of_step in ids:
            vectors = model(hb.Jagged.from_dict({"t": torch.tensor(of_step)})).concatenate()
            vectors.sum().backward()
            optimizer.step()
        return model

    def collection() -> EmbeddingCollection:
        return EmbeddingCollection(tables, [hb.Feature("t", table="t")], seed=4)

    def distributed() -> Any:
        return hb.distribute(collection(), hb.make_plan(tables, 1, cut))

    steps = [[1, 7, 19], [5], [2], [19, 18, 5]]
    whole, elsewhere = trained(collection(), steps), trained(distributed(), steps)
    assert bits(elsewhere.state_dict()) == bits(whole.state_dict())
    save_checkpoint(tmp_path, {"model": elsewhere})
    loaded = distributed()
    load_checkpoint(tmp_path, {"model": loaded})
    assert bits(loaded.state_dict()) == bits(whole.state_dict())


@pytest.mark.parametrize("background", [False, True])
def test_rows_in_host_memory_are_read_in_place(tmp_path: Path, background: bool) -> None:
    plain, of_plain = made(None, None)
    model, optimizer = made(None, CUTS["host"], host="uva")
    for seed in range(3):
        step(plain, of_plain, seed)
        step(model, optimizer, seed)
    expected = everything(plain, of_plain)
    assert everything(model, optimizer) == expected
    assert all(isinstance(store, DenseStore) and store.tier == "host" for store in stores(model))
    saving = save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer}, background=background)
    step(model, optimizer, 7)
    saving.wait()
    for cut, host in ((CUTS["host"], "uva"), (CUTS["disk, cached"], "records"), (None, "records")):
        other, of_other = made(None, cut, host)
        load_checkpoint(tmp_path / "c", {"model": other, "sparse": of_other})
        assert everything(other, of_other) == expected


def test_a_model_on_triton_with_a_cache_and_rows_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it as on a GPU, but for page-locking where there is none."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr("hotbed.store.row_cache.needs_staging", lambda _: True)

    def trained(cut: hb.Cut | None, host: Any = "records") -> Any:
        collection = EmbeddingCollection(TABLES, FEATURES, seed=4, backend="triton")
        model: Any = torch.nn.ModuleDict({"e": collection}).to(device)
        if cut is not None:
            memory = hb.MemoryOptions(host=host)
            model = hb.distribute(model, hb.make_plan(TABLES, 1, cut), memory=memory, device=device)
        optimizer = Adam(model, lr=0.1)
        for seed in range(2):
            step(model, optimizer, seed)
        return everything(model, optimizer)

    expected = trained(None)
    launches.clear()
    assert trained(CUTS["hot rows on the device, others on disk"]) == expected
    assert launches["triton.cache_take"] > 0
    assert trained(CUTS["host"], host="uva") == expected
    assert {key.split(".")[0] for key in launches} == {"triton"}


@pytest.mark.parametrize("optimizer", ["SGD", "RowWiseAdagrad", "LAMB"])
def test_hits_and_misses_are_of_lookups_also_where_a_rule_reads_rows_of_columns(optimizer: str) -> None:
    tables, features = [hb.Table("c", rows=50, dim=256)], [hb.Feature("c", table="c")]
    parts = [hb.Tile("c", range(50), cols, 0, tier="disk", cache_rows=9) for cols in (range(128), range(128, 256))]
    with tables_on_meta():
        meta = torch.nn.ModuleDict({"e": EmbeddingCollection(tables, features)})
    model: Any = hb.distribute(meta, hb.Plan(1, tuple(parts)))
    rule = getattr(hb.optim, optimizer)(model, lr=0.1)
    asked = 0
    for seed in range(4):
        ids = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(seed))
        asked += 2 * len(ids.unique())
        model.module["e"](hb.Jagged.from_dict({"c": ids}))["c"].square().sum().backward()
        rule.step()
    traffic = model.module["e"].traffic
    assert traffic.hits + traffic.misses == asked


@pytest.mark.parametrize("ahead", [full(False), True])
def test_several_ranks(ranks: Ranks, ahead: bool) -> None:
    expected = ranks.run(3, run, CUTS["device"])[0]
    for name, cut in CUTS.items():
        assert all(found == expected for found in ranks.run(3, run, cut, ahead)), name


def save(group: dist.ProcessGroup | None, cut: hb.Cut | None, load: Path | None, path: Path, background: bool) -> Any:
    model, optimizer = made(group, cut)
    parts = {"model": model, "sparse": optimizer}
    if load is None:
        for seed in range(3):
            step(model, optimizer, seed)
    else:
        load_checkpoint(load, parts)
    found = everything(model, optimizer)
    saving = save_checkpoint(path, parts, step=3, background=background)
    if background:
        step(model, optimizer, 7)
    saving.wait()
    return found


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_of_any_tier_load_into_any_other(tmp_path: Path, background: bool) -> None:
    expected = save(None, None, None, tmp_path / "first", False)
    last = tmp_path / "first"
    for i, cut in enumerate([*CUTS.values(), None, CUTS["disk, cached"], CUTS["host"]]):
        assert save(None, cut, last, tmp_path / str(i), background) == expected, cut
        last = tmp_path / str(i)
        verify_checkpoint(last)
    tables = read_manifest(last).tables
    assert all(tile.keyed for table in tables.values() for tile in table.tiles)


def test_checkpoints_of_several_ranks_and_tiers(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(3, save, CUTS["disk, cached"], None, tmp_path / "first", False)[0]
    chain = [(1, "columns on disk, cached"), (3, "hot rows on the device, others on disk"), (4, "device"), (3, "host")]
    last = tmp_path / "first"
    for size, name in chain:
        found = ranks.run(size, save, CUTS[name], last, tmp_path / name, True)
        assert all(state == expected for state in found), name
        last = tmp_path / name


def test_only_rows_that_were_trained_are_saved(tmp_path: Path) -> None:
    huge = [hb.Table("t", rows=1 << 33, dim=16)]
    with tables_on_meta():
        collection = torch.nn.ModuleDict({"e": EmbeddingCollection(huge, [hb.Feature("t", table="t")])})
    plan = hb.make_plan(huge, 1, hb.Cut(tier="disk", cache_rows=10))
    model: Any = hb.distribute(collection, plan, memory=hb.MemoryOptions(directory=str(tmp_path / "rows")))
    optimizer = Adam(model, lr=0.1)
    ids = torch.tensor([5, (1 << 33) - 1, 5, 1 << 32])
    model.module["e"](hb.Jagged.from_dict({"t": ids}))["t"].square().sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer})
    assert read_manifest(tmp_path / "c").nbytes < 10_000
    (tile,) = read_manifest(tmp_path / "c").tables["e.t"].tiles
    assert tile.rows == range(1 << 33)
    other: Any = hb.distribute(torch.nn.ModuleDict({"e": _on_meta(huge)}), plan)
    adam = Adam(other, lr=0.1)
    load_checkpoint(tmp_path / "c", {"model": other, "sparse": adam})
    (held,) = other.module["e"].local_tiles("t")
    assert held.arena.store.keys(0)[:].tolist() == [5, 1 << 32, (1 << 33) - 1]
    rows = torch.tensor([0, 5, 1 << 32, (1 << 33) - 1])
    (before,) = model.module["e"].local_tiles("t")
    for moment in (None, "exp_avg", "exp_avg_sq"):
        assert torch.equal(held.arena.store.read(rows, moment), before.arena.store.read(rows, moment))


def _on_meta(tables: list[hb.Table]) -> EmbeddingCollection:
    with tables_on_meta():
        return EmbeddingCollection(tables, [hb.Feature("t", table="t")])


def test_options_of_tiers_are_checked() -> None:
    with pytest.raises(SpecError, match=r"cache_policy: got 'lur', expected one of lru, lfu.*did you mean"):
        hb.MemoryOptions(cache_policy="lur")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"cache_tier: got 'hbm', expected one of device, host"):
        hb.MemoryOptions(cache_tier="hbm")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"host: got 'uvm', expected one of records, uva.*did you mean 'uva'"):
        hb.MemoryOptions(host="uvm")  # type: ignore[arg-type]
    with pytest.raises(hb.HotbedError, match=r"a cut: tier: got 'dsk', expected one of device, host, disk"):
        hb.Cut(tier="dsk")  # type: ignore[arg-type]
    with pytest.raises(hb.HotbedError, match="a cut: cache_rows: got -1"):
        hb.Cut(cache_rows=-1)
    assert Path(tempfile.gettempdir()).is_dir()


def replicated(group: dist.ProcessGroup, cut: hb.Cut, exact: bool, path: Path | None = None) -> Any:
    """Two groups of two ranks; with samples of their own unless they are exact. A checkpoint goes to a path."""
    model = torch.nn.ModuleDict({"e": EmbeddingCollection(TABLES, FEATURES, seed=4)})
    options: dict[str, Any] = {"exact": True} if exact else {"sync_every": 2}
    parallel = hb.ParallelOptions(replicas=2, **options)
    distributed = hb.distribute(model, hb.make_plan(TABLES, 2, cut), parallel, group=group)
    optimizer = Adam(distributed, lr=0.1)
    for seed in range(3):
        step(distributed, optimizer, seed if exact else seed + 10 * dist.get_rank(group))
    if path is not None:
        save_checkpoint(path, {"model": distributed, "sparse": optimizer}, step=3, background=True).wait()
    return everything(distributed, optimizer)


def plain(group: dist.ProcessGroup) -> Any:
    model, optimizer = made(group, CUTS["device"])
    for seed in range(3):
        step(model, optimizer, seed)
    return everything(model, optimizer)


def test_exact_replicas_of_rows_on_disk(ranks: Ranks) -> None:
    expected = ranks.run(4, plain)[0]
    assert all(found == expected for found in ranks.run(4, replicated, CUTS["disk, cached"], True))


@pytest.mark.parametrize("name", [*map(full, list(CUTS)[:-1]), list(CUTS)[-1]])
def test_averaged_replicas_have_the_same_bits_wherever_rows_are(ranks: Ranks, tmp_path: Path, name: str) -> None:
    expected = ranks.run(4, replicated, CUTS["device"], False)[0]
    assert all(found == expected for found in ranks.run(4, replicated, CUTS[name], False, tmp_path / "one"))
    for loaded in ranks.run(3, save, CUTS["host"], tmp_path / "one", tmp_path / "again", False):
        assert loaded == expected
