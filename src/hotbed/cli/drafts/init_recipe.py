"""Choose the model of ``hotbed init``, and write its recipe with a comment for each choice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hotbed.data.drafting.draft import MANY_REPEATS, SMALL, Draft, LeftOut
from hotbed.data.drafting.roles import LABEL_NAMES, words_of
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.parsing import yaml_text

if TYPE_CHECKING:
    from hotbed.data import Schema

MODELS = ("DLRM", "WideDeep", "DCNv2", "DeepFM", "MMoE", "DIN", "SASRec", "HSTU", "TwoTower")
"""Classes of `hotbed.nn` that a drafted recipe can have."""
OF_NEXT_ITEMS = ("SASRec", "HSTU")  # models that have a history and its candidate as their only inputs
_ITEM_WORDS = frozenset(
    ("item", "product", "sku", "movie", "film", "song", "track", "album", "book", "article", "video", "ad", "creative")
)
_MAX_LEN = 50  # drafted number of ids of a history
_WIDTH = 112  # of lines of YAML
_MOST_PAIRS = 1_500  # with more pairs of features, DLRM has too many products as inputs of its top MLP
_MOST_FOR_ENSEMBLES = 1_000_000  # with more samples, an ensemble is not better than one model
_FIRST = (1e-6, 1e-7)  # initial accumulator at batch size 256: of a single model, and of a member of an ensemble


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hyperparameters for a number of samples, as measured on several logs (docs/decisions/defaults.md)."""

    dim: int  # columns of the tables, of all members together
    members: int  # models in the ensemble; 1 for a single model
    batch_size: int
    epochs: int
    warmup_steps: int
    sparse_lr: float
    initial_accumulator: float
    dropout: float
    top: tuple[int, ...]  # widths of the top MLP without its output

    @staticmethod
    def of(samples: int, *, has_valid: bool, repeats: float, pairs: int, several: bool = True) -> Training:
        """Choose hyperparameters for a dataset with this number of samples.

        ``repeats`` is the mean number of occurrences of an id, and ``pairs`` is the number of pairs of features.
        ``several`` allows an ensemble of several models.
        """
        batch_size = min(4096, max(64, 1 << int(math.log2(max(1, samples / 350)))))
        steps = math.ceil(samples / batch_size)
        few = samples < SMALL
        most = 20 if few else 5 if repeats >= MANY_REPEATS else 1
        several = several and samples < _MOST_FOR_ENSEMBLES and pairs <= _MOST_PAIRS
        members = (8 if few else 4) if several else 1
        return Training(
            dim=16 if members == 1 else 8 * members,
            members=members,
            batch_size=batch_size,
            epochs=most if has_valid else 1,
            warmup_steps=steps // 20,
            sparse_lr=0.08 if members == 1 else 0.02 if few else 0.12,
            # Gradients of a mean fall with the batch size and the number of members; the accumulator sums squares.
            initial_accumulator=float(f"{_FIRST[members > 1] * (256 / batch_size / members) ** 2:.1e}"),
            dropout=0.2 if few and members == 1 else 0.0,
            top=(64,) if few else (256, 128),
        )


def recipe_text(
    draft: Draft,
    *,
    name: str,
    path: str,
    counts: Mapping[str, int],
    model: str | None = None,
    item: Sequence[str] = (),
    retrieval: bool = False,
) -> str:
    """Return the recipe as YAML."""
    several, pairs, has_valid = model is None, math.comb(len(draft.schema.sparse) + 1, 2), draft.splits.has_valid
    options: dict[str, Any] = {"has_valid": has_valid, "repeats": draft.repeats, "pairs": pairs, "several": several}
    training = Training.of(counts.get("train", 0), **options)
    lines = [
        "# Drafted by `hotbed init` from names, types and values of the columns. Check it, then run:",
        "#   hotbed train THIS_FILE --dry_run",
        "#   hotbed train THIS_FILE",
        f"name: {yaml_text(name)}",
        *_data(draft, path, counts, training),
        *_model(draft, training, model, item),
        *(_retrieval(draft) if retrieval else ()),
        *_training(training),
    ]
    return "\n".join(lines) + "\n"


def _data(draft: Draft, path: str, counts: Mapping[str, int], training: Training) -> Iterator[str]:
    splits = draft.splits
    yield "data:"
    yield f"  path: {yaml_text(path)}"
    of_members = f", {training.dim // training.members} for each model of the ensemble" if training.members > 1 else ""
    yield _with_comment(f"  dim: {training.dim}", f"columns of every embedding table{of_members}")
    for split, samples in counts.items():
        yield f"  # {split}: {samples:,} samples"
    for note in splits.notes:
        yield from _comment(note, 2)
    if splits.has_valid:
        yield "  valid_split: valid"
    elif draft.source is None:
        yield from _comment("One epoch needs no validation split. For tuning, draft again with --valid.", 2)
    if splits.has_test:
        yield "  test_split: test"
    else:
        yield _with_comment("  test_split: null", splits.reason or "no test split")
    if splits.in_time_order:
        yield _with_comment("  shuffle: false", "the rows are in time order, so the newest rows are trained on last")
    yield "  source:"
    if draft.source is not None:
        yield f"    class_path: {draft.source['class_path']}"
        if arguments := draft.source.get("init_args"):
            yield "    init_args:"
            yield _indented(arguments)
        return
    yield "    class_path: hotbed.data.ParquetSource"
    yield "    init_args:"
    if splits.init_args.get("split"):
        yield from _comment(f"Validation and test split: {splits.reason}.", 6)
    if splits.init_args:
        yield _indented(splits.init_args)
    if draft.left_out:
        yield "      # Unused columns (to use one of them, add it to the schema):"
        for column in draft.left_out:
            yield from _comment(f"- {column.name!r} ({column.type}): {column.reason}", 6, "    ")
    yield "      schema:"
    yield from _schema(draft)


def _schema(draft: Draft) -> Iterator[str]:
    plain: dict[str, Any] = draft.schema.to_dict()
    yield from _entries("labels", plain["labels"], draft.reasons)
    yield _with_comment(f"        weight: {yaml_text(plain['weight'])}", draft.reasons.get(plain["weight"], ""))
    yield _with_comment("        group: null", "column for AUC by group, e.g. the user")
    if plain["dense"]:
        yield from _comment(
            "Numbers are normalized with statistics of the train split. `log` uses log(1 + |x|). `asinh` is linear "
            "near the median and logarithmic far from it. Missing values become 0, and `indicator` adds an input that "
            "marks them.",
            8,
        )
    yield from _entries("dense", plain["dense"], draft.reasons)
    yield from _comment(
        "Values are hashed to rows, so `rows` is several times the number of distinct values. Columns with the same "
        "`table` share its rows. `ids` is the number of ids per sample, or null if the number varies.",
        8,
    )
    usual: list[tuple[str, Any]] = [("table", None), ("ids", 1), ("pooling", "sum")]
    shown = [{k: v for k, v in column.items() if (k, v) not in usual} for column in plain["sparse"]]
    yield from _entries("sparse", shown, draft.reasons)


def _entries(key: str, entries: Sequence[Any], reasons: Mapping[str, str]) -> Iterator[str]:
    if not entries:
        yield f"        {key}: []"
        return
    yield f"        {key}:"
    for entry in entries:
        name = entry if isinstance(entry, str) else entry.get("name", entry.get("column"))
        yield _with_comment(f"          - {_inline(entry)}", reasons.get(name, ""))


def _inline(value: object) -> str:
    is_plain = not isinstance(value, list | dict)
    return yaml_text(value) if is_plain else yaml_text([value], width=1 << 30).removeprefix("- ")


def _model(draft: Draft, training: Training, named: str | None, item: Sequence[str]) -> Iterator[str]:
    schema, dim = draft.schema, training.dim
    features, pairs = len(schema.sparse), math.comb(len(schema.sparse) + 1, 2)
    yield "model:"
    name, top = named or ("DLRM" if pairs <= _MOST_PAIRS else "DCNv2"), training.top
    if training.members > 1:
        yield from _comment("With few samples, the mean of several models has a lower error than one model.", 2)
        name = "DLRMEnsemble"
        arguments = [
            ("members", training.members, ""),
            ("bottom", [64, dim // training.members], "ends with data.dim ÷ members"),
            ("top", [*top, len(schema.labels)], "ends with the number of labels"),
        ]
    else:
        arguments = arguments_of(name, schema, dim, top, item)
    if named is None and name == "DCNv2":
        yield from _comment(
            f"{features:,} features have {pairs:,} pairs. DLRM would need a product of vectors for each pair, which is "
            f"too many. DCNv2 crosses the {dim * features + schema.dense_features:,} inputs with low-rank matrices.",
            2,
        )
    own = "" if named else "or your own class, which is called with tables=, features=, dense_features=, seed="
    yield _with_comment(f"  class_path: hotbed.nn.{name}", own)
    yield "  init_args:"
    for argument, value, remark in arguments:
        yield _with_comment(f"    {argument}: {_inline(value)}", remark)
    if training.dropout and name not in OF_NEXT_ITEMS:
        yield _with_comment(f"    dropout: {training.dropout}", "dropout in the MLPs, because there are few samples")


def _retrieval(draft: Draft) -> Iterator[str]:
    positives = "." if draft.schema.labels else "; without a label, all samples are positives."
    text = "Retrieve each sample's item among all items (docs/models.md) instead of predicting a label"
    yield from _comment(text + positives, 0)
    yield "retrieval:"
    yield _with_comment("  sampled: 256", "negatives drawn for each batch, in addition to the batch's items")
    yield _with_comment("  k: [10, 100]", "metrics: recall@k and ndcg@k among all items")


def _training(training: Training) -> Iterator[str]:
    members = f"(256 ÷ batch_size ÷ {training.members} members)²" if training.members > 1 else "(256 ÷ batch_size)²"
    first = f"{_FIRST[training.members > 1]:.1e} × {members}; rows start with small steps"
    epochs = "a second epoch would memorize rare ids"
    if training.epochs > 1:
        epochs = "at most; the validation split selects the best epoch"
    for line, comment in (
        ("dense_optimizer:", ""),
        ("  class_path: torch.optim.Adam", ""),
        ("  init_args: {lr: 0.002}", ""),
        ("sparse_optimizer:", ""),
        ("  class_path: hotbed.optim.RowWiseAdagrad", ""),
        ("  init_args:", ""),
        (f"    lr: {training.sparse_lr}", ""),
        (f"    initial_accumulator: {training.initial_accumulator:.1e}", first),
        ("schedule:", ""),
        (f"  warmup_steps: {training.warmup_steps}", "5 % of an epoch"),
        ("  decay_share: 0.4", "in this last share of each epoch's steps, the learning rates fall to 0"),
        ("  decay_power: 1", "linearly"),
        ("train:", ""),
        (f"  batch_size: {training.batch_size}", ""),
        (f"  epochs: {training.epochs}", epochs),
    ):
        yield _with_comment(line, comment)


def _with_comment(line: str, comment: str) -> str:
    return f"{line.ljust(32)}  # {_one_line(comment)}" if comment else line


def _comment(text: str, indent: int, hanging: str = "") -> list[str]:
    start = " " * indent + "# "
    options: dict[str, Any] = {"initial_indent": start, "subsequent_indent": start + hanging}
    return textwrap.wrap(_one_line(text), 118, **options, break_on_hyphens=False) or [start.rstrip()]


def _one_line(text: str) -> str:
    """Replace characters that a YAML comment cannot contain, e.g. line ends, by spaces."""
    return "".join(c if c.isprintable() else " " for c in text)


def _indented(value: object) -> str:
    return textwrap.indent(yaml_text(value, width=_WIDTH), " " * 6)


def parse_pairs(option: str, given: Sequence[str], form: str) -> dict[str, str]:
    """Parse pairs of columns, e.g. ``watched=movie``; ``option`` and ``form`` are for error messages."""
    found: dict[str, str] = {}
    for one in given:
        name, _, other = one.partition("=")
        if not name or not other or name == other:
            raise SpecError(f"{option}: got '{one}', expected two columns, {form}")
        if found.setdefault(name, other) != other:
            raise SpecError(f"{option}: got {found[name]} and {other} for '{name}', expected one column")
    return found


def histories_of(schema: Schema) -> dict[str, str]:
    """For each list column, return the column with one id per sample that uses the same table, if there is one."""
    single = {column.table_name: column.name for column in schema.sparse if column.ids == 1}
    lists = [column for column in schema.sparse if column.ids != 1]
    return {column.name: single[column.table_name] for column in lists if column.table_name in single}


def draft_for(
    draft: Draft, model: str, path: str, *, histories: Mapping[str, str] | None = None, item: Sequence[str] = ()
) -> Draft:
    """Check that a draft has the columns that a model of `MODELS` needs, and drop inputs that the model cannot use."""
    schema = draft.schema
    labels = ", ".join(schema.labels) or "no label"
    if model in (*OF_NEXT_ITEMS, "TwoTower") and len(schema.labels) > 1:
        raise DataError(
            f"{path}: got the labels {labels}, expected one label for {model}. Select the label with --label, and drop "
            "the other labels with --drop"
        )
    if model == "MMoE" and len(schema.labels) < 2:
        raise DataError(
            f"{path} lacks labels of several tasks for MMoE: got {labels}, expected columns of 0 and 1 with usual "
            f"names ({', '.join(LABEL_NAMES[:10])}, …). List the label columns, e.g. --label "
            f"{schema.labels[0] if schema.labels else 'ONE'} OTHER, or draft for DCNv2"
        )
    if model == "TwoTower":
        _check_towers(schema, path, item)
    if model not in ("DIN", *OF_NEXT_ITEMS):
        return draft
    shared = histories_of(schema)
    found = {**{h: c for h, c in (histories or {}).items() if h in shared}, **shared}
    if not found:
        lists, single = ([c.name for c in schema.sparse if (c.ids == 1) == one] for one in (False, True))
        raise DataError(
            f"{path} lacks a history for {model}, a list column with the values of a candidate column (e.g. "
            f"'item_history' of 'item'): got list columns {', '.join(lists) or 'none'} and single-valued columns "
            f"{', '.join(single) or 'none'}. If such columns have different names, pass --history "
            "HISTORY=CANDIDATE"
        )
    if model == "DIN":
        return draft
    kept = set(next(iter(found.items())))
    others = [column.name for column in schema.sparse if column.name not in kept] + [*schema.dense]
    if others and draft.source is not None:
        raise DataError(f"{path} also has {', '.join(others)}, which {model} cannot use. Draft with --model DIN")
    left_out = (LeftOut(name, "an input", f"{model} scores a candidate by a history only") for name in others)
    schema = replace(schema.only(kept), dense=(), numericals=())
    return replace(draft, schema=schema, left_out=(*draft.left_out, *left_out))


def _item_columns(schema: Schema, item: Sequence[str]) -> list[str]:
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
            f"{', '.join(names)}{', all of the item' if items else ''}. Name the item columns: --item COL"
        )


def arguments_of(
    model: str, schema: Schema, dim: int, top: Sequence[int], item: Sequence[str] = ()
) -> list[tuple[str, Any, str]]:
    """Choose a model's arguments. Return the name, the value and a comment of each argument."""
    widths: tuple[str, Any, str] = ("top", [*top, len(schema.labels)], "ends with the number of labels")
    max_len: tuple[str, Any, str] = ("max_len", _MAX_LEN, "number of newest ids that the model uses")
    histories = histories_of(schema)
    match model:
        case "SASRec" | "HSTU":
            history, candidate = next(iter(histories.items()))
            ids = ("history", history, "ids in time order, the newest last")
            return [ids, ("item", candidate, "candidate"), max_len]
        case "DLRM":
            crossed = ("embeddings_to_top", True, "the top MLP gets the vectors and their products")
            return [("bottom", [64, dim], "ends with data.dim"), widths, crossed]
        case "DCNv2":
            return [("layers", 2, "cross layers"), ("low_rank", 64, ""), widths]
        case "MMoE":
            tower = ("tower", [max(8, top[-1] // 2)], "hidden widths of each task's MLP")
            tasks = ("tasks", len(schema.labels), "the number of labels")
            return [tasks, ("experts", 8, "shared by all tasks"), ("expert", [*top], "widths of each expert"), tower]
        case "DIN":
            remark = "candidate column by history; histories are in time order, the newest id last"
            return [("histories", histories, remark), max_len, widths]
        case "TwoTower":
            items = ("item", _item_columns(schema, item), "columns of the item's tower; all others describe the user")
            return [items, ("widths", [*top, dim], "of both towers; the last is the width of their vectors")]
        case _:  # WideDeep and DeepFM
            return [widths]
