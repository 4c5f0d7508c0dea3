"""Protects: ranks wait for one that writes its files for long, and not for one that failed or hangs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotbed.checkpoint import MANIFEST, save, save_checkpoint, storage, verify_checkpoint
from hotbed.checkpoint.save import OtherRankError
from hotbed.comm import Link
from hotbed.embed import EmbeddingCollection, distribute
from hotbed.errors import CheckpointError
from hotbed.specs import Feature, Table
from tests.checkpoint.damage import disk_is_full
from tests.ranks import Ranks

WAIT_S = 120


def model_of(group: dist.ProcessGroup) -> torch.nn.Module:
    return distribute(EmbeddingCollection([Table("t", 99, 8)], [Feature("f", "t")]), "row", group=group)


def messages(patch: pytest.MonkeyPatch) -> threading.Event:
    """Tell when this rank has said several times how far it is with its files."""
    said, enough, gather = list[str](), threading.Event(), Link.all_gather

    def counted(link: Link, what: str, values: torch.Tensor) -> Any:
        if what == "whether the checkpoint was written":
            said.append(what)
            if len(said) == 4:
                enough.set()
        return gather(link, what, values)

    patch.setattr(Link, "all_gather", counted)
    return enough


def slow(group: dist.ProcessGroup, path: Path, background: bool) -> str:
    """The second rank writes only once it has told the others several times that it is about to."""
    write = storage._LocalWriter.write
    with pytest.MonkeyPatch.context() as patch:
        enough = messages(patch)

        def late(writer: Any, data: memoryview) -> None:
            assert enough.wait(WAIT_S)
            write(writer, data)

        if dist.get_rank(group) == 1:
            patch.setattr(storage._LocalWriter, "write", late)
        save_checkpoint(path, {"model": model_of(group)}, background=background).wait()
    return "saved"


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_writes_for_long_is_waited_for(ranks: Ranks, tmp_path: Path, background: bool) -> None:
    assert ranks.run(3, slow, tmp_path / "c", background) == ["saved"] * 3
    verify_checkpoint(storage.directory(tmp_path / "c"))


def silent(group: dist.ProcessGroup, path: Path) -> str:
    """The second rank can write nothing, not even its report."""

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(storage._LocalWriter, "write", disk_is_full)
            patch.setattr(storage.LocalDirectory, "write", disk_is_full)
        try:
            save_checkpoint(path, {"model": model_of(group)})
        except (CheckpointError, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_report_that_could_not_be_written_is_not_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, silent, tmp_path / "c")
    assert found[0].startswith(OtherRankError.__name__)
    assert "rank 1 failed. See the log of rank 1" in found[0]
    assert "No space left on device" in found[1]
    assert "rank 1 could not write its files. See its log" in found[2]
    assert not (tmp_path / "c").exists()


def stuck(group: dist.ProcessGroup, path: Path) -> str:
    """The second rank writes nothing at all, and the first gives up."""
    over = threading.Event()

    def hang(*_: object) -> None:
        over.wait(WAIT_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "PATIENCE_S", 0.5)
        if dist.get_rank(group) == 1:
            patch.setattr(storage._LocalWriter, "write", hang)
        try:
            save_checkpoint(path, {"model": model_of(group)})
        except CheckpointError as error:
            return str(error)
        finally:
            over.set()
    return "saved"


def test_a_rank_that_never_ends_writing_is_given_up(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(3, stuck, tmp_path / "c")
    assert "rank 1 has not written rank-1.json in" in found[0]
    assert "rank 0 could not write its files" in found[1]
    assert "rank 0 could not write its files" in found[2]
    assert not (tmp_path / "c" / MANIFEST).exists()
