"""Protects that the documentation holds together: links lead somewhere, every page is found, and its code runs."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import hotbed
import hotbed.errors
from hotbed.checkpoint.manifest import FORMAT
from hotbed.checks import is_within, keys_that_may_differ, settings
from hotbed.cli.main import COMMANDS, main
from hotbed.config import Component, Recipe
from hotbed.serve.model_files import VERSION

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *(page for page in DOCS.rglob("*.md") if page.parent.name != "archive")]
DECISIONS = [page for page in PAGES if page.parent.name == "decisions"]
NOW = [page for page in PAGES if page.name != "CHANGELOG.md" and page not in DECISIONS]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Ids of a page's headings, as repository browsers and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def script(name: str) -> ModuleType:
    """A script of docs, which is no part of the package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """``docs/build.py``."""
    return script("build")


def test_pictures_are_what_the_code_draws() -> None:
    pictures = script("pictures").PICTURES
    for name, draw in pictures.items():
        assert (DOCS / name).read_text(encoding="utf-8") == draw() + "\n", f"python docs/pictures.py rewrites {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)} links {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links {link}, which is no heading there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_begin_after_an_empty_line(page: Path) -> None:
    """Repository browsers do without, the site's Markdown does not."""
    text = re.sub(r"^```.*?^```$", "```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    inside = False
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        item = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if item:
            assert inside or not before or before.startswith(("#", "<!--", "```")), f"{name_of(page)}: {line}"
            assert len(item[1]) % 4 == 0, f"{name_of(page)}: {line}; indent by 4"
        inside = bool(item) or (inside and bool(line))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_has_marks_of_a_merge(page: Path) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_page_is_in_the_navigation(build: ModuleType) -> None:
    nav = build.navigation((DOCS / "index.md").read_text(encoding="utf-8"))
    found = [path for of in nav.values() for path in of.values()]
    assert len(found) == len(set(found))
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    beside = {f"../{name}" for name in build.BESIDE}
    assert set(found) == pages | beside | set(build.REFERENCE.values()) | {"tutorials/README.md", "decisions"}


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_decisions_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Choice", "Refused", "Cost"]
    assert len(text.split()) <= 400


def test_the_list_of_decisions_has_each_title(build: ModuleType) -> None:
    text = build.decisions()
    assert text.count("\n- [") == len(DECISIONS) > 10
    assert "[Order of sums](order-of-sums.md)" in text


def test_the_archive_is_not_on_the_site(build: ModuleType) -> None:
    assert set(build.list_pages()) == {page for page in PAGES if page.is_relative_to(DOCS)}


def test_pages_above_docs_and_notebooks_lie_elsewhere_on_the_site(build: ModuleType) -> None:
    assert build.on_the_site("[a](../ARCHITECTURE.md#x) [b](models.md) [c](decisions)", "") == (
        "[a](ARCHITECTURE.md#x) [b](models.md) [c](decisions/index.md)"
    )
    assert (
        build.on_the_site("[a](../../CHANGELOG.md) [b](../models.md)", "../")
        == "[a](../CHANGELOG.md) [b](../models.md)"
    )
    assert build.on_the_site("[a](docs/models.md) [b](LICENSE)", "docs/") == "[a](models.md) [b](LICENSE)"
    assert build.on_the_site("[a](3-skew.ipynb)", "../") == "[a](3-skew.md)"


def test_the_api_has_every_public_name(build: ModuleType) -> None:
    page = build.api_page("hotbed.optim")
    assert page.startswith("# hotbed.optim\n\n::: hotbed.optim.COMMON\n")
    assert page.count(":::") == len(importlib.import_module("hotbed.optim").__all__)
    assert "::: hotbed.nn\n" not in build.api_page("hotbed")


def test_the_command_line_has_every_command(build: ModuleType) -> None:
    words = [" ".join(command) for command, _ in build.commands([])]
    assert set(words) >= {"", *COMMANDS, "checkpoint verify"}
    assert len(words) == len(set(words))


def test_the_reference_of_recipes_has_every_key(build: ModuleType) -> None:
    page = build.recipe()
    rows = dict(re.findall(r"^\| `([\w.]+)` \|(.+) \|$", page, re.MULTILINE))
    keys = {setting.key for setting in settings(Recipe) if setting.of is not Component}
    assert keys < rows.keys()  # also keys of entries in mappings, e.g. tasks.NAME.weight
    undocumented = [key for key, row in rows.items() if not row.rpartition("|")[2].strip()]
    assert not undocumented
    changeable = {key for key, row in rows.items() if row.split(" | ")[2] == "yes"}
    assert changeable == {key for key in rows if is_within(key, keys_that_may_differ(Recipe))}
    assert rows["train.batch_size"].startswith(" integer ≥ 1 | required |  | Samples per step")
    for anchor in re.findall(r"\]\(#(.+?)\)", page):
        assert re.search(rf"^## {anchor}$", re.sub(r"(?<=\w)\.", "", page.lower()), re.MULTILINE), anchor


@pytest.mark.parametrize("page", NOW, ids=name_of)
def test_what_is_named_is_there(page: Path) -> None:
    """Targets of make, commands, and extras, of pages that say how things are now."""
    text = page.read_text(encoding="utf-8")
    code = "\n".join(
        [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for targets in re.findall(r"^make((?: [a-z][a-z-]*)+)(?= *$| +[#A-Z[])", code, re.MULTILINE):
        for target in targets.split():
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for command in re.findall(r"^hotbed ([a-z][\w-]*)", code, re.MULTILINE):
        assert command in COMMANDS, f"hotbed {command}"
    for extra in re.findall(r"hotbed\[([a-z]+)\]", text):
        assert extra in EXTRAS, f"hotbed[{extra}]"


def test_examples_in_docstrings_run() -> None:
    modules = {
        sys.modules[getattr(hotbed, name).__module__]
        for name in hotbed.__all__
        if hasattr(getattr(hotbed, name), "__module__")
    }
    results = [
        doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        for module in sorted(modules, key=lambda module: module.__name__)
    ]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) > 15


def test_the_extras_that_users_need_are_listed() -> None:
    (table,) = re.findall(
        r"^\| extra \|.*?\n\n", (DOCS / "install.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    first = re.findall(r"^\|(.+?)\|", table, re.MULTILINE)
    assert {name for cell in first for name in re.findall(r"`(\w+)`", cell)} == EXTRAS.keys() - {"dev", "docs"}


def test_formats_that_are_read_are_those_of_the_table() -> None:
    text = (DOCS / "releases.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| checkpoint, version (\d+) ", text, re.MULTILINE) == [str(FORMAT)]
    assert f"exported model and changes, version {VERSION} " in text


def test_every_class_of_error_has_a_line_in_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    classes = {
        name
        for name, value in vars(hotbed.errors).items()
        if inspect.isclass(value) and issubclass(value, hotbed.errors.HotbedError) and name != "HotbedError"
    }
    assert set(re.findall(r"^\| `(\w+Error)` \|", text, re.MULTILINE)) == classes


def test_threads_change_no_bit() -> None:
    (block,) = blocks("determinism.md", "python")
    exec(block, {})


def test_the_quickstart_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data, loop = blocks("quickstart.md", "python")
    exec(data, {})
    (commands,) = blocks("quickstart.md", "bash")
    for line in commands.splitlines():
        words = shlex.split(line)
        assert words[0] == "hotbed"
        more = ["--train.steps", "20"] if words[1] == "train" else []
        assert main([*words[1:], *more]) == 0, line
    assert (tmp_path / "scores.parquet").is_file()
    exec(loop, {})
    assert float(capsys.readouterr().out.splitlines()[-1].split()[-1]) < 0.5
