"""Find the tables of a model by name: those that an optimizer trains, and its groups of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from hotbed.checks import check_known
from hotbed.errors import SpecError
from hotbed.optim.rule import SparseModule


class TableSelection(nn.Module):
    """Select tables of a model, for an optimizer that trains no others.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    tables
        Names ``path.to.collection.table`` in the model, which the optimizer's groups and state use, too.

    Raises
    ------
    SpecError
        If no name is given, or one is of no table of the model.

    Examples
    --------
    >>> deep = RowWiseAdagrad(TableSelection(model, ["embeddings.user", "embeddings.item"]), lr=0.01)  # doctest: +SKIP
    >>> wide = FTRL(TableSelection(model, ["wide.user", "wide.item"]), lr=0.1)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, tables: Sequence[str]) -> None:
        super().__init__()
        table_places(model)  # a SpecError if it is no model
        self._model = [model]  # in a list, so that it is no part of this module
        self.tables = tuple(tables)
        known = list(table_places(self))
        if not self.tables:
            raise SpecError(f"no table is selected; tables are {', '.join(known)}")
        for name in self.tables:
            check_known("table", name, known, SpecError)

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of the model."""
        return self._model[0].named_modules(*args, **kwargs)


def table_places(model: object) -> dict[str, tuple[str, str]]:
    """Path of the collection, and name there, of every table of a model by its full name."""
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"a sparse optimizer got {type(model).__name__}, must be the model: tables are none of model.parameters(); "
            "use RowWiseAdagrad(model, lr=0.01) for the tables, with groups=[{'tables': ['users'], 'lr': 0.1}] where "
            "some have options of their own, and torch.optim.Adam(model.parameters()) for the rest"
        )
    collections = {path: m for path, m in model.named_modules() if isinstance(m, SparseModule)}
    return {f"{path}.{table}".lstrip("."): (path, table) for path, of in collections.items() for table in of.handles}


def resolve_groups(
    places: Mapping[str, tuple[str, str]], groups: Sequence[Mapping[str, Any]], known: set[str]
) -> list[tuple[list[str], dict[str, Any]]]:
    """Full table names and options of each group; the tables that no group names come last."""
    resolved: list[tuple[list[str], dict[str, Any]]] = []
    rest = list(places)
    for group in groups:
        options = {key: value for key, value in group.items() if key != "tables"}
        for key in options:
            check_known("optimizer option", key, sorted(known), SpecError)
        names: list[str] = []
        for name in group.get("tables", ()):
            found = [full for full, (_, table) in places.items() if name in (full, table)]
            if not found:
                check_known("table", name, places, SpecError)
            if len(found) > 1 or found[0] not in rest:
                what = "in two optimizer groups" if len(found) == 1 else f"ambiguous: {', '.join(found)}"
                raise SpecError(f"table '{name}' is {what}")
            rest.remove(found[0])
            names.append(found[0])
        if not names:
            raise SpecError(f"an optimizer group needs 'tables', got {dict(group)}")
        resolved.append((names, options))
    return [*resolved, (rest, {})] if rest else resolved
