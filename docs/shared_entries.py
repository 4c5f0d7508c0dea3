# pyright: reportMissingImports=false
"""Give each parameter its own type where a docstring describes several in one entry (``rows, dim``).

Griffe, which reads docstrings for the site, takes the type and default of the first for all of them.
"""

from __future__ import annotations

from typing import Any

import griffe


class SharedEntries(griffe.Extension):
    """Correct what was parsed of every docstring of a package, once all of it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Walk through modules and classes."""
        self._correct(pkg)

    def _correct(self, of: Any) -> None:
        if of.docstring is not None and (of.is_class or of.is_function):
            parsed = of.docstring.parse("numpy", warnings=False)
            for section in parsed:
                if section.kind is griffe.DocstringSectionKind.parameters:
                    for described in section.value:
                        if described.name in of.parameters:
                            parameter = of.parameters[described.name]
                            described.annotation, described.value = parameter.annotation, parameter.default
            of.docstring.__dict__["parsed"] = parsed
        if of.is_module or of.is_class:
            for member in of.members.values():
                if not member.is_alias:
                    self._correct(member)
