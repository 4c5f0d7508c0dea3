# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Find histories, lists of earlier values of another column: by names and values, or as they are said to be."""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data import arrow
from hotbed.data.profile import ColumnProfile
from hotbed.data.roles import ColumnRole, words_of
from hotbed.errors import DataError, SpecError, did_you_mean


def shared_tables(
    profiles: Sequence[ColumnProfile], roles: Mapping[str, ColumnRole], sample: pa.Table
) -> dict[str, str]:
    """Find lists whose elements are values of another column (``history`` of ``item_id``), with the table of that."""
    found: dict[str, str] = {}
    scalars = [p for p in profiles if roles[p.name].role in ("id", "category") and not pa.types.is_boolean(p.type)]
    for column in (p for p in profiles if roles[p.name].role == "list"):
        elements = pc.unique(pc.list_flatten(sample[column.name])).drop_null()
        of_text = arrow.is_text(elements.type)
        for other in scalars:
            if arrow.is_text(other.type) != of_text or not len(elements):
                continue
            values = pc.unique(sample[other.name]).drop_null()
            kind = pa.large_string() if of_text else pa.int64()
            inside = pc.mean(pc.is_in(pc.cast(elements, kind, safe=False), value_set=pc.cast(values, kind, safe=False)))
            related = {w.rstrip("s") for w in words_of(column.name)} & {w.rstrip("s") for w in words_of(other.name)}
            # Numbers from 1 on are in all columns of numbers from 1 on, and few texts (yes, no) in many columns: these
            # need a word in common.
            by_values = of_text and roles[other.name].role == "id"
            if (inside.as_py() or 0) > 0.5 and (by_values or related - {"id"}):
                found[column.name] = other.name
    return found


def roles_of_histories(
    path: str, names: Sequence[str], profiles: Sequence[ColumnProfile], histories: Mapping[str, str]
) -> dict[str, ColumnRole]:
    """Check histories, each with its candidate column, and return the roles that both have."""
    found: dict[str, ColumnRole] = {}
    by_name = {column.name: column for column in profiles}
    for pair in histories.items():
        for name in pair:
            if name not in names:
                raise DataError(
                    f"--history names column '{name}', which {path} does not have{did_you_mean(name, names)}"
                )
            if name not in by_name:
                raise SpecError(f"--history names '{name}', which is a label, a weight, or left out; name an input")
        history, candidate = (by_name[name].type for name in pair)
        if not arrow.is_list(history) or not _is_of_ids(history.value_type):
            raise DataError(
                f"{path}, column '{pair[0]}': a history is a list of integers or strings, this is {history}; write it "
                "as --history HISTORY=CANDIDATE"
            )
        if not _is_of_ids(candidate) or arrow.is_text(candidate) != arrow.is_text(history.value_type):
            raise DataError(
                f"{path}, column '{pair[1]}': the candidate of '{pair[0]}' has one value in each row, of the kind of "
                f"the list's, which is {history.value_type}; this is {candidate}"
            )
        found[pair[0]] = ColumnRole("list", f"earlier values of {pair[1]}, as --history says")
        found.setdefault(pair[1], ColumnRole("id", f"the candidate of {pair[0]}, as --history says"))
    return found


def _is_of_ids(kind: pa.DataType) -> bool:
    return (arrow.is_whole(kind) and not pa.types.is_boolean(kind)) or arrow.is_text(kind)
