"""Write the tables of docs/published.md: ``make conformance``, or ``python -m benchmarks.conformance [--page PAGE]``.

``claims.yaml`` has a row for each claim that is not a prediction of the source's own time or size: what is published,
and where ours is. A row is *measured* (a figure of a file in benchmarks/results, or of a benchmark of an earlier
commit), *tested* (by the named tests), *simulated* (a figure from a simulation, or an expected number of rows by Zipf's
law), *missing* (a figure of the source is unknown) or *scope* (adopted in another form, or not adopted). Predictions
are in benchmarks/results/published.json. The command measures nothing, so it takes seconds. It fails if a test, a file
or a figure does not exist. ``--json`` writes all rows, with the tests and full commands.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import runner
from hotbed.data.formats.zipf_source import CRITEO_1TB
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.plan.hit_rates import ExpectedRows, Zipf

ROOT = runner.ROOT
CLAIMS = Path(__file__).parent / "claims.yaml"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
KINDS = ("measured", "tested", "simulated", "missing", "scope")
PREDICT = "python -m benchmarks.published"
SIZE_TOLERANCE = 0.01
"""Predicted sizes with at most this relative error have no line on the page."""


class ClaimError(HotbedError):
    """A row of ``claims.yaml`` names a test, a file or a figure that does not exist."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print how many claims there are of each kind, and write the page."""
    parser = runner.arguments(__doc__)
    parser.add_argument("--page", type=Path, help="Markdown page with markers around the tables.")
    args = parser.parse_args(argv)
    given = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    rows = [*map(resolved, given["rows"]), *predictions()]
    counts: list[dict[str, object]] = []
    for source, about in given["sources"].items():
        of = [row for row in rows if row["source"] == source]
        kinds = {kind: sum(row["kind"] == kind for row in of) for kind in KINDS}
        counts.append({"source": about["name"], **kinds, "fall short": sum("short" in row for row in of)})
    runner.show("claims", counts)
    if args.json is not None:
        write_json(args.json, {"rows": rows})
    if args.page is not None:
        runner.put_between(args.page, BEGIN, END, markdown(given["sources"], rows))


def predictions() -> Iterator[dict[str, Any]]:
    """Yield rows for published times and sizes: predicted ones, and ones that lack an input."""
    results = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))
    for row in results["rows"]:
        claim = {"source": row["source"], "claim": row["quantity"], "published": _figure(row["published"], row["unit"])}
        if "predicted" not in row:
            if "quality is measured" not in row["missing"]:  # those have a row in claims.yaml
                yield {**claim, "kind": "missing", "ours": f"not published: {row['missing']}"}
            continue
        fitted = ", fitted" if row["split"] == "fitted" else ""
        ours = {"ours": _figure(row["predicted"], ""), "ratio": f"{row['ratio']:.2f} ×{fitted}", "command": PREDICT}
        is_exact = row["kind"] == "size" and abs(row["ratio"] - 1) <= SIZE_TOLERANCE
        short = {} if 0.5 <= row["ratio"] <= 2 else {"short": "off by more than 2 ×"}
        yield {**claim, "kind": "simulated", **ours, "size": is_exact, **short}


def _figure(value: Any, unit: str) -> str:
    return f"{value:,.4g} {unit}".strip() if isinstance(value, (int, float)) else str(value)


def resolved(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with our figure (``ours``), from the files and tests that it names.

    Raises
    ------
    ClaimError
        If its kind is unknown, or if it names a test, a file or a figure that does not exist.
    """
    if row["kind"] not in KINDS:
        raise ClaimError(f"claim '{row['claim']}' is {row['kind']}, expected one of {', '.join(KINDS)}")
    if row["kind"] in ("measured", "simulated") and ("value" in row or "commit" not in row):
        if "value" not in row:
            raise ClaimError(
                f"claim '{row['claim']}' is {row['kind']} and has no value. Name a file and the path of a figure"
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
    """Return a figure of a results file (the median of a list), or rows of tables over rows that samples touch."""
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
    (found,) = (entry for entry in entries if all(entry[key] == value for key, value in having.items()))
    return found


def _rows_over_touched(tables: str, samples: float) -> float:
    """Return rows of tables of Criteo 1TB ÷ expected rows that samples touch, with ids by Zipf's law.

    A differential checkpoint contains only these rows, so it is smaller by this factor.
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
    """Return the names of the tests in a file, also in classes."""
    path = ROOT / file
    if not path.exists():
        raise ClaimError(f"no file {file}, which a claim of {CLAIMS.name} names")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def markdown(sources: Mapping[str, Mapping[str, str]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of figures, and lists of tested claims, figures without a counterpart, and other ideas."""
    by_source = {about["name"]: [r for r in rows if r["source"] == source] for source, about in sources.items()}
    lines = ["## Figures", ""]
    lines += _table(
        ("source", "claim", "published", "ours", "verdict", "command"),
        (
            (name, row["claim"], row["published"], row["ours"], _verdict(row), _command(row))
            for name, of_source in by_source.items()
            for row in of_source
            if "short" in row or (row["kind"] in ("measured", "simulated") and not _is_left_out(row))
        ),
    )
    sizes = sum(row.get("size", False) for row in rows)
    lines += ["", f"{sizes} predicted sizes of tables and models are left out: they are within {SIZE_TOLERANCE:.0%}."]
    tested = {name: sum(r["kind"] == "tested" and "short" not in r for r in of) for name, of in by_source.items()}
    counts = ", ".join(f"{name} {count}" for name, count in tested.items() if count)
    lines += ["", "## Other claims", "", f"Tests hold {sum(tested.values())} further claims: {counts}."]
    lines += ["", "These figures need values that the sources do not publish, or data that is not available:", ""]
    lines += _list(by_source, "missing", lambda row: str(row["claim"]))
    lines += ["", "These ideas are not adopted, or in another form:", ""]
    lines += _list(by_source, "scope", lambda row: f"{row['claim']} ({row['ours']})", without="Others")
    return "\n".join(lines)


def _list(
    by_source: Mapping[str, Sequence[Mapping[str, Any]]],
    kind: str,
    text_of: Callable[[Mapping[str, Any]], str],
    without: str = "",
) -> Iterator[str]:
    """Yield an item with all claims of a kind for each source."""
    for name, rows in by_source.items():
        texts = [text_of(row) for row in rows if row["kind"] == kind]
        if texts and name != without:
            yield f"- **{name}**: {'; '.join(texts)}."


def _is_left_out(row: Mapping[str, Any]) -> bool:
    """Return whether the page has no line for a figure: a size that is predicted well, or nothing is published."""
    return bool(row.get("size")) or row["published"] in ("not given", "none")


def _verdict(row: Mapping[str, Any]) -> str:
    verdict = str(row.get("ratio", row["kind"]))
    return f"{verdict}; **falls short**: {row['short']}" if "short" in row else verdict


def _command(row: Mapping[str, Any]) -> str:
    """Return the benchmark of a row, another command, or the file of the first test."""
    command = row["command"] if "command" in row else row["tests"][0].split("::")[0]
    module = re.match(r"python -m benchmarks\.(\w+)", command)
    commit = f", {row['commit']}" if "commit" in row else ""
    return f"`{module[1] if module else command}`{commit}"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for cells in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
