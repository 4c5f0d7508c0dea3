"""Checkpoints that are written while training goes on are of the moment they began."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.checkpoint import init_from, load_checkpoint, save_checkpoint, storage
from hotbed.checkpoint import snapshot as snapshot_module
from hotbed.checkpoint.snapshot import Snapshot
from hotbed.embed import EmbeddingCollection
from hotbed.errors import CheckpointError
from hotbed.optim import Adam, Moment, SparseOptimizer
from hotbed.specs import Feature, Table
from hotbed.store import DenseStore, Span
from tests.checkpoint.damage import disk_is_full
from tests.checkpoint.test_checkpoint import bits, narrow_model, train
from tests.matrix import examples


def store_of(dtype: Any, fp32_rows: int) -> DenseStore:
    store = DenseStore([Span(20, fp32_rows), Span(12, 0)], 4, dtype=dtype)
    store.add_moment(Moment("sum", "row"))
    store.write(torch.arange(32), torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    return store


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_snapshot_is_what_was_there_whatever_is_written_meanwhile(data: st.DataObject) -> None:
    store = store_of(data.draw(st.sampled_from(["fp32", "bf16", "fp8", "int8"])), data.draw(st.integers(0, 20)))
    arrays = {name: t for name, t in store.arrays().items() if len(t)}
    before = {name: t.clone() for name, t in arrays.items()}
    snapshot = Snapshot([store])
    chunks: dict[str, list[torch.Tensor]] = {name: [] for name in arrays}
    at = dict.fromkeys(arrays, 0)
    while any(at[name] < len(t) for name, t in arrays.items()):
        if data.draw(st.booleans()):
            slots = torch.tensor(data.draw(st.lists(st.integers(0, 31), max_size=12)), dtype=torch.int64)
            assert store.on_change is not None
            store.on_change(slots)  # as an update does, with repetitions
            slots = slots.unique()
            store.write(slots, torch.randn(len(slots), 4))
            store.write(slots, torch.rand(len(slots)), "sum")
        name = data.draw(st.sampled_from([name for name in arrays if at[name] < len(arrays[name])]))
        stop = data.draw(st.integers(at[name] + 1, len(arrays[name])))
        chunks[name].append(snapshot.read(store, name, at[name], stop))
        at[name] = stop
    assert snapshot._bytes == 0
    for name, parts in chunks.items():
        whole = torch.cat([part.view(torch.uint8) for part in parts])
        assert torch.equal(whole, before[name].view(torch.uint8)), name
    snapshot.close()
    assert store.on_change is None


def test_updates_wait_for_room_and_say_how_long() -> None:
    store = store_of("fp32", 0)
    before = store.rows.wide.clone()
    snapshot = Snapshot([store], limit_bytes=100)
    done = threading.Event()

    def update() -> None:
        store.write(torch.arange(16, 32), torch.zeros(16, 4))
        done.set()

    thread = threading.Thread(target=update)
    thread.start()
    assert not done.wait(0.1)
    assert snapshot.is_waiting
    rows = [snapshot.read(store, "wide", start, start + 8) for start in (0, 8, 16, 24)]
    snapshot.read(store, "moment.sum", 0, 32)
    thread.join(60)
    assert done.is_set()
    assert not snapshot.is_waiting
    assert torch.equal(torch.cat(rows), before)
    assert snapshot.waited_s > 0
    assert snapshot.most_bytes > 100
    snapshot.close()


def test_a_snapshot_that_is_given_up_lets_updates_go() -> None:
    store = store_of("fp32", 0)
    snapshot = Snapshot([store], limit_bytes=0)
    thread = threading.Thread(target=lambda: store.write(torch.arange(4), torch.zeros(4, 4)))
    thread.start()
    snapshot.close()
    thread.join(60)
    assert not thread.is_alive()


def slowly(monkeypatch: pytest.MonkeyPatch, begin: threading.Event) -> None:
    """Let files be written slowly, and not before there is leave to begin."""
    read = Snapshot.read

    def waited(*args: Any) -> torch.Tensor:
        assert begin.wait(60)
        time.sleep(0.02)
        return read(*args)

    monkeypatch.setattr(Snapshot, "read", waited)


def test_narrow_tables_are_saved_while_they_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    slowly(monkeypatch, begin)
    model, optimizer = narrow_model()
    train(model, optimizer, range(4))
    at_four = bits(model.state_dict()), bits(optimizer.state_dict())
    saving = save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer}, step=4, background=True)
    step = 4
    while saving.under_way:
        train(model, optimizer, range(step, step + 1))
        step += 1
        if step > 6:
            begin.set()
    saving.wait()
    assert step > 6
    assert bits(model.state_dict()) != at_four[0]
    other, other_optimizer = narrow_model(seed=1)
    load_checkpoint(tmp_path / "c", {"model": other, "sparse": other_optimizer})
    assert (bits(other.state_dict()), bits(other_optimizer.state_dict())) == at_four
    assert saving.nbytes == sum(f.stat().st_size for f in (tmp_path / "c").glob("*.safetensors"))
    assert 0 < saving.stalled_s < saving.seconds


def large_model() -> tuple[EmbeddingCollection, SparseOptimizer]:
    model = EmbeddingCollection([Table("t", 60_000, 16)], [Feature("f", table="t")])
    return model, Adam(model, lr=0.1)


def test_a_large_table_is_saved_while_rows_at_both_ends_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotbed.checkpoint import tensor_files
    from hotbed.jagged import Jagged

    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr(snapshot_module, "KEPT_BYTES", 1 << 16)
    model, optimizer = large_model()
    draw = torch.Generator().manual_seed(0)

    def step() -> None:
        ids = torch.randint(0, 60_000, (256, 2), generator=draw)
        model(Jagged.from_dict({"f": ids}))["f"].square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    before = bits(model.state_dict()), bits(optimizer.state_dict())
    saving = save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer}, background=True)
    while saving.under_way:
        step()
    saving.wait()
    other, other_optimizer = large_model()
    load_checkpoint(tmp_path / "c", {"model": other, "sparse": other_optimizer})
    assert (bits(other.state_dict()), bits(other_optimizer.state_dict())) == before


def test_tables_that_are_being_saved_are_not_loaded_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    slowly(monkeypatch, begin)
    model, optimizer = narrow_model()
    save_checkpoint(tmp_path / "first", {"model": model})
    saving = save_checkpoint(tmp_path / "second", {"model": model, "sparse": optimizer}, background=True)
    with pytest.raises(CheckpointError, match="table 'user' is being saved"):
        load_checkpoint(tmp_path / "first", {"model": model})
    with pytest.raises(CheckpointError, match="table 'user' is being saved"):
        save_checkpoint(tmp_path / "third", {"model": model}, background=True)
    with pytest.raises(CheckpointError, match="table 'user' is being saved"):
        init_from(tmp_path / "first", {"model": model})
    begin.set()
    saving.wait()
    load_checkpoint(tmp_path / "first", {"model": model})


def test_a_failure_in_the_background_is_raised_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage._LocalWriter, "write", disk_is_full)
    model, optimizer = narrow_model()
    saving = save_checkpoint(tmp_path / "c", {"model": model, "sparse": optimizer}, background=True)
    with pytest.raises(OSError, match="No space left"):
        saving.wait()
    with pytest.raises(OSError, match="No space left"):
        _ = saving.under_way
    assert list(tmp_path.iterdir()) == []
    train(model, optimizer, range(2))  # nothing holds it up
