"""``hotbed.__all__`` is what users see, no more and no less."""

import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hotbed
from hotbed import data


def test_all_is_what_is_visible():
    for name in hotbed.__all__:
        getattr(hotbed, name)  # some are imported at first use
    submodules = {name for name, value in vars(hotbed).items() if isinstance(value, types.ModuleType)}
    visible = {name for name in vars(hotbed) if not name.startswith("_")} - submodules
    assert visible - {"TYPE_CHECKING", "lazy"} | {"nn", "optim"} == set(hotbed.__all__)
    assert hotbed.__all__ == sorted(hotbed.__all__)
    assert len(hotbed.__all__) <= 36


PACKAGES = ["", ".data", ".nn", ".optim", ".plan", ".train", ".compat", ".compat.torchrec"]
RECORDED = Path(__file__).parent / "golden" / "public_names.txt"


def public_names() -> list[str]:
    """List what packages export."""
    packages = [importlib.import_module(f"hotbed{package}") for package in PACKAGES]
    return sorted(f"{package.__name__}.{name}" for package in packages for name in package.__all__)


def test_public_names_are_those_that_are_recorded():
    """A name that comes or goes is a decision: write it to the list by hand."""
    assert public_names() == RECORDED.read_text(encoding="utf-8").splitlines()


def test_every_public_name_has_a_docstring():
    for name in hotbed.__all__:
        assert inspect.getdoc(getattr(hotbed, name)), name


@pytest.mark.parametrize("package", [hotbed, data])
def test_names_imported_at_first_use(package: types.ModuleType):
    for name in package.__all__:
        assert getattr(package, name).__name__.endswith(name)
    assert dir(package) == package.__all__
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'ParquetSauce'"):
        package.ParquetSauce  # noqa: B018


def imported(script: str) -> set[str]:
    """Which of the slow libraries a process has imported after a script."""
    slow = {"torch", "numpy", "numba", "pyarrow", "polars", "matplotlib"}
    code = f"{script}; import sys; print(*({slow} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_hotbed_leaves_the_slow_libraries_for_later():
    assert imported("import hotbed, hotbed.config; hotbed.Table") == set()
    # Numba imports scipy where it is installed.
    assert not imported("import hotbed; hotbed.Trainer") & {"pyarrow", "polars", "matplotlib"}
    assert "polars" not in imported("from hotbed.data import ParquetSource; from hotbed.train.runs.run import train")


def test_subpackages_are_names_too():
    assert imported("import hotbed as hb; assert hb.nn.DLRM.__module__ == 'hotbed.nn.dlrm'; hb.optim") >= {"torch"}
    imported("from hotbed import *; assert {'Table', 'nn'} <= set(dir()), dir()")


def test_a_name_at_its_first_use_in_a_compiled_function():
    """In a process of its own, where no one has used it."""
    imported(
        "import pickle, torch, hotbed as hb; "
        "f = torch.compile(lambda x: x * hb.Table('a', 3, 4).rows, backend='eager'); "
        "assert 'Table' not in vars(hb) and f(torch.ones(1)).item() == 3; "
        "assert pickle.loads(pickle.dumps(hb.Table('a', 3, 4))) == hb.Table('a', 3, 4)"
    )
