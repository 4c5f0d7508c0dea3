"""Protects that a stranger finds the way: what ARCHITECTURE.md names is there, and its reading path is short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hotbed"
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reading_path_has_fewer_than_6000_lines() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    path = text[text.index("## Three journeys") : text.index("## Where to look")]
    stops = re.findall(r"^\d+\. `(src/hotbed/\S+\.py)`: .+\.$", path, flags=re.MULTILINE)
    assert len(stops) == len(set(stops)) == 16
    assert sum(len((ROOT / stop).read_text(encoding="utf-8").splitlines()) for stop in stops) < 6000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    """A bare name may be a file of any folder; one with a folder is under the root, ``src/hotbed`` or ``tests``."""
    names = {file.name for folder in ("src", "tests", "benchmarks", "docs") for file in (ROOT / folder).rglob("*.py")}
    text = re.sub(r"```diff.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # what a patch would add
    for name in re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", text):
        if "NAME" in name:  # whatever an extension is called
            continue
        found = any((base / name).is_file() for base in (ROOT, PACKAGE, ROOT / "tests"))
        assert found or ("/" not in name and name in names), f"{page.name} names {name}"


def test_files_of_a_layer_are_in_its_folder() -> None:
    """A row of the table of layers names files of its own package, or files with their folder."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \|$", text[text.index("## Layers") : text.index("## Three journeys")], re.MULTILINE
    )
    assert len(rows) > 10
    for package, row in rows:
        names = {file.name for file in (PACKAGE / package).rglob("*.py")}
        for name in re.findall(r"`([\w-]+\.py)`", row):
            assert name in names, f"{package} has no {name}"
