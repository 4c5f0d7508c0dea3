"""Compare hotbed's cost model with published figures: ``python -m benchmarks.published [--json F]``.

The published figures and their setups are in ``rows.yaml``. ``--json F`` is written after each row, and ``--resume``
continues an interrupted run.
"""

from __future__ import annotations

from typing import Any

from benchmarks import runner
from benchmarks.published.report import Predictor, fitted, predictions, published, results
from hotbed.files import write_json


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--resume", action="store_true", help="Keep the constants and rows of the file.")
    args = parser.parse_args()
    given = published()
    predictor = Predictor(given)
    before = (runner.read_json(args.json) if args.resume else {}) or {"constants": {}, "rows": []}
    found = {row["id"]: row for row in before["rows"]}
    known = {name: row["predicted"] for name, row in found.items() if "predicted" in row}
    constants = fitted(given, predictor, before["constants"])
    rows: list[dict[str, Any]] = []
    for row in predictions(given, predictor, constants, known=known):
        found[row["id"]] = row
        rows = [found[one["id"]] for one in given["rows"] if one["id"] in found]
        if args.json is not None and row["id"] not in known:
            write_json(args.json, results(given, constants, rows))
    keys = ("source", "quantity", "unit", "published", "predicted", "ratio", "split", "missing")
    runner.show("published figures", [{key: row.get(key) for key in keys} for row in rows])
    print({name: value for name, value in results(given, constants, rows).items() if name != "rows"})


if __name__ == "__main__":
    main()
