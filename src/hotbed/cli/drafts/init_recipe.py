"""Write the recipe of `hotbed init`, with a comment for each choice."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotbed.cli.drafts.init_models import OF_NEXT_ITEMS, arguments_of
from hotbed.data.drafting.draft import MANY_REPEATS, SMALL
from hotbed.parsing import yaml_text

if TYPE_CHECKING:
    from hotbed.data.drafting.draft import Draft

_WIDTH = 112
_MOST_PAIRS = 1_500  # of features, whose products a top MLP can take
_MOST_FOR_ENSEMBLES = 1_000_000  # samples; with more, one model errs no more than several do
_FIRST = (1e-6, 1e-7)  # initial accumulator at a batch of 256, of one model and of a member


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hyperparameters by the number of samples, measured on several logs (docs/decisions/0026)."""

    dim: int  # columns of the tables, for all members
    members: int  # models of an ensemble
    batch_size: int
    epochs: int
    warmup_steps: int
    sparse_lr: float
    initial_accumulator: float
    dropout: float
    top: tuple[int, ...]  # widths of the top MLP without its output

    @staticmethod
    def of(samples: int, *, has_valid: bool, repeats: float, pairs: int, several: bool = True) -> Training:
        """Choose by the training samples, the mean occurrences of an id, and the number of feature pairs.

        ``several`` allows an ensemble.
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
            # Squared gradients of a mean fall with the square of the batch size and of the number of members.
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
    features = len(draft.schema.sparse)
    training = Training.of(
        counts.get("train", 0),
        has_valid=draft.splits.has_valid,
        repeats=draft.repeats,
        pairs=(features + 1) * features // 2,
        several=model is None,
    )
    lines = [
        "# Drafted by `hotbed init` from names, types and values of the columns. Check it, then run:",
        "#   hotbed train THIS_FILE --dry_run",
        "#   hotbed train THIS_FILE",
        f"name: {yaml_text(name)}",
        *_data(draft, path, counts, training),
        *_model(draft, training, model, item),
        *(_retrieval(draft) if retrieval else ()),
        *_optimizers(training),
        *_train(training),
    ]
    return "\n".join(lines) + "\n"


# -- data ----------------------------------------------------------------------------------------------------------


def _data(draft: Draft, path: str, counts: Mapping[str, int], training: Training) -> Iterator[str]:
    splits = draft.splits
    yield "data:"
    yield f"  path: {yaml_text(path)}"
    of_members = f", {training.dim // training.members} for each member of the model" if training.members > 1 else ""
    yield _with_comment(f"  dim: {training.dim}", f"columns of every embedding table{of_members}")
    for split, samples in counts.items():
        yield f"  # {split}: {samples:,} samples"
    for note in splits.notes:
        yield from _comment(note, 2)
    if splits.has_valid:
        yield "  valid_split: valid"
    elif draft.source is None:
        yield from _comment("One epoch needs no validation split. Tuning does: draft with --valid.", 2)
    if splits.has_test:
        yield "  test_split: test"
    else:
        yield _with_comment("  test_split: null", splits.reason or "no test split")
    if splits.in_time_order:
        yield _with_comment("  shuffle: false", "the rows are in time order: the newest are trained on last")
    yield "  source:"
    if draft.source is not None:
        yield f"    class_path: {draft.source['class_path']}"
        if arguments := draft.source.get("init_args"):
            yield "    init_args:"
            yield from _indented(yaml_text(arguments, width=_WIDTH), 6)
        return
    yield "    class_path: hotbed.data.ParquetSource"
    yield "    init_args:"
    if splits.init_args.get("split"):
        yield from _comment(f"Validation and test split: {splits.reason}.", 6)
    if splits.init_args:
        yield from _indented(yaml_text(splits.init_args, width=_WIDTH), 6)
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
            "Numbers are normalized with statistics of the train split: `log` uses log(1 + |x|); `asinh` is linear "
            "near the median and logarithmic far from it. Missing values become 0; an indicator is one more input.",
            8,
        )
    yield from _entries("dense", plain["dense"], draft.reasons)
    yield from _comment(
        "`rows` is several times the number of distinct values, which are hashed to rows. Columns with the same "
        "`table` share one. `ids` is the number of ids per sample, null if it varies.",
        8,
    )
    shown = [{k: v for k, v in column.items() if v not in _USUAL.get(k, ())} for column in plain["sparse"]]
    yield from _entries("sparse", shown, draft.reasons)


_USUAL: dict[str, tuple[object, ...]] = {"table": (None,), "ids": (1,), "pooling": ("sum",)}


def _entries(key: str, entries: Sequence[Any], reasons: Mapping[str, str]) -> Iterator[str]:
    if not entries:
        yield f"        {key}: []"
        return
    yield f"        {key}:"
    for entry in entries:
        name = entry if isinstance(entry, str) else entry.get("name", entry.get("column"))
        written = yaml_text(entry) if isinstance(entry, str) else yaml_text([entry], width=1 << 30).removeprefix("- ")
        yield _with_comment(f"          - {written}", reasons.get(name, ""))


# -- model and training --------------------------------------------------------------------------------------------


def _model(draft: Draft, training: Training, named: str | None, item: Sequence[str]) -> Iterator[str]:
    """Write the model of ``--model``, or the one that fits the data."""
    schema, dim = draft.schema, training.dim
    features = len(schema.sparse)
    pairs = (features + 1) * features // 2
    yield "model:"
    name, top = named or ("DLRM" if pairs <= _MOST_PAIRS else "DCNv2"), training.top
    if training.members > 1:
        yield from _comment("Few samples: the mean of several models has a lower error than one model.", 2)
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
            f"{features:,} features have {pairs:,} pairs, too many products for DLRM. DCNv2 crosses the "
            f"{dim * features + schema.dense_features:,} inputs with low-rank matrices.",
            2,
        )
    own = "" if named else "or your own class, called with tables=, features=, dense_features=, seed="
    yield _with_comment(f"  class_path: hotbed.nn.{name}", own)
    yield "  init_args:"
    for argument, value, remark in arguments:
        is_plain = not isinstance(value, list | dict)
        text = yaml_text(value) if is_plain else yaml_text([value], width=1 << 30).removeprefix("- ")
        yield _with_comment(f"    {argument}: {text}", remark)
    if training.dropout and name not in OF_NEXT_ITEMS:
        yield _with_comment(f"    dropout: {training.dropout}", "in the MLPs, because there are few samples")


def _retrieval(draft: Draft) -> Iterator[str]:
    """Write the settings of training and measuring a retrieval model."""
    yield from _comment(
        "Retrieve each sample's item among all items (docs/models.md) instead of predicting a label"
        + ("; without a label, all samples are positives." if not draft.schema.labels else "."),
        0,
    )
    yield "retrieval:"
    yield _with_comment("  sampled: 256", "negatives drawn for each batch, in addition to the batch's items")
    yield _with_comment("  k: [10, 100]", "metrics: recall@k and ndcg@k among all items")


def _optimizers(training: Training) -> Iterator[str]:
    yield "dense_optimizer:"
    yield "  class_path: torch.optim.Adam"
    yield "  init_args: {lr: 0.002}"
    yield "sparse_optimizer:"
    yield "  class_path: hotbed.optim.RowWiseAdagrad"
    yield "  init_args:"
    yield f"    lr: {training.sparse_lr}"
    yield _with_comment(
        f"    initial_accumulator: {training.initial_accumulator:.1e}",
        f"small first steps for rare rows; for another batch size: {_FIRST[training.members > 1]:.1e} × "
        + ("(256 ÷ batch_size)²" if training.members == 1 else f"(256 ÷ batch_size ÷ {training.members} members)²"),
    )
    yield "schedule:"
    yield _with_comment(f"  warmup_steps: {training.warmup_steps}", "5 % of an epoch")
    yield _with_comment(
        "  decay_share: 0.4", "last share of every epoch's steps, in which the learning rates fall to 0"
    )
    yield _with_comment("  decay_power: 1", "linearly")


def _train(training: Training) -> Iterator[str]:
    yield "train:"
    yield f"  batch_size: {training.batch_size}"
    if training.epochs == 1:
        yield _with_comment("  epochs: 1", "a second epoch would memorize rare ids")
    else:
        yield _with_comment(f"  epochs: {training.epochs}", "at most; the validation split selects the best")


# -- text ----------------------------------------------------------------------------------------------------------


def _with_comment(line: str, comment: str) -> str:
    """Append a comment to a line."""
    return f"{line.ljust(32)}  # {_one_line(comment)}" if comment else line


def _comment(text: str, indent: int, hanging: str = "") -> list[str]:
    """Wrap a comment."""
    start = " " * indent + "# "
    wrapped = textwrap.wrap(
        _one_line(text), 118, initial_indent=start, subsequent_indent=start + hanging, break_on_hyphens=False
    )
    return wrapped or [start.rstrip()]


def _one_line(text: str) -> str:
    """Replace line ends and characters that YAML comments cannot contain."""
    return "".join(c if c.isprintable() else " " for c in text)


def _indented(text: str, indent: int) -> Iterator[str]:
    for line in text.split("\n"):
        yield " " * indent + line
