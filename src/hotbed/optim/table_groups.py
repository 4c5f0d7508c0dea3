"""Find the tables of a model by name, and resolve an optimizer's groups of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from hotbed.checks import check_known
from hotbed.errors import SpecError
from hotbed.optim.rule import SparseModule


class TableSelection(nn.Module):
    """Select the tables of a model that an optimizer trains.

    Parameters
    ----------
    model
        Any module that contains embedding collections.
    tables
        Names ``path.to.collection.table`` in the model. The optimizer's groups and state use the same names.

    Raises
    ------
    SpecError
        If no name is passed, or the model has no table of a name.

    Examples
    --------
    >>> deep = RowWiseAdagrad(TableSelection(model, ["embeddings.user", "embeddings.item"]), lr=0.01)  # doctest: +SKIP
    >>> wide = FTRL(TableSelection(model, ["wide.user", "wide.item"]), lr=0.1)  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, tables: Sequence[str]) -> None:
        super().__init__()
        locate_tables(model)  # raises a SpecError if it is not a model
        self._model = [model]  # a list hides the model from nn.Module, so that it is not a submodule
        self.tables = tuple(tables)
        known = list(locate_tables(self))
        if not self.tables:
            raise SpecError(f"selected tables: got none, expected at least one of {', '.join(known)}")
        for name in self.tables:
            check_known("table", name, known, SpecError)

    @override
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the modules of the model."""
        return self._model[0].named_modules(*args, **kwargs)


def locate_tables(model: object) -> dict[str, tuple[str, str]]:
    """Map the full name of every table of a model to the path of its collection and its name in the collection."""
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"sparse optimizer: got {type(model).__name__}, expected the model, because model.parameters() has no "
            "tables. Use RowWiseAdagrad(model, lr=0.01) for the tables, with groups=[{'tables': ['users'], 'lr': 0.1}] "
            "for tables with other options, and torch.optim.Adam(model.parameters()) for the rest"
        )
    collections = {path: m for path, m in model.named_modules() if isinstance(m, SparseModule)}
    return {f"{path}.{table}".lstrip("."): (path, table) for path, of in collections.items() for table in of.handles}


def resolve_groups(
    places: Mapping[str, tuple[str, str]], groups: Sequence[Mapping[str, Any]], known: set[str]
) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the full table names and the options of each group. Tables without a group are the last group."""
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
                problem = "in two optimizer groups" if len(found) == 1 else f"ambiguous: {', '.join(found)}"
                raise SpecError(f"table '{name}' is {problem}")
            rest.remove(found[0])
            names.append(found[0])
        if not names:
            raise SpecError(f"optimizer group: got {dict(group)}, expected 'tables' with at least one name")
        resolved.append((names, options))
    return [*resolved, (rest, {})] if rest else resolved
