"""Checkpoints of several ranks, gone on from by any number of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hotbed.checkpoint import checkpoints_in, directory, load_checkpoint, read_manifest, verify_checkpoint
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.data import Loader
from hotbed.errors import CommError
from hotbed.train import Callback, Metrics, Trainer
from hotbed.train import checkpoints as checkpointing
from hotbed.train.directory_lock import OWNER
from hotbed.train.ranks.broadcast import BroadcastLoader
from hotbed.train.runs.callbacks import KeepBest, KeepLast
from tests.ranks import Ranks
from tests.train import planted
from tests.train.planted import Losses

from .parallel_cases import (
    RECIPE,
    TRAIN,
    Group,
    InMemory,
    assert_equal,
    hotbed_threads,
    make_trainer,
    place,
    shares,
    state_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


STEPS, STOPPED = 14, 9
"""Steps of a run of two epochs of 7 steps, and where it was stopped."""


def run(
    group: Group,
    scheme: str,
    *,
    stop: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    one_reads: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A run on a loader, perhaps stopped and saved, perhaps gone on from a checkpoint."""
    rank, size = place(group)
    losses = Losses()
    trainer = make_trainer(group, scheme, replace(TRAIN, epochs=2, steps=stop), callbacks=[losses], **options)
    if save is not None:
        trainer.callbacks.append(KeepLast(save, RECIPE, 4))
    loader: Loader | BroadcastLoader
    if one_reads and trainer.ranks.link is not None:
        whole = Loader(InMemory(), "train", 40, shuffle=True, window=3) if rank == 0 else None
        loader = BroadcastLoader(whole, trainer.ranks.link)
    else:
        loader = Loader(InMemory(), "train", 40, shuffle=True, window=3, rank=rank, world_size=size)
    if resume is not None:
        load_checkpoint(resume, trainer.parts())
        trainer.resume_data(loader)
    before = state_of(trainer)
    trainer.fit(loader)
    assert hotbed_threads() == []
    return {"before": before, "losses": losses.losses, "state": state_of(trainer), "step": trainer.step}


def _run(group: Group, scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    return run(group, scheme, **options)


def test_a_checkpoint_of_three_ranks_is_gone_on_from_by_any_number(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(3, _run, "row", {})
    first = ranks.run(3, _run, "row", {"stop": STOPPED, "save": tmp_path / "run" / "checkpoints"})
    (checkpoint,) = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert checkpoint.name == f"last-{STOPPED:08d}"
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {OWNER, checkpoint.name}  # nothing unfinished
    verify_checkpoint(checkpoint)
    assert read_manifest(checkpoint).recipe["name"] == "test"
    saved = first[0]["state"]
    resume = {"resume": checkpoint}
    # Of equally many ranks, whatever the plan: the bits of a run that was not interrupted.
    for found, uninterrupted in zip(ranks.run(3, _run, "column", resume), whole, strict=True):
        assert_equal(found["before"], saved)
        assert found["step"] == STEPS
        assert found["losses"] == uninterrupted["losses"][STOPPED:]
        assert_equal(found["state"], uninterrupted["state"])
    # Of others: the same state, and the same training but for rounding.
    for found in (run(None, "", resume=checkpoint), *ranks.run(4, _run, "column", resume)):
        assert_equal(found["before"], saved)
        assert found["losses"] == pytest.approx(whole[0]["losses"][STOPPED:], abs=1e-4)


def test_four_ranks_go_on_bit_for_bit_whoever_reads(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(4, _run, "table", {})
    ranks.run(4, _run, "table", {"stop": STOPPED, "save": tmp_path / "checkpoints", "one_reads": True})
    resume = {"resume": tmp_path / "checkpoints" / f"last-{STOPPED:08d}"}
    for one_reads in (True, False):
        found = ranks.run(4, _run, "table", resume | {"one_reads": one_reads})
        for one, uninterrupted in zip(found, whole, strict=True):
            assert one["losses"] == uninterrupted["losses"][STOPPED:]
            assert_equal(one["state"], uninterrupted["state"])


class Remember(Callback):
    """State and logloss at every evaluation, and the checkpoints that there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[float, int, dict[str, Tensor]]] = []
        self.names: list[list[str]] = []

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        state = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
        self.seen.append((metrics.logloss, trainer.step, state))

    def on_step_end(self, trainer: Trainer) -> None:
        self.names.append(sorted(path.name for path in self.folder.iterdir() if path.name != OWNER))


def kept_best(group: Group, folder: Path) -> dict[str, Any]:
    """A run that becomes better, then worse, with the best evaluation restored at the end."""
    remember = Remember(folder)
    callbacks = [KeepBest(folder, RECIPE, background=False), remember]
    trainer = make_trainer(group, "row", replace(TRAIN, eval_every=2), callbacks=callbacks)
    batches = planted.batches(12)
    for batch in batches[6:]:
        assert batch.labels is not None
        batch.labels.neg_().add_(1)
    trainer.fit(shares(batches, group), shares(planted.batches(2, seed=5), group))
    end = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    return {"end": end, "seen": remember.seen, "names": remember.names}


def test_the_best_checkpoint_is_restored_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks.run(3, kept_best, tmp_path)
    for found in by_rank:
        _, step, state = min(found["seen"], key=lambda seen: seen[0])
        assert 2 < step < 12
        assert_equal(found["end"], state)
        assert [seen[0] for seen in found["seen"]] == [seen[0] for seen in by_rank[0]["seen"]]
        assert found["names"][0] == []
        assert all(len(names) == 1 for names in found["names"][1:])  # one at any moment
        assert found["names"][-1] == [f"best-{step:08d}"]


def refused(group: Group, folder: Path, when: str) -> str:
    """What a rank says when the first one's store fails at this moment."""

    def fail(*_: object) -> None:
        raise OSError("the store does not answer")

    trainer = make_trainer(group, "row")
    where = directory(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if when == "remove":
                patch.setattr(checkpointing, "_remove_unfinished", fail)
            trainer.saver.lock(where, remove_unfinished=True)
            patch.setattr(LocalDirectory, "has", fail)
            trainer.saver.begin(where / "last-00000001", 1, RECIPE, background=False, may_exist=True)
    except (OSError, CommError) as error:
        return str(error)
    finally:
        trainer.saver.release()
    return "nothing"


@pytest.mark.parametrize(("when", "what"), [("remove", "use"), ("look", "look at")])
def test_what_the_first_rank_cannot_look_at_ends_all(ranks: Ranks, tmp_path: Path, when: str, what: str) -> None:
    first, *others = ranks.run(3, refused, tmp_path, when)
    assert first == "the store does not answer"
    assert all(said.startswith(f"rank 0 cannot {what} {tmp_path}") for said in others), others
