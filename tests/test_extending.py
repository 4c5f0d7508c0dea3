"""Promise: every block of docs/extending.md runs as it stands, and extensions touch no more files than it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import hotbed

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "extending.md"
TESTS = ROOT / "tests" / "extensions"
"""Patches and tests that the page does not show. The tests run as ``test_NAME.py`` next to the files of the page."""
SOURCE = Path(hotbed.__file__).parent
MOST_FILES = {"A sharding scheme": 1, "A storage tier": 3, "An optimizer rule": 4, "A pooling mode": 5}
"""Files of src/hotbed that an extension may touch, by section."""


class Section(NamedTuple):
    """What a section of the page has: files, what is moved into hotbed, and patches of hotbed."""

    files: dict[str, str]
    moved: dict[str, str]
    patches: list[tuple[str, list[tuple[str, str]]]]

    @property
    def touched(self) -> set[str]:
        """Files of hotbed that are changed or new."""
        return {*self.moved.values(), *(path for path, _ in self.patches)}


def sections() -> dict[str, Section]:
    found: dict[str, Section] = {}
    for title, text in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        section = found[title] = Section({}, {}, [])
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if language in ("python", "yaml"):
                name = re.match(r"# (\S+)\n", block)
                assert name, f"a block of '{title}' does not begin with its file's name: {block[:60]}"
                section.files[name[1]] = block
            elif language == "diff":
                section.patches.extend(patches(block))
            else:
                section.moved.update(re.findall(r"^mv (\S+) src/hotbed/(\S+)$", block, re.MULTILINE))
        for name in re.findall(r"`tests/extensions/(\w+\.diff)`", text):
            section.patches.extend(patches((TESTS / name).read_text(encoding="utf-8")))
    return found


def patches(diff: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Paths below src/hotbed, and for each the texts that are replaced, and by what."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for path, body in re.findall(
        r"^--- a/src/hotbed/(\S+)\n\+\+\+ b/src/hotbed/\1\n(.*?)(?=^--- |\Z)", diff, re.DOTALL | re.MULTILINE
    ):
        changes: list[tuple[str, str]] = []
        for hunk in body.split("@@\n")[1:]:
            lines = [line or " " for line in hunk.splitlines()]
            before, after = ("".join(f"{x[1:]}\n" for x in lines if x[0] in kinds) for kinds in (" -", " +"))
            changes.append((before, after))
        found.append((path, changes))
    return found


def apply(section: Section, package: Path, files: Path) -> None:
    for name, path in section.moved.items():
        shutil.move(files / name, package / path)
    for path, changes in section.patches:
        text = (package / path).read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, f"{PAGE.name}: this is {text.count(before)} times in {path}:\n{before}"
            text = text.replace(before, after)
        (package / path).write_text(text, encoding="utf-8")


def patched(folder: Path, files: Path, page: dict[str, Section]) -> Path:
    """A copy of hotbed with everything that the page adds inside of it."""
    package = folder / "src" / "hotbed"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for section in page.values():
        apply(section, package, files)
    return package


def run(script: str, at: Path, package: Path) -> str:
    """Run Python in a folder with this copy of hotbed, and with the modules that are in the folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), str(at)])}
    done = subprocess.run([sys.executable, "-c", script], cwd=at, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PYTEST = "import pytest\nassert pytest.main(['-q', '-rs', '-p', 'no:cacheprovider', *{}]) == 0\n"
INSIDE = ["test_halves.py", "test_sqrtn.py", "test_compressed_tier.py", "test_lion_kernels.py"]
"""Tests of what is added inside hotbed; all others are of what needs no change of it."""


@pytest.fixture(scope="module")
def page() -> dict[str, Section]:
    return sections()


@pytest.fixture
def outside(tmp_path: Path, page: dict[str, Section]) -> Path:
    """A folder with all files of the page, and the tests of its extensions."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for section in page.values():
        for name, text in section.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    for file in TESTS.glob("*.py"):
        shutil.copyfile(file, folder / f"test_{file.name}")
    return folder


def test_extensions_touch_no_more_files_than_the_page_says(page: dict[str, Section]) -> None:
    assert {title for title, section in page.items() if section.touched} == MOST_FILES.keys()
    for title, most in MOST_FILES.items():
        assert len(page[title].touched) <= most, (title, page[title].touched)
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| \[(a.*?)\].*\| (\d) files?: ", line):
            title = match[1][0].upper() + match[1][1:]
            assert int(match[2]) == (len(page[title].touched) or 1), line


def test_what_is_added_from_outside_needs_no_change_of_hotbed(outside: Path, page: dict[str, Section]) -> None:
    tests = sorted(file.name for file in outside.glob("test_*.py"))
    assert len(tests) == 8 and set(INSIDE) < set(tests)
    (outside / "data").mkdir()
    for split, n in (("train", 200), ("valid", 40)):
        values = np.stack([np.arange(n) % 100, np.arange(n) * 7 % 50, np.arange(n) / n, np.arange(n) % 2], axis=1)
        np.savetxt(outside / "data" / f"{split}.csv", values, delimiter=",", header="user,item,age,click")
    train = (
        "import runpy, sys\nsys.argv = ['hotbed', 'train', 'recipe.yaml']\n"
        "runpy.run_module('hotbed', run_name='__main__')\n"
    )
    run(
        PYTEST.format([name for name in tests if name not in INSIDE]) + "import dealt_out, slowest_step\n" + train,
        at=outside,
        package=SOURCE,
    )
    assert list((outside / "runs" / "clicks").glob("*/summary.json"))


def test_the_patches_of_the_page_fit(outside: Path, tmp_path: Path, page: dict[str, Section]) -> None:
    package = patched(tmp_path, outside, page)
    for section in page.values():
        for path in section.touched:
            text = (package / path).read_text(encoding="utf-8")
            compile(text, path, "exec")
            assert not (SOURCE / path).exists() or text != (SOURCE / path).read_text(encoding="utf-8")


@pytest.mark.full  # all kernels are compiled anew
def test_what_is_added_inside_hotbed_needs_these_patches_alone(
    outside: Path, tmp_path: Path, page: dict[str, Section]
) -> None:
    # Of the rule's contract the kernels: its formula has passed outside.
    chosen = [*INSIDE, "-k", "not test_lion_kernels or kernels_give"]
    done = run(PYTEST.format(chosen), at=outside, package=patched(tmp_path, outside, page))
    assert "no kernel" not in done


def test_names_are_known_in_few_files() -> None:
    """Of what is here already: nobody else asks which rule or scheme it is."""
    from hotbed.ops.cpu_rules import RULES
    from hotbed.plan.schemes import SCHEMES

    others = ("testing", "torchrec")  # the latter has FBGEMM's names, some of which are equal
    texts = {p: p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py") if p.parent.name not in others}
    for name in RULES:
        files = [str(path.relative_to(SOURCE)) for path, text in texts.items() if f'"{name}"' in text]
        allowed = 4 if name == "rowwise_adagrad" else 3
        assert len(files) <= allowed, (name, files)  # a file of optim, and kernels
    asking = [p for p, text in texts.items() if re.search(r'scheme\w* (==|!=|in) [("]', text)]
    assert not asking and len(SCHEMES) >= 5


def test_pytest_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise ModuleNotFoundError(\"No module named 'pytest'\", name='pytest')")
    script = "import hotbed.testing"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE.parent)])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    last = "ImportError: hotbed.testing needs pytest (No module named 'pytest'); pip install 'hotbed[testing]'"
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == last
