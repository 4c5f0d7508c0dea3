"""Find the label of a dataset, and say which of its values are positive: `find_labels`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data import arrow
from hotbed.data.columns import Label
from hotbed.data.labels import check_label, read_labels
from hotbed.data.place import Place
from hotbed.data.roles import words_of
from hotbed.errors import DataError, SpecError, did_you_mean

LABEL_NAMES = (
    *("label", "labels", "click", "clicks", "clicked", "is_click", "is_clicked", "target", "conversion", "y"),
    *("converted", "is_converted", "purchase", "purchased", "is_purchase", "bought", "buy", "is_buy", "outcome"),
)
RATING_NAMES = ("rating", "ratings", "stars")
_LABEL_WORDS = frozenset(
    (
        *("label", "target", "click", "clicks", "clicked", "clk", "conversion", "converted", "purchase", "purchased"),
        *("bought", "buy", "attributed", "outcome", "response", "responded", "install", "installed", "subscribed"),
        *("churn", "churned", "fraud", "liked", "class"),
    )
)
_BEFORE_LABELS = frozenset(("is", "was", "has", "did"))
_POSITIVE_TEXTS = ("yes", "true", "1", "y", "t", "positive", "pos", "clicked", "click", "converted", "buy", "+1")
_NEGATIVE_TEXTS = ("no", "false", "0", "n", "f", "negative", "neg", "not clicked", "none", "-1")
_MOST_RATINGS = 101


@dataclass(frozen=True)
class FoundLabel:
    """A label column, its condition if its values are not 0 and 1, and a remark for the recipe's reader."""

    name: str
    mapping: Label | None
    remark: str


def find_labels(
    path: str, sample: pa.Table, asked: Sequence[str], positive: str | None, *, needed: bool = True
) -> list[FoundLabel]:
    """Find labels by names and values, or check those that are ``asked`` for.

    ``positive`` is the condition of the only label (default: found). Unless ``needed``, there may be no label.
    """
    names: list[str] = sample.column_names
    for label in asked:
        if label not in names:
            raise DataError(f"{path} has no column '{label}'; it has {_listed(names)}{did_you_mean(label, names)}")
    candidates = list(asked) or _named(sample)
    if not candidates and not needed and positive is None:
        return []
    if not candidates:
        named = next((name for name in names if name.strip().lower() in (*LABEL_NAMES, *RATING_NAMES)), None)
        unfit = "" if named is None else f", but '{named}', which is {sample[named].type} and can be none"
        binary: list[str] = [name for name in names if _is_binary(sample[name])]
        binary.sort(key=lambda name: _LABEL_WORDS.isdisjoint(words_of(name)))
        hint = f", such as one of 0 and 1: {_listed(binary)}" if binary else ""
        raise DataError(
            f"{path} has no column named like a label ({', '.join(LABEL_NAMES[:10])}, …, {', '.join(RATING_NAMES)})"
            f"{unfit}; it has {_listed(names)}. Name one with --label NAME (label=… in Python){hint}"
        )
    if positive is not None and len(asked) > 1:
        raise SpecError(
            f"--positive says which values of one label are positive, and --label names {len(asked)}: "
            f"{', '.join(asked)}; leave it out, and write `positive` beside each in the recipe (docs/tasks.md)"
        )
    if positive is not None:
        mapping = Label(candidates[0], positive)
        check_label(mapping.column, sample.schema.field(mapping.column).type, mapping, path)
        return [FoundLabel(mapping.column, mapping, _share(sample, mapping))]
    return [_found(path, sample, name) for name in candidates]


def sample_labels(sample: pa.Table, found: FoundLabel) -> arrow.Array | None:
    """Labels of the sample ``[n]`` from 0 to 1; None where one is missing or another number."""
    column = sample[found.name]
    if column.null_count:
        return None
    labels = read_labels(column, found.name, found.mapping, Place("the sample"))
    return labels if ((labels >= 0) & (labels <= 1)).all() else None


def _listed(names: Sequence[str]) -> str:
    most = 60
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _named(sample: pa.Table) -> list[str]:
    """Find columns named like labels: all of 0 and 1, or the first of others."""
    by_name = {name.strip().lower(): name for name in reversed(sample.column_names)}
    types = {lower: sample[name].type for lower, name in by_name.items()}
    named = [
        by_name[n]
        for n in LABEL_NAMES
        if (kind := types.get(n)) is not None and (arrow.is_number(kind) or arrow.is_text(kind))
    ]
    binary = [name for name in sample.column_names if name in named and _is_binary(sample[name])]
    ratings = [by_name[n] for n in RATING_NAMES if n in by_name and arrow.is_number(sample[by_name[n]].type)]
    return binary or named[:1] or _like_labels(sample) or ratings[:1]


def _like_labels(sample: pa.Table) -> list[str]:
    """Find columns of 0 and 1 with a name such as ``isClick`` or ``was_converted``; ``Class`` if there is no other."""
    words = {name: [w for w in words_of(name) if w not in _BEFORE_LABELS] for name in sample.column_names}
    like = [n for n, of in words.items() if len(of) == 1 and of[0] in _LABEL_WORDS and _is_binary(sample[n])]
    return [name for name in like if words[name] != ["class"]] or like


def _is_binary(column: pa.ChunkedArray) -> bool:
    if pa.types.is_boolean(column.type):
        return True
    if not arrow.is_number(column.type) or column.null_count:
        return False
    values = arrow.wide_numbers(column)
    return bool(np.isin(values, (0, 1)).all())


def _found(path: str, sample: pa.Table, name: str) -> FoundLabel:
    kind = sample.schema.field(name).type
    if _is_binary(sample[name]):
        share = arrow.numbers(pc.fill_null(sample[name], False) if pa.types.is_boolean(kind) else sample[name]).mean()
        return FoundLabel(name, None, f"{share:.1%} are positive")
    if arrow.is_text(kind):
        mapping = _of_text(path, sample, name)
    elif arrow.is_number(kind):
        mapping = _of_numbers(path, sample, name)
    else:
        raise DataError(
            f"{path}: label column '{name}' is {kind}, must be numbers, booleans or text; name another (--label)"
        )
    return FoundLabel(name, mapping, "" if mapping is None else _share(sample, mapping))


def _of_text(path: str, sample: pa.Table, name: str) -> Label:
    column = sample[name]
    texts = pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column
    values = [
        v.decode(errors="replace") if isinstance(v, bytes) else v for v in pc.unique(texts).drop_null().to_pylist()
    ]
    positives = [v for v in values if v.strip().lower() in _POSITIVE_TEXTS]
    rest = [v for v in values if v not in positives]
    if len(positives) == 1 and len(rest) <= 1 and all(v.strip().lower() in _NEGATIVE_TEXTS for v in rest):
        return Label(name, f"== {_quoted(positives[0])}")
    shown = ", ".join(repr(v) for v in sorted(values)[:8])
    example = _quoted(sorted(values)[0]) if values else "yes"
    raise DataError(
        f"{path}: label column '{name}' is text with {len(values):,} values ({shown}{', …' * (len(values) > 8)}); say "
        f'which are positive: --positive "== {example}" (or "in [a, b]"), or name another column with --label NAME'
    )


def _quoted(text: str) -> str:
    return text if text.strip() == text and text.isalnum() else f"'{text}'"


def _of_numbers(path: str, sample: pa.Table, name: str) -> Label | None:
    """A condition for ±1 and for ratings; none for numbers from 0 to 1, and where values are missing."""
    values = arrow.wide_numbers(sample[name])
    known = values[~np.isnan(values)]
    if not len(known):
        raise DataError(f"{path}: label column '{name}' is empty; name another with --label NAME")
    if known.min() >= 0 and known.max() <= 1:
        return None
    different = np.unique(known)
    if np.isin(different, (-1, 0, 1)).all():
        return Label(name, "> 0")
    if len(different) == 2:
        return Label(name, f">= {different[1]:g}")
    if len(different) > _MOST_RATINGS:
        raise DataError(
            f"{path}: label column '{name}' has {len(different):,} different numbers from {known.min():g} to "
            f"{known.max():g}, and labels are 0 and 1; say which are positive: --positive "
            f'">= {np.median(known):g}", or name another column with --label NAME'
        )
    shares = np.array([(known >= value).mean() for value in different[1:]])
    return Label(name, f">= {different[1:][np.abs(shares - 0.5).argmin()]:g}")


def _share(sample: pa.Table, mapping: Label) -> str:
    column = pc.drop_null(sample[mapping.column])
    values = arrow.wide_numbers(column) if arrow.is_number(column.type) else None
    if values is not None:
        column = column.filter(pa.array(~np.isnan(values)))
        values = values[~np.isnan(values)]
    labels = read_labels(column, mapping.column, mapping, Place("the sample"))
    counts = Counter((values if values is not None else np.array([])).tolist())
    spread = ", ".join(f"{value:g}: {count / len(labels):.0%}" for value, count in sorted(counts.items()))
    spread = f" ({spread})" if 0 < len(counts) <= 11 else ""
    return f"{labels.mean():.1%} are positive by this{spread}"
