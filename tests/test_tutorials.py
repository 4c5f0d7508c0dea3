"""The notebooks of ``docs/tutorials`` run, and are stored as they ran."""

import importlib.util
from pathlib import Path

import nbformat
import pytest

from tests.data.data_cases import REAL_LOG
from tests.matrix import full

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
MOST_BYTES = 1_500_000  # of all of them together


def codes(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """How many there are, by cell of code."""
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in codes(notebook)]


def assert_ran(notebook: nbformat.NotebookNode) -> None:
    """All cells ran, in order and without errors, and each one that shows a plot has a picture."""
    assert [cell.execution_count for cell in codes(notebook)] == list(range(1, len(codes(notebook)) + 1))
    assert not [o for cell in codes(notebook) for o in cell.outputs if o.output_type == "error"]
    assert pictures(notebook) == [cell.source.count("plt.show()") for cell in codes(notebook)]
    assert sum(pictures(notebook)) >= 2


def test_there_are_six_and_the_readme_names_them() -> None:
    assert len(NOTEBOOKS) == 6
    readme = (TUTORIALS / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in readme for path in NOTEBOOKS)


def run(path: Path, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("tutorials_run", TUTORIALS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert_ran(module.execute(path, folder))


@pytest.mark.parametrize("path", [NOTEBOOKS[0], *map(full, NOTEBOOKS[1:])], ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA", raising=False)
    run(path, tmp_path)


@pytest.mark.skipif(not REAL_LOG.exists(), reason="needs the real log, which is not redistributed")
@pytest.mark.parametrize("number", [full(number) for number in (1, 3, 5)])
def test_it_runs_on_a_real_log(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", str(REAL_LOG.resolve()))
    run(NOTEBOOKS[number - 1], tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_as_it_ran(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert_ran(notebook)
    assert not [o for cell in codes(notebook) for o in cell.outputs if o.get("name") == "stderr"]


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES
