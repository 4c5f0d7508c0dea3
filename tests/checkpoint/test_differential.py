"""Protects: a difference on its base is, to the bit, what a full checkpoint of the same moment is, for every table."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

import hotbed as hb
from hotbed.checkpoint import (
    differential,
    init_from,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    storage,
    verify_checkpoint,
)
from hotbed.checkpoint.convert import convert, export_tables
from hotbed.checkpoint.save import RankReports, Saving
from hotbed.errors import CheckpointError, DamagedError
from hotbed.specs import Table
from tests.checkpoint.damage import flip_last_bit
from tests.checkpoint.test_tiles import tables, tilings_of
from tests.checkpoint.tiles import Tiles, load, save
from tests.fixtures.models import CASES, build, embeddings, rowwise, sha256, state, train
from tests.matrix import examples, full
from tests.ranks import Ranks

ALL = 10.0
"""Share that lets a difference hold all rows: tests' tables are so small that most rows change."""


@pytest.fixture(autouse=True)
def any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "MOST_SHARE", ALL)


def go_on(name: str, path: Path, plan: Any = None, group: dist.ProcessGroup | None = None) -> tuple[str, str]:
    """Load into a new model and train this; hashes of both."""
    parts = build(CASES[name], plan=plan, group=group, seed=6)
    load_checkpoint(path, parts)
    loaded = sha256(state(parts))
    return loaded, sha256([train(CASES[name], parts, range(100, 102)), state(parts)])


def chain(name: str, folder: Path, parts: Any, steps: Sequence[range], *, background: bool = False) -> list[Saving]:
    """Save a base, then after each training a difference to it, and a full checkpoint of the same moment."""
    base = save_checkpoint(folder / "base", parts, track=True, background=background)
    found: list[Saving] = []
    for i, seeds in enumerate(steps):
        base.wait()
        train(CASES[name], parts, seeds)
        difference = save_checkpoint(folder / f"d{i}", parts, base=base, background=background)
        difference.wait()
        save_checkpoint(folder / f"full{i}", parts)
        found.append(difference)
    return found


EVERY_KIND = ("whole", "narrow", "lazy", "dynamic", "adam", "compact")
"""Rows of all dtypes, in keyed tiles and dynamic tables; other cases differ in the optimizer's rule alone."""


@pytest.mark.parametrize("name", [*EVERY_KIND, *(full(name) for name in CASES if name not in (*EVERY_KIND, "tiles"))])
def test_a_difference_loads_and_goes_on_as_a_full_checkpoint(name: str, tmp_path: Path) -> None:
    parts = build(CASES[name], plan=CASES[name].plan)
    train(CASES[name], parts, range(2))
    # The optimizer counts steps of rows that were last updated before the base, too.
    saved = chain(name, tmp_path, parts, [range(7, 8), range(8, 9)], background=name in ("whole", "lazy", "narrow"))
    assert [s.base for s in saved] == ["base", "base"]
    for i in range(2):
        manifest = verify_checkpoint(tmp_path / f"d{i}")
        assert all(tile.keyed for table in manifest.tables.values() for tile in table.tiles)
        assert go_on(name, tmp_path / f"d{i}", CASES[name].plan) == go_on(name, tmp_path / f"full{i}")


@pytest.mark.parametrize("name", ["lazy", "whole", "adam", "compact"])
def test_any_tier_loads_a_difference(name: str, tmp_path: Path) -> None:
    parts = build(CASES[name])
    chain(name, tmp_path, parts, [range(1)])
    expected = go_on(name, tmp_path / "full0")
    for cut in (hb.Cut(tier="disk", cache_rows=7), hb.Cut(tier="host")):
        assert go_on(name, tmp_path / "d0", cut) == expected


def test_only_rows_that_changed_are_in_it(tmp_path: Path) -> None:
    parts = build(CASES["whole"])
    base = save_checkpoint(tmp_path / "base", parts, track=True)
    nothing = save_checkpoint(tmp_path / "nothing", parts, base=base)
    assert [t.nbytes for t in keys_of(tmp_path / "nothing")] == [0, 0, 0]
    case = CASES["whole"]
    bags = embeddings(parts)(hb.Jagged.from_dict({f.name: [[3], [5, 3]] for f in case.features}))
    torch.autograd.backward([bags[f.name] for f in case.features[:2]], [torch.ones(2, 8)] * 2)
    parts["sparse"].step()
    save_checkpoint(tmp_path / "some", parts, base=base)
    assert [t.tolist() for t in keys_of(tmp_path / "some")] == [[3, 5], [3, 5], []]
    assert nothing.nbytes < base.nbytes


def keys_of(path: Path) -> list[torch.Tensor]:
    manifest = read_manifest(path)
    with differential.open_with_bases(hb.checkpoint.directory(path), manifest) as files:
        return [files.read(t.file, f"{t.key}/keys") for table in manifest.tables.values() for t in table.tiles]


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_any_tiles_load_differences_of_any_tiles(data: st.DataObject) -> None:
    table = data.draw(tables())
    saved = Tiles(table, data.draw(tilings_of(table)))
    saved.fill(1, data.draw(st.none() | st.sets(st.integers(0, table.rows - 1))))
    rows = st.sets(st.integers(0, table.rows - 1))
    other = data.draw(tables())
    other = Table("t", table.rows, table.dim, dtype=other.dtype, fp32_rows=min(other.fp32_rows, table.rows))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "base", saved)
        for tile in saved.tiles:
            tile.arena.store.track("base")
        for i in range(2):
            saved.fill(i + 2, data.draw(rows))
        save(folder / "d", saved, ranks=data.draw(st.integers(1, 3)), base="base")
        save(folder / "full", saved)
        assert convert(folder / "d", folder / "whole").base_files == {}
        assert read_manifest(folder / "whole").base is None
        for spec in (table, other):
            tiling = data.draw(tilings_of(spec))
            found = {path: Tiles(spec, tiling, seed=5) for path in ("d", "full", "whole")}
            for path, tiles in found.items():
                load(folder / path, tiles)
            assert found["d"].bits() == found["full"].bits(), spec
            if spec is table:
                assert found["whole"].bits() == found["full"].bits()


# -- several ranks -------------------------------------------------------------------------------------------------


def on_ranks(rule: str, group: dist.ProcessGroup, plan: Any, *, seed: int = 5) -> Any:
    """The model of tiles, trained by Adam or by a rule that sums over columns."""
    case = CASES["tiles"] if rule == "adam" else replace(CASES["tiles"], optimizers={"sparse": rowwise})
    return build(case, group=group, plan=plan, seed=seed)


def chain_on_ranks(group: dist.ProcessGroup, folder: Path, plan: Any, rule: str) -> list[str | None]:
    differential.MOST_SHARE = ALL
    parts = on_ranks(rule, group, plan)
    return [saving.base for saving in chain("tiles", folder, parts, [range(2), range(7, 8)], background=True)]


def loaded_on_ranks(group: dist.ProcessGroup, path: Path, plan: Any, rule: str) -> str:
    parts = on_ranks(rule, group, plan, seed=6)
    load_checkpoint(path, parts)
    return sha256(state(parts))


DISK = hb.Cut(tier="disk")


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        *[("given", "adam"), ("given", "rowwise"), (DISK, "adam")],
        *map(full, ["row", "column", "grid", "dp"], ["rowwise", "rowwise", "adam", "adam"]),
    ],
)
def test_differences_of_three_ranks_load_on_one_and_four(ranks: Ranks, tmp_path: Path, plan: Any, rule: str) -> None:
    plan = CASES["tiles"].plan if plan == "given" else plan
    assert ranks.run(3, chain_on_ranks, tmp_path, plan, rule) == [["base", "base"]] * 3
    (expected,) = set(ranks.run(1, loaded_on_ranks, tmp_path / "full1", "table", rule))
    for size, other in ((1, "table"), (4, "row"), (3, "column")):
        found = set(ranks.run(size, loaded_on_ranks, tmp_path / "d1", other, rule))
        assert found == {expected}, (size, other)


def replaced_on_one(group: dist.ProcessGroup, folder: Path) -> str | None:
    differential.MOST_SHARE = ALL
    parts = build(CASES["tiles"], group=group, plan="row")
    base = save_checkpoint(folder / "base", parts, track=True)
    if dist.get_rank(group) == 1:
        embeddings(parts).local_tiles("rows")[0].arena.store.replaced()
    return save_checkpoint(folder / "next", parts, base=base).base


def test_all_ranks_save_all_rows_where_one_must(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, replaced_on_one, tmp_path) == [None] * 3
    assert read_manifest(tmp_path / "next").base is None


def unreachable_on_first(group: dist.ProcessGroup, folder: Path) -> str:
    parts = build(CASES["tiles"], group=group, plan="row")
    base = save_checkpoint(folder / "base", parts, track=True)
    has = storage.LocalDirectory.has

    def fails(place: Any, name: str) -> bool:
        if place.name == "base" and dist.get_rank(group) == 0:
            raise OSError("the store does not answer")
        return has(place, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.LocalDirectory, "has", fails)
        try:
            save_checkpoint(folder / "next", parts, base=base)
        except (CheckpointError, OSError) as error:
            return str(error)
    return "saved"


def test_all_ranks_end_where_the_first_cannot_look_at_the_base(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run(3, unreachable_on_first, tmp_path)
    assert first == "the store does not answer"
    assert (
        others
        == [f"{tmp_path / 'next'} was not saved: rank 0 could not access its base base. See the log of rank 0"] * 2
    )


# -- where it is not known what changed ----------------------------------------------------------------------------


def test_all_rows_are_saved_where_differences_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hotbed")
    parts = build(CASES["whole"])
    untracked = save_checkpoint(tmp_path / "untracked", parts)
    reasons = {
        "a": (untracked, "it is not the newest checkpoint with track=True of these tables"),
        "b": (save_checkpoint(tmp_path / "base", parts, track=True), ""),
        "elsewhere/c": (save_checkpoint(tmp_path / "base2", parts, track=True), "it is in another directory"),
    }
    for path, (base, reason) in reasons.items():
        if path == "b":
            load_checkpoint(tmp_path / "untracked", parts)
            reason = "tables or moments were loaded, filled or created since"
        caplog.clear()
        assert save_checkpoint(tmp_path / path, parts, base=base).base is None
        assert reason in caplog.text and f"{path} holds all rows, not only rows changed since" in caplog.text
    base = save_checkpoint(tmp_path / "base3", parts, track=True)
    shutil.rmtree(tmp_path / "base3")
    assert save_checkpoint(tmp_path / "d", parts, base=base).base is None
    assert "since base3: it does not exist any more" in caplog.text
    base = save_checkpoint(tmp_path / "base4", {"model": parts["model"]}, track=True)  # without moments
    assert save_checkpoint(tmp_path / "e", parts, base=base).base is None
    assert "e holds all rows, not only rows changed since base4: it has other tables, or other mo" in caplog.text
    base = save_checkpoint(tmp_path / "base5", parts, track=True)
    averaged = {**parts, "average": AveragedModel(parts["model"])}
    assert save_checkpoint(tmp_path / "f", averaged, base=base).base is None
    for path in ("e", "f"):
        verify_checkpoint(tmp_path / path)
    monkeypatch.setattr(differential, "MOST_SHARE", 0.01)
    base = save_checkpoint(tmp_path / "base6", parts, track=True)
    train(CASES["whole"], parts, range(1))
    assert save_checkpoint(tmp_path / "g", parts, base=base).base is None
    assert "bytes of rows have changed" in caplog.text


def test_all_rows_are_saved_of_a_copy_that_was_made_after_the_base(tmp_path: Path) -> None:
    """It has the marks of what it was copied from, and the base has other rows of it."""
    case = CASES["whole"]
    parts = build(case)
    before = {**parts, "average": AveragedModel(parts["model"])}
    base = save_checkpoint(tmp_path / "base", before, track=True)
    train(case, parts, range(2))
    after = {**parts, "average": AveragedModel(parts["model"])}
    assert save_checkpoint(tmp_path / "d", after, base=base).base is None
    loaded = build(case, seed=6)
    loaded["average"] = AveragedModel(loaded["model"])
    load_checkpoint(tmp_path / "d", loaded)
    for found, expected in zip(tables_of(loaded["average"]), tables_of(after["average"]), strict=True):
        assert torch.equal(found, expected)


def tables_of(averaged: Any) -> list[torch.Tensor]:
    collection = averaged.module["embeddings"]
    return [collection.weight(name) for name in collection.tables]


# -- bases ---------------------------------------------------------------------------------------------------------


def base_and_difference(folder: Path, name: str = "whole") -> Any:
    parts = build(CASES[name], plan=CASES[name].plan)
    chain(name, folder, parts, [range(1)])
    return parts


def test_a_base_that_is_gone_or_another_is_an_error(tmp_path: Path) -> None:
    parts = base_and_difference(tmp_path)
    (tmp_path / "base").rename(tmp_path / "kept")
    for read in (read_manifest, verify_checkpoint, lambda p: load_checkpoint(p, parts), lambda p: init_from(p, parts)):
        with pytest.raises(
            CheckpointError, match=r"d0 is a differential checkpoint, but its base .*base does not exist"
        ) as error:
            read(tmp_path / "d0")
        assert not isinstance(error.value, DamagedError)  # which resuming would set aside
    shutil.copytree(tmp_path / "full0", tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"got SHA-256 .{12}…, expected .{12}…"):
        read_manifest(tmp_path / "d0")


def test_damage_of_a_base_is_found_by_its_differences(tmp_path: Path) -> None:
    parts = base_and_difference(tmp_path)
    file = tmp_path / "base" / "tables-00000-00000.safetensors"
    flip_last_bit(file)
    for read in (verify_checkpoint, lambda p: load_checkpoint(p, parts)):
        with pytest.raises(DamagedError, match=r"base/tables-00000-00000.safetensors: block 0"):
            read(tmp_path / "d0")


def test_a_base_that_vanishes_while_a_difference_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(CASES["whole"])
    base = save_checkpoint(tmp_path / "base", parts, track=True)
    report = RankReports.write

    def removed(*args: Any) -> None:
        shutil.rmtree(tmp_path / "base")
        report(*args)

    monkeypatch.setattr(RankReports, "write", removed)
    with pytest.raises(CheckpointError, match="d was not saved: its base base does not exist any more"):
        save_checkpoint(tmp_path / "d", parts, base=base)
    assert not (tmp_path / "d").exists()


def test_a_copy_of_both_elsewhere_and_a_link_to_a_difference_are_read(tmp_path: Path) -> None:
    base_and_difference(tmp_path)
    expected = go_on("whole", tmp_path / "full0")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "newest").symlink_to(tmp_path / "d0")
    assert go_on("whole", tmp_path / "links" / "newest") == expected
    for name in ("base", "d0"):
        shutil.copytree(tmp_path / name, tmp_path / "copy" / name)
    shutil.rmtree(tmp_path / "base")
    assert go_on("whole", tmp_path / "copy" / "d0") == expected


@pytest.mark.parametrize("name", ["whole", "narrow", "lazy", "dynamic"])
def test_what_is_made_of_a_difference_needs_no_base(tmp_path: Path, name: str) -> None:
    base_and_difference(tmp_path, name)
    convert(tmp_path / "d0", tmp_path / "whole")
    convert(tmp_path / "d0", tmp_path / "compact", compact=True)
    export_tables(tmp_path / "d0", tmp_path / "exported")
    export_tables(tmp_path / "full0", tmp_path / "exported-full")
    shutil.rmtree(tmp_path / "base")
    for path in ("whole", "compact"):
        assert go_on(name, tmp_path / path) == go_on(name, tmp_path / "full0")
    for file in (tmp_path / "exported").iterdir():
        assert file.read_bytes() == (tmp_path / "exported-full" / file.name).read_bytes()


def test_a_warm_start_takes_a_difference(tmp_path: Path) -> None:
    base_and_difference(tmp_path)
    found = []
    for path in ("d0", "full0"):
        parts = build(CASES["whole"], seed=6)
        init_from(tmp_path / path, parts)
        found.append(sha256(state(parts)))
    assert found[0] == found[1]
