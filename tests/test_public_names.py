"""``hotbed.__all__`` is what users see, no more and no less."""

import inspect
import subprocess
import sys
import types

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
    assert len(hotbed.__all__) <= 35


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


def test_importing_hotbed_leaves_the_slow_libraries_for_later():
    script = (
        "import hotbed, sys; print(*{'pyarrow', 'polars', 'jsonargparse', 'matplotlib', 'scipy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_names_of_earlier_versions_warn_and_serve():
    with pytest.warns(
        DeprecationWarning, match="hotbed.Spread is now hotbed.ModelParallelInput; the earlier name goes"
    ):
        assert hotbed.Spread is hotbed.ModelParallelInput  # pyright: ignore[reportAttributeAccessIssue]
    assert "Spread" not in dir(hotbed)
