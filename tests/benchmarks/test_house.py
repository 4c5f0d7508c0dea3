"""The benchmark of how far a reader walks counts what its docstring says; it times nothing here."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks import house
from benchmarks.house import CASES, PACKAGE, Walk, functions, has_example, source, step, walked

FILES = {
    "a.py": """
        import json
        import threading
        from walked_package import b, c

        def start():
            b.middle([1, 2])
            c.last()
            json.dumps({})  # of no file of the package
            thread = threading.Thread(target=c.last, name="other")
            thread.start()
            thread.join()
        """,
    "b.py": """
        from walked_package import c

        def middle(numbers):
            return [own(c.last()) for _ in numbers]

        def own(number):
            return number
        """,
    "c.py": """
        def last():
            return 0
        """,
    "__init__.py": "",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "walked_package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(dedent(text).lstrip(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_calls_of_a_known_nest_are_counted(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "QUIET_S", 0.01)
    start = importlib.import_module("walked_package.a").start
    walk = Walk(package)
    before = sys.getprofile()
    start()  # not counted
    walk.start()
    start()
    walk.stop()
    assert sys.getprofile() is before
    found = walk.found()
    inlined = sys.version_info >= (3, 12)
    assert found == {
        "files": 3,
        "moves": 6,  # start, middle, last, own, last, own, last, each in another file than the one before
        "calls_into_others": 4,
        "frames": 3,
        "frames_with_comprehensions": 3 if inlined else 4,
        "calls": 8,
        "threads": 2,
        "entered": {"a.py": ["start"], "b.py": ["middle", "own"], "c.py": ["last"]},
    }


def test_sizes_of_source(package: Path) -> None:
    (package / "inner").mkdir()
    body = "\n".join(["    x = 0"] * 41)
    (package / "inner" / "long.py").write_text(f'def long():\n    """Say:\n\n        >>> 1\n    """\n{body}\n' * 8)
    found = source(package)
    assert (found["files"], found["lines"]) == (5, 20 + 8 * 46)
    assert found["packages"] == {".": {"files": 4, "lines": 20}, "inner": {"files": 1, "lines": 368}}
    assert (found["short_files"], found["long_files"]) == (["__init__.py", "a.py", "b.py", "c.py"], [])
    where = {"name": "long", "lines": 46, "code": 42, "example": True}
    assert {"where": "inner/long.py:1", **where} in found["long_functions"] and len(found["long_functions"]) == 8


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Add.\n\n>>> 1 + 1\n2", True),
        ("Three ranks::\n\n    0 1 2", True),
        ("Three ranks:\n    0 1 2", True),
        ("Add.\n\nParameters\n----------\nx\n    A number.", False),
        ("As follows:\nnothing", False),
        ("", False),
    ],
)
def test_an_example_is_a_session_or_a_picture(docstring: str, expected: bool) -> None:
    assert has_example(docstring) == expected


def test_a_docstring_is_not_code() -> None:
    (found,) = functions("f.py", 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n')
    assert found == ("f", "f.py:1", 6, 2, False)


def test_a_step_of_tables_and_of_the_trainer() -> None:
    tables, trainer = (step(CASES[0], loop) for loop in house.LOOPS)
    for found in (tables, trainer):
        assert found["calls"] >= found["moves"] >= found["files"] > 5
        assert found["calls"] > found["calls_into_others"] > 0
        assert 3 < found["frames"] <= found["frames_with_comprehensions"]
        assert all((PACKAGE / file).is_file() for file in found["entered"])
    assert trainer["files"] > tables["files"]


@pytest.mark.full
def test_all_cases_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[str] = []
    found = {loop: {**Walk(PACKAGE).found(), "entered": {"one.py": ["first"]}} for loop in house.LOOPS}
    monkeypatch.setattr(house, "walked", lambda case: cases.append(case.name) or found)
    house.main(["--files", "--turns", "1", "--json", str(tmp_path / "found.json")])
    results = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert list(results["steps"]) == cases == [case.name for case in CASES]
    assert list(results["imports_s"]) == ["import torch", "import hotbed", "hotbed --help"]
    assert results["source"]["files"] == len(list(PACKAGE.rglob("*.py")))
    printed = capsys.readouterr().out
    assert "disk and cache" in printed and "one.py: first" in printed


@pytest.mark.full
def test_two_ranks_and_rows_in_files() -> None:
    (one, other) = (walked(case) for case in CASES[1:])
    assert one["Trainer"]["threads"] > 1 and other["Trainer"]["threads"] > 1
    assert other["tables"]["files"] > 10 and other["tables"]["frames"] > 3
