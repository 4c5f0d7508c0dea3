"""Import the names of a package when they are first used (PEP 562)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(
    package: str, places: Mapping[str, str], renamed: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package.

    Parameters
    ----------
    package
        Its ``__name__``.
    places
        By name, the module that defines it; the package itself for one of its subpackages.
    renamed
        By a name of earlier versions, the one that it has now; using it warns.
    """

    def get(name: str) -> object:
        if renamed is not None and name in renamed:
            new = renamed[name]
            warnings.warn(
                f"{package}.{name} is now {package}.{new}; the earlier name goes in the next version",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(sys.modules[package], new)
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        if places[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, names
