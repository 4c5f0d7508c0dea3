"""Write docs/conformance.md: ``python -m benchmarks.conformance [--page PAGE] [--json FILE]``, or ``make conformance``.

``claims.yaml`` has a row for each claim that is not a prediction of the source's own time or size: what is published,
and where ours is. A row is *measured* (a figure of a file in benchmarks/results, or of a benchmark of an earlier
commit), *tested* (tests that hold it), *simulated* (a figure that a simulation has written, or rows that a law of
popularity lets expect), *missing* (why nothing can be said) or *scope* (adopted in another form, or not at all, and
why). Predictions are those of benchmarks/results/published.json. Nothing is measured by this command, so it takes
seconds; each row says which command measures. A test, a file or a figure that is not there is an error.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.pages import put_between
from hotbed.data.formats.zipf_source import CRITEO_1TB
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.plan.hit_rates import ExpectedRows, Zipf

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = Path(__file__).parent / "claims.yaml"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
KINDS = ("measured", "tested", "simulated", "missing", "scope")
PREDICT = "python -m benchmarks.published"


class ClaimError(HotbedError):
    """Say which row of ``claims.yaml`` names what is not there."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print how many claims there are of each kind, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Markdown page that gets the tables, between its markers")
    parser.add_argument("--json", type=Path, help="all rows")
    args = parser.parse_args(argv)
    given = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    rows = [*map(resolved, given["rows"]), *predictions()]
    console = Console(width=120)
    for source, title in given["sources"].items():
        of_source = [row for row in rows if row["source"] == source]
        console.print(f"{title.split('(')[0].strip()}: {summary(of_source)}")
    if args.json is not None:
        write_json(args.json, {"rows": rows})
    if args.page is not None:
        put_between(args.page, BEGIN, END, markdown(given["sources"], rows))


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count rows by what ours are, and those that fall short."""
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in KINDS}
    said = [
        f"{count} {'out of scope or other' if kind == 'scope' else kind}" for kind, count in counts.items() if count
    ]
    short = sum("short" in row for row in rows)
    return ", ".join(said) + (f"; {short} fall short" if short else "")


def predictions() -> Iterator[dict[str, Any]]:
    """Rows of what the cost model predicts of published times and sizes, and of what it cannot express."""
    results = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        claim = {"source": row["source"], "claim": row["quantity"], "published": _figure(row["published"], row["unit"])}
        if "predicted" not in row:
            if "quality is measured" not in row["missing"]:  # those have a row in claims.yaml
                yield {**claim, "kind": "missing", "ours": f"not published: {row['missing']}"}
            continue
        split = "; a constant is fitted on it" if row["split"] == "fitted" else ""
        said = {"ours": f"{_figure(row['predicted'], row['unit'])} ({row['ratio']:.2f} ×{split})", "command": PREDICT}
        off = not 0.5 <= row["ratio"] <= 2
        yield {
            **claim,
            "kind": "simulated",
            **said,
            **({"short": "off by more than 2 ×, see published.md"} if off else {}),
        }


def _figure(value: Any, unit: str) -> str:
    return f"{value:,.4g} {unit}".strip() if isinstance(value, (int, float)) else str(value)


def resolved(row: Mapping[str, Any]) -> dict[str, Any]:
    """Give a row with what ours is (``ours``), from the files and tests that it names.

    Raises
    ------
    ClaimError
        If it is of no kind, or names a test, a file or a figure that is not there.
    """
    if row["kind"] not in KINDS:
        raise ClaimError(f"claim '{row['claim']}' is {row['kind']}, must be one of {', '.join(KINDS)}")
    if row["kind"] in ("measured", "simulated") and ("value" in row or "commit" not in row):
        if "value" not in row:
            raise ClaimError(
                f"claim '{row['claim']}' is {row['kind']} and has no value; say which figure of which file"
            )
        figures = [_value(row["claim"], value) for value in row["value"]]
        return {**row, "ours": row["ours"].format(*figures)}
    if row["kind"] == "tested":
        for test in row["tests"]:
            file, name = test.split("::")
            if name not in _tests_of(file):
                raise ClaimError(f"claim '{row['claim']}' names {test}, which is no test; see {file}")
    return {**row, "ours": row.get("ours", row.get("why", ""))}


def _value(claim: str, value: Mapping[str, Any]) -> float:
    """A figure of a results file, of a list the median; or, of tables, their rows over those that samples touch."""
    if "tables" in value:
        return _rows_over_touched(value["tables"], value["samples"])
    found: Any = _results(value["file"])
    for key in value["path"]:
        try:
            found = _only(found, key) if isinstance(key, dict) else found[key]
        except (KeyError, IndexError, TypeError, ValueError):
            where = f"claim '{claim}': {value['file']} has nothing at {value['path']}"
            raise ClaimError(f"{where}, not exactly one {key!r}") from None
    figure = float(statistics.median(found) if isinstance(found, list) else found) * value.get("scale", 1)
    return figure / _value(claim, value["over"]) if "over" in value else figure


def _only(entries: Sequence[Mapping[str, Any]], having: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one entry with these values."""
    (found,) = (entry for entry in entries if all(entry[key] == value for key, value in having.items()))
    return found


def _rows_over_touched(tables: str, samples: float) -> float:
    """How many times as many rows tables of the Criteo 1TB log have as so many samples touch, ids being by Zipf's law.

    A difference to a checkpoint has the rows that were touched since, so it is so much smaller.
    """
    rows = CRITEO_1TB[tables]
    return sum(rows) / sum(ExpectedRows(n, Zipf(n)).distinct(range(n), samples) for n in rows)


@functools.cache
def _results(name: str) -> Any:
    file = RESULTS / name
    if not file.exists():
        raise ClaimError(f"no file {file}; its command writes it")
    return json.loads(file.read_text(encoding="utf-8"))


@functools.cache
def _tests_of(file: str) -> frozenset[str]:
    """Names of the tests of a file, those in classes too."""
    path = ROOT / file
    if not path.exists():
        raise ClaimError(f"no file {file}, which a claim of {CLAIMS.name} names")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def markdown(sources: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A section for each source: what it is, its counts, its rows."""
    lines: list[str] = []
    for source, title in sources.items():
        of_source = [row for row in rows if row["source"] == source]
        name, _, what = title.partition(" (")
        lines += [f"## {name}", ""]
        lines += [f"{what.rstrip(')')}. {summary(of_source)}.", ""] if what else [f"{summary(of_source)}.", ""]
        lines += ["| claim | published | | here | by |", "|---|---|---|---|---|"]
        for row in of_source:
            here = row["ours"] + (f" **Falls short**: {row['short']}" if "short" in row else "")
            by = ", ".join(f"`{test}`" for test in row["tests"]) if "tests" in row else row.get("command", "")
            by = f"`{by}`" if by and "tests" not in row else by
            by += f" of commit {row['commit']}" if "commit" in row else ""
            cells = (row["claim"], row["published"], row["kind"], here or "held", by or "–")
            lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main()
