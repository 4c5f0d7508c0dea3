"""Train a model to find items among all: which candidates each batch has, and the loss over them.

A batch gets further samples that have an item and no user, before its ids are exchanged::

    samples of the data     drawn, the same on all ranks     negatives of single samples
    user, item              item                             item
    └─ rows ─┘              └──────────────── candidates alone ───────────────┘

Of the drawn items each rank computes its share. The vectors of the candidates of all ranks are then gathered, in rank
order, and each rank computes the losses of its own samples; gradients go back to the rank that has the candidate, which
adds those of all ranks in rank order. So the negatives of a sample, and its gradient, do not depend on how many ranks
there are. Why: decision 0061.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hotbed.data.loader import share_of
from hotbed.embed import Distributed
from hotbed.errors import BatchError, DataError, NonFiniteError, RecipeError
from hotbed.jagged import Jagged
from hotbed.train.metrics import Metrics, evaluating, refuse_unnormalized, to_device
from hotbed.train.ranks.parallel import Ranks

CANDIDATE, LOG_DRAWN = "retrieval.candidate", "retrieval.log_drawn"
"""Columns of `RetrievalBatch.extra`: see `Retrieval.prepared`."""


@dataclass(frozen=True, kw_only=True)
class RetrievalBatch(Batch):
    """Hold a batch with its candidates."""

    rows: int  # its first samples, which are those of the data; the others are candidates alone
    positives: int  # how many of these are positives


def is_positive(batch: Batch) -> Tensor:
    """Tell which samples have an item to be found ``[B]`` bool: those whose label is 1, or all where there is none."""
    labels = batch.labels
    if labels is None or not labels.shape[1]:
        return torch.ones(len(batch), dtype=torch.bool, device=batch.sparse.values.device)
    return labels[:, 0] == 1


def trained_samples(batch: Batch) -> int:
    """Count the samples of a batch that the loss is the mean of."""
    return batch.positives if isinstance(batch, RetrievalBatch) else len(batch)


class Options(NamedTuple):
    """Say what `Retrieval` does."""

    item: Sequence[str]  # features of items; the first says which item it is
    # sampled, by_popularity: items to draw for each step, and how
    sampled: int = 0
    by_popularity: bool = False
    negatives: str | None = None  # feature whose ids are a sample's own negatives
    seed: int = 0  # of the draws
    k: Sequence[int] = (10, 100)  # of recall@k and ndcg@k


class Retrieval:
    """Add the candidates of each batch, and compute the loss over them."""

    def __init__(
        self,
        options: Options,
        loss: nn.Module,  # as `hotbed.nn.InBatchSoftmax` is called
        correction: nn.Module | None,  # as `hotbed.nn.ItemFrequencies` is called
        items: Callable[[], ItemSet],  # returns the items to draw; called on all ranks when first needed
        ranks: Ranks,
    ) -> None:
        self.options, self._loss, self._correction, self._make, self._ranks = options, loss, correction, items, ranks
        # Of its own: backward exchanges by it while dense gradients are averaged by another.
        self._link = None if ranks.link is None else ranks.link.clone()

    @cached_property
    def items(self) -> ItemSet:
        """Give all items that are drawn, or looked up as negatives."""
        return self._make()

    @cached_property
    def _draws(self) -> ItemDraws:
        return ItemDraws(self.items, self.options.seed, by_popularity=self.options.by_popularity)

    def among(self, items: ItemSet) -> Self:
        """Draw from these items from now on, in the place of all."""
        vars(self).update(items=items)
        vars(self).pop("_draws", None)
        return self

    # -- candidates ------------------------------------------------------------------------------------------------

    def prepared(self, batch: Batch, step: int) -> RetrievalBatch:
        """Add the candidates of a step, 1 the first, to this rank's samples, in the memory of the host.

        Column `CANDIDATE` ``[n, 3]`` has the item, the sample that it is a negative of (−1: of all), and whether the
        sample is a positive; `LOG_DRAWN` ``[n]`` the logarithm of how often the item is drawn in a step.
        """
        rows, options = len(batch), self.options
        ids = item_ids(batch.sparse, options.item[0])
        positive = is_positive(batch).long()
        everyone = torch.full_like(ids, -1)
        columns = [torch.stack([ids, everyone, positive], dim=1)]
        more: list[Tensor] = []
        if options.sampled:
            share = share_of(options.sampled, self._ranks.rank, self._ranks.size)
            drawn = self._draws(step, options.sampled)[share]
            more.append(drawn)
            columns.append(self._columns(drawn, torch.full_like(drawn, -1)))
        if options.negatives is not None:
            own, of = self._own_negatives(batch.sparse, options.negatives)
            more.append(own)
            columns.append(self._columns(own, of))
        candidates, positions = torch.cat(columns), torch.cat(more) if more else ids[:0]
        extra = {CANDIDATE: candidates}
        if options.sampled and self._correction is not None:
            at = self.items.positions(candidates[:, 0])
            extra[LOG_DRAWN] = (self._draws.log_p(at) + torch.tensor(float(options.sampled)).double().log()).float()
        new = len(positions)

        def padded(values: Tensor | None) -> Tensor | None:
            return None if values is None else torch.cat([values, values.new_zeros(new, *values.shape[1:])])

        return RetrievalBatch(
            sparse=batch.sparse
            if not new
            else Jagged.concatenate([batch.sparse, self.items.rows(positions, batch.sparse)]),
            dense=padded(batch.dense),
            labels=padded(batch.labels),
            weights=padded(batch.weights),
            extra=extra,
            rows=rows,
            positives=int(positive.sum()),
        )

    def _columns(self, positions: Tensor, of: Tensor) -> Tensor:
        return torch.stack([self.items.ids[positions], of, torch.zeros_like(of)], dim=1)

    def _own_negatives(self, ids: Jagged, name: str) -> tuple[Tensor, Tensor]:
        """Give positions of samples' own negatives among the items, and of which sample each is."""
        bags = ids[name]
        of = torch.repeat_interleave(torch.arange(len(ids)), bags.lengths())
        positions = self.items.positions(bags.values.long())
        if bool((positions < 0).any()):
            at = int((positions < 0).nonzero()[0])
            raise BatchError(
                f"column '{name}' has a negative at sample {int(of[at]):,} (row {int(bags.values[at]):,} of its table) "
                f"that is none of the {len(self.items):,} items; name a Parquet of all items as retrieval.items, or "
                "leave such negatives out of the data"
            )
        return positions, of

    # -- the loss --------------------------------------------------------------------------------------------------

    def __call__(self, model: nn.Module, batch: Batch, *, counts: bool = True) -> Tensor:
        """Compute the sum of the losses of a batch that was `prepared`; all ranks must call this.

        The correction keeps what it learns of the batch if that ``counts``, as those do that are trained on.
        """
        assert isinstance(batch, RetrievalBatch)
        users, items = cast("tuple[Tensor, Tensor]", model(batch, vectors=True, users=batch.rows))
        of_all = self._gathered(items, batch)
        log_q = self._log_q(of_all, counts=counts)
        own = torch.arange(of_all.first, of_all.first + batch.rows, device=users.device)
        negative_of = None if self.options.negatives is None else of_all.negative_of
        losses = self._loss(users, of_all.vectors, of_all.ids, log_q, own=own, negative_of=negative_of)
        weights = batch.extra[CANDIDATE][: batch.rows, 2].to(losses.dtype)
        if batch.weights_by_label is not None:
            weights = weights * batch.weights_by_label[: batch.rows, 0]
        return (losses * weights).sum()

    def _gathered(self, items: Tensor, batch: RetrievalBatch) -> _Candidates:
        """Gather the candidates of all ranks, in rank order."""
        own = batch.extra[CANDIDATE]
        log_drawn = batch.extra.get(LOG_DRAWN)
        if self._link is None:
            return _Candidates(items, own[:, 0], own[:, 1], log_drawn, [slice(0, batch.rows)], 0)
        here = torch.tensor([len(batch), batch.rows], device=self._link.device)
        sizes = self._link.all_gather("numbers of candidates", here).wait().tolist()
        counts = [size for size, _ in sizes]
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        first = starts[self._link.rank]
        shifted = torch.where(own[:, 1] < 0, -1, own[:, 1] + first)
        everyone = _exchanged(torch.stack([own[:, 0], shifted], dim=1), self._link, counts)
        rows = [slice(start, start + n) for start, (_, n) in zip(starts, sizes, strict=True)]
        if log_drawn is not None:
            log_drawn = _exchanged(log_drawn, self._link, counts)
        vectors = _Gathered.apply(items, self._link, counts)
        return _Candidates(vectors, everyone[:, 0], everyone[:, 1], log_drawn, rows, first)

    def _log_q(self, of_all: _Candidates, *, counts: bool) -> Tensor | None:
        """Estimate how probable candidates are, by the batches so far and this one, and by the draws."""
        if self._correction is None:
            return None
        correction = self._correction if counts else copy.deepcopy(self._correction)
        correction.train()(torch.cat([of_all.ids[rows] for rows in of_all.rows]))
        log_q = correction.eval()(of_all.ids)
        return log_q if of_all.log_drawn is None else torch.logaddexp(log_q, of_all.log_drawn)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        """Give what the correction has learned, which is the same on all ranks."""
        return {} if self._correction is None else {"correction": self._correction.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        if self._correction is not None and "correction" in state:
            self._correction.load_state_dict(state["correction"])


class _Candidates(NamedTuple):
    """Hold the candidates of all ranks."""

    vectors: Tensor
    ids: Tensor
    negative_of: Tensor
    log_drawn: Tensor | None
    rows: list[slice]
    """Those that are samples of the data."""
    first: int
    """The first one of this rank."""


def _exchanged(values: Tensor, link: Link, counts: Sequence[int]) -> Tensor:
    """Gather rows of all ranks, in rank order."""
    received = values.new_empty(sum(counts), *values.shape[1:])
    link.exchange("candidates", [values.contiguous()] * link.size, received.split(list(counts))).wait()
    return received


class _Gathered(torch.autograd.Function):
    """Gather vectors of all ranks; their gradients are added in rank order."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, link: Link, counts: Sequence[int]) -> Tensor:
        ctx.link, ctx.counts = link, counts
        return _exchanged(vectors.detach(), link, counts)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None]:
        link, counts = cast(Link, ctx.link), cast("Sequence[int]", ctx.counts)
        outgoing = grad_outputs[0].contiguous().split(list(counts))
        theirs = grad_outputs[0].new_empty(link.size, *outgoing[link.rank].shape)
        link.exchange("gradients of candidates", outgoing, list(theirs)).wait()
        total = theirs[0]
        for rank in range(1, link.size):
            total = total + theirs[rank]
        return total, None, None


def refuse_missing(items: ItemSet, ids: Tensor, where: str) -> Tensor:
    """Give positions of items in a set; a `DataError` if one is not there."""
    positions = items.positions(ids)
    if bool((positions < 0).any()):
        raise DataError(
            f"{int((positions < 0).sum()):,} of {len(ids):,} samples of {where} have an item that is none of the "
            f"{len(items):,} of retrieval.items, so it can never be found; add such items to it, or leave "
            "retrieval.items out"
        )
    return positions


def retrieval_of(recipe: Recipe, source: Source, model: nn.Module, device: torch.device) -> Retrieval:
    """Make the candidates and the loss of a recipe."""
    asked = recipe.retrieval
    assert asked is not None
    options = options_of(recipe, model)
    loss = build_loss("retrieval.loss", _with_temperature(asked.loss, model)).to(device)
    correction = None if asked.correction is None else build_loss("retrieval.correction", asked.correction).to(device)

    return Retrieval(options, loss, correction, lambda: all_items(recipe, source, options.item), Ranks(model))


def options_of(recipe: Recipe, model: nn.Module) -> Options:
    """Give what a recipe asks for, of a model of two towers."""
    asked = recipe.retrieval
    assert asked is not None
    return Options(
        item=item_features(model),
        sampled=asked.sampled,
        by_popularity=asked.sampled_by == "popularity",
        negatives=asked.negatives,
        seed=recipe.train.seed,
        k=asked.k,
    )


def all_items(recipe: Recipe, source: Source, item: Sequence[str]) -> ItemSet:
    """Collect all items that can be found: those of the recipe's Parquet of items, or of all splits of the data."""
    asked = recipe.retrieval
    if asked is None or asked.items is None:
        return items_of(source, item, source.splits, counted=recipe.data.train_split)
    of_items = source_of_items(recipe, source, asked.items, item)
    return items_of(of_items, item, of_items.splits)


def source_of_items(recipe: Recipe, source: Source, path: str, item: Sequence[str]) -> Source:
    """Open a Parquet of items, which is read as the samples are."""
    from hotbed.data import ParquetSource

    given = recipe.data.source
    if not issubclass(given.load(), ParquetSource):
        raise RecipeError(
            f"retrieval.items is {path}, which needs data of hotbed.data.ParquetSource, and data.source is "
            f"{given.class_path}; leave retrieval.items out, so that the items of the data's splits are taken"
        )
    schema = source.schema.inputs.only(item)
    schema = replace(schema, dense=(), scaling=(), numericals=())
    kept = {key: value for key, value in given.init_args.items() if key in ("ids", "text")}
    return ParquetSource(path, schema, **kept)


def refuse_retrieval(recipe: Recipe, source: Source) -> None:
    """Raise `RecipeError` if a recipe's other sections or its data do not go with ``retrieval``; before data are read.

    It is allowed to have no label, or one of which all are 1.
    """
    asked = recipe.retrieval
    assert asked is not None
    schema = source.schema
    if len(schema.labels) > 1:
        raise RecipeError(
            f"retrieval is set, and there are the labels {', '.join(schema.labels)}; leave one, which is 1 for the "
            "samples that an item is to be found for, or none if it is to be found for all"
        )
    sections = (("tasks", recipe.tasks, "a loss of its own"), ("metrics", recipe.metrics, "metrics of its own"))
    for section, given, has in sections:
        if given:
            raise RecipeError(f"{section} is set, but retrieval has {has}; leave {section} out")
    for key, value, may in (
        ("hot.batches", recipe.hot.batches, ("mixed",)),
        ("parallel.reader", recipe.parallel.reader, ("each", "first")),
    ):
        if value not in may:
            raise RecipeError(
                f"{key} is '{value}', but retrieval needs all samples of a batch with all of their columns at once; "
                "leave it out"
            )
    if asked.negatives is not None:
        _check_negatives(asked.negatives, recipe, source)


def refuse_no_positive(source: Source, found: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Raise `DataError` if no label to train on is 1; ``found`` has the smallest and the largest by column."""
    for label in source.schema.labels:
        if found and max(spans.get(label, (0, 1))[1] for spans in found) < 1:
            raise DataError(
                f"no label '{label}' to train on is 1, so there is no sample to find an item for; say which "
                "values are positive in the schema's labels, or leave labels out if all samples are positive"
            )


def _check_negatives(negatives: str, recipe: Recipe, source: Source) -> None:
    columns = {column.name: column for column in source.schema.sparse}
    check_known("retrieval.negatives", negatives, columns, RecipeError, "Add it to the sparse columns of the schema.")
    item = recipe.model.init_args.get("item", [None])[0]
    if item in columns and columns[negatives].table_name != columns[item].table_name:
        raise RecipeError(
            f"retrieval.negatives is '{negatives}', whose table is '{columns[negatives].table_name}', and that of the "
            f"item's column '{item}' is '{columns[item].table_name}', so its values are not items; give both one table"
        )


def model_source(recipe: Recipe, source: Source) -> Source:
    """Give a source without the column of negatives, which the model does not take."""
    schema = model_schema(recipe, source.schema)
    return source if schema is source.schema else source.only([column.name for column in schema.sparse])


def model_schema(recipe: Recipe, schema: Schema) -> Schema:
    """Give a schema without the column of negatives."""
    if recipe.retrieval is None or recipe.retrieval.negatives is None:
        return schema
    return schema.only([column.name for column in schema.sparse if column.name != recipe.retrieval.negatives])


def item_features(model: nn.Module) -> list[str]:
    """Give the features of the items' tower, first that of which item it is; a `RecipeError` if there is no tower."""
    inner = model.module if isinstance(model, Distributed) else model
    towers: Any = getattr(inner, "towers", None)
    known = signature(inner.forward).parameters
    if not isinstance(towers, dict) or not towers.get("item") or not {"vectors", "users"} <= known.keys():
        raise RecipeError(
            f"retrieval is set, but {type(inner).__name__} gives no vectors of users and items; use "
            "hotbed.nn.TwoTower, or a model with towers = {'user': […], 'item': […]} whose forward takes vectors= "
            "and users= as it does"
        )
    return list(towers["item"])


def _with_temperature(loss: Component, model: nn.Module) -> Component:
    """Give the loss the model's temperature, unless it has one of its own or takes none."""
    temperature = getattr(model, "temperature", None)
    with naming("retrieval.loss"):
        takes = "temperature" in signature(loss.load()).parameters
    if temperature is None or not takes or "temperature" in loss.init_args:
        return loss
    return replace(loss, init_args={**loss.init_args, "temperature": temperature})


def build_loss(key: str, component: Component, **given: object) -> nn.Module:
    """Make a module without parameters, by the key of a recipe where it stands."""
    with naming(key):
        if not issubclass(component.load(), nn.Module):
            raise RecipeError(f"{component.class_path} is not a torch.nn.Module")
        made: nn.Module = component.build(**given)
    if any(True for _ in made.parameters()):
        raise RecipeError(
            f"{key}: {component.class_path} has parameters, which no optimizer trains; make them part of the model"
        )
    return made


_log = logging.getLogger("hotbed")
_USERS, _ITEMS = 1024, 16_384


@dataclass(frozen=True, kw_only=True)
class FoundMetrics(Metrics):
    """Hold metrics of retrieval, in ``others``: ``recall@k`` and ``ndcg@k``; ``samples`` are the positives."""

    items: int  # among how many items each sample's item was searched for

    @override
    def to_dict(self) -> dict[str, Any]:
        """Give what was measured, as plain values."""
        return {"samples": self.samples, "items": self.items, **self.others}

    @override
    def value(self, monitor: str) -> float:
        """Give recall or ndcg of the last k."""
        of_k = [value for name, value in self.others.items() if name.startswith(f"{monitor}@")]
        return of_k[-1] if monitor in ("recall", "ndcg") else math.nan


def evaluate_found(
    model: nn.Module,
    batches: Iterable[Batch],
    items: ItemSet,
    options: Options,
    *,
    device: torch.device | str = "cpu",
    finished: Callable[[], None] = lambda: None,
) -> FoundMetrics:
    """Measure recall@k and nDCG@k over the positives of batches, in float32; all ranks must call this.

    Each positive sample is a query whose one relevant item is its own. Recall@k is the share of samples whose item is
    among the k items with the largest products, nDCG@k the mean of ``1 ÷ log₂(1 + place)`` of those that are. Items are
    searched exactly, in blocks.
    """
    refuse_unnormalized(model, batches)
    ranks = Ranks(model)
    ranks.sync()
    if ranks.is_first and (all_found := [k for k in options.k if k >= len(items)]):
        _log.warning(
            "retrieval.k has %s, and there are %s items, all of which are found: recall is 1 there whatever the model",
            ", ".join(map(str, all_found)),
            f"{len(items):,}",
        )
    count, total, sums = 0, 0.0, torch.zeros(2, len(options.k), dtype=torch.float64)
    of_items: Tensor | None = None
    with evaluating(model):
        for batch in batches:
            if of_items is None:
                of_items = item_vectors(model, items, batch, device=device, finished=finished)
            wanted = is_positive(batch).nonzero()[:, 0]
            own = refuse_missing(items, item_ids(batch.sparse, options.item[0])[wanted], "the split")
            weights = torch.ones(len(batch)) if batch.weights_by_label is None else batch.weights_by_label[:, 0].cpu()
            weights = weights[wanted].double()
            users = _vectors(model, to_device(batch, model, device), "users")[0][wanted.to(of_items.device)]
            places = places_of(users, of_items, own.to(of_items.device), max(options.k)).cpu()
            for i, k in enumerate(options.k):
                found = weights * (places < k)
                sums[:, i] += torch.stack([found.sum(), (found / (places + 2.0).log2()).sum()])
            count, total = count + len(wanted), total + float(weights.sum())
            finished()
    counted, weight, *flat = ranks.add(count, total, *sums.flatten().tolist())
    if not weight:
        raise BatchError(
            "there is no positive sample to find an item for: no label is 1, or all weights are 0; evaluate other data"
        )
    names = [f"{name}@{k}" for name in ("recall", "ndcg") for k in options.k]
    return FoundMetrics(
        samples=int(counted),
        items=len(items),
        auc=math.nan,
        logloss=math.nan,
        normalized_entropy=math.nan,
        calibration=math.nan,
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
    """Compute the vectors of all items ``[N, D]`` float32 on the device, in evaluation; all ranks must call this.

    ``like`` is any batch of the model's data: of it only the names and kinds of columns count.
    """
    ranks = Ranks(model)
    made: list[Tensor] = []
    for start in range(0, len(items), _ITEMS):
        size = min(_ITEMS, len(items) - start)
        share = share_of(size, ranks.rank, ranks.size)
        batch = batch_of_items(items, torch.arange(start + share.start, start + share.stop), like)
        made.append(ranks.gather(_vectors(model, to_device(batch, model, device), "items")[1]))
        finished()
    return torch.cat(made)


def batch_of_items(items: ItemSet, positions: Tensor, like: Batch) -> Batch:
    """Make items samples without a user."""
    dense = None if like.dense is None else like.dense.new_zeros(len(positions), *like.dense.shape[1:])
    return Batch(sparse=items.rows(positions, like.sparse), dense=dense)


def places_of(users: Tensor, items: Tensor, own: Tensor, most: int) -> Tensor:
    """Find where each user's own item is among all, the best one 0 ``[B]`` int64; ``most`` where it is not found."""
    places = torch.full_like(own, most)
    for rows, best in zip(torch.arange(len(users)).split(_USERS), _best(users, items, most), strict=False):
        hits = best == own[rows.to(own.device)][:, None]
        places[rows.to(own.device)] = torch.where(hits.any(1), hits.long().argmax(1), most)
    return places


def _best(users: Tensor, items: Tensor, most: int) -> Iterator[Tensor]:
    """Yield positions of the items with the largest products ``[b, most]``, of `_USERS` users after the others."""
    for part in users.split(_USERS) if len(users) else ():
        scores = part.new_empty(len(part), 0)
        positions = torch.empty(len(part), 0, dtype=torch.int64, device=part.device)
        for start in range(0, len(items), _ITEMS):
            block = part @ items[start : start + _ITEMS].T
            here = torch.arange(start, start + block.shape[1], device=part.device).expand_as(block)
            scores, positions = torch.cat([scores, block], dim=1), torch.cat([positions, here], dim=1)
            scores, at = scores.topk(min(most, scores.shape[1]), dim=1)
            positions = positions.gather(1, at)
        yield positions


def _vectors(model: nn.Module, batch: Batch, what: str) -> tuple[Tensor, Tensor]:
    found = cast("Sequence[Tensor]", model(batch, vectors=True))
    if not bool(found[what == "items"].isfinite().all()):
        raise NonFiniteError(
            f"evaluation: a vector of {what} is not finite; the model has diverged or an input is not finite"
        )
    users, items = found
    return users.float(), items.float()
