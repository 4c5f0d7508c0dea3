"""Hold hotbed's cost model against published figures: ``python -m benchmarks.published [--json F] [--svg F]``.

What is published is in ``rows.yaml``, with what each figure is of. Prints the tables of docs/published.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.published.report import Predictor, draw, fitted, markdown, predictions, published, summary
from hotbed.files import json_text


def main() -> None:
    """Fit, predict and show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draw the ratios here (needs matplotlib)")
    args = parser.parse_args()
    given = published()
    predictor = Predictor(given)
    constants = fitted(given, predictor)
    rows = predictions(given, predictor, constants)
    sources = summary(rows)
    print(markdown(rows))
    print({"constants": constants, "sources": sources, "looks": given["looks"]})
    if args.json is not None:
        found = {"looks": given["looks"], "constants": constants, "sources": sources, "rows": rows}
        args.json.write_text(json_text(found), encoding="utf-8")
    if args.svg is not None:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
