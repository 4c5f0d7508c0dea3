"""Protects: who has an older model and applies the changes in order has, to the bit, the rows of the newest."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.checkpoint import changes, differential, read_manifest, save_checkpoint
from hotbed.checkpoint.changes import export_changes
from hotbed.checkpoint.convert import convert
from hotbed.cli.main import main
from hotbed.errors import CheckpointError
from tests.checkpoint.test_fuzz import manifest_of, sign
from tests.checkpoint.test_tiles import tables, tilings_of
from tests.checkpoint.tiles import Tiles, save
from tests.cli.cases import Output, refused
from tests.fixtures.models import CASES, build, embeddings, train
from tests.matrix import examples
from tests.ranks import Ranks

Served = dict[tuple[str, int], bytes]
"""Bytes of the vectors that a server has, by table and id."""


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "MOST_SHARE", 10.0)
    monkeypatch.setattr(changes, "rows_in_memory", lambda *_: 1)  # the fewest there can be: a set of ids


def apply(served: Served, file: Path) -> None:
    """What a server does, with nothing of hotbed."""
    seen = set()
    for row in pq.read_table(file).to_pylist():
        key = row["table"], row["id"]
        assert key not in seen
        seen.add(key)
        if row["op"] == "delete":
            del served[key]
            assert row["vector"] is None
        else:
            served[key] = np.array(row["vector"], dtype=np.float32).tobytes()


def rows_of(parts: Any) -> Served:
    """What the model looks up."""
    found: Served = {}
    collection = embeddings(parts)
    state = collection.state_dict()
    for name in collection.tables:
        rows = collection.weight(name)
        ids = state.get(f"{name}.dynamic_ids", torch.arange(len(rows)))
        for row, own in zip(rows, ids.tolist(), strict=True):
            if own >= 0:
                found[f"embeddings.{name}", own] = row.detach().numpy().tobytes()
    return found


@pytest.mark.parametrize("name", ["whole", "narrow", "lazy", "dynamic"])
@given(data=st.data())
@settings(max_examples=examples(4), deadline=None)
def test_changes_of_any_chain_lead_to_the_newest_rows(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    parts = build(case, plan=case.plan)
    served: Served = {}
    with tempfile.TemporaryDirectory() as folder:
        before: Path | None = None
        base: Any = None
        seed = 0
        for i in range(data.draw(st.integers(2, 4))):
            steps = data.draw(st.integers(0, 2))
            train(case, parts, range(seed, seed + steps))
            seed += steps
            place = Path(folder) / f"c{i}"
            base_or_none = base if data.draw(st.booleans()) else None
            saved = save_checkpoint(place, parts, step=i, base=base_or_none, track=base_or_none is None)
            base = saved if saved.base is None else base
            if data.draw(st.booleans()):
                compact = place.with_name(f"compact{i}")
                convert(place, compact, compact=True)
                place = compact
            found = export_changes(place, Path(folder) / f"{i}.parquet", before)
            assert (found["base"], found["sequence"]) == (None if before is None else i - 1, i)
            apply(served, Path(folder) / f"{i}.parquet")
            assert served == rows_of(parts)
            before = place


@given(st.data())
@settings(max_examples=examples(20), deadline=None)
def test_changes_of_any_tiles_are_those_of_the_rows(data: st.DataObject) -> None:
    table = data.draw(tables())
    tiles = Tiles(table, data.draw(tilings_of(table)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "base", tiles)
        for tile in tiles.tiles:
            tile.arena.store.track("base")
        before = tiles.values()["rows"]
        tiles.fill(2, data.draw(st.sets(st.integers(0, table.rows - 1))))
        save(folder / "d", tiles, base="base")
        export_changes(folder / "d", folder / "changes.parquet", folder / "base")
        after = tiles.values()["rows"]
        found = pq.read_table(folder / "changes.parquet").to_pylist()
    differ = (before.view(torch.int32) != after.view(torch.int32)).any(1)
    assert [row["id"] for row in found] == differ.nonzero()[:, 0].tolist()
    vectors = [np.array(row["vector"], dtype=np.float32).tobytes() for row in found]
    assert vectors == [row.numpy().tobytes() for row in after[differ]]


def evicting(folder: Path) -> Any:
    """A dynamic table whose first set is full, before and after an id took the row of another."""
    tables = [hb.Table("t", "dynamic", 4, 0.5, dynamic=hb.Dynamic(128 * 16))]
    model = torch.nn.ModuleDict({"e": hb.EmbeddingCollection(tables, [hb.Feature("t", "t")])})
    parts: Any = {"model": model, "sparse": hb.optim.SGD(model, lr=0.1)}

    def step(ids: list[int]) -> None:
        found = model["e"](hb.Jagged.from_dict({"t": [ids]}))
        found["t"].sum().backward()
        parts["sparse"].step()

    step(list(range(128)))
    base = save_checkpoint(folder / "base", parts, step=1, track=True)
    step([500])
    save_checkpoint(folder / "d", parts, step=2, base=base)
    return model


def test_a_row_that_changes_ids_is_a_tombstone_and_a_vector(tmp_path: Path) -> None:
    evicting(tmp_path)
    found = export_changes(tmp_path / "d", tmp_path / "changes.parquet", tmp_path / "base")
    assert found["tables"] == {"e.t": {"upserts": 1, "deletes": 1}}
    table = pq.read_table(tmp_path / "changes.parquet")
    gone, new = table.to_pylist()
    assert (gone["op"], gone["vector"], gone["table"], gone["base"], gone["sequence"]) == ("delete", None, "e.t", 1, 2)
    assert gone["id"] in range(128)
    assert (new["op"], new["id"], len(new["vector"])) == ("upsert", 500, 4)
    hashes = [read_manifest(tmp_path / name).sha256.encode() for name in ("base", "d")]
    assert [table.schema.metadata[key] for key in (b"hotbed.base", b"hotbed.sequence")] == hashes


def test_only_windows_with_changed_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hb.Table("t", 1000, 16)
    tiles = Tiles(table, [(range(1000), range(16))])
    save(tmp_path / "base", tiles)
    tiles.tiles[0].arena.store.track("base")
    tiles.fill(2, [300])
    save(tmp_path / "d", tiles, base="base")
    read: list[range] = []
    original = changes.read_rectangle
    monkeypatch.setattr(changes, "read_rectangle", lambda r, *args: (read.append(r.rows), original(r, *args))[1])
    export_changes(tmp_path / "d", tmp_path / "changes.parquet", tmp_path / "base")
    assert read == [range(256, 384)] * 2


def saved_by_ranks(group: dist.ProcessGroup, folder: Path) -> None:
    differential.MOST_SHARE = 10.0
    parts = build(CASES["dynamic"], group=group, plan="row")
    train(CASES["dynamic"], parts, range(dist.get_rank(group), 6, 3))
    base = save_checkpoint(folder / "base", parts, step=1, track=True)
    train(CASES["dynamic"], parts, range(9 + dist.get_rank(group), 12, 3))
    save_checkpoint(folder / "d", parts, step=2, base=base)


def test_changes_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(3, saved_by_ranks, tmp_path)
    parts = build(CASES["dynamic"])
    served: Served = {}
    for i, (name, since) in enumerate([("base", None), ("d", tmp_path / "base")]):
        export_changes(tmp_path / name, tmp_path / f"{i}.parquet", since)
        apply(served, tmp_path / f"{i}.parquet")
        hb.load_checkpoint(tmp_path / name, parts)
        assert served == rows_of(parts)


# -- on the command line -------------------------------------------------------------------------------------------


def test_commands(tmp_path: Path, capsys: Output) -> None:
    evicting(tmp_path)
    for name, new in (("base", "last-00000001"), ("d", "last-00000002")):
        (tmp_path / name).rename(tmp_path / new)
    values = manifest_of(tmp_path / "last-00000002")
    values["base"]["name"] = "last-00000001"
    sign(tmp_path / "last-00000002", values)
    out, report = tmp_path / "changes.parquet", tmp_path / "report.json"
    argv = ["checkpoint", "changes", str(tmp_path), "--out", str(out), "--since"]
    for since in ("1", str(tmp_path / "last-00000001")):
        assert main([*argv, since, "--json", str(report)]) == 0
        assert "1 rows and 1 deleted ids of step 2 since step 1, " in capsys.readouterr().out
        assert json.loads(report.read_text())["tables"] == {"e.t": {"upserts": 1, "deletes": 1}}
    assert main(argv[:-1]) == 0
    assert "128 rows and 0 deleted ids of step 2, " in capsys.readouterr().out
    message = refused([*argv, "7"], capsys)
    assert f"--since is 7, but neither {tmp_path}/last-00000007 nor {tmp_path}/best-00000007 exists" in message
    for name in ("changes.csv", "nowhere/changes.parquet"):
        message = refused(["checkpoint", "changes", str(tmp_path), "--out", str(tmp_path / name)], capsys)
        assert f"--out: got '{tmp_path / name}', expected a file NAME.parquet in a directory that exists" in message

    assert main(["checkpoint", "compact", str(tmp_path), str(tmp_path / "whole"), "--json", str(report)]) == 0
    assert f"{tmp_path}/whole: all rows of {tmp_path}/last-00000002, " in capsys.readouterr().out
    assert read_manifest(tmp_path / "whole").base is None
    (tmp_path / "last-00000001").rename(tmp_path / "elsewhere")
    message = refused(["checkpoint", "compact", str(tmp_path / "last-00000002"), str(tmp_path / "x")], capsys)
    assert f"its base {tmp_path}/last-00000001 does not exist" in message
    assert main(["checkpoint", "verify", str(tmp_path / "whole")]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path / "whole")]) == 0


def test_other_tables_are_refused_and_no_file_is_left(tmp_path: Path) -> None:
    for name in ("whole", "narrow"):
        save_checkpoint(tmp_path / name, build(CASES[name]))
    with pytest.raises(CheckpointError, match=r"got 37 × 8 in .*whole, expected no such table as in"):
        export_changes(tmp_path / "whole", tmp_path / "x.parquet", tmp_path / "narrow")
    file = tmp_path / "whole" / "tables-00000-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="its content has changed"):
        export_changes(tmp_path / "whole", tmp_path / "x.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["narrow", "whole"]


def test_ids_that_are_not_those_of_the_rows_are_refused(tmp_path: Path) -> None:
    evicting(tmp_path)
    values = manifest_of(tmp_path / "base")
    state = values["parts"]["model"]
    state["e.t.dynamic_ids"] = state["e.t.dynamic_now"]
    sign(tmp_path / "base", values)
    with pytest.raises(CheckpointError, match=r"'e.t.dynamic_now': got torch.int64 \[\], expected torch.int64 \[128\]"):
        export_changes(tmp_path / "base", tmp_path / "x.parquet")
