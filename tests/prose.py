"""Count phrases that make English hard to read, by package and folder, and compare with the limits of ``prose.toml``.

    python -m tests.prose [--list] [--lower] [PATH …]

Docstrings, strings of at least four words, and pages outside of code blocks are read. The command fails if a group has
more phrases than its limit. With ``--list`` or paths, each phrase is printed with its file, its line and a fix. With
``--lower``, limits above the counts are lowered to them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("prose.toml")
PAGES = ("src/hotbed/**/*.py", "benchmarks/**/*.py", "docs/**/*.md", "*.md")
ARCHIVE = ROOT / "docs" / "archive"
FEWEST_WORDS = 4


class Phrase(NamedTuple):
    """A pattern that is hard to read, and a fix for it."""

    pattern: re.Pattern[str]
    fix: str


class Finding(NamedTuple):
    """A place of a phrase in a file."""

    path: Path
    line: int
    text: str
    fix: str


def read_list() -> tuple[list[Phrase], dict[str, int]]:
    """Read the phrases, and the limits by group."""
    entries = tomllib.loads(LIST.read_text())
    phrases = [
        Phrase(re.compile(e["pattern"], re.MULTILINE | (0 if e.get("case_sensitive") else re.IGNORECASE)), e["fix"])
        for e in entries["phrase"]
    ]
    return phrases, entries["limits"]


def group_of(path: Path) -> str:
    """Return the group that a file counts for: a package of ``src``, or a folder."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        return f"src/{parts[2]}" if len(parts) > 3 else "src"
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0] if len(parts) > 1 else "*.md"


def list_files() -> list[Path]:
    """List the files that are read."""
    files = {path for pattern in PAGES for path in ROOT.glob(pattern) if ".venv" not in str(path)}
    return sorted(path for path in files if path.parent != ARCHIVE)


def find_phrases(path: Path, phrases: list[Phrase]) -> list[Finding]:
    """Find phrases in a file."""
    pieces = list(_read_python(path) if path.suffix == ".py" else _read_page(path))
    starts = list(accumulate((len(text) + 1 for _, text in pieces), initial=0))
    joined = "\n".join(text for _, text in pieces)
    return [
        Finding(path, pieces[bisect(starts, found.start()) - 1][0], found[0].strip("\x00 \n"), phrase.fix)
        for phrase in phrases
        for found in phrase.pattern.finditer(joined)
    ]


def _read_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of docstrings and longer strings; NUL marks their start."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        else:
            continue
        if len(text.split()) >= FEWEST_WORDS:
            yield node.lineno, "\x00" + re.sub(r"`[^`\n]*`", "x", text)


def _read_page(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are not in code blocks."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and line.strip():
            yield number, re.sub(r"`[^`]*`", "x", line)


def lower_limits(counts: Counter[str], limits: dict[str, int]) -> None:
    """Write the smaller of limit and count for each group."""
    head = LIST.read_text().split("[limits]\n")[0]
    lines = [f'"{group}" = {min(counts[group], limits.get(group, counts[group]))}\n' for group in sorted(counts)]
    LIST.write_text(head + "[limits]\n" + "".join(lines))


def main() -> int:
    """Print counts and limits; return 1 if a group exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders to list (default: all are counted)")
    parser.add_argument("--list", action="store_true", help="print each phrase with its place")
    parser.add_argument("--lower", action="store_true", help="lower limits to the counts")
    options = parser.parse_args()
    phrases, limits = read_list()
    counts: Counter[str] = Counter()
    chosen = [path.resolve() for path in options.paths]
    for path in list_files():
        found = find_phrases(path, phrases)
        counts[group_of(path)] += len(found)
        if options.list or any(path == wanted or wanted in path.parents for wanted in chosen):
            for finding in sorted(found, key=lambda f: f.line):
                print(f"{path.relative_to(ROOT)}:{finding.line}: “{finding.text}”: {finding.fix}")
    if options.lower:
        lower_limits(counts, limits)
        return 0
    above = [group for group in counts if counts[group] > limits.get(group, 0)]
    for group in above or sorted(counts):
        print(f"{group:30} {counts[group]:5} of at most {limits.get(group, 0)}")
    if above:
        print("More phrases are hard to read than before. `python -m tests.prose --list` shows them.", file=sys.stderr)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
