"""``hotbed.__all__`` is what users see, no more and no less."""

import inspect
import types

import hotbed


def test_all_is_what_is_visible():
    submodules = {name for name, value in vars(hotbed).items() if isinstance(value, types.ModuleType)}
    visible = {name for name in vars(hotbed) if not name.startswith("_")} - submodules
    assert visible | {"nn", "optim"} == set(hotbed.__all__)
    assert hotbed.__all__ == sorted(hotbed.__all__)
    assert len(hotbed.__all__) <= 35


def test_every_public_name_has_a_docstring():
    for name in hotbed.__all__:
        assert inspect.getdoc(getattr(hotbed, name)), name
