"""Checkpoints from any plan and number of ranks to any other, through real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hotbed as hb
from hotbed.checkpoint import (
    blocks,
    init_from,
    load_checkpoint,
    read_manifest,
    save,
    save_checkpoint,
    storage,
    verify_checkpoint,
)
from hotbed.errors import CheckpointError
from hotbed.optim import Adam, RowWiseAdagrad, SparseOptimizer
from tests.checkpoint.damage import disk_is_full
from tests.checkpoint.test_checkpoint import bits
from tests.matrix import full
from tests.ranks import RankError, Ranks

TABLES = [
    hb.Table("a", rows=101, dim=48),
    hb.Table("b", rows=7, dim=48, dtype="bf16", fp32_rows=3),
    hb.Table("c", rows=50, dim=256, dtype="int8", fp32_rows=10),
]
CHAIN = [(4, "row"), (1, "table"), (3, "column"), (4, "row"), (3, "grid"), (4, "dp")]
"""Ranks and plans, each of which loads the checkpoint of the one before."""


def made(group: dist.ProcessGroup | None, plan: str, rule: str = "adam", **sizes: int) -> tuple[Any, SparseOptimizer]:
    tables = [hb.Table(t.name, sizes.get(t.name, t.rows), t.dim, dtype=t.dtype, fp32_rows=t.fp32_rows) for t in TABLES]
    features = [hb.Feature(t.name, table=t.name) for t in tables]
    model: Any = torch.nn.ModuleDict({"e": hb.EmbeddingCollection(tables, features), "out": torch.nn.Linear(352, 1)})
    torch.manual_seed(1)
    torch.nn.init.normal_(model["out"].weight)
    if group is not None:
        model = hb.distribute(model, plan, group=group)
    return model, (Adam(model, lr=0.1) if rule == "adam" else RowWiseAdagrad(model, lr=0.1))


def step(model: Any, optimizer: SparseOptimizer, seed: int) -> None:
    embeddings = getattr(model, "module", model)["e"]
    draw = torch.Generator().manual_seed(seed)
    ids = hb.Jagged.from_dict({t.name: torch.randint(0, t.rows, (16, 2), generator=draw) for t in TABLES})
    found = embeddings(ids)
    loss = torch.stack([(found[t.name] - 1).square().mean() for t in TABLES]).sum()
    loss.backward()
    optimizer.step()


def everything(model: Any, optimizer: SparseOptimizer) -> Any:
    return bits(model.state_dict()), bits(optimizer.state_dict()["state"])


def go(group: dist.ProcessGroup | None, plan: str, rule: str, load: Path | None, target: Path, background: bool) -> Any:
    model, optimizer = made(group, plan, rule)
    parts = {"model": model, "sparse": optimizer}
    if load is None:
        for seed in range(3):
            step(model, optimizer, seed)
    else:
        load_checkpoint(load, parts)
    found = everything(model, optimizer)
    saving = save_checkpoint(target, parts, step=3, background=background)
    saving.wait()
    return found


@pytest.mark.parametrize("rule", ["adam", full("rowwise")])
def test_four_ranks_to_one_to_three_and_back(ranks: Ranks, tmp_path: Path, rule: str) -> None:
    path: Path | None = None
    first: Any = None
    for i, (size, plan) in enumerate(CHAIN):
        target = tmp_path / str(i)
        found = ranks.run(size, go, plan, rule, path, target, i % 2 == 1)
        first = first or found[0]
        assert all(state == first for state in found), (size, plan)
        assert verify_checkpoint(target).step == 3
        assert sorted(f.suffix for f in target.iterdir() if f.suffix == ".json") == [".json"]  # the manifest alone
        path = target
    manifests = [read_manifest(tmp_path / name) for name in "03"]
    assert manifests[0].tables == manifests[1].tables
    assert manifests[0].files == manifests[1].files  # the same bytes


@pytest.mark.full
def test_every_plan_saves_what_every_plan_loads(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(3, go, "row", "adam", None, tmp_path / "first", False)[0]
    for plan in ("table", "row", "column", "grid", "dp"):
        found = ranks.run(3, go, plan, "adam", tmp_path / "first", tmp_path / plan, False)
        again = ranks.run(4, go, "column", "adam", tmp_path / plan, tmp_path / f"{plan}-again", False)
        assert all(state == expected for state in (*found, *again)), plan


def grow(group: dist.ProcessGroup | None, plan: str, path: Path) -> Any:
    model, optimizer = made(group, plan, a=150)
    report = init_from(path, {"model": model, "sparse": optimizer})
    return everything(model, optimizer), [t.note for t in report if t.what == "table"]


def test_tables_grow_under_any_plan(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, go, "row", "adam", None, tmp_path / "c", False)
    ((expected, notes),) = ranks.run(1, grow, "table", tmp_path / "c")
    assert notes[0] == "101 rows, 49 new rows, moments exp_avg, exp_avg_sq"
    for plan in ("row", "column", "dp"):
        assert all(found == (expected, notes) for found in ranks.run(3, grow, plan, tmp_path / "c")), plan


def fails(group: dist.ProcessGroup, path: Path, failing: int, background: bool) -> str:
    model, optimizer = made(group, "row")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == failing:
            patch.setattr(blocks.BlockWriter, "write", disk_is_full)
        try:
            save_checkpoint(path, {"model": model, "sparse": optimizer}, background=background).wait()
        except (CheckpointError, OSError) as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize(("failing", "background"), [(0, False), (2, True), full(0, True), full(2, False)])
def test_when_a_rank_cannot_write_all_ranks_say_so_and_nothing_is_left(
    ranks: Ranks, tmp_path: Path, failing: int, background: bool
) -> None:
    found = ranks.run(3, fails, tmp_path / "c", failing, background)
    assert found[failing] == "[Errno 28] No space left on device"
    for rank in {0, 1, 2} - {failing}:
        assert f"was not saved: rank {failing} " in found[rank]
    assert list(tmp_path.iterdir()) == []


def inner(group: dist.ProcessGroup, path: Path) -> str:
    model, _ = made(group, "row")
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(CheckpointError, match=r"has distributed tables"):
            call(path, {"model": model.module})
    return "refused"


def test_an_existing_checkpoint_and_the_module_inside_a_model_are_refused_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(3, go, "row", "adam", None, tmp_path / "c", False)
    with pytest.raises(RankError) as error:
        ranks.run(3, go, "row", "adam", None, tmp_path / "c", False)
    assert str(error.value).count(f"hotbed.errors.CheckpointError: {tmp_path / 'c'} exists already") == 1
    assert (
        str(error.value).count("hotbed.errors.CheckpointError: rank 0 could not create the checkpoint's directory") == 2
    )
    assert ranks.run(3, inner, tmp_path / "c") == ["refused"] * 3


def apart(group: dist.ProcessGroup, path: Path) -> str:
    """Ranks that do not see one directory."""
    model, _ = made(group, "row")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "PATIENCE_S", 0.5)
        try:
            save_checkpoint(storage.directory(path / str(dist.get_rank(group))), {"model": model})
        except CheckpointError as error:
            return str(error)
    return "saved"


def test_ranks_that_do_not_see_one_directory(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    found = ranks.run(3, apart, tmp_path)
    assert "rank 1 has not written rank-1.json in" in found[0]
    assert "Use a directory that all ranks share" in found[0]
    assert "rank 0 could not write its files" in found[1]
