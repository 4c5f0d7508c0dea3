"""Lay out the pages of the documentation's site: ``python docs/build.py FOLDER``, as ``make docs`` does.

The pages are docs/*.md as they are. These parts are generated: the navigation, from docs/index.md; the command line,
from the program's own help; the keys of recipes, from their dataclasses; the API, a page per package, of every name in
its ``__all__``; the list of decisions. The site does not have docs/archive.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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
REFERENCE = {"Command line": "command_line.md", "Recipe keys": "recipe.md"}
REFERENCE |= {package: f"api/{page}.md" for package, page in API.items()}
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


def recipe() -> str:
    """Make the page of the recipe's keys: a table for each section."""
    from hotbed.config import Recipe

    intro = (
        "# Recipe keys\n\nA recipe is a YAML file with these keys. `hotbed train recipe.yaml --KEY VALUE` overrides a "
        "key, e.g. `--train.batch_size 4096`. A key of type class takes `class_path`, an import path, and `init_args`, "
        "a mapping of arguments. *Resume* is yes if a resumed run may change the key.\n"
    )
    return "\n".join([intro, *_recipe_tables(Recipe, "", False)])


def _recipe_tables(cls: type[Any], above: str, may_differ: bool) -> Iterator[str]:
    """Write a table of a section's keys, and then the tables of its nested sections."""
    from hotbed.checks import annotations_of, section_of
    from hotbed.cli.arguments import documentation
    from hotbed.config import Component

    rows, nested = ["| key | type | default | resume | description |", "|---|---|---|---|---|"], []
    for field in fields(cls):
        key, annotation = f"{above}{field.name}", annotations_of(cls)[field.name]
        section, differs = section_of(annotation), may_differ or "may_differ" in field.metadata
        text = documentation(cls).get(field.name, "")
        if section not in (None, Component):
            below = f"{key}.NAME." if get_origin(annotation) is dict else f"{key}."
            nested.append((section, below, differs))
            text = f"{text} See [{below[:-1]}](#{re.sub(r'[^a-z_]', '', below.lower())}).".strip()
        cells = [f"`{key}`", _type_of(annotation), _default_of(field), "yes" if differs else "", text]
        rows.append("| " + " | ".join(cell.replace("``", "`").replace("|", "\\|") for cell in cells) + " |")
    if above:
        about = (inspect.getdoc(cls) or "").partition("\n\nRaises")[0]
        yield f"## {above[:-1]}\n\n{about.replace('``', '`')}\n"
    yield "\n".join(rows) + "\n"
    for section, below, differs in nested:
        yield from _recipe_tables(section, below, differs)


def _type_of(annotation: Any) -> str:
    """Describe the type of a key, with its limits or its choices."""
    from hotbed.checks import Range, describe, section_of
    from hotbed.config import Component

    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(map(_type_of, parts))
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is Annotated and isinstance(parts[1], Range):
        limits = {"≥": parts[1].least, ">": parts[1].above, "≤": parts[1].most, "<": parts[1].below}
        shown = [f"{sign} {limit:,}" for sign, limit in limits.items() if abs(limit) != float("inf")]
        return f"{_type_of(parts[0])} {', '.join(shown)}"
    if origin is dict:
        return f"mapping of names to {_type_of(parts[1])}"
    if origin is list:
        return f"list of {_type_of(parts[0])}"
    if annotation is Component:
        return "class"
    return re.sub("^an? ", "", describe(annotation)) if section_of(annotation) is None else "section"


def _default_of(field: Field[Any]) -> str:
    """Return the default of a key as in a recipe, or an empty text for a section."""
    from hotbed.config import Component

    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if isinstance(value, Component):
        return f"`{value.class_path}`"
    if hasattr(value, "contradictions"):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


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
    generated = {"command_line.md": command_line(), "recipe.md": recipe(), "decisions/index.md": decisions()}
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
