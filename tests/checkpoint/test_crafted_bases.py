"""Protects: a base that cannot be is refused before anything else is read: paths, itself, chains, other tables."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotbed.checkpoint import differential, load_checkpoint, read_manifest, save_checkpoint, verify_checkpoint
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.errors import CheckpointError
from tests.checkpoint.test_fuzz import MANIFEST, REMOVED, Fuzz, Path_, Values, changed, manifest_of, nodes, sign
from tests.fixtures.models import CASES, build, train

TABLE = "embeddings.users"


def make(folder: Path) -> Path:
    """A difference; its base is beside it."""
    parts = build(CASES["whole"])
    share, differential.MOST_SHARE = differential.MOST_SHARE, 10.0
    try:
        base = save_checkpoint(folder / "base", parts, track=True)
        train(CASES["whole"], parts, range(1))
        save_checkpoint(folder / "d", parts, base=base)
        save_checkpoint(folder / "d2", parts, base=base)
    finally:
        differential.MOST_SHARE = share
    return folder / "d"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the difference, with its base and another difference beside it."""
    return shutil.copytree(whole.parent, tmp_path / "copy") / whole.name


def with_base(folder: Path, **entries: Any) -> None:
    values = manifest_of(folder)
    values["base"].update(entries)
    sign(folder, values)


def sha256_of(folder: Path) -> str:
    return str(json.loads((folder / MANIFEST).read_text())["sha256"])


@pytest.mark.parametrize(
    "name", ["../base", "/etc", "..", ".", "", "a/b", "a\\b", "base\n", ".hidden", "x" * 256, 3, None]
)
def test_a_base_is_a_plain_name(folder: Path, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_base(folder, name=name)
    monkeypatch.setattr(LocalDirectory, "sibling", None)  # nothing is looked for
    with pytest.raises(CheckpointError, match=r"d/manifest.json: base.name: got .*(: string|, expected) "):
        read_manifest(folder)


def test_no_checkpoint_is_its_own_base(folder: Path) -> None:
    with_base(folder, name="d")
    with pytest.raises(CheckpointError, match=r"'base\.name' is 'd', the checkpoint itself"):
        read_manifest(folder)
    (folder.parent / "other").symlink_to(folder)  # by a detour, its own hash is not the one that it names
    with_base(folder, name="other")
    with pytest.raises(CheckpointError, match="got SHA-256"):
        read_manifest(folder)


def test_a_base_is_a_full_checkpoint(folder: Path) -> None:
    with_base(folder, name="d2", sha256=sha256_of(folder.parent / "d2"))
    with pytest.raises(CheckpointError, match=r"'base\.name': got differential checkpoint 'd2', expected"):
        read_manifest(folder)


def test_a_base_has_the_same_tables(folder: Path) -> None:
    base = folder.parent / "base"
    values = manifest_of(base)
    values["tables"][TABLE]["init"]["seed"] += 1
    sign(base, values)
    with_base(folder, sha256=sha256_of(base))
    with pytest.raises(CheckpointError, match=f"'tables' differ from the tables of its base {re.escape(str(base))}"):
        read_manifest(folder)


def test_a_difference_holds_keys(folder: Path) -> None:
    values = manifest_of(folder)
    del values["tables"][TABLE]["tiles"][0]["keyed"]
    sign(folder, values)
    with pytest.raises(
        CheckpointError, match=f"'tables.{TABLE}.tiles.0.keyed': got False, expected True, because there is"
    ):
        read_manifest(folder)


@st.composite
def of_differences(draw: st.DrawFn) -> tuple[int, Any]:
    return draw(st.integers(0, 10**6)), draw(st.one_of(st.just(REMOVED), Values))


@Fuzz
@given(of_differences())
@example((0, None))
def test_an_entry_of_a_difference_is_another(whole: Path, change: tuple[int, Any]) -> None:
    """Whatever it is: it is read, or a `CheckpointError` says what is wrong."""
    before = (whole / MANIFEST).read_text()
    values = manifest_of(whole)
    paths: list[Path_] = list(nodes(values))
    try:
        sign(whole, changed(values, paths[change[0] % len(paths)], change[1]))
        parts = build(CASES["whole"])
        for read in (verify_checkpoint, lambda path: load_checkpoint(path, parts)):
            try:
                read(whole)
            except CheckpointError as error:
                assert str(error)
    finally:
        (whole / MANIFEST).write_text(before)
