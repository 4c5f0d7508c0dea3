"""Hold hotbed's cost model against published figures: ``python -m benchmarks.published [--json F] [--svg F]``.

What is published is in ``rows.yaml``, with what each figure is of. Prints tables of all rows.
``--json F`` is written after each row, and ``--resume`` continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.published.report import Predictor, draw, fitted, markdown, predictions, published, results
from hotbed.files import json_text, write_text


def main() -> None:
    """Fit, predict and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draw the ratios here (needs matplotlib)")
    parser.add_argument("--resume", action="store_true", help="keep constants and rows that the file has")
    args = parser.parse_args()
    given = published()
    predictor = Predictor(given)
    before: dict[str, Any] = {"constants": {}, "rows": []}
    if args.resume and args.json is not None and args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
    found = {row["id"]: row for row in before["rows"]}
    known = {name: row["predicted"] for name, row in found.items() if "predicted" in row}
    constants = fitted(given, predictor, before["constants"])
    rows: list[dict[str, Any]] = []
    for row in predictions(given, predictor, constants, known=known):
        found[row["id"]] = row
        rows = [found[one["id"]] for one in given["rows"] if one["id"] in found]
        if args.json is not None and row["id"] not in known:
            write_text(args.json, json_text(results(given, constants, rows)))
    print(markdown(rows))
    print({name: value for name, value in results(given, constants, rows).items() if name != "rows"})
    if args.svg is not None:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
