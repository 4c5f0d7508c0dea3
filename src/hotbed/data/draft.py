"""Propose what the columns and splits of a dataset are for, as a careful engineer would: `draft`, `draft_schema`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hotbed.data import arrow
from hotbed.data.columns import Numerical, SparseColumn
from hotbed.data.draft_labels import LABEL_NAMES, FoundLabel, find_labels, sample_labels
from hotbed.data.draft_splits import DraftedSplits, DraftFiles, draft_splits
from hotbed.data.hashing import rows_of
from hotbed.data.parquet_files import ParquetFile, with_rows
from hotbed.data.profile import ColumnProfile, count_distinct, profile, take_sample
from hotbed.data.roles import ColumnRole, is_named_like_time, leak_reason, role_of, rule_of, time_reason, words_of
from hotbed.data.row_groups import RowGroup
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean

_log = logging.getLogger("hotbed")

WEIGHT_NAMES = ("weight", "weights", "sample_weight")
SMALL = 20_000
"""Rows of train data below which several epochs are drafted, with a validation split that decides which is the best."""
MANY_REPEATS = 100
"""How often an id is met in the mean, from which on that is so with any number of rows."""
_SMALLEST_TABLE = 64
_LARGEST_TABLE = 1 << 31
_ROWS_PER_VALUE = ((250_000, 16), (1_000_000, 8), (math.inf, 4))
"""By the most distinct values. Of 4 × a fifth of the ids that training never saw fall on a row of one that it saw."""
_INDICATOR = 0.005
_FEW_VALUES = 50


@dataclass(frozen=True)
class LeftOut:
    """A column that is no input, with its type and the reason."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a recipe says of a dataset, and why."""

    schema: Schema
    reasons: Mapping[str, str]  # by column
    left_out: tuple[LeftOut, ...]
    labels: tuple[FoundLabel, ...]
    splits: DraftedSplits
    samples: int  # rows to train on and to cut other splits from
    repeats: float  # how often an id occurs in these rows, on average
    # entry `data.source` of the recipe, unless it is a `ParquetSource` with this schema
    source: Mapping[str, object] | None = None


def draft_schema(
    path: str | Path, *, label: str | Sequence[str] = (), filesystem: fs.FileSystem | None = None
) -> Schema:
    """Propose a schema from names, types and values, see `draft`.

    Labels are columns of a usual name (label, click, target, …), or ratings; numbers that measure something are
    numericals with a rule of normalization; ids, categories and lists of them are sparse. Rows of a table are 16 ×
    the estimated number of distinct values (8 × of more than 250,000, 4 × of more than a million), rounded up to a
    power of 2, so that few of the values share a row with another when hashed. What is no input is left out: times,
    free text, constants, numbers of rows, columns that give the label away. Where there is a train split, only that is
    looked at.

    Parameters
    ----------
    path
        File, folder or URI, as for `ParquetSource`.
    label
        The label column, where its name is not a usual one, or several, of a task each.
    filesystem
        See `ParquetSource`.

    Raises
    ------
    DataError
        If there is no such path, no label column is found, two columns have one name, or no column can be sparse.
    """
    return draft(path, label=label, filesystem=filesystem).schema


def draft(
    path: str | Path,
    *,
    label: str | Sequence[str] = (),
    positive: str | None = None,  # condition of a positive label, see `hotbed.data.Label`
    drop: Sequence[str] = (),  # columns to leave out
    time: str | None = None,  # column of times to split by
    test: str | Path | None = None,  # path of a separate test split
    valid: bool = False,  # whether to draft a validation split even for one epoch, which needs none
    # columns of lists, each with the column whose table it shares, in addition to names that match
    histories: Mapping[str, str] | None = None,
    needs_label: bool = True,  # without a label, all samples are positives
    weights: Mapping[str, str] | None = None,  # columns of ids, each with the column of their weights
    filesystem: fs.FileSystem | None = None,
) -> Draft:
    """Propose schema and splits of a dataset."""
    files = DraftFiles.find(path, test, filesystem)
    groups = files.train
    if not groups:
        raise DataError(f"{path} has no rows")
    names = _names(files.train_files)
    for option, name in [*(("--drop", name) for name in drop), *([("--time", time)] if time else [])]:
        if name not in names:
            raise DataError(f"{option} names column '{name}', which {path} does not have{did_you_mean(name, names)}")
    missing = _not_everywhere(files.train_files, names)
    sample = _sample(groups, [name for name in names if name not in drop], missing)
    total = sum(group.samples for group in groups)
    asked = list(dict.fromkeys([label] if isinstance(label, str) else label))
    if dropped := [name for name in asked if name in drop]:
        raise SpecError(f"--label and --drop both name '{dropped[0]}'; leave one of them out")
    unlike = next((n for n in missing if n in asked or (not asked and n.lower() in LABEL_NAMES)), None)
    try:
        labels = find_labels(
            str(path),
            sample.select([n for n in sample.column_names if n not in drop]),
            asked,
            positive,
            needed=needs_label,
        )
    except DataError:
        if unlike is None:
            raise
        raise DataError(f"{path}, column '{unlike}': {missing[unlike]}, so it can be no label; write it anew") from None
    of_label = [found.name for found in labels]
    if time in of_label:
        raise SpecError(f"--time names '{time}', which is the label; name the column of the rows' times")
    missing |= _not_everywhere(with_rows([*files.train_files, *files.others_with(of_label)]), names)
    used = [n for n in sample.column_names if n not in of_label and n not in drop and n not in missing]
    weight = next((n for n in used if n.lower() in WEIGHT_NAMES and n != time and _may_be_weight(sample[n])), None)
    of_ids = dict(weights or {})
    inputs = [n for n in used if n != weight and n not in of_ids.values()]
    distinct = count_distinct(groups, {n: sample[n].type for n in inputs if _is_counted(sample[n])})
    profiles = profile(sample.select(inputs), total, distinct, sample_labels(sample, labels[0]) if labels else None)
    roles = {p.name: role_of(p, of_label[0] if of_label else "") for p in profiles}
    for found in labels[1:]:  # a column may give away another label than the first
        kept = sample.select([name for name in inputs if roles[name].role != "left out"])
        by_label = profile(kept, total, distinct, sample_labels(sample, found))
        leaks = {p.name: reason for p in by_label if (reason := leak_reason(p, found.name)) is not None}
        roles |= {name: ColumnRole("left out", reason) for name, reason in leaks.items()}
    roles |= roles_of_histories(str(path), names, profiles, histories or {})
    _refuse_inexact_ids(str(path), profiles, roles)
    times = [p for p in profiles if roles[p.name].role == "time" or p.name == time]
    if time is not None:
        chosen = next((p for p in profiles if p.name == time), None)
        if chosen is None:
            raise SpecError(f"--time names '{time}', which is left out ({missing.get(time, '--drop')})")
        if chosen.dates == "other":
            raise SpecError(
                f"--time names '{time}', whose text does not sort by time; write it as 2024-12-31, or as times"
            )
        roles[time] = ColumnRole("time", "the splits are by it")
    schema, reasons = _schema(str(path), labels, weight, profiles, roles, sample, histories or {})
    schema = weighted(str(path), schema, of_ids, sample)
    reasons |= {name: f"the weight of each id of '{ids}'" for ids, name in of_ids.items()}
    repeats = _repeats(profiles, schema)
    several_epochs = total < SMALL or repeats >= MANY_REPEATS
    splits = draft_splits(files, of_label, sample, times, total=total, time=time, valid=valid or several_epochs)
    unused = _unused_times(profiles, roles, time)
    splits.notes += unused
    if cut := splits.init_args.get("split"):
        by_time = isinstance(cut, dict) and "column" in cut
        unused += [] if by_time or not any(map(is_named_like_time, times)) else [f"The splits are {splits.reason}"]
    for note in (*unused, *(f"Column '{name}' is left out: {why}" for name, why in missing.items())):
        _log.warning("%s: %s", path, note)
    types = {field.name: str(field.type) for file in files.train_files for field in file.schema}
    dropped = [LeftOut(name, types[name], "--drop") for name in dict.fromkeys(drop)]
    elsewhere = [LeftOut(name, types[name], why) for name, why in missing.items()]
    left = [LeftOut(p.name, str(p.type), why) for p in profiles if (why := _why(roles[p.name]))]
    return Draft(
        schema=schema,
        reasons=reasons,
        left_out=(*left, *elsewhere, *dropped),
        labels=tuple(labels),
        splits=splits,
        samples=total,
        repeats=repeats,
    )


def _sample(groups: Sequence[RowGroup], names: Sequence[str], missing: dict[str, str]) -> pa.Table:
    """Sample columns that are not in `missing`, to which those are added that have decimals of more than 64 bits."""
    while True:
        try:
            return take_sample(groups, [name for name in names if name not in missing])
        except arrow.WideDecimalError as error:
            missing[error.column] = f"it {error.reason}"


def _names(files: Sequence[ParquetFile]) -> list[str]:
    """Columns of any of the files."""
    return list(dict.fromkeys(name for file in files for name in file.schema.names))


def _not_everywhere(files: Sequence[ParquetFile], names: Sequence[str]) -> dict[str, str]:
    """Columns that some of these files lack, or have of another type than others; with the reason."""
    found: dict[str, str] = {}
    for name in names:
        kinds: list[pa.DataType] = []
        for file in files:
            at = file.schema.get_field_index(name)
            if at < 0:
                found.setdefault(name, f"{file.name} has no such column")
                continue
            kind = file.schema.types[at]
            other = next((before for before in kinds if not arrow.alike(before, kind)), None)
            if other is not None:
                found.setdefault(name, f"in {file.name} it is {kind}, in another file {other}")
            if kind not in kinds:
                kinds.append(kind)
    return found


def _unused_times(profiles: Sequence[ColumnProfile], roles: Mapping[str, ColumnRole], time: str | None) -> list[str]:
    """Describe columns that are named like the time of their row, or have dates, but hold no time that is known."""
    found: list[str] = []
    for column in profiles:
        role = roles[column.name]
        is_known = time_reason(column) is not None or column.name == time or column.distinct < 2
        if is_known or not (is_named_like_time(column) or column.dates == "other"):
            continue
        values = f"{column.type}, {column.low:.16g} to {column.high:.16g}" if column.quantiles else str(column.type)
        use = "left out" if role.role == "left out" else "an input"
        found.append(
            f"Column '{column.name}' is named like a time, but its values have no known layout ({values}): it is {use}"
            ", and splits are not by it. Write it as times or 2024-12-31 if it is the time of the rows"
            + (f", or draft with --time '{column.name}'" if use == "an input" else "")
        )
    return found


def _refuse_inexact_ids(path: str, profiles: Sequence[ColumnProfile], roles: Mapping[str, ColumnRole]) -> None:
    """Raise `DataError` if ids were written as floats that do not hold them exactly."""
    for column in profiles:
        if roles[column.name].role in ("id", "category") and (value := column.inexact) is not None:
            raise DataError(
                f"{path}, column '{column.name}': the ids are {column.type}, which has lost digits of large ones: got "
                f"{value:.0f}, expected at most {arrow.exact_integers(column.type):,}. Write the column as integers "
                f"(Int64 in pandas) or strings, or leave it out: --drop '{column.name}'"
            )


def _repeats(profiles: Sequence[ColumnProfile], schema: Schema) -> float:
    """Ids that are looked up, per distinct one."""
    sparse = {column.name for column in schema.sparse}
    used = [column for column in profiles if column.name in sparse]
    lookups = sum(c.present * (c.length if arrow.is_list(c.type) else 1) for c in used)
    return lookups / max(1, sum(c.distinct for c in used))


def _may_be_weight(column: pa.ChunkedArray) -> bool:
    if not arrow.is_number(column.type) or column.null_count:
        return False
    weights = arrow.wide_numbers(column)
    return bool(((weights >= 0) & (weights < np.inf)).all())


def _is_counted(column: pa.ChunkedArray) -> bool:
    """Whether the number of distinct values matters: of ids, of what may be ids, and of lists of these."""
    kind = column.type
    inner = kind.value_type if arrow.is_list(kind) else kind
    if pa.types.is_floating(kind):
        numbers = arrow.wide_numbers(column)
        return bool((np.isnan(numbers) | (numbers == np.floor(numbers))).all())
    return (arrow.is_whole(inner) and not pa.types.is_boolean(inner)) or arrow.is_text(inner)


def _why(role: ColumnRole) -> str:
    if role.role == "time":
        return f"a time ({role.reason}): later rows have values that training has not seen"
    return role.reason if role.role == "left out" else ""


def _schema(
    path: str,
    labels: Sequence[FoundLabel],
    weight: str | None,
    profiles: Sequence[ColumnProfile],
    roles: Mapping[str, ColumnRole],
    sample: pa.Table,
    histories: Mapping[str, str],
) -> tuple[Schema, dict[str, str]]:
    """The schema, and what was found of each of its inputs."""
    reasons: dict[str, str] = {found.name: found.remark for found in labels}
    if weight is not None:
        reasons[weight] = "by its name, how much a sample counts; null if it is none, and the column among `dense`"
    sparse: list[SparseColumn] = []
    numericals: list[Numerical] = []
    shared = shared_tables(profiles, roles, sample) | {h: c for h, c in histories.items() if h in roles}
    for column in profiles:
        role = roles[column.name]
        absent = f"; {column.missing:.1%} are missing" if column.missing else ""
        if role.role == "number":
            rule, why = rule_of(column)
            missing = "indicator" if column.missing > _INDICATOR else "center"
            numericals.append(Numerical(name=column.name, rule=rule, missing=missing))
            reasons[column.name] = why + (f" ({role.reason})" if role.reason else "") + absent
        elif role.role in ("id", "category", "list"):
            sparse.append(_sparse(column, shared.get(column.name)))
            reasons[column.name] = role.reason + absent
    sparse = _same_rows(sparse)
    if not sparse:
        out = "; ".join(f"'{n}': {_why(r)}" for n, r in list(roles.items())[:8] if _why(r))
        raise DataError(
            f"{path} has no column of integers, strings or lists of them to embed, beside its label"
            + (f" (left out: {out})" if out else "")
        )
    positives = tuple(found.mapping for found in labels if found.mapping is not None)
    try:
        schema = Schema(
            labels=tuple(found.name for found in labels),
            positives=positives,
            weight=weight,
            dense=tuple(n.name for n in numericals),
            numericals=tuple(numericals),
            sparse=tuple(sparse),
        )
    except SpecError as error:
        raise DataError(f"{path}: {error}") from None
    return schema, reasons


def _sparse(column: ColumnProfile, table: str | None) -> SparseColumn:
    kind = column.type
    ragged = arrow.is_list(kind)
    ids = None if ragged else 1
    if pa.types.is_fixed_size_list(kind) and not column.missing:
        ids = int(kind.list_size)
    rows = _without_collisions(column, hashed_rows(column.distinct))
    pooling = "mean" if ragged and ids is None else "sum"
    return SparseColumn(name=column.name, rows=rows, table=table, ids=ids, pooling=pooling)


def hashed_rows(distinct: int) -> int:
    """Compute the rows of a table whose ids so many distinct values are hashed to, see `draft_schema`."""
    per_value = next(times for most, times in _ROWS_PER_VALUE if distinct <= most)
    rows = max(_SMALLEST_TABLE, per_value * distinct)
    return min(_LARGEST_TABLE, 1 << (rows - 1).bit_length())


def _without_collisions(column: ColumnProfile, rows: int) -> int:
    """A few times more rows where these make all of few values rows of their own."""
    if column.few is None or column.distinct > len(column.few) or len(column.few) > _FEW_VALUES:
        return rows
    kind = column.type.value_type if arrow.is_list(column.type) or pa.types.is_dictionary(column.type) else column.type
    values = pa.array([v for v in column.few if v is not None], kind)
    if pa.types.is_floating(values.type):
        values = pa.array(values.cast(pa.float64()).to_numpy().astype(np.int64))
    hashes = arrow.hashes(values)
    for larger in (rows, 2 * rows, 4 * rows, 8 * rows, 16 * rows):
        if len(np.unique(rows_of(hashes, larger))) == len(hashes):
            return larger
    return rows


def _same_rows(columns: list[SparseColumn]) -> list[SparseColumn]:
    """Columns with the rows of the largest that shares their table."""
    most: dict[str, int] = {}
    for column in columns:
        most[column.table_name] = max(most.get(column.table_name, 0), column.rows)
    return [replace(column, rows=most[column.table_name]) for column in columns]


def weighted(path: str, schema: Schema, weights: Mapping[str, str], sample: pa.Table) -> Schema:
    """Return a schema whose columns of ids have these weights; the sample has all columns that can be inputs."""
    names: list[str] = sample.column_names
    inputs = [column.name for column in schema.sparse]
    for ids, name in weights.items():
        for column in (ids, name):
            if column not in names:
                hint = did_you_mean(column, names)
                raise DataError(f"--weights names column '{column}', which {path} does not have in all files{hint}")
        if ids not in inputs:
            raise SpecError(
                f"--weights gives weights to '{ids}', which is no input of ids; there are {', '.join(inputs)}"
                f"{did_you_mean(ids, inputs)}"
            )
    columns = tuple(replace(column, weights=weights.get(column.name)) for column in schema.sparse)
    for column in (column for column in columns if column.weights is not None):
        arrow.check_id_weights(column, sample.schema, path)
    return replace(schema, sparse=columns)


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
