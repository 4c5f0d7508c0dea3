"""Draft the model that ``hotbed init --model`` names, for the columns of a dataset; or say which columns it lacks."""

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
"""Classes of `hotbed.nn` that a recipe can be drafted for."""
OF_NEXT_ITEMS = ("SASRec", "HSTU")
"""Those that take a history and its candidate, and nothing else."""
_OF_ONE_LABEL = (*OF_NEXT_ITEMS, "TwoTower")
_ITEM_WORDS = frozenset(
    ("item", "product", "sku", "movie", "film", "song", "track", "album", "book", "article", "video", "ad", "creative")
)
_MAX_LEN = 50
_REASON = "{} scores a candidate by a history alone"


def pairs_of(
    given: Sequence[str], option: str = "--history", what: str = "HISTORY=CANDIDATE, such as watched=movie"
) -> dict[str, str]:
    """Read two columns from ``first=second`` each: histories and their candidates, or ids and their weights."""
    found: dict[str, str] = {}
    for one in given:
        name, _, other = one.partition("=")
        if not name or not other or name == other:
            raise SpecError(f"{option} is '{one}', must be two columns, {what}")
        if found.setdefault(name, other) != other:
            raise SpecError(f"{option} gives '{name}' two columns, {found[name]} and {other}; give it one")
    return found


def histories_of(schema: Schema) -> dict[str, str]:
    """Find histories: columns of lists, each with the column of single values whose table it shares."""
    single = {column.table_name: column.name for column in schema.sparse if column.ids == 1}
    lists = [column for column in schema.sparse if column.ids != 1]
    return {column.name: single[column.table_name] for column in lists if column.table_name in single}


def draft_for(
    draft: Draft, model: str, path: str, *, histories: Mapping[str, str] | None = None, item: Sequence[str] = ()
) -> Draft:
    """Leave out what a model of `MODELS` does not take."""
    schema = draft.schema
    labels, problem = ", ".join(schema.labels) or "no label", ""
    if model in _OF_ONE_LABEL and len(schema.labels) > 1:
        problem = (
            f"has the labels {labels}, and {model} predicts one; name it with --label, and leave out the others with "
            "--drop"
        )
    elif model == "MMoE" and len(schema.labels) < 2:
        problem = (
            "lacks what MMoE needs: labels of several tasks, columns of 0 and 1 that are named like labels "
            f"({', '.join(LABEL_NAMES[:10])}, …); there is {labels} alone. Name all, as "
            f"--label {schema.labels[0] if schema.labels else 'ONE'} OTHER, or draft for DCNv2"
        )
    if problem:
        raise DataError(f"{path} {problem}")
    if model == "TwoTower":
        _check_towers(schema, path, item)
    if model not in ("DIN", *OF_NEXT_ITEMS):
        return draft
    found = {**{h: c for h, c in (histories or {}).items() if h in histories_of(schema)}, **histories_of(schema)}
    if not found:
        lists = [column.name for column in schema.sparse if column.ids != 1]
        single = [column.name for column in schema.sparse if column.ids == 1]
        raise DataError(
            f"{path} lacks what {model} needs: a column of lists, the history, whose values are those of another "
            "column, the candidate, such as 'item_history' of 'item'; there are columns of lists: "
            f"{', '.join(lists) or 'none'}, and of single values: {', '.join(single) or 'none'}. Where names do not "
            "tell, name two of them: --history HISTORY=CANDIDATE"
        )
    return draft if model == "DIN" else _of_one_history(draft, model, path, *next(iter(found.items())))


def _of_one_history(draft: Draft, model: str, path: str, history: str, candidate: str) -> Draft:
    """The history and its candidate, without other inputs."""
    kept, schema = {history, candidate}, draft.schema
    others = [column.name for column in schema.sparse if column.name not in kept] + [*schema.dense]
    if others and draft.source is not None:
        raise DataError(f"{path} has {', '.join(others)}, too, which {model} does not take; draft for DIN")
    left_out = tuple(LeftOut(name, "an input", _REASON.format(model)) for name in others)
    schema = replace(schema.only(kept), dense=(), numericals=())
    return replace(draft, schema=schema, left_out=(*draft.left_out, *left_out))


def _items_of(schema: Schema, item: Sequence[str]) -> list[str]:
    """Columns of the item's tower: those that were asked for, or single values whose names say so."""
    return list(item) or [c.name for c in schema.sparse if c.ids == 1 and not _ITEM_WORDS.isdisjoint(words_of(c.name))]


def _check_towers(schema: Schema, path: str, item: Sequence[str]) -> None:
    names = [column.name for column in schema.sparse]
    items, problem = _items_of(schema, item), ""
    if other := next((name for name in item if name not in names), None):
        problem = (
            f"--item names column '{other}', which is no categorical input of {path}; there are {', '.join(names)}"
            f"{did_you_mean(other, names)}"
        )
    elif not items or len(items) == len(names):
        problem = (
            f"{path} lacks what TwoTower needs: categorical columns of the {'user' if items else 'item'}; there are "
            f"{', '.join(names)}{', all of the item' if items else ''}. Where names do not tell, name the item's: "
            "--item COL"
        )
    if problem:
        raise DataError(problem)


def arguments_of(
    model: str, schema: Schema, dim: int, top: Sequence[int], item: Sequence[str] = ()
) -> list[tuple[str, Any, str]]:
    """Choose a model's arguments: names, values and remarks."""
    widths: tuple[str, Any, str] = ("top", [*top, len(schema.labels)], "ends with the number of labels")
    max_len: tuple[str, Any, str] = ("max_len", _MAX_LEN, "newest ids that are looked at")
    histories = histories_of(schema)
    if model in OF_NEXT_ITEMS:
        (history, candidate), *_ = histories.items()
        return [
            ("history", history, "its ids in the order of time, the newest last"),
            ("item", candidate, "the candidate"),
            max_len,
        ]
    of_histories = "each with the column of its candidate; ids in the order of time, the newest last"
    of_model: dict[str, list[tuple[str, Any, str]]] = {
        "DLRM": [
            ("bottom", [64, dim], "ends with data.dim"),
            widths,
            ("embeddings_to_top", True, "the top MLP sees the vectors beside their products"),
        ],
        "WideDeep": [widths],
        "DCNv2": [("layers", 2, "cross layers"), ("low_rank", 64, ""), widths],
        "DeepFM": [widths],
        "MMoE": [
            ("tasks", len(schema.labels), "the number of labels"),
            ("experts", 8, "that all tasks share"),
            ("expert", [*top], "widths of each"),
            ("tower", [max(8, top[-1] // 2)], "hidden widths of each task's own MLP"),
        ],
        "DIN": [("histories", histories, of_histories), max_len, widths],
        "TwoTower": [
            ("item", _items_of(schema, item), "columns of the item's tower; all others are of the user's"),
            ("widths", [*top, dim], "of both towers; the last that of their vectors"),
        ],
    }
    return of_model[model]
