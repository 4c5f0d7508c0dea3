"""Lay out the pages of the documentation's site: ``python docs/build.py FOLDER``, as ``make docs`` does.

The pages are docs/*.md as they are. What is generated: the navigation, from docs/index.md; the command line, from the
program's own help; the API, a page per package, of every name in its ``__all__``; the list of decisions.
docs/archive is no part of the site.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ARCHIVE = DOCS / "archive"
"""Pages that are kept in the repository only."""
BESIDE = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""Pages above docs, which the site has beside the others."""
PICTURES = "benchmarks/results"
API = {
    "hotbed": "hotbed",
    "hotbed.nn": "nn",
    "hotbed.optim": "optim",
    "hotbed.data": "data",
    "hotbed.compat.torchrec": "torchrec",
}
"""By package, the page in ``api/``."""
REFERENCE = {"Command line": "command_line.md", **{package: f"api/{page}.md" for package, page in API.items()}}
"""Generated pages, by their titles in the navigation."""

Navigation = dict[str, dict[str, str]]


def navigation(index: str) -> Navigation:
    """Read sections, and the page of each title, from docs/index.md; in *Reference* generated pages come first."""
    found: Navigation = {}
    for indent, link, path, title in re.findall(r"^( *)- (?:\[(.+?)\]\((.+?)\)|(.+))$", index, re.MULTILINE):
        if indent:
            list(found.values())[-1][link] = path
        else:
            found[title] = dict(REFERENCE) if title == "Reference" else {}
    return found


def on_the_site(text: str, above: str) -> str:
    """Rewrite links of a page: what is above docs lies beside its pages, notebooks are pages, decisions have a list.

    Parameters
    ----------
    text
        The page.
    above
        What leads from its folder to docs, such as ``../``; ``docs/`` for pages above docs.
    """
    if above == "docs/":
        text = text.replace("](docs/", "](")
    else:
        text = text.replace(f"]({above}../", f"]({above}")
    text = re.sub(r"\]\(([^)\s]+)\.ipynb\)", r"](\1.md)", text)
    return text.replace("](decisions)", "](decisions/index.md)")


def api_page(package: str) -> str:
    """Make a page whose entries the site takes from docstrings."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    return f"# {package}\n\n" + "".join(f"::: {package}.{name}\n\n" for name in names)


def help_of(words: list[str]) -> str:
    """Ask the program for a command's help."""
    from hotbed.cli.main import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        status = main([*words, "--help"])
    if status:
        sys.exit(f"hotbed {' '.join(words)} --help ended with {status}")
    return text.getvalue()


def commands(words: list[str]) -> Iterator[tuple[list[str], str]]:
    """List the program's commands, and those of its commands, with their help."""
    text = help_of(words)
    yield words, text
    inner = text.partition("\ncommands:\n")[2]
    for name in re.findall(r"^ {4}([\w-]+)(?=\s)", inner, re.MULTILINE):
        yield from commands([*words, name])


def command_line() -> str:
    """Make the page of the command line."""
    os.environ["COLUMNS"] = "110"
    parts = ["# Command line\n\nAs `hotbed COMMAND --help` prints it.\n"]
    for words, text in commands([]):
        level = "##" if len(words) < 2 else "###"
        parts.append(f"{level} {' '.join(['hotbed', *words])}\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


def decisions() -> str:
    """Make the list of decisions, by their titles."""
    text = "# Decisions\n\nEach page states a choice, its reasons, refused alternatives, and the cost.\n\n"
    for page in sorted((DOCS / "decisions").glob("*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        text += f"- [{title}]({page.name})\n"
    return text


def configuration(nav: Navigation) -> str:
    """Give Zensical's settings with the navigation."""
    entries = ['{"hotbed" = "index.md"}']
    for section, of in nav.items():
        pages = ", ".join(f"{{{json.dumps(title)} = {json.dumps(path)}}}" for title, path in of.items())
        entries.append(f"{{{json.dumps(section)} = [{pages}]}}")
    text = (DOCS / "zensical.toml").read_text(encoding="utf-8")
    joined = ",\n    ".join(entries)
    return text.replace("[project]\n", f"[project]\nnav = [\n    {joined},\n]\n", 1)


def list_pages() -> list[Path]:
    """List the pages below docs, without the archive."""
    return [page for page in DOCS.rglob("*.md") if ARCHIVE not in page.parents]


def write(folder: Path) -> None:
    """Write settings and pages into a folder, which may have pages already (of notebooks)."""
    pages = folder / "pages"
    for page in [*list_pages(), *(ROOT / name for name in BESIDE)]:
        inside = page.is_relative_to(DOCS)
        target = pages / page.relative_to(DOCS if inside else ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        above = "../" * len(page.relative_to(DOCS).parts[:-1]) if inside else "docs/"
        target.write_text(on_the_site(page.read_text(encoding="utf-8"), above), encoding="utf-8")
    for page in (pages / "tutorials").glob("*.md"):
        page.write_text(on_the_site(page.read_text(encoding="utf-8"), "../"), encoding="utf-8")
    for file in [*DOCS.glob("*.svg"), *(DOCS / "jobs").rglob("*.*"), *(DOCS / "serving").rglob("*.*")]:
        _copy(file, pages / file.relative_to(DOCS))
    for file in (ROOT / PICTURES).glob("*.svg"):
        _copy(file, pages / PICTURES / file.name)
    generated = {"command_line.md": command_line(), "decisions/index.md": decisions()}
    generated |= {f"api/{page}.md": api_page(package) for package, page in API.items()}
    for name, text in generated.items():
        (pages / name).parent.mkdir(exist_ok=True)
        (pages / name).write_text(text, encoding="utf-8")
    nav = navigation(on_the_site((DOCS / "index.md").read_text(encoding="utf-8"), ""))
    (folder / "zensical.toml").write_text(configuration(nav), encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
