"""Protects: what fuzzing once found, and what it begins from, is read or refused as it should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import CORPUS, TARGETS

FILES = sorted(file for file in CORPUS.rglob("*") if file.is_file())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CORPUS)))
def test_files_of_the_corpus(file: Path) -> None:
    assert file.stat().st_size < 4096
    TARGETS[file.parent.name].read(file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_what_fuzzing_begins_from(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert seeds or (CORPUS / name).is_dir()
    for content in seeds.values():
        TARGETS[name].read(content)
        TARGETS[name].read(content[: len(content) // 2])
        TARGETS[name].read(b"")
