"""Define the recipe's section on retrieval: a two-tower model is trained to find items among all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from hotbed.config.component import Component, at_least, one_of
from hotbed.errors import RecipeError

SampledBy = Literal["uniform", "popularity"]


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe:
    """Which negatives an item is told from, and among how many items it is to be found.

    The item of a sample is what the first of the model's ``item`` columns says. A sample is a positive if its label is
    1, or if the data have no label; the item of any other sample is a negative of all positives.
    """

    loss: Component = field(default_factory=lambda: Component(class_path="hotbed.nn.InBatchSoftmax"))
    """The loss of vectors of users and items, called as `hotbed.nn.InBatchSoftmax` is; made with the model's
    ``temperature`` unless init_args say another."""
    correction: Component | None = field(default_factory=lambda: Component(class_path="hotbed.nn.ItemFrequencies"))
    """What estimates how probable each item is in a batch, to correct for it; null: nothing is corrected."""
    sampled: int = 0
    """Items that are drawn for each batch, negatives of all its samples beside the batch's own items."""
    sampled_by: SampledBy = "uniform"
    """Draw all items alike, or in proportion to how often each is in the split to train on."""
    negatives: str | None = None
    """Column of lists of items, of the table of the item's column: negatives of their own sample alone."""
    items: str | None = None
    """Parquet of all items, a row each, with the model's item columns; default: the items of the data's splits."""
    k: list[int] = field(default_factory=lambda: [10, 100])
    """Evaluations measure recall@k and ndcg@k among all items; the last one's is `TrainRecipe.monitor`'s."""

    def __post_init__(self) -> None:
        at_least("retrieval.sampled", self.sampled, 0)
        one_of("retrieval.sampled_by", self.sampled_by, get_args(SampledBy))
        if not isinstance(self.k, list) or not self.k:
            raise RecipeError(f"retrieval.k is {self.k!r}, must be a list of numbers of items, such as [10, 100]")
        for k in self.k:
            at_least("retrieval.k", k, 1)
        if len(set(self.k)) < len(self.k):
            raise RecipeError(f"retrieval.k is {self.k}, which names a number twice; once will do")
        if self.sampled and self.sampled_by == "popularity" and self.items is not None:
            raise RecipeError(
                f"retrieval.sampled_by is 'popularity', and retrieval.items {self.items} does not say how often items "
                "are met; leave retrieval.items out, so that they are counted, or draw them uniform"
            )
