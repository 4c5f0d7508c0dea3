"""Draft the model of ``hotbed init --model`` for the columns of a dataset, or list the columns that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotbed.data.drafting.draft import Draft, LeftOut
from hotbed.data.drafting.roles import LABEL_NAMES, words_of
from hotbed.errors import DataError, SpecError, did_you_mean

if TYPE_CHECKING:
    from hotbed.data import Schema

MODELS = ("DLRM", "WideDeep", "DCNv2", "DeepFM", "MMoE", "DIN", "SASRec", "HSTU", "TwoTower")
"""Classes of `hotbed.nn` that a drafted recipe can have."""
OF_NEXT_ITEMS = ("SASRec", "HSTU")
"""Models whose only inputs are a history and its candidate."""
_ITEM_WORDS = frozenset(
    ("item", "product", "sku", "movie", "film", "song", "track", "album", "book", "article", "video", "ad", "creative")
)
_MAX_LEN = 50


def parse_pairs(option: str, given: Sequence[str], form: str) -> dict[str, str]:
    """Parse pairs of columns, e.g. ``watched=movie``."""
    found: dict[str, str] = {}
    for one in given:
        name, _, other = one.partition("=")
        if not name or not other or name == other:
            raise SpecError(f"{option}: got '{one}', expected two columns, {form}")
        if found.setdefault(name, other) != other:
            raise SpecError(f"{option}: got {found[name]} and {other} for '{name}', expected one column")
    return found


def histories_of(schema: Schema) -> dict[str, str]:
    """Return list columns with the single-valued column that shares their table."""
    single = {column.table_name: column.name for column in schema.sparse if column.ids == 1}
    lists = [column for column in schema.sparse if column.ids != 1]
    return {column.name: single[column.table_name] for column in lists if column.table_name in single}


def draft_for(
    draft: Draft, model: str, path: str, *, histories: Mapping[str, str] | None = None, item: Sequence[str] = ()
) -> Draft:
    """Check that a draft has the columns of a model in `MODELS`, and drop columns that it cannot take."""
    schema = draft.schema
    labels = ", ".join(schema.labels) or "no label"
    if model in (*OF_NEXT_ITEMS, "TwoTower") and len(schema.labels) > 1:
        raise DataError(
            f"{path} has the labels {labels}, and {model} predicts one. Select it with --label, and leave out the "
            "others with --drop"
        )
    if model == "MMoE" and len(schema.labels) < 2:
        raise DataError(
            f"{path} lacks labels of several tasks for MMoE: got {labels}, expected columns of 0 and 1 with usual "
            f"names ({', '.join(LABEL_NAMES[:10])}, …). List the labels, e.g. --label "
            f"{schema.labels[0] if schema.labels else 'ONE'} OTHER, or draft for DCNv2"
        )
    if model == "TwoTower":
        _check_towers(schema, path, item)
    if model not in ("DIN", *OF_NEXT_ITEMS):
        return draft
    shared = histories_of(schema)
    found = {**{h: c for h, c in (histories or {}).items() if h in shared}, **shared}
    if not found:
        lists = [column.name for column in schema.sparse if column.ids != 1]
        single = [column.name for column in schema.sparse if column.ids == 1]
        raise DataError(
            f"{path} lacks a history for {model}, a list column with the values of a candidate column (e.g. "
            f"'item_history' of 'item'): got list columns {', '.join(lists) or 'none'} and single-valued columns "
            f"{', '.join(single) or 'none'}. If names differ, add --history HISTORY=CANDIDATE"
        )
    if model == "DIN":
        return draft
    kept = set(next(iter(found.items())))
    others = [column.name for column in schema.sparse if column.name not in kept] + [*schema.dense]
    if others and draft.source is not None:
        raise DataError(f"{path} also has {', '.join(others)}, which {model} cannot use. Draft for DIN")
    reason = f"{model} scores a candidate by a history only"
    left_out = tuple(LeftOut(name, "an input", reason) for name in others)
    schema = replace(schema.only(kept), dense=(), numericals=())
    return replace(draft, schema=schema, left_out=(*draft.left_out, *left_out))


def _item_columns(schema: Schema, item: Sequence[str]) -> list[str]:
    """Return the columns of the item's tower: the requested ones, or columns with a usual name."""
    return list(item) or [c.name for c in schema.sparse if c.ids == 1 and not _ITEM_WORDS.isdisjoint(words_of(c.name))]


def _check_towers(schema: Schema, path: str, item: Sequence[str]) -> None:
    names = [column.name for column in schema.sparse]
    items = _item_columns(schema, item)
    if other := next((name for name in item if name not in names), None):
        raise DataError(
            f"--item: got '{other}', expected a categorical input of {path}: {', '.join(names)}"
            f"{did_you_mean(other, names)}"
        )
    if not items or len(items) == len(names):
        raise DataError(
            f"{path} lacks categorical columns of the {'user' if items else 'item'} for TwoTower: got "
            f"{', '.join(names)}{', all of the item' if items else ''}. If names differ, add --item COL"
        )


def arguments_of(
    model: str, schema: Schema, dim: int, top: Sequence[int], item: Sequence[str] = ()
) -> list[tuple[str, Any, str]]:
    """Choose a model's arguments: names, values and comments."""
    widths: tuple[str, Any, str] = ("top", [*top, len(schema.labels)], "ends with the number of labels")
    max_len: tuple[str, Any, str] = ("max_len", _MAX_LEN, "number of newest ids that are used")
    histories = histories_of(schema)
    if model in OF_NEXT_ITEMS:
        (history, candidate), *_ = histories.items()
        return [("history", history, "ids in time order, the newest last"), ("item", candidate, "candidate"), max_len]
    of_model: dict[str, list[tuple[str, Any, str]]] = {
        "DLRM": [
            ("bottom", [64, dim], "ends with data.dim"),
            widths,
            ("embeddings_to_top", True, "the top MLP gets the vectors and their products"),
        ],
        "WideDeep": [widths],
        "DCNv2": [("layers", 2, "cross layers"), ("low_rank", 64, ""), widths],
        "DeepFM": [widths],
        "MMoE": [
            ("tasks", len(schema.labels), "the number of labels"),
            ("experts", 8, "shared by all tasks"),
            ("expert", [*top], "widths of each expert"),
            ("tower", [max(8, top[-1] // 2)], "hidden widths of each task's MLP"),
        ],
        "DIN": [
            ("histories", histories, "each with its candidate column; ids in time order, the newest last"),
            max_len,
            widths,
        ],
        "TwoTower": [
            ("item", _item_columns(schema, item), "columns of the item's tower; all others describe the user"),
            ("widths", [*top, dim], "of both towers; the last is the width of their vectors"),
        ],
    }
    return of_model[model]
