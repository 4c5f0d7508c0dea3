"""Protects: what is not the next version of this model is refused with its reason, and changes nothing."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.errors import StoreError
from hotbed.serve import row_files
from hotbed.serve.model_files import ChangeSet, ExportedModel, TableChange
from hotbed.serve.served_model import RefusedError, ServedModel
from tests.serve.published import DYNAMIC, WITH_IDS, Planted, Publisher, batch_of, scores_of

MEMORY = 3_000


class Case:
    """A served model of step 10 and the changes to step 20; the trained model is of step 20."""

    def __init__(self, root: Path, memory_bytes: int | None = MEMORY, seed: int = 1) -> None:
        self.model = Planted(*WITH_IDS)
        self.model.train_some(seed, most_id=400)
        self.publisher = Publisher(self.model, root)
        self.publisher.save()
        self.exported = self.publisher.export()
        self.served = ServedModel.open(self.exported, memory_bytes=memory_bytes, threads=1)
        self.batch = batch_of(self.model, 40, 3, most_id=400)
        self.before = scores_of(self.model, self.batch).tobytes()
        self.change = self.publisher.step_on(2)

    def refused(self, what: ChangeSet | ExportedModel, reason: str, message: str) -> None:
        """The version is refused, and what is served is what was served."""
        step = self.served.step
        with pytest.raises(RefusedError, match=message) as found:
            self.served.apply(what) if isinstance(what, ChangeSet) else self.served.take_over(what)
        assert found.value.reason == reason
        assert self.served.step == step
        if step == 10:
            assert self.served.score_batch(self.batch)[0].tobytes() == self.before

    def refused_by(self, patched: pytest.MonkeyPatch, where: Any, name: str, fake: Any, reason: str, said: str) -> None:
        """The change is refused while a function is another one, and taken over afterwards."""
        with patched.context() as patch:
            patch.setattr(where, name, fake)
            self.refused(self.change, reason, said)
        self.goes_on()

    def goes_on(self) -> None:
        """The changes are taken over, whatever was refused."""
        self.served.apply(self.change)
        found, step = self.served.score_batch(self.batch)
        assert (step, found.tobytes()) == (20, scores_of(self.model, self.batch).tobytes())


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_changes_out_of_order_are_refused(case: Case) -> None:
    later = case.publisher.step_on(3)
    case.refused(later, "gap", r"step 20.*step 10")
    case.served.apply(case.change)
    case.refused(case.change, "duplicate", "step 20")
    case.served.apply(later)
    case.refused(case.change, "disorder", r"step 10.*step 30")
    case.refused(case.exported, "disorder", r"step 10.*step 30")


def test_changes_to_another_model_are_refused(case: Case, tmp_path: Path) -> None:
    other = Case(tmp_path / "other", seed=9)
    case.refused(other.change, "other_model", r"step 10 \(state [0-9a-f]{12}…\)")
    tables = [hb.Table("items", rows=301, dim=4), DYNAMIC]
    publisher = Publisher(Planted(tables, WITH_IDS[1]), tmp_path / "larger")
    publisher.save()
    case.refused(publisher.export(), "other_model", "tables, inputs or labels")
    case.goes_on()


def rewritten(change: ChangeSet, edit: Callable[[dict[str, Any]], None]) -> ChangeSet:
    manifest = Path(str(change)) / "manifest.json"
    values = json.loads(manifest.read_text())
    edit(values)
    manifest.write_text(json.dumps(values))
    return ChangeSet.open(str(change))


@pytest.mark.parametrize("file", ["rows.parquet", "dense.safetensors"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "gone"])
def test_damaged_changes_are_refused_until_they_are_mended(case: Case, file: str, how: str) -> None:
    path = Path(str(case.change)) / file
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-9] if how == "truncated" else whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    message = {"truncated": r"got [\d,]+ bytes, expected", "flipped": "is damaged", "gone": "is missing"}[how]
    case.refused(case.change, "damaged", message)
    path.write_bytes(whole)
    case.goes_on()


def test_counts_and_shapes_that_do_not_fit_are_refused(case: Case, tmp_path: Path) -> None:
    def more(count: int) -> ChangeSet:
        return rewritten(case.change, lambda values: values["tables"]["embeddings.items"].update(upserts=rows + count))

    rows = case.change.manifest.tables["embeddings.items"].upserts
    case.refused(more(1), "damaged", r"table 'embeddings.items': got [\d,]+ rows and 0 deleted ids")
    case.change = more(0)
    dense = {"model.version": torch.zeros(2)}
    wrong = case.publisher.change(10, 20, name="wrong", dense=dense)
    case.refused(wrong, "damaged", "dense parameters")
    case.goes_on()


def test_changes_with_other_inputs_are_refused(case: Case) -> None:
    path = Path(str(case.change)) / "manifest.json"
    whole = path.read_text()
    other = rewritten(case.change, lambda values: values.update(encoder="0" * 64))
    case.refused(other, "other_model", r"encodes rows differently")
    path.write_text(whole)
    case.goes_on()


@pytest.mark.parametrize("table", ["items", "users"])
def test_an_id_that_is_there_twice_is_refused(case: Case, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ChangeSet.rows

    def twice(change: ChangeSet) -> Iterator[TableChange]:
        for part in rows(change):
            yield part
            if part.table == f"embeddings.{table}":
                yield part

    message = {"items": r"has unsorted ids of table 'embeddings.items'", "users": "has an id of .* twice"}
    case.refused_by(monkeypatch, ChangeSet, "rows", twice, "damaged", message[table])


@pytest.mark.parametrize("memory_bytes", [MEMORY, None])
def test_a_full_disk_refuses_a_change_until_there_is_room(
    tmp_path: Path, memory_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, memory_bytes)
    written: list[int] = []

    def full(file: int, numbers: torch.Tensor, records: torch.Tensor) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(numbers))
        write_all(file, numbers[:3], records[:3])

    write_all = row_files.write_all
    case.refused_by(monkeypatch, row_files, "write_all", full, "disk_full", os.strerror(errno.ENOSPC))


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_files_that_fail_for_now_are_told_apart(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.refused_by(monkeypatch, ChangeSet, "rows", fails, "unreadable", "files cannot be read or written")


def test_a_swap_that_fails_halfway_answers_nothing_until_a_model_is_whole(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(case.served._scorer, "replace_dense", fails)
        with pytest.raises(OSError, match="Input/output error"):
            case.served.apply(case.change)
    assert case.served.is_broken
    with pytest.raises(
        StoreError, match=r"no version of planted is intact, because a swap failed halfway \(.*Input/output"
    ):
        case.served.score_batch(case.batch)
    case.served.take_over(case.publisher.export())
    assert case.served.score_batch(case.batch)[0].tobytes() == scores_of(case.model, case.batch).tobytes()
