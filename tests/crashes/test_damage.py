"""Any file of a run's checkpoints that is cut, changed or gone is named by whoever reads it, and is not used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused, train
from tests.crashes.workloads import make_recipe
from tests.matrix import full

CHAIN = ("--train.checkpoint_every", "4", "--train.checkpoint_full_every", "4", "--train.keep_last", "9")
BASE, NEWEST = "last-00000004", "last-00000008"


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """A run that has a full checkpoint and a difference to it."""
    from hotbed.checkpoint import differential

    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differential, "MOST_SHARE", 10.0)
        status, _, run = train(make_recipe(folder, prepared), *CHAIN, "--train.steps", "8")
    assert status == 0
    return run


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def empty(file: Path) -> None:
    file.write_bytes(b"")


FILES = ("manifest.json", "model-*.safetensors", "dense-*.safetensors", "tables-00000-00000-*.safetensors")
"""The attempt that wrote a file ends its name."""
OF_BASES = (FILES[0], FILES[-1])
"""What a difference needs of its base."""


@pytest.mark.parametrize("checkpoint", [BASE, NEWEST])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [flip, full(cut), full(empty), Path.unlink])
def test_a_damaged_file_is_named_and_not_used(
    run: Path, tmp_path: Path, capsys: Output, checkpoint: str, file: str, damage: Callable[[Path], None]
) -> None:
    kept = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoints", kept)
    (found,) = (kept / checkpoint).glob(file)
    damage(found)
    said = refused(["checkpoint", "verify", str(kept / checkpoint)], capsys)
    assert checkpoint in said and (found.name in said or "manifest" in said), said
    if checkpoint == NEWEST or file in OF_BASES:
        said = refused(["checkpoint", "compact", str(kept / NEWEST), str(tmp_path / "compacted")], capsys)
        assert checkpoint in said and not (tmp_path / "compacted").exists()
    if file in OF_BASES:
        argv = ["checkpoint", "changes", str(kept / NEWEST), "--out", str(tmp_path / "rows.parquet")]
        assert checkpoint in refused(argv, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(run: Path, tmp_path: Path, capsys: Output) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(run.parents[1], runs)
    (of,) = runs.glob("*/*")
    (of / "summary.json").unlink()
    argv = ["train", str(run.parents[2] / "recipe.yaml"), "--out", str(runs), *CHAIN, "--resume", "auto"]
    flip(next((of / "checkpoints" / NEWEST).glob(FILES[-1])))
    assert main(argv) == 0
    said = capsys.readouterr().err
    assert f"to damaged-{NEWEST}-" in said
    assert f"{BASE} at step 4" in said
    (of / "summary.json").unlink()
    for checkpoint in (of / "checkpoints").glob("last-*"):
        flip(next(checkpoint.glob(FILES[-1])))
    said = refused(argv, capsys)
    assert "all checkpoints in" in said and "are damaged" in said
