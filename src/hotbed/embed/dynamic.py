"""`DynamicTables`: the dynamic tables of a collection, whose ids become rows before anything else sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hotbed.bags import Bags
from hotbed.comm import Link
from hotbed.embed.ids import kept
from hotbed.embed.vocabulary import Renewed, Vocabulary
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.specs import Feature, Table
from hotbed.spread import Spread

PREFIX = "dynamic_"
"""What names of a dynamic table's state begin with, after its own."""


class DynamicTables:
    """Vocabularies by table.

    Parameters
    ----------
    tables, features
        Of the collection; those that are not dynamic are left alone.
    link
        The ranks that share the vocabularies; None for one.

    Attributes
    ----------
    unadmitted
        By feature, how many ids had no row so far.
    """

    def __init__(self, tables: Sequence[Table], features: Sequence[Feature], link: Link | None = None) -> None:
        place = (0, 1) if link is None else (link.rank, link.size)
        self._vocabularies = {t.name: Vocabulary(t, *place) for t in tables if t.dynamic is not None}
        self._features = {t: [f.name for f in features if f.table == t] for t in self._vocabularies}
        self._link = link
        self.unadmitted: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._vocabularies)

    def with_rows(self, ids: Jagged, renew: Callable[[str, Renewed], None], *, train: bool) -> Jagged:
        """Rows in the place of ids; ids that have none are left out. All ranks must call this.

        Parameters
        ----------
        ids
            The batch.
        renew
            Called with a table's rows that begin anew.
        train
            Whether ids that are not known are to be noted.
        """
        if isinstance(ids, Spread):
            raise BatchError(
                f"table '{next(iter(self._vocabularies))}' is dynamic, so every rank must have all ids of its samples; "
                "give the batch without hotbed.Spread"
            )
        changed: dict[str, Bags] = {}
        for table, vocabulary in self._vocabularies.items():
            features = self._features[table]
            values = [ids[name].values.long() for name in features]
            rows, renewed = vocabulary.rows_of(torch.cat(values), self._link, train=train)
            if len(renewed.rows):
                renew(table, renewed)
            for name, own in zip(features, rows.split([len(v) for v in values]), strict=True):
                bags, missing = ids[name]._replace(values=own), own < 0
                if bool(missing.any()):
                    self.unadmitted[name] += int(missing.sum())
                    bags = kept(bags, ~missing)
                changed[name] = bags
        return ids.with_features(changed)

    def stepped(self, tables: Collection[str]) -> None:
        """The optimizer of these tables has used all gradients; see `Vocabulary.stepped`."""
        for table, vocabulary in self._vocabularies.items():
            if table in tables:
                vocabulary.stepped()

    def save(self, destination: dict[str, Any], prefix: str) -> None:
        """Add the state to that of a collection; all ranks must call this."""
        for table, vocabulary in self._vocabularies.items():
            for name, tensor in vocabulary.state(self._link).items():
                destination[f"{prefix}{table}.{PREFIX}{name}"] = tensor

    def load(self, state: Mapping[str, Any], prefix: str, missing: list[str], errors: list[str]) -> set[str]:
        """Take over what `save` added; the keys that this is about."""
        expected: set[str] = set()
        for table, vocabulary in self._vocabularies.items():
            shapes = vocabulary.shapes()
            keys = {name: f"{prefix}{table}.{PREFIX}{name}" for name in shapes}
            expected.update(keys.values())
            absent = [key for key in keys.values() if key not in state]
            missing += absent
            other = [key for name, key in keys.items() if key in state and state[key].shape != shapes[name]]
            errors += [f"table '{table}': '{key}' is of another capacity; load it with the one it had" for key in other]
            if not absent and not other:
                vocabulary.load_state({name: state[key] for name, key in keys.items()})
        return expected
