"""Test that docs/conformance.md says what files and tests say, and that what is gone is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.conformance import __main__ as program
from benchmarks.conformance.__main__ import BEGIN, CLAIMS, END, ROOT, ClaimError, main, predictions, resolved, summary

CLAIM: dict[str, Any] = {"source": "neo", "claim": "it is fast", "published": "2 ×"}


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "conformance.md"
    kept = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    page.write_text(f"{kept.split(BEGIN)[0]}{BEGIN}\nold\n{END}{kept.split(END)[1]}", encoding="utf-8")
    main(["--page", str(page), "--json", str(tmp_path / "rows.json")])
    assert page.read_text(encoding="utf-8") == kept, "run `make conformance`"
    assert '"claim"' in (tmp_path / "rows.json").read_text(encoding="utf-8")


def test_every_published_figure_has_a_row() -> None:
    given = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    published = yaml.safe_load((ROOT / "benchmarks" / "published" / "rows.yaml").read_text(encoding="utf-8"))
    measured_elsewhere = [row for row in published["rows"] if "quality is measured" in row.get("missing", "")]
    assert len(list(predictions())) + len(measured_elsewhere) == len(published["rows"])
    assert {row["source"] for row in [*given["rows"], *predictions()]} == set(given["sources"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"kind": "believed"}, "is believed, must be one of measured, tested, missing, scope"),
        ({"kind": "tested", "tests": ["tests/no_such.py::test_it"]}, "no file .*tests/no_such.py"),
        ({"kind": "tested", "tests": ["tests/test_specs.py::test_no_such"]}, "test_no_such, which is no test"),
        ({"kind": "measured", "ours": "{0}", "value": [{"file": "none.json", "path": []}]}, "no file .*none.json"),
        (
            {"kind": "measured", "ours": "{0}", "value": [{"file": "ablation.json", "path": ["results", "magic"]}]},
            r"ablation.json has nothing at \['results', 'magic'\], no 'magic'",
        ),
    ],
)
def test_what_is_not_there_is_an_error(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        resolved({**CLAIM, **row})


def test_figures_are_medians_and_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    program._results.cache_clear()
    (tmp_path / "a.json").write_text('{"ms": [3, 1, 8], "of": [{"ms": 1.5}]}')
    value = {"file": "a.json", "path": ["ms"], "over": {"file": "a.json", "path": ["of", 0, "ms"]}}
    row = resolved({**CLAIM, "kind": "measured", "value": [value], "ours": "{0:.1f} ×", "short": "of noise"})
    program._results.cache_clear()
    assert row["ours"] == "2.0 ×"
    assert summary([row, {"kind": "scope"}]) == "1 measured, 1 out of scope or other; 1 fall short"
