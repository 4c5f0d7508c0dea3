"""Draft a schema and splits for a dataset from names, types and values: `draft`, `draft_schema`."""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

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
    words_of,
)
from hotbed.data.files.criteo import COLUMNS
from hotbed.data.files.delimited import is_delimited
from hotbed.data.files.parquet_files import (
    ParquetFile,
    RowGroup,
    find_parquet,
    refuse_same_files,
    text_columns,
    with_rows,
)
from hotbed.data.files.text_dates import parse_dates
from hotbed.data.hashing import hashes_to_rows
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean

_log = logging.getLogger("hotbed")

WEIGHT_NAMES = ("weight", "weights", "sample_weight")
SMALL = 20_000
"""Rows of train data below which several epochs are drafted, with a validation split that decides which is the best."""
MANY_REPEATS = 100
"""Mean occurrences of an id, above which several epochs are drafted for any number of rows."""
_SMALLEST_TABLE = 64
_LARGEST_TABLE = 1 << 31
_ROWS_PER_VALUE = ((250_000, 16), (1_000_000, 8), (math.inf, 4))
"""By the most distinct values. Of 4 × a fifth of the ids that training never saw fall on a row of one that it saw."""
FEWEST_ROWS = 50
"""Of fewer rows none are cut off."""
_SHARE = 0.1
_FEW_ROWS, _SHARE_OF_FEW = 5_000, 0.2  # a tenth of so few says little
_SMALLEST, _LARGEST = 0.03, 0.3  # shares that a split by time may have where many rows have one time
_MISSING = 0.01
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
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
    """Drafted parts of a recipe, with the reasons."""

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
    asked_for = {"--drop": drop, "--time": [time] if time else [], "--history": [*chain(*(histories or {}).items())]}
    for option, name in ((option, name) for option, of_option in asked_for.items() for name in of_option):
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
    missing |= _not_everywhere(with_rows([*files.train_files, *files.others_with(of_label)]), names)
    used = [n for n in sample.column_names if n not in of_label and n not in drop and n not in missing]
    weight = next((n for n in used if n.lower() in WEIGHT_NAMES and n != time and _may_be_weight(sample[n])), None)
    of_ids = dict(weights or {})
    inputs = [n for n in used if n != weight and n not in of_ids.values()]
    distinct = count_distinct(groups, {n: sample[n].type for n in inputs if _is_counted(sample[n])})
    profiles = [SampledColumn(name, sample[name], total, distinct.get(name)) for name in inputs]
    roles = {p.name: role_of(p, None) for p in profiles}
    for i, found in enumerate(labels):
        values = sample_labels(sample, found)
        for column in profiles:  # the first label decides before the type of the column does
            if roles[column.name].role != "left out" or not i:
                leak = leak_reason(sample[column.name], values, found.name)
                roles[column.name] = roles[column.name] if leak is None else role_of(column, leak)
    roles |= roles_of_histories(str(path), profiles, histories or {})
    _refuse_inexact_ids(str(path), profiles, roles)
    times = [p for p in profiles if roles[p.name].role == "time" or p.name == time]
    if time is not None:
        chosen, problem = next((p for p in profiles if p.name == time), None), ""
        if time in of_label:
            problem = "which is the label; name the column of the rows' times"
        elif chosen is None:
            problem = f"which is left out ({missing.get(time, '--drop')})"
        elif chosen.dates == "other":
            problem = "but its text does not sort by time; write it as 2024-12-31, or as times"
        if problem:
            raise SpecError(f"--time names '{time}', {problem}")
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
            other = next((before for before in kinds if not arrow.are_compatible(before, kind)), None)
            if other is not None:
                found.setdefault(name, f"in {file.name} it is {kind}, in another file {other}")
            if kind not in kinds:
                kinds.append(kind)
    return found


def _unused_times(profiles: Sequence[SampledColumn], roles: Mapping[str, ColumnRole], time: str | None) -> list[str]:
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


def _refuse_inexact_ids(path: str, profiles: Sequence[SampledColumn], roles: Mapping[str, ColumnRole]) -> None:
    """Raise `DataError` if ids were written as floats that do not hold them exactly."""
    for column in profiles:
        if roles[column.name].role in ("id", "category") and (value := column.inexact) is not None:
            raise DataError(
                f"{path}, column '{column.name}': the ids are {column.type}, which has lost digits of large ones: got "
                f"{value:.0f}, expected at most {arrow.exact_integers(column.type):,}. Write the column as integers "
                f"(Int64 in pandas) or strings, or leave it out: --drop '{column.name}'"
            )


def _repeats(profiles: Sequence[SampledColumn], schema: Schema) -> float:
    """Return the mean number of lookups per distinct id."""
    sparse = {column.name for column in schema.sparse}
    used = [column for column in profiles if column.name in sparse]
    lookups = sum(c.present * (c.length if arrow.is_list(c.type) else 1) for c in used)
    return lookups / max(1, sum(c.distinct for c in used))


def _may_be_weight(column: pa.ChunkedArray) -> bool:
    if not arrow.is_number(column.type) or column.null_count:
        return False
    weights = arrow.to_float64(column)
    return bool(((weights >= 0) & (weights < np.inf)).all())


def _is_counted(column: pa.ChunkedArray) -> bool:
    """Whether the number of distinct values matters: of ids, of what may be ids, and of lists of these."""
    kind = column.type
    inner = kind.value_type if arrow.is_list(kind) else kind
    if pa.types.is_floating(kind):
        numbers = arrow.to_float64(column)
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
    profiles: Sequence[SampledColumn],
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
        absent = f"; {column.missing_share:.1%} are missing" if column.missing_share else ""
        if role.role == "number":
            rule, why = rule_of(column)
            missing = "indicator" if column.missing_share > _INDICATOR else "center"
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


def _sparse(column: SampledColumn, table: str | None) -> SparseColumn:
    kind = column.type
    ragged = arrow.is_list(kind)
    ids = None if ragged else 1
    if pa.types.is_fixed_size_list(kind) and not column.missing_share:
        ids = int(kind.list_size)
    rows = _without_collisions(column, hashed_rows(column.distinct))
    pooling = "mean" if ragged and ids is None else "sum"
    return SparseColumn(name=column.name, rows=rows, table=table, ids=ids, pooling=pooling)


def hashed_rows(distinct: int) -> int:
    """Compute the rows of a table for this number of distinct values, which are hashed, see `draft_schema`."""
    per_value = next(times for most, times in _ROWS_PER_VALUE if distinct <= most)
    rows = max(_SMALLEST_TABLE, per_value * distinct)
    return min(_LARGEST_TABLE, 1 << (rows - 1).bit_length())


def _without_collisions(column: SampledColumn, rows: int) -> int:
    """Return up to 16 times more rows if each of a few values then has its own row."""
    if column.few is None or column.distinct > len(column.few) or len(column.few) > _FEW_VALUES:
        return rows
    kind = column.type.value_type if arrow.is_list(column.type) or pa.types.is_dictionary(column.type) else column.type
    values = pa.array([v for v in column.few if v is not None], kind)
    if pa.types.is_floating(values.type):
        values = pa.array(values.cast(pa.float64()).to_numpy().astype(np.int64))
    hashes = arrow.hash_values(values)
    for larger in (rows, 2 * rows, 4 * rows, 8 * rows, 16 * rows):
        if len(np.unique(hashes_to_rows(hashes, larger))) == len(hashes):
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
    profiles: Sequence[SampledColumn], roles: Mapping[str, ColumnRole], sample: pa.Table
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
    path: str, profiles: Sequence[SampledColumn], histories: Mapping[str, str]
) -> dict[str, ColumnRole]:
    """Check histories, each with its candidate column, and return the roles that both have."""
    found: dict[str, ColumnRole] = {}
    by_name = {column.name: column for column in profiles}
    for pair in histories.items():
        for name in pair:
            if name not in by_name:
                raise SpecError(f"--history names '{name}', which is a label, a weight, or left out; name an input")
        (history, candidate), problem = (by_name[name].type for name in pair), ""
        if not arrow.is_list(history) or not _is_of_ids(history.value_type):
            problem = (
                f"'{pair[0]}': a history is a list of integers or strings, this is {history}; write it as --history "
                "HISTORY=CANDIDATE"
            )
        elif not _is_of_ids(candidate) or arrow.is_text(candidate) != arrow.is_text(history.value_type):
            problem = (
                f"'{pair[1]}': the candidate of '{pair[0]}' has one value in each row, of the kind of the list's, "
                f"which is {history.value_type}; this is {candidate}"
            )
        if problem:
            raise DataError(f"{path}, column {problem}")
        found[pair[0]] = ColumnRole("list", f"earlier values of {pair[1]}, as --history says")
        found.setdefault(pair[1], ColumnRole("id", f"the candidate of {pair[0]}, as --history says"))
    return found


def _is_of_ids(kind: pa.DataType) -> bool:
    return (arrow.is_whole(kind) and not pa.types.is_boolean(kind)) or arrow.is_text(kind)


# -- splits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftFiles:
    """Files of a dataset by split, and of a separate test split."""

    path: str
    by_split: dict[str, list[ParquetFile]]  # result of `find_parquet`
    test_path: str | None = None  # a separate test split
    test_files: tuple[ParquetFile, ...] = ()

    @staticmethod
    def find(path: str | Path, test: str | Path | None, filesystem: fs.FileSystem | None) -> DraftFiles:
        """Find the files; `DataError` if there is nothing to train on."""
        files = find_parquet(path, filesystem)
        if "" not in files and "train" not in files:
            raise DataError(
                f"{path} has no train split, only {', '.join(files)}; add one, or give one of these by itself"
            )
        if test is None:
            return DraftFiles(str(path), files)
        if "test" in files:
            raise SpecError(f"--test is {test}, but {path} has a test split; leave --test out, or give the train files")
        found = find_parquet(test, filesystem, text_columns(file for of in files.values() for file in of))
        of_test = found.get("test", next(iter(found.values())))
        refuse_same_files("test", of_test, files)
        return DraftFiles(str(path), files, str(test), tuple(of_test))

    @property
    def train_files(self) -> Sequence[ParquetFile]:
        """Files to train on, and to cut other splits off."""
        return with_rows(self.by_split.get("", self.by_split.get("train", [])))

    @property
    def train(self) -> list[RowGroup]:
        """Row groups of these files."""
        return [group for file in self.train_files for group in file.row_groups()]

    @property
    def others(self) -> dict[str, Sequence[ParquetFile]]:
        """Files of the other splits."""
        there = {split: files for split, files in self.by_split.items() if split not in ("", "train")}
        return {**there, **({"test": self.test_files} if self.test_path else {})}

    def others_with(self, labels: Sequence[str]) -> list[ParquetFile]:
        """Files of the other splits that have labels: those without are not used."""
        return [f for of in self.others.values() for f in with_rows(of) if not {*labels} - {*f.schema.names}]


@dataclass
class DraftedSplits:
    """Drafted splits: arguments of the source, the reason, and the resulting splits."""

    init_args: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    has_valid: bool = False
    has_test: bool = False
    in_time_order: bool = False
    """Whether the rows are known to be stored in the order of time."""
    notes: list[str] = field(default_factory=list)


def draft_splits(
    files: DraftFiles,
    labels: Sequence[str],  # a split without one of these columns is not used
    sample: pa.Table,  # of the train data
    times: Sequence[SampledColumn],  # columns of times in the sample
    *,
    total: int,  # rows of the train data
    time: str | None = None,  # column of times to cut by, if it is known
    valid: bool = False,  # whether a validation split is wanted
) -> DraftedSplits:
    """Keep the splits that there are, and cut the others off the train data: the last in time, else by a hash."""
    found = DraftedSplits()
    paths: dict[str, str | None] = {}
    there: set[str] = set()
    for split, of_split in files.others.items():
        lacking = next((f for f in with_rows(of_split) if any(name not in f.schema.names for name in labels)), None)
        if lacking is None:
            there.add(split)
            if split == "test" and files.test_path:
                paths["test"] = files.test_path
        elif split == "test" and files.test_path:
            raise DataError(f"--test is {files.test_path}, but {lacking} has no column {labels[0]!r} to test by")
        else:
            paths[split] = None
            found.notes.append(f"The {split} files ({lacking.name}) have no column {labels[0]!r} and are not used.")
    found.has_valid, found.has_test = "valid" in there, "test" in there
    wanted = [split for split in ("valid", "test") if split not in there and (split == "test" or valid)]
    if wanted and total < FEWEST_ROWS:
        found.reason = f"{total:,} rows are too few to cut off some"
    elif wanted:
        shares = {split: _SHARE_OF_FEW if split == "valid" and total < _FEW_ROWS else _SHARE for split in wanted}
        split, found.reason = _cut(files, sample, times, shares, time)
        found.init_args["split"] = split
        ordered = {column.name for column in times if column.is_sorted}
        found.in_time_order = split["by"] == "order" or split.get("column") in ordered
        found.has_valid, found.has_test = found.has_valid or "valid" in wanted, True
    if paths:
        found.init_args["split_paths"] = paths
    return found


def _cut(
    files: DraftFiles, sample: pa.Table, times: Sequence[SampledColumn], wanted: dict[str, float], time: str | None
) -> tuple[dict[str, object], str]:
    """How to cut splits off the train data, and why so."""
    shares: dict[str, object] = dict(wanted)
    if time is None and all(is_delimited(f.shown) and tuple(f.schema.names) == COLUMNS for f in files.train_files):
        return {"by": "order", **shares}, "the last rows: logs of Criteo are in the order of time"
    ranked = sorted(times, key=lambda c: (-time_rank(c.name), -c.distinct))
    unfit: list[str] = []
    for column in ranked if time is None else [c for c in times if c.name == time]:
        if time is None and (why := _unfit(column)):
            unfit.append(why)
            continue
        starts = _starts(sample[column.name], wanted, column.date_format)
        if starts is not None:
            by_time = {"by": "time", "column": column.name, **{f"{s}_from": t for s, t in starts.items()}}
            by_time |= {} if column.date_format is None else {"format": column.date_format}
            return by_time, f"the latest rows by '{column.name}': a model is to predict what comes after its training"
        if time is not None:
            raise DataError(
                f"--time is {time}, but the latest of its values are in fewer than {_SMALLEST:.0%} or more than "
                f"{_LARGEST:.0%} of the rows, so it makes no test split; leave --time out"
            )
        unfit.append(
            f"'{column.name}' has no value that the latest {_SMALLEST:.0%} to {_LARGEST:.0%} of the rows begin with"
        )
    why = f" ({'; '.join(unfit)})" if unfit else ", for there is no column of time"
    return {"by": "hash", **shares}, f"drawn by a hash of the rows' places{why}"


def _unfit(column: SampledColumn) -> str:
    """Why rows are not to be split by a column of times that nobody named for it; "" where they may be."""
    if column.missing_share >= _MISSING:
        return f"{column.missing_share:.1%} of '{column.name}' are missing"
    if not time_rank(column.name) and not column.is_sorted:
        return f"'{column.name}' may not be the time of the row; if it is: --time"
    return ""


def _starts(
    column: pa.ChunkedArray, wanted: dict[str, float], date_format: str | None = None
) -> dict[str, object] | None:
    """Return first times of the splits, so that each has about its share of the rows; None if there are none."""
    column = pc.drop_null(column)
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = pc.cast(column, kind.value_type)
    if date_format is not None:
        kind = pa.timestamp("us")
        column = pc.cast(parse_dates(column, date_format), kind)
    if arrow.is_time(kind):
        values = arrow.to_microseconds(column).to_numpy()
    elif arrow.is_text(column.type):
        values = np.array(pc.cast(column, pa.string()).to_pylist(), dtype=np.str_)
    else:
        values = arrow.to_float64(column)
        values = values[np.isfinite(values)]
    if not len(values):
        return None
    values = np.sort(values)
    different, firsts = np.unique(values, return_index=True)
    left = 1 - firsts / len(values)  # share of the rows from each value on
    starts: dict[str, object] = {}
    total = 0.0
    for split, share in reversed(wanted.items()):
        at = int(np.abs(left - (total + share)).argmin())
        if not _SMALLEST <= left[at] - total <= _LARGEST:
            return None
        total = float(left[at])
        starts[split] = _plain(different[at], kind)
    return dict(reversed(starts.items()))


def _plain(value: np.generic, kind: pa.DataType) -> object:
    """Convert a time to a plain value for the recipe."""
    if arrow.is_time(kind):
        time = (_EPOCH + datetime.timedelta(microseconds=int(value))).replace(tzinfo=None)  # pyright: ignore[reportArgumentType]
        return str(time.date()) if time.time() == datetime.time() else str(time)
    if isinstance(value, np.str_):
        return str(value)
    number = float(value)  # pyright: ignore[reportArgumentType]
    return int(number) if number.is_integer() else number
