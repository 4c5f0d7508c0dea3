"""Protects that a search finds one place, and that `src` does not grow: names occur once, and lines have a limit."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hotbed

PACKAGE = Path(hotbed.__file__).parent
SHARED_FILES = {"__init__", "__main__", "base"}
COMMANDS = {"add_arguments", "run"}
"""Functions that every command of `hotbed.cli` has."""
MAX_LINES = 79_715
"""Limit of the lines of `src`. Lower it when code leaves. New code needs other code to leave."""
MAX_RAISES = 15.1
"""Limit of the raise statements per 1,000 lines. Values are checked once, where they come in."""
TORCHREC = PACKAGE / "compat" / "torchrec"
"""Its classes have TorchRec's names."""


@cache
def sources() -> dict[Path, tuple[str, ast.Module]]:
    """Return the text and the syntax tree of each file."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


@cache
def definitions() -> list[tuple[str, Path, ast.stmt]]:
    """Return the statements of all files that define something at the top level."""
    return [
        (node.name, path, node)
        for path, (_, tree) in sources().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def repeated(names: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    """Return the names that are in several files, and these files."""
    files: dict[str, list[str]] = defaultdict(list)
    for name, path in names:
        files[name].append(str(path.relative_to(PACKAGE)))
    return {name: found for name, found in files.items() if len(set(found)) > 1}


def test_base_names_of_files():
    assert repeated((path.stem, path) for path in sources() if path.stem not in SHARED_FILES) == {}


def test_names_of_classes():
    classes = ((name, path) for name, path, node in definitions() if isinstance(node, ast.ClassDef))
    assert repeated((name, path) for name, path in classes if TORCHREC not in path.parents) == {}


def test_names_of_public_functions():
    functions = (
        (name, path)
        for name, path, node in definitions()
        if not isinstance(node, ast.ClassDef) and not name.startswith("_") and name not in COMMANDS
    )
    found = repeated(functions)
    assert {name: files for name, files in found.items() if not all(f.startswith("ops/") for f in files)} == {}


def test_src_does_not_grow():
    lines = sum(len(text.splitlines()) for text, _ in sources().values())
    raises = sum(isinstance(node, ast.Raise) for _, tree in sources().values() for node in ast.walk(tree))
    assert lines <= MAX_LINES
    assert 1000 * raises / lines <= MAX_RAISES
