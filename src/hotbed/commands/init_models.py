"""Draft the model that ``hotbed init --model`` names, for the columns of a dataset; or say which columns it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotbed.errors import DataError

if TYPE_CHECKING:
    from hotbed.data import Schema
    from hotbed.data.draft import Draft

MODELS = ("DLRM", "WideDeep", "DCNv2", "DeepFM", "DIN", "SASRec", "HSTU")
"""Classes of `hotbed.nn` that a recipe can be drafted for."""
_OF_NEXT_ITEMS = ("SASRec", "HSTU")
_MAX_LEN = 50
_REASON = "{} scores a candidate by a history alone"


def histories_of(schema: Schema) -> dict[str, str]:
    """Find histories: columns of lists, each with the column of single values whose table it shares."""
    single = {column.table_name: column.name for column in schema.sparse if column.ids == 1}
    lists = [column for column in schema.sparse if column.ids is None]
    return {column.name: single[column.table_name] for column in lists if column.table_name in single}


def draft_for(draft: Draft, model: str, path: str) -> Draft:
    """Leave out what a model of `MODELS` does not take.

    Raises
    ------
    DataError
        If the data lack columns that the model needs, or have more than it takes and say themselves what these are.
    """
    from hotbed.data.draft import LeftOut

    schema = draft.schema
    if model not in ("DIN", *_OF_NEXT_ITEMS):
        return draft
    histories = histories_of(schema)
    if not histories:
        lists = [column.name for column in schema.sparse if column.ids is None]
        single = [column.name for column in schema.sparse if column.ids == 1]
        raise DataError(
            f"{path} lacks what {model} needs: a column of lists, the history, whose values are those of another "
            "column, the candidate, such as 'item_history' of 'item'; there are columns of lists: "
            f"{', '.join(lists) or 'none'}, and of single values: {', '.join(single) or 'none'}"
        )
    if model == "DIN":
        return draft
    if len(schema.labels) > 1:
        raise DataError(
            f"{path} has the labels {', '.join(schema.labels)}, and {model} predicts one; name it with --label, and "
            "leave out the others with --drop"
        )
    history = next(iter(histories))
    kept = {history, histories[history]}
    others = [column.name for column in schema.sparse if column.name not in kept] + [*schema.dense]
    if others and draft.source is not None:
        raise DataError(f"{path} has {', '.join(others)}, too, which {model} does not take; draft for DIN")
    reason = _REASON.format(model)
    return replace(
        draft,
        schema=replace(schema.only(kept), dense=(), numericals=()),
        left_out=(*draft.left_out, *(LeftOut(name, "an input", reason) for name in others)),
    )


def arguments_of(model: str, schema: Schema, dim: int, top: Sequence[int]) -> list[tuple[str, Any, str]]:
    """Choose a model's arguments: names, values and remarks.

    Parameters
    ----------
    model
        One of `MODELS`.
    schema
        Columns that it takes.
    dim
        Columns of the tables.
    top
        Widths of its last MLP, but for the labels.
    """
    widths: tuple[str, Any, str] = ("top", [*top, len(schema.labels)], "ends with the number of labels")
    histories = histories_of(schema)
    if model in _OF_NEXT_ITEMS:
        (history, item), *_ = histories.items()
        return [
            ("history", history, "its ids in the order of time, the newest last"),
            ("item", item, "the candidate"),
            ("max_len", _MAX_LEN, "newest ids that are looked at"),
        ]
    of_model: dict[str, list[tuple[str, Any, str]]] = {
        "DLRM": [
            ("bottom", [64, dim], "ends with data.dim"),
            widths,
            ("embeddings_to_top", True, "the top MLP sees the vectors beside their products"),
        ],
        "WideDeep": [widths],
        "DCNv2": [("layers", 2, "cross layers"), ("low_rank", 64, ""), widths],
        "DeepFM": [widths],
        "DIN": [
            (
                "histories",
                histories,
                "each with the column of its candidate; ids in the order of time, the newest last",
            ),
            ("max_len", _MAX_LEN, "newest ids that are looked at"),
            widths,
        ],
    }
    return of_model[model]
