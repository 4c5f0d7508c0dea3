"""Protects that seeded faults do not rot: each fits one place of the source, and the runner tells who finds it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

from . import run
from .run import ROOT, Fault, FaultError, locate, read_faults, seeded

FAULTS = read_faults()


def project(root: Path) -> Path:
    """A project of one function and one test, tracked by git."""
    files = {
        "src/hotbed/__init__.py": "",
        "src/hotbed/sums.py": "def total(values):\n    return sum(values)\n",
        "tests/test_sums.py": "from hotbed.sums import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n",
        "tests/test_other.py": "def test_other():\n    pass\n",
        "pyproject.toml": "[project]\nname = 'hotbed'\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_one_place_and_leaves_python(fault: Fault):
    path, text, faulty = locate(fault, ROOT)
    assert text != faulty
    ast.parse(faulty, str(path))


def test_faults_have_names_words_and_tests():
    assert len(FAULTS) == 34 == len({fault.name for fault in FAULTS})
    for fault in FAULTS:
        assert fault.breaks.endswith(".") and fault.tests
        assert any((ROOT / test).exists() for test in fault.tests), f"none of {fault.tests} is there any more"


def test_a_seeded_file_is_as_it_was_afterwards(tmp_path: Path):
    file = project(tmp_path) / "src/hotbed/sums.py"
    before, times = file.read_text(), file.stat().st_mtime_ns
    with pytest.raises(ZeroDivisionError), seeded(Fault("f", "", (("sum(values)", "0"),), ()), tmp_path) as path:
        assert path == file and file.read_text() == before.replace("sum(values)", "0")
        raise ZeroDivisionError
    assert (file.read_text(), file.stat().st_mtime_ns) == (before, times)


@pytest.mark.parametrize(("find", "places"), [("nothing of the kind", "nowhere"), ("values", "src/hotbed/sums.py")])
def test_a_fault_that_does_not_fit_one_place_is_refused(tmp_path: Path, find: str, places: str):
    fault = Fault("rotten", "", ((find, "x"),), ())
    with pytest.raises(FaultError, match=f"fault 'rotten' fits . places, must fit one: {places}.*; mend its edits"):
        locate(fault, project(tmp_path))


def test_one_of_several_edits_fits(tmp_path: Path):
    edits = (("sum(numbers)", "0"), ("sum(values)", "1"))
    assert locate(Fault("f", "", edits, ()), project(tmp_path))[2].endswith("return 1\n")


def test_a_copy_that_is_not_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = project(tmp_path)
    run.refuse_another_source(copy, tmp_path / "cache")
    elsewhere = project(tmp_path / "elsewhere") / "src"
    monkeypatch.setattr(run, "environment", lambda copy, cache: {**os.environ, "PYTHONPATH": str(elsewhere)})
    with pytest.raises(FaultError, match=f"hotbed is imported from {elsewhere}.*, must be from {copy}/src"):
        run.refuse_another_source(copy, tmp_path / "cache")


def test_the_runner_tells_which_test_finds_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    root, work = project(tmp_path / "project"), tmp_path / "work"
    (root / "faults.toml").write_text(
        "[[fault]]\nname = 'doubled'\nbreaks = 'All.'\nedits = [['sum(values)', '2 * sum(values)']]\n"
        "tests = ['tests/test_other.py', 'tests/test_gone.py']\n"
        "[[fault]]\nname = 'unseen'\nbreaks = 'Little.'\nedits = [['sum(values)', '0 + sum(values)']]\n"
        "tests = ['tests/test_other.py']\n"
    )
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setattr(run, "read_faults", lambda: read_faults(root / "faults.toml"))
    asked = ["--work", str(work), "--json", str(tmp_path / "found.json")]
    assert run.main([*asked, "--only", "doubled"]) == 0
    (doubled,) = json.loads((tmp_path / "found.json").read_text())
    assert (doubled["outcome"], doubled["caught_by"]) == ("caught", "tests/test_sums.py::test_total")
    assert doubled["tests"] == ["tests/test_other.py", "tests"]
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 faults caught"
    assert run.main([*asked, "--only", "unseen", "none", "--tests", "tests/test_sums.py"]) == 1
    unseen, none = json.loads((tmp_path / "found.json").read_text())
    assert unseen["outcome"] == none["outcome"] == "missed"
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 1 faults caught"
    assert not (work / "hotbed").exists()
