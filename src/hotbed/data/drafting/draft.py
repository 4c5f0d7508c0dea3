"""Draft a schema and splits for a dataset from names, types and values: `draft`, `draft_schema`."""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hotbed.checks import check_known
from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import Numerical, SparseColumn
from hotbed.data.drafting.profile import count_distinct, take_sample
from hotbed.data.drafting.roles import (
    LABEL_NAMES,
    ColumnRole,
    FoundLabel,
    SampledColumn,
    find_labels,
    is_named_like_time,
    leak_reason,
    role_of,
    rule_of,
    sample_labels,
    time_rank,
    time_reason,
    without_dictionary,
    words_of,
)
from hotbed.data.files.criteo import COLUMNS
from hotbed.data.files.delimited import is_delimited
from hotbed.data.files.parquet_files import (
    ParquetFile,
    find_parquet,
    refuse_same_files,
    text_columns,
    with_rows,
)
from hotbed.data.files.text_dates import parse_dates
from hotbed.data.hashing import hashes_to_rows
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError

_log = logging.getLogger("hotbed")

WEIGHT_NAMES = ("weight", "weights", "sample_weight")
SMALL = 20_000
"""With fewer train rows, several epochs are drafted, and a validation split that selects the best epoch."""
MANY_REPEATS = 100
"""If an id occurs more often than this on average, several epochs are drafted for any number of rows."""
FEWEST_ROWS = 50
"""With fewer train rows, no split is cut off the train rows."""
_SMALLEST_TABLE, _LARGEST_TABLE = 64, 1 << 31
_ROWS_PER_VALUE = ((250_000, 16), (1_000_000, 8), (math.inf, 4))
"""Rows per distinct value, by the largest number of values. With 4 rows, a fifth of new ids share a trained row."""
_SHARE = 0.1  # share of the rows in a drafted split
_FEW_ROWS, _SHARE_OF_FEW = 5_000, 0.2  # of fewer rows, a larger share is for validation, so that it is reliable
_SMALLEST, _LARGEST = 0.03, 0.3  # limits of the share of a split by time; many rows may have the same time
_MISSING = 0.01  # smallest share of missing times that rules out a split by them
_INDICATOR = 0.005  # numbers with a larger share of missing values get an indicator
_FEW_VALUES = 50  # for at most this many values, a table is enlarged until no two values share a row


@dataclass(frozen=True)
class LeftOut:
    """A column that the draft does not use, with its type and the reason."""

    name: str
    type: str
    reason: str


@dataclass
class DraftedSplits:
    """Drafted splits, and how a `ParquetSource` makes them."""

    init_args: dict[str, Any] = field(default_factory=dict)  # arguments of the source
    reason: str = ""  # why the rows are split in this way
    has_valid: bool = False
    has_test: bool = False
    in_time_order: bool = False  # whether the rows are stored in the order of time
    notes: list[str] = field(default_factory=list)  # comments for the recipe


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Drafted parts of a recipe, and the reasons for them."""

    schema: Schema
    reasons: Mapping[str, str]  # by column
    left_out: tuple[LeftOut, ...]
    labels: tuple[FoundLabel, ...]
    splits: DraftedSplits
    samples: int  # rows of the train files, before other splits are cut off
    repeats: float  # mean occurrences of an id in these rows
    source: Mapping[str, object] | None = None  # `data.source` of the recipe; None for Parquet


def draft_schema(
    path: str | Path, *, label: str | Sequence[str] = (), filesystem: fs.FileSystem | None = None
) -> Schema:
    """Propose a schema from the names, types and values of columns.

    Labels are columns with a common name (label, click, target, …), or ratings. Numbers that measure something are
    numericals with a normalization rule. Columns of ids or categories, and of lists of ids or categories, are sparse.
    A table has 16 rows per distinct value (8 above 250,000 values, 4 above a million), rounded up to a power of 2, so
    that few hashed values share a row. Times, free text, constants, row numbers and columns that reveal the label are
    left out. If the data has a train split, only the files of this split are read.

    Parameters
    ----------
    path
        File, folder or URI, as for `ParquetSource`.
    label
        Label column, or several for a multi-task model (default: found by name).
    filesystem
        See `ParquetSource`.

    Raises
    ------
    DataError
        If the path does not exist, no label is found, two columns have the same name, or no column can be sparse.
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
    valid: bool = False,  # whether to draft a validation split even if one epoch is drafted, which does not need it
    # column with the same ids by column of lists, e.g. ``{"watched": "movie"}``, unless similar names show the pair
    histories: Mapping[str, str] | None = None,
    needs_label: bool = True,  # whether a missing label is an error; if not, all samples are positives
    weights: Mapping[str, str] | None = None,  # column of weights by column of ids
    filesystem: fs.FileSystem | None = None,
) -> Draft:
    """Propose the schema and the splits of a dataset, with reasons."""
    histories, of_ids = dict(histories or {}), dict(weights or {})
    files = DraftFiles.find(path, test, filesystem)
    groups = [group for file in files.train for group in file.row_groups()]
    if not groups:
        raise DataError(f"{path} has no rows")
    names = list(dict.fromkeys(name for file in files.train for name in file.schema.names))
    chosen = {"--drop": drop, "--time": [time] if time else [], "--history": chain(*histories.items())}
    for option, of_option in chosen.items():
        for name in of_option:
            check_known(f"{option}, column of {path}", name, names, DataError)
    missing = _unlike(files.train, names)
    while True:
        try:
            sample = take_sample(groups, [name for name in names if name not in missing and name not in drop])
            break
        except arrow.WideDecimalError as error:
            missing[error.column] = f"it {error.reason}"
    total = sum(group.samples for group in groups)
    required = list(dict.fromkeys([label] if isinstance(label, str) else label))
    if dropped := [name for name in required if name in drop]:
        raise SpecError(f"--label and --drop: got '{dropped[0]}' in both options. Remove the column from one.")
    unlike = next((n for n in missing if n in required or (not required and n.lower() in LABEL_NAMES)), None)
    try:
        labels = find_labels(str(path), sample, required, positive, needed=needs_label)
    except DataError:
        if unlike is None:
            raise
        raise DataError(
            f"{path}, label column '{unlike}': {missing[unlike]}. Write the column with one type to every file."
        ) from None
    of_label = [found.name for found in labels]
    # Files of the other splits are not used if they lack a label.
    others = [f for of in files.others.values() for f in with_rows(of) if not {*of_label} - {*f.schema.names}]
    missing |= _unlike(with_rows([*files.train, *others]), names)
    used = [n for n in sample.column_names if n not in of_label and n not in missing]
    weight = next((n for n in used if n.lower() in WEIGHT_NAMES and n != time and _may_be_weight(sample[n])), None)
    inputs = [n for n in used if n != weight and n not in of_ids.values()]
    distinct = count_distinct(groups, {n: sample[n].type for n in inputs if _is_counted(sample[n])})
    profiles = [SampledColumn(name, sample[name], total, distinct.get(name)) for name in inputs]
    roles = {p.name: role_of(p, None) for p in profiles}
    for i, found in enumerate(labels):
        values = sample_labels(sample, found)
        for column in profiles:  # the first label may explain better why a column is left out
            if roles[column.name].role != "left out" or not i:
                leak = leak_reason(sample[column.name], values, found.name)
                roles[column.name] = roles[column.name] if leak is None else role_of(column, leak)
    roles |= roles_of_histories(str(path), profiles, histories)
    for column in profiles:
        if roles[column.name].role in ("id", "category") and (value := column.inexact) is not None:
            raise DataError(
                f"{path}, column '{column.name}': got the id {value:.0f} as {column.type}, a type that drops the last "
                f"digits, expected at most {arrow.exact_integers(column.type):,}. Write the column as integers (Int64 "
                f"in pandas) or strings, or leave the column out: --drop '{column.name}'"
            )
    times = [p for p in profiles if roles[p.name].role == "time" or p.name == time]
    if time is not None:
        problems = {
            "it is the label": time in of_label,
            f"it is left out ({missing.get(time, '--drop')})": time not in inputs,
            "its text does not sort by time. Write the texts as 2024-12-31, or write timestamps": any(
                p.name == time and p.dates == "other" for p in profiles
            ),
        }
        if problem := next((text for text, is_so in problems.items() if is_so), None):
            raise SpecError(f"--time: got '{time}', expected the column of the rows' times, but {problem}.")
        roles[time] = ColumnRole("time", "the rows are split by it")
    schema, reasons = _schema(str(path), labels, weight, profiles, roles, sample, histories)
    schema = weighted(str(path), schema, of_ids, sample)
    reasons |= {name: f"the weight of each id in '{ids}'" for ids, name in of_ids.items()}
    used_ids = [p for p in profiles if p.name in {column.name for column in schema.sparse}]
    lookups = sum(p.present * (p.length if arrow.is_list(p.type) else 1) for p in used_ids)
    repeats = lookups / max(1, sum(p.distinct for p in used_ids))
    several_epochs = total < SMALL or repeats >= MANY_REPEATS
    splits = draft_splits(files, of_label, sample, times, total=total, time=time, valid=valid or several_epochs)
    unused = _unused_times(profiles, roles, time)
    splits.notes += unused
    if cut := splits.init_args.get("split"):
        by_time = isinstance(cut, dict) and "column" in cut
        unused += [] if by_time or not any(map(is_named_like_time, times)) else [f"The splits are {splits.reason}"]
    for note in (*unused, *(f"Column '{name}' is left out: {why}" for name, why in missing.items())):
        _log.warning("%s: %s", path, note)
    types = {field.name: str(field.type) for file in files.train for field in file.schema}
    reasons_out = {p.name: why for p in profiles if (why := _reason_left_out(roles[p.name]))}
    reasons_out |= missing | dict.fromkeys(drop, "--drop")
    return Draft(
        schema=schema,
        reasons=reasons,
        left_out=tuple(LeftOut(name, types[name], why) for name, why in reasons_out.items()),
        labels=tuple(labels),
        splits=splits,
        samples=total,
        repeats=repeats,
    )


def _unlike(files: Sequence[ParquetFile], names: Sequence[str]) -> dict[str, str]:
    """Map each column that a file lacks, or that has incompatible types in two files, to a text about this fault."""
    found: dict[str, str] = {}
    for name in names:
        kinds: dict[pa.DataType, None] = {}
        for file in files:
            at = file.schema.get_field_index(name)
            kind = file.schema.types[at]
            if at < 0:
                found.setdefault(name, f"{file.name} has no such column")
            elif other := next((before for before in kinds if not arrow.are_compatible(before, kind)), None):
                found.setdefault(name, f"its type is {kind} in {file.name}, but {other} in another file")
            kinds |= {kind: None} if at >= 0 else {}
    return found


def _unused_times(profiles: Sequence[SampledColumn], roles: Mapping[str, ColumnRole], time: str | None) -> list[str]:
    """Return notes on columns that seem to hold times (by name, or because they have dates), but in no known layout."""
    found: list[str] = []
    for column in profiles:
        is_known = time_reason(column) is not None or column.name == time or column.distinct < 2
        if is_known or not (is_named_like_time(column) or column.dates == "other"):
            continue
        values = f"{column.type}, {column.low:.16g} to {column.high:.16g}" if column.quantiles else str(column.type)
        is_input = roles[column.name].role != "left out"
        found.append(
            f"Column '{column.name}' has the name of a time, but its values have no known layout ({values}), so the "
            f"rows are not split by this column, and the column is {'an input' if is_input else 'left out'}. If the "
            "column has the time of the rows, write it as timestamps or as 2024-12-31"
            + (f", or draft with --time '{column.name}'" if is_input else "")
        )
    return found


def _may_be_weight(column: pa.ChunkedArray) -> bool:
    if not arrow.is_number(column.type) or column.null_count:
        return False
    weights = arrow.to_float64(column)
    return bool(((weights >= 0) & (weights < np.inf)).all())


def _is_counted(column: pa.ChunkedArray) -> bool:
    """Return whether a column may hold ids, or lists of ids, so that its distinct values have to be counted."""
    if pa.types.is_floating(column.type):
        numbers = arrow.to_float64(column)
        return bool((np.isnan(numbers) | (numbers == np.floor(numbers))).all())
    return _is_of_ids(arrow.value_type_of(column.type))


def _is_of_ids(kind: pa.DataType) -> bool:
    return (arrow.is_whole(kind) and not pa.types.is_boolean(kind)) or arrow.is_text(kind)


def _reason_left_out(role: ColumnRole) -> str:
    if role.role == "time":
        return f"a time ({role.reason}): later rows have values that training has not seen"
    return role.reason if role.role == "left out" else ""


# -- the schema ----------------------------------------------------------------------------------------------------


def _schema(
    path: str,
    labels: Sequence[FoundLabel],
    weight: str | None,
    profiles: Sequence[SampledColumn],
    roles: Mapping[str, ColumnRole],
    sample: pa.Table,
    histories: Mapping[str, str],
) -> tuple[Schema, dict[str, str]]:
    """Return the schema, and the reason for each of its columns."""
    reasons: dict[str, str] = {found.name: found.remark for found in labels}
    if weight is not None:
        reasons[weight] = (
            "the weight of each sample, by its name; if it is an input, set null, and add the column to `dense`"
        )
    sparse: list[SparseColumn] = []
    numericals: list[Numerical] = []
    shared = shared_tables(profiles, roles, sample) | {h: c for h, c in histories.items() if h in roles}
    for column in profiles:
        role = roles[column.name]
        absent = f"; {column.missing_share:.1%} are missing" if column.missing_share else ""
        if role.role == "number":
            rule, why = rule_of(column)
            missing = "indicator" if column.missing_share > _INDICATOR else "center"
            numericals.append(Numerical(name=column.name, rule=rule, missing=missing))
            reasons[column.name] = why + (f" ({role.reason})" if role.reason else "") + absent
        elif role.role in ("id", "category", "list"):
            is_fixed = pa.types.is_fixed_size_list(column.type) and not column.missing_share
            ids = int(column.type.list_size) if is_fixed else None if arrow.is_list(column.type) else 1
            rows, table = _without_collisions(column, hashed_rows(column.distinct)), shared.get(column.name)
            pooling = "mean" if ids is None else "sum"
            sparse.append(SparseColumn(name=column.name, rows=rows, table=table, ids=ids, pooling=pooling))
            reasons[column.name] = role.reason + absent
    if not sparse:
        left_out = [f"'{n}': {why}" for n, role in roles.items() if (why := _reason_left_out(role))][:8]
        out = f" (left out: {'; '.join(left_out)})" if left_out else ""
        raise DataError(f"{path}: got no column of ids besides the label{out}, expected integers, strings or lists")
    most: dict[str, int] = {}  # a shared table has as many rows as its largest column needs
    for column in sparse:
        most[column.table_name] = max(most.get(column.table_name, 0), column.rows)
    try:
        schema = Schema(
            labels=tuple(found.name for found in labels),
            positives=tuple(found.mapping for found in labels if found.mapping is not None),
            weight=weight,
            dense=tuple(n.name for n in numericals),
            numericals=tuple(numericals),
            sparse=tuple(replace(column, rows=most[column.table_name]) for column in sparse),
        )
    except SpecError as error:
        raise DataError(f"{path}: {error}") from None
    return schema, reasons


def hashed_rows(distinct: int) -> int:
    """Return the number of rows for a table of this many distinct values (see `draft_schema`)."""
    per_value = next(times for most, times in _ROWS_PER_VALUE if distinct <= most)
    rows = max(_SMALLEST_TABLE, per_value * distinct)
    return min(_LARGEST_TABLE, 1 << (rows - 1).bit_length())


def _without_collisions(column: SampledColumn, rows: int) -> int:
    """For a column with few values, multiply ``rows`` by up to 16 if each value then is hashed to its own row."""
    if column.few is None or column.distinct > len(column.few) or len(column.few) > _FEW_VALUES:
        return rows
    kind = column.type.value_type if arrow.is_list(column.type) or pa.types.is_dictionary(column.type) else column.type
    values = pa.array([v for v in column.few if v is not None], kind)
    hashes = arrow.hash_values(values.cast(pa.int64()) if pa.types.is_floating(kind) else values)
    larger = (rows << i for i in range(5))
    return next((n for n in larger if len(np.unique(hashes_to_rows(hashes, n))) == len(hashes)), rows)


def weighted(path: str, schema: Schema, weights: Mapping[str, str], sample: pa.Table) -> Schema:
    """Return the schema with id weights. ``weights`` maps columns of ids to the columns with their weights."""
    for ids, name in weights.items():
        for column in (ids, name):
            check_known(f"--weights, column in all files of {path}", column, sample.column_names, DataError)
        check_known("--weights, input of ids", ids, [column.name for column in schema.sparse], SpecError)
    columns = tuple(replace(column, weights=weights.get(column.name)) for column in schema.sparse)
    for column in (column for column in columns if column.weights is not None):
        arrow.check_id_weights(column, sample.schema, path)
    return replace(schema, sparse=columns)


def shared_tables(
    profiles: Sequence[SampledColumn], roles: Mapping[str, ColumnRole], sample: pa.Table
) -> dict[str, str]:
    """Map each column of lists to the column that has one id of the same kind per row, e.g. history to item_id."""
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
            # Most columns of integers contain 1, 2, 3, …, and many categories are yes and no. Such columns must also
            # have a common word in their names.
            by_values = of_text and roles[other.name].role == "id"
            if (inside.as_py() or 0) > 0.5 and (by_values or related - {"id"}):
                found[column.name] = other.name
    return found


def roles_of_histories(
    path: str, profiles: Sequence[SampledColumn], histories: Mapping[str, str]
) -> dict[str, ColumnRole]:
    """Check the columns of ``--history``, and return their roles.

    ``histories`` maps a column of lists to its candidate column. The lists have earlier values of the candidate column.
    """
    found: dict[str, ColumnRole] = {}
    by_name = {column.name: column for column in profiles}
    for pair in histories.items():
        for name in pair:
            check_known("--history, input", name, by_name, SpecError)
        history, candidate = (by_name[name].type for name in pair)
        if not arrow.is_list(history) or not _is_of_ids(history.value_type):
            raise DataError(
                f"--history, column '{pair[0]}' of {path}: got {history}, expected lists of integers or strings. Set "
                "--history HISTORY=CANDIDATE."
            )
        if not _is_of_ids(candidate) or arrow.is_text(candidate) != arrow.is_text(history.value_type):
            raise DataError(
                f"--history, column '{pair[1]}' of {path}: got {candidate}, expected one {history.value_type} per row, "
                f"as in the lists of '{pair[0]}'"
            )
        found[pair[0]] = ColumnRole("list", f"earlier values of {pair[1]}, by --history")
        found.setdefault(pair[1], ColumnRole("id", f"the candidate of {pair[0]}, by --history"))
    return found


# -- splits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftFiles:
    """Files of a dataset by split."""

    train: Sequence[ParquetFile]  # files from which the other splits may be cut off
    others: Mapping[str, Sequence[ParquetFile]]
    test_path: str | None = None  # path of a separate test split

    @staticmethod
    def find(path: str | Path, test: str | Path | None, filesystem: fs.FileSystem | None) -> DraftFiles:
        """Find the files. Raise `DataError` if there is no train split."""
        files = find_parquet(path, filesystem)
        if "" not in files and "train" not in files:
            raise DataError(
                f"{path}: got the splits {', '.join(files)}, expected a split named train. Add it, or pass "
                "the path of one split."
            )
        others: dict[str, Sequence[ParquetFile]] = {s: of for s, of in files.items() if s not in ("", "train")}
        train = with_rows(files.get("", files.get("train", [])))
        if test is None:
            return DraftFiles(train, others)
        if "test" in files:
            fix = "Remove --test, or pass the path of the train files."
            raise SpecError(f"--test: got {test}, but {path} already has a test split. {fix}")
        found = find_parquet(test, filesystem, text_columns(chain(*files.values())))
        of_test = found.get("test", next(iter(found.values())))
        refuse_same_files("test", of_test, files)
        return DraftFiles(train, {**others, "test": of_test}, str(test))


def draft_splits(
    files: DraftFiles,
    labels: Sequence[str],  # a split without one of these columns is not used
    sample: pa.Table,  # rows of the train data
    times: Sequence[SampledColumn],  # columns of times in the sample
    *,
    total: int,  # rows of the train data
    time: str | None = None,  # column of times to split by
    valid: bool = False,  # whether a validation split is wanted
) -> DraftedSplits:
    """Keep existing splits. Cut missing splits off the train data: the latest rows, or rows that a hash selects."""
    found = DraftedSplits()
    paths: dict[str, str | None] = {}
    there: set[str] = set()
    for split, of_split in files.others.items():
        path = files.test_path if split == "test" else None
        lacking = next((f for f in with_rows(of_split) if {*labels} - {*f.schema.names}), None)
        if lacking is None:
            there.add(split)
        elif path is not None:
            raise DataError(f"--test: {lacking} has no column {labels[0]!r}, which is the label")
        else:
            found.notes.append(f"The {split} files ({lacking.name}) have no column {labels[0]!r} and are not used.")
        if lacking is not None or path is not None:
            paths[split] = path
    found.has_valid, found.has_test = "valid" in there, "test" in there
    wanted = [split for split in ("valid", "test") if split not in there and (split == "test" or valid)]
    if wanted and total < FEWEST_ROWS:
        found.reason = f"{total:,} rows are too few to cut off splits"
    elif wanted:
        shares = {split: _SHARE_OF_FEW if split == "valid" and total < _FEW_ROWS else _SHARE for split in wanted}
        split, found.reason = _cut(files.train, sample, times, shares, time)
        found.init_args["split"] = split
        ordered = {column.name for column in times if column.is_sorted}
        found.in_time_order = split["by"] == "order" or split.get("column") in ordered
        found.has_valid, found.has_test = found.has_valid or "valid" in wanted, True
    if paths:
        found.init_args["split_paths"] = paths
    return found


def _cut(
    train: Iterable[ParquetFile],
    sample: pa.Table,
    times: Sequence[SampledColumn],
    shares: Mapping[str, float],
    time: str | None,
) -> tuple[dict[str, object], str]:
    """Return the rule (see `hotbed.data.files.row_split`) that cuts splits off the train data, and the reason."""
    if time is None and all(is_delimited(f.shown) and tuple(f.schema.names) == COLUMNS for f in train):
        return {"by": "order", **shares}, "the last rows, because Criteo logs are in the order of time"
    limits = f"time that {_SMALLEST:.0%} to {_LARGEST:.0%} of the rows follow"
    unfit: list[str] = []
    for column in sorted(times, key=lambda c: (-time_rank(c.name), -c.distinct)):
        if time is None and column.missing_share >= _MISSING:
            unfit.append(f"{column.missing_share:.1%} of '{column.name}' are missing")
        elif time is None and not time_rank(column.name) and not column.is_sorted:
            unfit.append(f"'{column.name}' may not be the time of the row (if it is, set --time)")
        elif time in (None, column.name):
            if starts := _starts(sample[column.name], shares, column.date_format):
                by_time = {"by": "time", "column": column.name, **{f"{s}_from": t for s, t in starts.items()}}
                by_time |= {} if column.date_format is None else {"format": column.date_format}
                return by_time, f"the latest rows by '{column.name}', because a model predicts the future"
            if time is not None:
                raise DataError(f"--time: got {time}, expected a {limits}, for a test split. Remove --time.")
            unfit.append(f"'{column.name}' has no {limits}")
    why = f" ({'; '.join(unfit)})" if unfit else ", because there is no column of time"
    return {"by": "hash", **shares}, f"by a hash of the rows' positions{why}"


def _starts(column: pa.ChunkedArray, shares: Mapping[str, float], date_format: str | None) -> dict[str, object]:
    """Return a start time by split, so that each split gets about its share of the rows; {} if this is impossible."""
    column = without_dictionary(pc.drop_null(column))
    if date_format is not None:
        column = pc.cast(parse_dates(column, date_format), pa.timestamp("us"))
    if is_time := arrow.is_time(column.type):
        values = arrow.to_microseconds(column).to_numpy()
    elif arrow.is_text(column.type):
        values = np.array(pc.cast(column, pa.string()).to_pylist(), dtype=np.str_)
    else:
        values = arrow.to_float64(column)
        values = values[np.isfinite(values)]
    different, firsts = np.unique(np.sort(values), return_index=True)
    left = 1 - firsts / max(1, len(values))  # share of the rows from each value on
    starts: dict[str, object] = {}
    total = 0.0
    for split, share in reversed(list(shares.items()) if len(values) else []):
        at = int(np.abs(left - (total + share)).argmin())
        if not _SMALLEST <= left[at] - total <= _LARGEST:
            return {}
        total, start = float(left[at]), different[at].item()
        if is_time:
            moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=start)
            start = str(moment.date()) if moment.time() == datetime.time() else str(moment)
        starts[split] = int(start) if isinstance(start, float) and start.is_integer() else start
    return dict(reversed(starts.items()))
