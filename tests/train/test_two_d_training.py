"""Replicas in a `Trainer`: one model for evaluations and checkpoints, on all ranks."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbed.checkpoint import (
    checkpoints_in,
    differential,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    snapshot,
    verify_checkpoint,
)
from hotbed.checkpoint.tensor_files import FileWriter
from hotbed.comm import Link
from hotbed.embed.replicas import Sync
from hotbed.train import Callback, Trainer
from hotbed.train.runs.callbacks import KeepLast
from tests.matrix import full
from tests.ranks import Ranks
from tests.train import planted
from tests.train.planted import Do, Losses

from .parallel_cases import (
    RECIPE,
    TRAIN,
    Group,
    assert_equal,
    loader_of,
    make_trainer,
    shares,
    state_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TWO = {"replicas": 2, "sync_every": 4}
STEPS, STOPPED = 14, 9
"""Steps of a run of two epochs, and where it was stopped: between two averages."""


def run(
    group: Group,
    options: dict[str, Any],
    stop: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    losses = Losses()
    trainer = make_trainer(group, "row", replace(TRAIN, epochs=2, steps=stop), callbacks=[losses], **options)
    if save is not None:
        trainer.callbacks.append(KeepLast(save, RECIPE, STOPPED, keep_last=9))
    loader = loader_of(group)
    if resume is not None:
        load_checkpoint(resume, trainer.parts())
        trainer.resume_data(loader)
    before = state_of(trainer)
    trainer.fit(loader)
    collection = trainer.model.embeddings
    own = {name: collection.weight(name).clone() for name in collection.tables}
    dense = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {
        "before": before,
        "losses": losses.losses,
        "own": own,
        "dense": dense,
        "state": state_of(trainer),
        "records": losses.records,
    }


OTHERS = [full({"replicas": 4, "layout": "replicas"}), full({"replicas": 2, "exact": True})]


@pytest.mark.parametrize("options", [TWO, *OTHERS])
def test_all_ranks_end_with_one_model(ranks: Ranks, tmp_path: Path, options: dict[str, Any]):
    """Also if they are resumed between two averages."""
    whole = ranks.run(4, run, options, None, tmp_path / "checkpoints")
    for of_rank in whole[1:]:
        for what in ("own", "dense", "state"):
            assert_equal(of_rank[what], whole[0][what])
        assert of_rank["losses"] == whole[0]["losses"]
    checkpoint = next(c for c in checkpoints_in(tmp_path / "checkpoints") if c.path.endswith(f"{STOPPED:08d}"))
    for of_rank in ranks.run(4, run, options, None, None, checkpoint):
        assert of_rank["losses"] == whole[0]["losses"][STOPPED:]
        assert_equal(of_rank["state"], whole[0]["state"])


@pytest.mark.full
def test_the_exact_mode_trains_the_model_of_one_group(ranks: Ranks):
    one, exact = (ranks.run(4, run, options)[0] for options in ({}, {"replicas": 2, "exact": True}))
    assert exact["losses"] == one["losses"]
    assert_equal(exact["state"], one["state"])


@pytest.mark.parametrize(
    ("size", "options"),
    [full(4, TWO), full(4, {}), (4, {"replicas": 4}), (3, {}), full(8, {"replicas": 4, "exact": True})],
)
def test_a_checkpoint_of_replicas_is_loaded_by_any_number_of_them(
    ranks: Ranks, tmp_path: Path, size: int, options: dict[str, Any]
):
    first = ranks.run(4, run, TWO, STOPPED, tmp_path / "checkpoints")[0]
    (checkpoint,) = checkpoints_in(tmp_path / "checkpoints")
    verify_checkpoint(checkpoint)
    assert {name[:12] for name in read_manifest(checkpoint).files if name.startswith("tables")} == {
        "tables-00000",
        "tables-00001",
    }
    for of_rank in ranks.run(size, run, options, STOPPED + 1, None, checkpoint):
        assert_equal(of_rank["before"], first["state"])
    assert_equal(run(None, {}, STOPPED + 1, None, checkpoint)["before"], first["state"])


def differing(group: Group, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train with a base after the first step, and save every later state as a difference and as a full checkpoint."""
    differential.MOST_SHARE = 10.0
    trainer = make_trainer(group, "row", replace(TRAIN, epochs=1), callbacks=[saves := Saves(folder)], **options)
    trainer.fit(loader_of(group))
    return {"bases": saves.bases, "state": state_of(trainer)}


class Saves(Callback):
    """Saves after some steps: a base, then pairs of a difference and a full checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._base, self.bases = folder, None, list[str | None]()

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 1:
            self._base = save_checkpoint(self._folder / "base", trainer.parts(), track=True)
        elif trainer.step in (3, 6):  # between two averages, and after one
            saved = save_checkpoint(self._folder / f"d{trainer.step}", trainer.parts(), base=self._base)
            self.bases.append(saved.base)
            save_checkpoint(self._folder / f"full{trainer.step}", trainer.parts())


def resumed(group: Group, options: dict[str, Any], path: Path) -> dict[str, Any]:
    trainer = make_trainer(group, "row", replace(TRAIN, epochs=1), **options)
    loader = loader_of(group)
    load_checkpoint(path, trainer.parts())
    trainer.resume_data(loader)
    before = state_of(trainer)
    trainer.fit(loader)
    return {"before": before, "state": state_of(trainer)}


@pytest.mark.parametrize("options", [TWO, *OTHERS])
def test_differences_of_replicas_load_and_go_on_as_full_checkpoints(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
):
    saved = ranks.run(4, differing, tmp_path, options)
    assert [of_rank["bases"] for of_rank in saved] == [["base", "base"]] * 4
    for step in (3, 6):
        verify_checkpoint(tmp_path / f"d{step}")
        found, expected = (ranks.run(4, resumed, options, tmp_path / f"{kind}{step}") for kind in ("d", "full"))
        for one, other in zip(found, expected, strict=True):
            assert_equal(one["before"], other["before"])
            assert_equal(one["state"], other["state"])
    one = resumed(None, {}, tmp_path / "d6")
    assert_equal(one["before"], expected[0]["before"])


Beside = tuple[list[float], dict[str, Any], dict[str, Any], set[str]]


def beside_a_checkpoint(group: Group, path: Path | None) -> Beside:
    """Losses beside a checkpoint that is slowly written, state when it began and at the end; who waited."""
    trainer = make_trainer(group, "row", replicas=2)
    names: set[str] = set()
    finish, write = Sync.finish, FileWriter.write

    def noted(sync: Sync) -> None:
        names.add(threading.current_thread().name)
        finish(sync)

    def slowly(*args: Any) -> Any:
        time.sleep(0.5)
        return write(*args)

    losses: list[float] = []
    saving, began = None, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sync, "finish", noted)
        patch.setattr(FileWriter, "write", slowly)
        patch.setattr(snapshot, "KEPT_BYTES", 1000)
        for i, batch in enumerate(shares(planted.batches(10), group)):
            if i == 2 and path is not None:
                began = state_of(trainer)
                saving = save_checkpoint(path, trainer.parts(), step=i, background=True)
            loss = trainer.loss(batch)
            losses.append(float(loss.detach()))
            loss.backward()
            for optimizer in trainer.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        if saving is not None:
            saving.wait()
    return losses, began, state_of(trainer), names


def loaded(group: Group, path: Path) -> dict[str, Any]:
    trainer = make_trainer(group, "row")
    load_checkpoint(path, trainer.parts())
    return state_of(trainer)


def test_averages_go_on_beside_a_checkpoint_whose_thread_never_waits_for_them(ranks: Ranks, tmp_path: Path):
    expected = ranks.run(4, beside_a_checkpoint, None)
    found = ranks.run(4, beside_a_checkpoint, tmp_path / "checkpoint")
    for (losses, began, end, names), (without, _, end_without, _) in zip(found, expected, strict=True):
        assert losses == without
        assert_equal(end, end_without)
        assert not any("checkpoint" in name for name in names)
        assert_equal(began, found[0][1])
    assert_equal(ranks.run(3, loaded, tmp_path / "checkpoint")[0], found[0][1])


def one_after_the_other(group: Group) -> tuple[dict[str, Any], float, list[int]]:
    """A run where exchanges of several threads may not overlap, and averages after steps of another."""
    syncs: list[int] = []
    note = dict.fromkeys((1, 2, 3), lambda trainer: syncs.append(trainer.model.wire.replicas.syncs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "overlaps", property(lambda _: False))
        found = run(group, TWO)
        trainer = make_trainer(group, "row", replicas=2, callbacks=[Do(note)])
        trainer.fit(shares(planted.batches(3), group))
    return found, trainer.prefetcher.exchange_s, syncs


def test_where_exchanges_may_not_overlap_they_follow_each_other(ranks: Ranks):
    expected = ranks.run(4, run, TWO)
    for (found, ahead_s, syncs), of_rank in zip(ranks.run(4, one_after_the_other), expected, strict=True):
        assert found["losses"] == of_rank["losses"]
        assert_equal(found["state"], of_rank["state"])
        assert ahead_s == 0
        assert syncs == [1, 2, 3]


def evaluated(group: Group) -> tuple[float, float, bool]:
    """Logloss between two averages, after one, and whether that changed tables."""
    trainer = make_trainer(group, "row", replace(TRAIN, steps=3), replicas=2, sync_every=100)
    batches = shares(planted.batches(4, 64), group)
    for batch in batches[:3]:
        trainer.loss(batch).backward()
        for optimizer in trainer.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    collection = trainer.model.embeddings
    before = {name: collection.weight(name).clone() for name in collection.tables}
    first, again = (trainer.evaluate(batches).logloss for _ in range(2))
    changed = any(not torch.equal(collection.weight(name), rows) for name, rows in before.items())
    return first, again, changed


def test_evaluations_are_of_the_average(ranks: Ranks):
    found = ranks.run(4, evaluated)
    assert len({first for first, _, _ in found}) == 1
    assert all(first == again and changed for first, again, changed in found)


def test_records_say_how_evenly_ranks_work_and_what_averages_took(ranks: Ranks):
    averaged, plain = ranks.run(4, run, TWO), ranks.run(4, run, {})
    for record in averaged[0]["records"]:
        for name in ("bytes", "lookups", "time"):
            assert 1 <= record[f"imbalance_{name}"] <= 4
        assert record["sync_bytes"] > 0 and record["sync_s"] > 0
    for record in plain[0]["records"]:
        assert "imbalance_lookups" in record and "sync_bytes" not in record
