"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_getattr(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package.

    Parameters
    ----------
    package
        Its ``__name__``.
    places
        By name, the module that defines it.
    """

    def getattr_(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_
