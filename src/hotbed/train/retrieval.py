"""Train and evaluate two-tower models: add candidates to each batch, compute the loss over them, compute recall@k.

A candidate is an item that the loss compares with each user's own item. Before the ids of a batch are exchanged,
samples that have an item but no user are appended to the batch::

    samples of the data     drawn, equal on all ranks     negatives of single samples
    user, item              item                          item
    └─ rows ─┘              └─────────── candidates only ───────────┘

Each virtual rank (`hotbed.virtual_ranks`) has its share of the drawn items. All ranks gather the candidates of all
virtual ranks in order, and compute the losses of their own samples. The gradients of a candidate are sent back to the
rank that computed the candidate, and are added along the tree over virtual ranks. So the number of ranks changes
neither the negatives nor the gradients of a sample. See docs/decisions/tasks-and-retrieval.md.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import accumulate
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
from hotbed.train.metrics import Metrics, divide_batch, evaluating, move_batch, refuse_unnormalized, slicer_of
from hotbed.train.ranks.parallel import Ranks, sum_virtual_ranks
from hotbed.virtual_ranks import VirtualRanks, subtrees, tree_additions

CANDIDATE, LOG_DRAWN = "retrieval.candidate", "retrieval.log_drawn"
"""Columns of `RetrievalBatch.extra`; see `Retrieval.prepare`."""
_USERS, _ITEMS = 1024, 16_384  # numbers of users and items in a block of the exact search

_log = logging.getLogger("hotbed")


@dataclass(frozen=True, kw_only=True)
class RetrievalBatch(Batch):
    """A batch with its candidates: the first ``rows`` samples come from the data, the others are only candidates.

    If a batch belongs to several virtual ranks, the samples of each are followed by its candidates.
    """

    rows: int
    positives: int  # number of positive samples
    by_slice: tuple[tuple[int, int], ...] = ()
    """``rows`` and ``positives`` of each of `slices`."""

    @override
    def divide(self, virtual: VirtualRanks) -> list[Batch]:
        return [
            replace(cast("RetrievalBatch", own), rows=rows, positives=positives, by_slice=())
            for own, (rows, positives) in zip(super().divide(virtual), self.by_slice, strict=True)
        ]


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
    """The ``n`` candidates of all virtual ranks, in order."""

    vectors: Tensor  # [n, D]
    ids: Tensor  # items [n]
    negative_of: Tensor  # the sample that uses the candidate as a negative [n]; −1: all samples
    log_drawn: Tensor | None  # see `Retrieval.prepare`
    rows: list[slice]  # for each virtual rank, the slice of candidates that are samples of the data
    counts: list[int]  # number of candidates of each virtual rank
    by_rank: list[int]  # and of each rank


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
        virtual = self._ranks.virtual
        if virtual.are_processes:
            return self._prepare(batch, step, virtual.rank)
        parts = [self._prepare(own, step, v) for own, v in zip(batch.divide(virtual), virtual.own, strict=True)]
        whole = Batch.concatenate(parts)
        return RetrievalBatch(
            **{name: getattr(whole, name) for name in ("sparse", "dense", "labels", "weights", "extra")},
            slices=tuple(map(len, parts)),
            rows=sum(part.rows for part in parts),
            positives=sum(part.positives for part in parts),
            by_slice=tuple((part.rows, part.positives) for part in parts),
        )

    def _prepare(self, batch: Batch, step: int, virtual_rank: int) -> RetrievalBatch:
        """Add the candidates of one virtual rank to its samples."""
        rows, options = len(batch), self.options
        ids, positive = item_ids(batch.sparse, options.item[0]), is_positive(batch).long()
        columns, more = [torch.stack([ids, torch.full_like(ids, -1), positive], dim=1)], [ids[:0]]

        def add(positions: Tensor, negative_of: Tensor) -> None:
            more.append(positions)
            columns.append(torch.stack([self.items.ids[positions], negative_of, torch.zeros_like(positions)], dim=1))

        if options.sampled:
            total = self._ranks.virtual.total
            share = VirtualRanks(virtual_rank, total).share(options.sampled)
            drawn = self._draws(step, options.sampled)[share]
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

    def __call__(
        self, vectors: Sequence[tuple[Tensor, Tensor]], batches: Sequence[Batch], *, counts: bool = True
    ) -> list[Tensor]:
        """Return the sum of the losses of each virtual rank of this process; all ranks must call this.

        ``batches`` are batches that `prepare` returned, divided, and ``vectors`` are the vectors of their users and
        items. All losses must have the same gradient. With ``counts``, the correction counts the items of the batch.
        Training sets ``counts``.
        """
        own = [cast("RetrievalBatch", batch) for batch in batches]
        candidates = self._gather([items for _, items in vectors], own)
        log_q = self._log_q(candidates, counts=counts)
        found: list[tuple[Tensor, Tensor]] = []  # users and loss of each virtual rank
        for (of_users, _), batch, v in zip(vectors, own, self._ranks.virtual.own, strict=True):
            users, first = of_users.detach().requires_grad_(of_users.requires_grad), candidates.rows[v].start
            losses = self._loss(
                users,
                candidates.vectors,
                candidates.ids,
                log_q,
                own=torch.arange(first, first + batch.rows, device=users.device),
                negative_of=None if self.options.negatives is None else candidates.negative_of,
            )
            weights = batch.extra[CANDIDATE][: batch.rows, 2].to(losses.dtype)
            if batch.weights_by_label is not None:
                weights = weights * batch.weights_by_label[: batch.rows, 0]
            found.append((users, (losses * weights).sum()))
        backward = _Backward(found, candidates, self._ranks.virtual, self._link)
        return [
            cast(Tensor, _OfVirtualRank.apply(users, items, backward, number))
            for number, (users, items) in enumerate(vectors)
        ]

    def _gather(self, items: Sequence[Tensor], batches: Sequence[RetrievalBatch]) -> _Candidates:
        """Gather the candidates of all virtual ranks. ``items`` are the vectors of the own ones."""
        virtual, link = self._ranks.virtual, self._link
        sizes = [[len(batch), batch.rows] for batch in batches]
        if link is not None:
            most = max(len(virtual.block(rank)) for rank in range(virtual.size))
            padded = torch.tensor([*sizes, *[[0, 0]] * (most - len(sizes))], device=link.device)
            of_ranks: list[list[list[int]]] = link.all_gather("numbers of candidates", padded).wait().tolist()
            sizes = [size for rank, own in enumerate(of_ranks) for size in own[: len(virtual.block(rank))]]
        counts = [count for count, _ in sizes]
        starts = [0, *accumulate(counts)]
        columns, log_drawn = list[Tensor](), [batch.extra[LOG_DRAWN] for batch in batches if LOG_DRAWN in batch.extra]
        for batch, v in zip(batches, virtual.own, strict=True):
            own = batch.extra[CANDIDATE]
            columns.append(torch.stack([own[:, 0], torch.where(own[:, 1] < 0, -1, own[:, 1] + starts[v])], dim=1))
        by_rank = [sum(counts[v] for v in virtual.block(rank)) for rank in range(virtual.size)]

        def everywhere(parts: Sequence[Tensor]) -> Tensor:
            values = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            return values if link is None else _exchange(values, link, by_rank)

        vectors = everywhere([of_rank.detach() for of_rank in items])
        whole = everywhere(columns)
        return _Candidates(
            vectors.requires_grad_(any(of_rank.requires_grad for of_rank in items)),
            whole[:, 0],
            whole[:, 1],
            everywhere(log_drawn) if log_drawn else None,
            [slice(start, start + rows) for start, (_, rows) in zip(starts, sizes, strict=False)],
            counts,
            by_rank,
        )

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


class _Backward:
    """Gradients of the vectors of this process's virtual ranks, computed at once by the first backward pass.

    A candidate has a gradient from the loss of every virtual rank. They are added along the tree.
    """

    def __init__(
        self,
        found: Sequence[tuple[Tensor, Tensor]],
        candidates: _Candidates,
        virtual: VirtualRanks,
        link: Link | None,
    ) -> None:
        self._found, self._candidates, self._virtual, self._link = found, candidates, virtual, link
        self._gradients: list[tuple[Tensor | None, Tensor | None]] = []

    def loss(self, number: int) -> Tensor:
        """Return the loss of a virtual rank of this process."""
        return self._found[number][1].detach()

    def of(self, number: int, seed: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the users and items of a virtual rank of this process."""
        if not self._gradients:
            self._gradients = self._compute(seed)
            self._found = []  # with their graphs
        return self._gradients[number]

    def _compute(self, seed: Tensor) -> list[tuple[Tensor | None, Tensor | None]]:
        of_users, of_candidates, vectors = list[Tensor | None](), list[Tensor](), self._candidates.vectors
        for users, loss in self._found:
            inputs = [t for t in (users, vectors) if t.requires_grad]
            found = list(torch.autograd.grad(loss, inputs, seed))
            of_users.append(found.pop(0) if users.requires_grad else None)
            of_candidates += found
        if not of_candidates:
            return [(gradient, None) for gradient in of_users]
        own, counts = self._virtual.own, self._candidates.counts
        nodes, first = list[Tensor](), own.start
        for node in subtrees(own):
            nodes.append(_add_along_tree(of_candidates[node.start - first : node.stop - first], node))
        total = nodes[0] if self._link is None else self._exchange(torch.stack(nodes), self._link)
        return list(zip(of_users, total.split([counts[v] for v in own]), strict=True))

    def _exchange(self, nodes: Tensor, link: Link) -> Tensor:
        """Return the gradients of this process's candidates. ``nodes [nodes of the tree, n, D]`` are its sums."""
        virtual, by_rank = self._virtual, self._candidates.by_rank
        leaves = [[node.start for node in subtrees(virtual.block(rank))] for rank in range(virtual.size)]
        received = nodes.new_empty(sum(map(len, leaves)), by_rank[link.rank], nodes.shape[2])
        outgoing = [part.contiguous() for part in nodes.split(by_rank, dim=1)]
        incoming = received.split([len(of_rank) for of_rank in leaves])
        link.exchange("gradients of candidates", outgoing, incoming).wait()
        return _add_along_tree(received, [leaf for of_rank in leaves for leaf in of_rank])


def _add_along_tree(values: Iterable[Tensor], leaves: Sequence[int]) -> Tensor:
    """Add the values of ascending leaves along the tree."""
    sums = list(values)
    for left, right in tree_additions(leaves):
        sums[left] = sums[left] + sums[right]
    return sums[0]


class _OfVirtualRank(torch.autograd.Function):
    """Return the loss of a virtual rank as a function of the vectors of its users and items."""

    @staticmethod
    def forward(ctx: Any, _users: Tensor, _items: Tensor, backward: _Backward, number: int) -> Tensor:
        ctx.gradients, ctx.number = backward, number
        return backward.loss(number)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        return *cast(_Backward, ctx.gradients).of(ctx.number, grad_outputs[0]), None, None


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
    slicer, virtual = slicer_of(model), ranks.virtual
    # by virtual rank: positives, weight, then recall and nDCG at each k
    sums = torch.zeros(len(virtual.own), 2 + 2 * len(options.k), dtype=torch.float64)
    vectors: Tensor | None = None
    with evaluating(model):
        for batch in batches:
            if vectors is None:
                vectors = item_vectors(model, items, batch, device=device, finished=finished)
            positions = items.positions(item_ids(batch.sparse, options.item[0]))
            unknown = is_positive(batch) & (positions < 0)
            if bool(unknown.any()):
                raise DataError(
                    f"{int(unknown.sum()):,} of {int(is_positive(batch).sum()):,} samples have an item that is not "
                    f"among the {len(items):,} items of retrieval.items. Add the missing items to that file, or remove "
                    "retrieval.items from the recipe"
                )
            with divide_batch(move_batch(batch, model, device), slicer) as of_ranks:
                first = 0
                for own, of_rank in zip(of_ranks, sums, strict=True):
                    users, places = _vectors(model, own, "users")[0], positions[first : first + len(own)]
                    of_rank += _sums_of_hits(users, vectors, own, places, options.k)
                    first += len(own)
            finished()
    counted, weight, *flat = sum_virtual_ranks(ranks.gather(sums)).tolist()
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


def _sums_of_hits(users: Tensor, items: Tensor, batch: Batch, positions: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the number of positives of a batch, their weight, and Σ weight of recall and of nDCG at each k, float64.

    ``positions [B]`` are the positions of the samples' items in ``items``.
    """
    positive = is_positive(batch).cpu().nonzero()[:, 0]
    weights = torch.ones(len(batch)) if batch.weights_by_label is None else batch.weights_by_label[:, 0].cpu()
    weights, device = weights[positive].double(), items.device
    hits = hit_positions(users[positive.to(device)], items, positions[positive].to(device), max(ks)).cpu()
    found = [weights * (hits < k) for k in ks]
    gains = [of_k / (hits + 2.0).log2() for of_k in found]
    count = torch.ones_like(weights)
    return torch.stack([values.sum() for values in (count, weights, *found, *gains)])


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
    ranks, slicer, made = Ranks(model), slicer_of(model), list[Tensor]()
    for start in range(0, len(items), _ITEMS):
        count = min(_ITEMS, len(items) - start)
        share = ranks.virtual.share(count)
        positions = torch.arange(start + share.start, start + share.stop)
        dense = None if like.dense is None else like.dense.new_zeros(len(positions), *like.dense.shape[1:])
        batch = Batch(sparse=items.rows(positions, like.sparse), dense=dense, slices=ranks.virtual.slices(count))
        with divide_batch(move_batch(batch, model, device), slicer) as of_ranks:
            made.append(ranks.gather(torch.cat([_vectors(model, own, "items")[1] for own in of_ranks])))
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
