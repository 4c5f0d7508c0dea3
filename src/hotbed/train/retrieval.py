"""Train and evaluate two-tower models: add candidates to each batch, compute the loss over them, compute recall@k.

A candidate is an item that the loss compares with each user's own item. Before the ids of a batch are exchanged,
samples that have an item but no user are appended to the batch::

    samples of the data     drawn, equal on all ranks     negatives of single samples
    user, item              item                          item
    └─ rows ─┘              └─────────── candidates only ───────────┘

Each rank computes its share of the drawn items. All ranks then gather the candidates of all ranks in rank order, and
each rank computes the losses of its own samples. The gradients of a candidate are sent back to the rank that computed
the candidate, and are added in rank order. So the number of ranks changes neither the negatives nor the gradients of a
sample. See docs/decisions/tasks-and-retrieval.md.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from hotbed.batch import Batch
from hotbed.checks import check_known, naming
from hotbed.comm import Link
from hotbed.config import Component, Recipe
from hotbed.data import Schema, Source
from hotbed.data.items import ItemDraws, ItemSet, item_ids, items_of
from hotbed.embed import Distributed
from hotbed.errors import BatchError, DataError, NonFiniteError, RecipeError
from hotbed.jagged import Jagged
from hotbed.train.metrics import Metrics, evaluating, move_batch, refuse_unnormalized
from hotbed.train.ranks.parallel import Ranks

CANDIDATE, LOG_DRAWN = "retrieval.candidate", "retrieval.log_drawn"
"""Columns of `RetrievalBatch.extra`; see `Retrieval.prepare`."""
_USERS, _ITEMS = 1024, 16_384  # numbers of users and items in a block of the exact search

_log = logging.getLogger("hotbed")


@dataclass(frozen=True, kw_only=True)
class RetrievalBatch(Batch):
    """A batch with its candidates: the first ``rows`` samples come from the data, the others are only candidates."""

    rows: int
    positives: int  # number of positive samples


def is_positive(batch: Batch) -> Tensor:
    """Return which samples are positive ``[B]`` bool: those with label 1, or all if there is no label."""
    labels = batch.labels
    if labels is None or not labels.shape[1]:
        return torch.ones(len(batch), dtype=torch.bool, device=batch.sparse.values.device)
    return labels[:, 0] == 1


def trained_samples(batch: Batch) -> int:
    """Return the divisor of the mean loss: the number of samples, or of positive samples in retrieval."""
    return batch.positives if isinstance(batch, RetrievalBatch) else len(batch)


class RetrievalOptions(NamedTuple):
    """Options of `Retrieval`."""

    item: Sequence[str]  # features of items; the first one identifies the item
    sampled: int = 0  # items to draw for each step
    by_popularity: bool = False
    negatives: str | None = None  # feature that lists the negative items of each sample
    seed: int = 0  # seed of the draws
    k: Sequence[int] = (10, 100)  # values of k for recall@k and ndcg@k


class _Candidates(NamedTuple):
    """The ``n`` candidates of all ranks in rank order."""

    vectors: Tensor  # [n, D]
    ids: Tensor  # items [n]
    negative_of: Tensor  # the sample that uses the candidate as a negative [n]; −1: all samples
    log_drawn: Tensor | None  # see `Retrieval.prepare`
    rows: list[slice]  # for each rank, the slice of candidates that are samples of the data
    first: int  # index of this rank's first candidate


class Retrieval:
    """Add candidates to each batch, and compute the loss over the candidates.

    ``loss`` has the signature of `hotbed.nn.InBatchSoftmax`, and ``correction`` has the signature of
    `hotbed.nn.ItemFrequencies`. ``items`` returns the items that can be drawn. All ranks call ``items`` when they first
    need an item.
    """

    def __init__(
        self,
        options: RetrievalOptions,
        loss: nn.Module,
        correction: nn.Module | None,
        items: Callable[[], ItemSet],
        ranks: Ranks,
    ) -> None:
        self.options, self._loss, self._correction, self._make, self._ranks = options, loss, correction, items, ranks
        # A link of its own, because the backward pass exchanges gradients while dense gradients are averaged
        self._link = None if ranks.link is None else ranks.link.clone()

    @cached_property
    def items(self) -> ItemSet:
        """All items that may be negatives, either drawn at random or listed by a sample."""
        return self._make()

    @cached_property
    def _draws(self) -> ItemDraws:
        return ItemDraws(self.items, self.options.seed, by_popularity=self.options.by_popularity)

    def among(self, items: ItemSet) -> Self:
        """Replace `items` by other items, and return this object."""
        vars(self).update(items=items)
        vars(self).pop("_draws", None)
        return self

    # -- candidates ------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, step: int) -> RetrievalBatch:
        """Return this rank's samples in host memory with the candidates of ``step``, which counts from 1.

        Column `CANDIDATE` ``[n, 3]`` has the item of each candidate, the sample that uses the candidate as a negative
        (−1: all samples), and whether the candidate is a positive sample. Column `LOG_DRAWN` ``[n]`` has the logarithm
        of the expected number of draws of the item per step.
        """
        rows, options = len(batch), self.options
        ids, positive = item_ids(batch.sparse, options.item[0]), is_positive(batch).long()
        columns, more = [torch.stack([ids, torch.full_like(ids, -1), positive], dim=1)], [ids[:0]]

        def add(positions: Tensor, negative_of: Tensor) -> None:
            more.append(positions)
            columns.append(torch.stack([self.items.ids[positions], negative_of, torch.zeros_like(positions)], dim=1))

        if options.sampled:
            drawn = self._draws(step, options.sampled)[self._ranks.virtual.share(options.sampled)]
            add(drawn, torch.full_like(drawn, -1))
        if options.negatives is not None:
            add(*self._own_negatives(batch.sparse, options.negatives))
        candidates, positions = torch.cat(columns), torch.cat(more)
        extra = {CANDIDATE: candidates}
        if options.sampled and self._correction is not None:
            at = self.items.positions(candidates[:, 0])
            extra[LOG_DRAWN] = (self._draws.log_p(at) + torch.tensor(float(options.sampled)).double().log()).float()

        sparse = batch.sparse
        if len(positions):
            sparse = Jagged.concatenate([sparse, self.items.rows(positions, sparse)])
        padded = batch.map_columns(sparse, lambda t: torch.cat([t, t.new_zeros(len(positions), *t.shape[1:])]))
        return RetrievalBatch(
            sparse=sparse,
            dense=padded.dense,
            labels=padded.labels,
            weights=padded.weights,
            extra=extra,
            rows=rows,
            positives=int(positive.sum()),
        )

    def _own_negatives(self, ids: Jagged, name: str) -> tuple[Tensor, Tensor]:
        """Return two values for each negative in column ``name``: its position in `items`, and the index of its sample.

        A sample may list several negatives or none.
        """
        bags = ids[name]
        samples = torch.repeat_interleave(torch.arange(len(ids)), bags.lengths())
        positions = self.items.positions(bags.values.long())
        if bool((positions < 0).any()):
            at = int((positions < 0).nonzero()[0])
            raise BatchError(
                f"column '{name}' of sample {int(samples[at]):,} has an unknown negative: got row "
                f"{int(bags.values[at]):,} of its table, expected one of {len(self.items):,} items. Set "
                "retrieval.items to a Parquet file of all items, or remove this item from the column"
            )
        return positions, samples

    # -- the loss --------------------------------------------------------------------------------------------------

    def __call__(self, model: nn.Module, batch: Batch, *, counts: bool = True) -> Tensor:
        """Return the sum of the losses of a batch that `prepare` returned; all ranks must call this.

        With ``counts``, the correction counts the items of the batch. Training sets ``counts``.
        """
        assert isinstance(batch, RetrievalBatch)
        users, items = cast("tuple[Tensor, Tensor]", model(batch, vectors=True, users=batch.rows))
        candidates = self._gather(items, batch)
        losses = self._loss(
            users,
            candidates.vectors,
            candidates.ids,
            self._log_q(candidates, counts=counts),
            own=torch.arange(candidates.first, candidates.first + batch.rows, device=users.device),
            negative_of=None if self.options.negatives is None else candidates.negative_of,
        )
        weights = batch.extra[CANDIDATE][: batch.rows, 2].to(losses.dtype)
        if batch.weights_by_label is not None:
            weights = weights * batch.weights_by_label[: batch.rows, 0]
        return (losses * weights).sum()

    def _gather(self, items: Tensor, batch: RetrievalBatch) -> _Candidates:
        own, log_drawn, link = batch.extra[CANDIDATE], batch.extra.get(LOG_DRAWN), self._link
        if link is None:
            return _Candidates(items, own[:, 0], own[:, 1], log_drawn, [slice(0, batch.rows)], 0)
        own_sizes = torch.tensor([len(batch), batch.rows], device=link.device)
        sizes = link.all_gather("numbers of candidates", own_sizes).wait().tolist()
        counts = [size for size, _ in sizes]
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        first = starts[link.rank]
        shifted = torch.where(own[:, 1] < 0, -1, own[:, 1] + first)
        columns = _exchange(torch.stack([own[:, 0], shifted], dim=1), link, counts)
        rows = [slice(start, start + n) for start, (_, n) in zip(starts, sizes, strict=True)]
        if log_drawn is not None:
            log_drawn = _exchange(log_drawn, link, counts)
        vectors = _GatherVectors.apply(items, link, counts)
        return _Candidates(vectors, columns[:, 0], columns[:, 1], log_drawn, rows, first)

    def _log_q(self, candidates: _Candidates, *, counts: bool) -> Tensor | None:
        """Estimate, for each candidate, the logarithm of the probability that a batch contains the candidate.

        The estimate uses the items of all batches so far and the draws. Return None without a correction.
        """
        if self._correction is None:
            return None
        correction = self._correction if counts else copy.deepcopy(self._correction)
        correction.train()(torch.cat([candidates.ids[rows] for rows in candidates.rows]))
        log_q = correction.eval()(candidates.ids)
        return log_q if candidates.log_drawn is None else torch.logaddexp(log_q, candidates.log_drawn)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the correction, which is equal on all ranks."""
        return {} if self._correction is None else {"correction": self._correction.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the correction."""
        if self._correction is not None and "correction" in state:
            self._correction.load_state_dict(state["correction"])


def _exchange(values: Tensor, link: Link, counts: Sequence[int]) -> Tensor:
    """Return the rows of all ranks in rank order; ``counts`` has the number of rows of each rank."""
    received = values.new_empty(sum(counts), *values.shape[1:])
    link.exchange("candidates", [values.contiguous()] * link.size, received.split(list(counts))).wait()
    return received


class _GatherVectors(torch.autograd.Function):
    """Gather the vectors of all ranks. The backward pass adds the gradients of a vector in rank order."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, link: Link, counts: Sequence[int]) -> Tensor:
        ctx.link, ctx.counts = link, counts
        return _exchange(vectors.detach(), link, counts)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        link, counts = cast(Link, ctx.link), cast("Sequence[int]", ctx.counts)
        outgoing = grad_outputs[0].contiguous().split(list(counts))
        received = grad_outputs[0].new_empty(link.size, *outgoing[link.rank].shape)
        link.exchange("gradients of candidates", outgoing, list(received)).wait()
        total = received[0]
        for rank in range(1, link.size):
            total = total + received[rank]
        return total, None, None


# -- from a recipe -----------------------------------------------------------------------------------------------------


def build_retrieval(recipe: Recipe, source: Source, model: nn.Module, device: torch.device) -> Retrieval:
    """Build the `Retrieval` of a recipe."""
    section = recipe.retrieval
    assert section is not None
    options = retrieval_options(recipe, model)
    component, temperature = section.loss, getattr(model, "temperature", None)
    with naming("retrieval.loss"):
        has_temperature = "temperature" in signature(component.load()).parameters
    if temperature is not None and has_temperature and "temperature" not in component.init_args:
        component = replace(component, init_args={**component.init_args, "temperature": temperature})
    loss = build_loss("retrieval.loss", component).to(device)
    correction = section.correction and build_loss("retrieval.correction", section.correction).to(device)
    return Retrieval(options, loss, correction, lambda: all_items(recipe, source, options.item), Ranks(model))


def retrieval_options(recipe: Recipe, model: nn.Module) -> RetrievalOptions:
    """Return the options that a recipe sets for its two-tower model."""
    section = recipe.retrieval
    assert section is not None
    return RetrievalOptions(
        item=item_features(model),
        sampled=section.sampled,
        by_popularity=section.sampled_by == "popularity",
        negatives=section.negatives,
        seed=recipe.train.seed,
        k=section.k,
    )


def all_items(recipe: Recipe, source: Source, item: Sequence[str]) -> ItemSet:
    """Return the items of the file ``retrieval.items``, or of all splits of the data if the recipe names no file."""
    section = recipe.retrieval
    if section is None or section.items is None:
        return items_of(source, item, source.splits, counted=recipe.data.train_split)
    catalog = source_of_items(recipe, source, section.items, item)
    return items_of(catalog, item, catalog.splits)


def source_of_items(recipe: Recipe, source: Source, path: str, item: Sequence[str]) -> Source:
    """Open a Parquet file of items. Its ids are encoded like the ids of the samples."""
    from hotbed.data import ParquetSource

    component = recipe.data.source
    if not issubclass(component.load(), ParquetSource):
        raise RecipeError(
            f"retrieval.items is {path}, but data.source is {component.class_path}, expected "
            "hotbed.data.ParquetSource. Remove retrieval.items; then the items of the data's splits are used"
        )
    schema = replace(source.schema.inputs.only(item), dense=(), scaling=(), numericals=())
    options = {key: value for key, value in component.init_args.items() if key in ("ids", "text")}
    return ParquetSource(path, schema, **options)


def refuse_retrieval(recipe: Recipe, source: Source) -> None:
    """Raise `RecipeError` if other sections of the recipe or the schema contradict ``retrieval``; read no data."""
    section, schema = recipe.retrieval, source.schema
    assert section is not None
    if len(schema.labels) > 1:
        raise RecipeError(
            f"retrieval is set, but the schema has several labels: got {', '.join(schema.labels)}, expected at most "
            "one. Keep only the label that is 1 for positive samples; keep no label if all samples are positive"
        )
    for key, value, reason in (
        ("tasks", recipe.tasks, "has its own loss"),
        ("metrics", recipe.metrics, "has its own metrics"),
        (
            "hot.batches",
            recipe.hot.batches if recipe.hot.batches != "mixed" else "",
            "needs batches that are not divided",
        ),
    ):
        if value:
            got = f"'{value}'" if isinstance(value, str) else "set"
            raise RecipeError(f"{key} is {got}, but retrieval {reason}. Remove {key}")
    if section.negatives is not None:
        columns, name = {column.name: column for column in schema.sparse}, section.negatives
        check_known("retrieval.negatives", name, columns, RecipeError, "Add the column to schema.sparse.")
        item = recipe.model.init_args.get("item", [None])[0]
        if item in columns and columns[name].table_name != columns[item].table_name:
            raise RecipeError(
                f"retrieval.negatives is '{name}', a column with table '{columns[name].table_name}', expected table "
                f"'{columns[item].table_name}' of the item's column '{item}'. Set the same table for both columns in "
                "the schema"
            )


def refuse_no_positive(source: Source, spans: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Raise `DataError` if no training label is 1.

    ``spans`` has, for each training split, the minimum and maximum of each label.
    """
    for label in source.schema.labels:
        if spans and max(span.get(label, (0, 1))[1] for span in spans) < 1:
            raise DataError(
                f"no label '{label}' of the train split is 1, so no sample is positive. Define the positive values of "
                f"'{label}' in schema.labels, or remove schema.labels if all samples are positive"
            )


def model_source(recipe: Recipe, source: Source) -> Source:
    """Return the source without the column that ``retrieval.negatives`` names, which is no input of the model."""
    schema = model_schema(recipe, source.schema)
    return source if schema is source.schema else source.only([column.name for column in schema.sparse])


def model_schema(recipe: Recipe, schema: Schema) -> Schema:
    """Return the schema without the column that ``retrieval.negatives`` names."""
    if recipe.retrieval is None or recipe.retrieval.negatives is None:
        return schema
    return schema.only([column.name for column in schema.sparse if column.name != recipe.retrieval.negatives])


def item_features(model: nn.Module) -> list[str]:
    """Return the features of the item tower; the first feature identifies items."""
    inner = model.module if isinstance(model, Distributed) else model
    towers: Any = getattr(inner, "towers", None)
    parameters = signature(inner.forward).parameters
    if not isinstance(towers, dict) or not towers.get("item") or not {"vectors", "users"} <= parameters.keys():
        raise RecipeError(
            f"retrieval is set, but model {type(inner).__name__} computes no vectors of users and items. Use "
            "hotbed.nn.TwoTower, or a model with an attribute towers = {'user': […], 'item': […]} and a method "
            "forward(batch, vectors=, users=)"
        )
    return list(towers["item"])


def build_loss(key: str, component: Component, **options: object) -> nn.Module:
    """Build the module at ``key`` of a recipe; raise `RecipeError` if the module has parameters."""
    with naming(key):
        if not issubclass(component.load(), nn.Module):
            raise RecipeError(f"{component.class_path} is not a torch.nn.Module")
        made: nn.Module = component.build(**options)
    if any(True for _ in made.parameters()):
        raise RecipeError(
            f"{key}: {component.class_path} has parameters, but no optimizer trains parameters of losses. Move the "
            "parameters into the model"
        )
    return made


# -- evaluation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RetrievalMetrics(Metrics):
    """Metrics of retrieval. ``others`` has ``recall@k`` and ``ndcg@k``; ``samples`` is the number of positives."""

    items: int  # number of items that were searched

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as plain values."""
        return {"samples": self.samples, "items": self.items, **self.others}

    @override
    def value(self, monitor: str) -> float:
        """Return recall or nDCG at the last k of ``retrieval.k``; ``monitor`` is ``"recall"`` or ``"ndcg"``."""
        values = [value for name, value in self.others.items() if name.startswith(f"{monitor}@")]
        return values[-1] if monitor in ("recall", "ndcg") else math.nan


def evaluate_retrieval(
    model: nn.Module,
    batches: Iterable[Batch],
    items: ItemSet,
    options: RetrievalOptions,
    *,
    device: torch.device | str = "cpu",
    finished: Callable[[], None] = lambda: None,
) -> RetrievalMetrics:
    """Compute recall@k and nDCG@k of the positive samples in float32; all ranks must call this.

    Each positive sample is a query, and its item is the only relevant item. The k items with the largest products of
    user vector and item vector are retrieved. Recall@k is the share of queries with the relevant item among these.
    nDCG@k is the mean of ``1 ÷ log₂(2 + position)`` over queries, where ``position`` counts retrieved items from 0. A
    query without the relevant item counts as 0. The search compares all items, block by block.
    """
    refuse_unnormalized(model, batches)
    ranks = Ranks(model)
    ranks.sync()
    if ranks.is_first and (too_large := [k for k in options.k if k >= len(items)]):
        _log.warning(
            "retrieval.k is %s, but there are only %s items, so recall is 1 for any model",
            ", ".join(map(str, too_large)),
            f"{len(items):,}",
        )
    count, total, sums = 0, 0.0, torch.zeros(2, len(options.k), dtype=torch.float64)
    vectors: Tensor | None = None
    with evaluating(model):
        for batch in batches:
            if vectors is None:
                vectors = item_vectors(model, items, batch, device=device, finished=finished)
            positive = is_positive(batch).nonzero()[:, 0]
            own = items.positions(item_ids(batch.sparse, options.item[0])[positive])
            if bool((own < 0).any()):
                raise DataError(
                    f"{int((own < 0).sum()):,} of {len(own):,} samples have an item that is not among the "
                    f"{len(items):,} items of retrieval.items. Add the missing items to that file, or remove "
                    "retrieval.items from the recipe"
                )
            weights = torch.ones(len(batch)) if batch.weights_by_label is None else batch.weights_by_label[:, 0].cpu()
            weights = weights[positive].double()
            users = _vectors(model, move_batch(batch, model, device), "users")[0][positive.to(vectors.device)]
            hits = hit_positions(users, vectors, own.to(vectors.device), max(options.k)).cpu()
            for i, k in enumerate(options.k):
                found = weights * (hits < k)
                sums[:, i] += torch.stack([found.sum(), (found / (hits + 2.0).log2()).sum()])
            count, total = count + len(positive), total + float(weights.sum())
            finished()
    counted, weight, *flat = ranks.add(count, total, *sums.flatten().tolist())
    if not weight:
        raise BatchError(
            "no sample is positive: no label is 1, or all weights are 0. Evaluate data with positive samples"
        )
    names = [f"{name}@{k}" for name in ("recall", "ndcg") for k in options.k]
    return RetrievalMetrics(
        samples=int(counted),
        items=len(items),
        **dict.fromkeys(("auc", "logloss", "normalized_entropy", "calibration"), math.nan),
        others=dict(zip(names, (value / weight for value in flat), strict=True)),
    )


def item_vectors(
    model: nn.Module,
    items: ItemSet,
    like: Batch,
    *,
    device: torch.device | str = "cpu",
    finished: Callable[[], None] = lambda: None,
) -> Tensor:
    """Compute the vectors of all items ``[N, D]`` float32 on the device; all ranks must call this.

    ``like`` is any batch of the model's data; only the names and dtypes of its columns are used.
    """
    ranks, made = Ranks(model), list[Tensor]()
    for start in range(0, len(items), _ITEMS):
        share = ranks.virtual.share(min(_ITEMS, len(items) - start))
        positions = torch.arange(start + share.start, start + share.stop)
        dense = None if like.dense is None else like.dense.new_zeros(len(positions), *like.dense.shape[1:])
        batch = Batch(sparse=items.rows(positions, like.sparse), dense=dense)
        made.append(ranks.gather(_vectors(model, move_batch(batch, model, device), "items")[1]))
        finished()
    return torch.cat(made)


def hit_positions(users: Tensor, items: Tensor, own: Tensor, limit: int) -> Tensor:
    """Return the place ``[B]`` int64 of each user's own item among all items, from 0 to at most ``limit``.

    Items are ordered by descending product of their vector and the user's vector. ``own`` has the position of each
    user's own item in ``items``.
    """
    hits = torch.full_like(own, limit)
    for first in range(0, len(users), _USERS):
        rows = slice(first, first + _USERS)
        part = users[rows]
        scores = part.new_empty(len(part), 0)
        best = torch.empty(len(part), 0, dtype=torch.int64, device=part.device)
        for start in range(0, len(items), _ITEMS):
            block = part @ items[start : start + _ITEMS].T
            positions = torch.arange(start, start + block.shape[1], device=part.device).expand_as(block)
            scores, best = torch.cat([scores, block], dim=1), torch.cat([best, positions], dim=1)
            scores, at = scores.topk(min(limit, scores.shape[1]), dim=1)
            best = best.gather(1, at)
        found = best == own[rows, None]
        hits[rows] = torch.where(found.any(1), found.long().argmax(1), limit)
    return hits


def _vectors(model: nn.Module, batch: Batch, tower: str) -> tuple[Tensor, Tensor]:
    users, items = cast("Sequence[Tensor]", model(batch, vectors=True))
    if not bool((items if tower == "items" else users).isfinite().all()):
        raise NonFiniteError(
            f"evaluation: a vector of {tower} is not finite, because the model has diverged or an input is not finite. "
            "Train with lower learning rates, or correct inputs that are not finite"
        )
    return users.float(), items.float()
