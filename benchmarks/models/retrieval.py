"""Plant what users look at next among 100,000 items, and measure which share of it a model has in its best hundred.

A user likes three topics of 1,000, by weights 5 : 3 : 2. A history of 8 to 16 items is of these; the next item is, too,
nine times of ten, else of any topic; within a topic of 100 items, the k-th is 1/k as frequent as the first. The columns
are the history, its topics, the item and its topic. A history holds every topic several times, so the probability of
each next item given the likes is known, and what its best hundred hold is the attainable recall.

`TwoTower` is trained by the softmax over the items of a batch and as many as `DRAWN` drawn uniformly, with the
correction for how often each is among them; `DLRM`, which needs labels, by each next item beside four items drawn
uniformly. Both rank all items for the same users.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.first_contact.planted import Array, zipf
from benchmarks.models.training import Settings, fit

PER_TOPIC, LONGEST, NEGATIVES, DRAWN, BEST = 100, 16, 4, 1024, 100
BLOCK = 8_192
"""Items that `DLRM` scores at a time, so that what it computes of them stays in caches."""
WEIGHTS = np.array([0.5, 0.3, 0.2])
ANY = 0.1
"""Share of next items that are of any topic."""


@dataclass(frozen=True)
class Visits:
    """Users: their ids, and the topics that they like ``[N, 3]``."""

    batch: hb.Batch
    liked: Array


class Retrieval:
    """The planted log, and what models reach on it.

    Parameters
    ----------
    topics
        Their number; there are `PER_TOPIC` items of each.
    train, users
        Next items to train on, and users of valid and of test, for each of whom all items are ranked.
    seed
        Of everything that is drawn.
    """

    name = "retrieval"
    models = ("DLRM", "TwoTower")

    def __init__(self, topics: int, train: int, users: int, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, 6])
        self.topics, self.items = topics, topics * PER_TOPIC
        self.topic_of = rng.permutation(np.arange(self.items) % topics)
        self.of_topic = np.argsort(self.topic_of, kind="stable").reshape(topics, PER_TOPIC)
        self.splits = {name: self._draw(rng, n) for name, n in (("train", train), ("valid", users), ("test", users))}
        share = np.log1p(1 / np.arange(1, PER_TOPIC + 1)) / np.log(PER_TOPIC + 1)  # what `zipf` draws
        self.within = np.empty(self.items)
        self.within[self.of_topic] = share

    def _draw(self, rng: np.random.Generator, size: int) -> Visits:
        liked = _distinct(rng, self.topics, size)
        topics = np.take_along_axis(liked, rng.choice(3, (size, LONGEST + 1), p=WEIGHTS), 1)
        topics[:, -1] = np.where(rng.random(size) < ANY, rng.integers(0, self.topics, size), topics[:, -1])
        items = self.of_topic[topics.ravel(), zipf(rng, PER_TOPIC, topics.size)].reshape(topics.shape)
        lengths = rng.integers(LONGEST // 2, LONGEST + 1, size)
        kept = np.arange(LONGEST) < lengths[:, None]
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        ids = {
            "history": (torch.from_numpy(items[:, :-1][kept]), offsets),
            "topics": (torch.from_numpy(topics[:, :-1][kept]), offsets),
            "item": torch.from_numpy(items[:, -1].copy()),
            "topic": torch.from_numpy(topics[:, -1].copy()),
        }
        return Visits(hb.Batch(sparse=hb.Jagged.from_dict(ids)), liked)

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes, with which results can be compared."""
        return {
            "samples": len(self.splits["train"].batch),
            "items": self.items,
            "users": len(self.splits["test"].batch),
        }

    def attainable(self) -> dict[str, float]:
        """Recall of the items that are most probable given what a user likes."""
        test = self.splits["test"]
        hits = 0
        for user, liked in enumerate(test.liked):
            of_topic = np.full(self.topics, ANY / self.topics)
            of_topic[liked] += (1 - ANY) * WEIGHTS
            best = np.argpartition(-of_topic[self.topic_of] * self.within, BEST)[:BEST]
            hits += int(test.batch.sparse["item"].values[user]) in best
        return {"score": hits / len(test.liked)}

    def run(self, name: str, settings: Settings, seed: int) -> dict[str, Any]:
        """Train a model; its recall on valid and test."""
        start = time.perf_counter()
        torch.manual_seed(seed)
        tables = [
            hb.Table(n, r, settings.dim, init_bound=settings.init_bound)
            for n, r in (("item", self.items), ("topic", self.topics))
        ]
        features = [hb.Feature("item", "item"), hb.Feature("topic", "topic")]
        features += [hb.Feature("history", "item", pooling="mean"), hb.Feature("topics", "topic", pooling="mean")]
        train = self.splits["train"].batch
        if name == "DLRM":
            model: nn.Module = hb.nn.DLRM(
                tables,
                features,
                0,
                bottom=(settings.dim,),
                top=(*settings.widths, 1),
                embeddings_to_top=True,
                seed=seed,
            )
            draws = torch.Generator().manual_seed(seed)
            fit(model, train, settings, seed, lambda m, batch: self._with_negatives(m, batch, draws))
        else:
            model = hb.nn.TwoTower(tables, features, item=["item", "topic"], widths=settings.widths, seed=seed)
            fit(model, train, settings, seed, _MixedNegatives(self, seed))
        found = {split: self.recall(model, self.splits[split].batch) for split in ("valid", "test")}
        seconds = round(time.perf_counter() - start, 1)
        return {"valid": found["valid"], "test": {"score": found["test"]}, "seconds": seconds}

    def _with_negatives(self, model: nn.Module, batch: hb.Batch, draws: torch.Generator) -> Tensor:
        size = len(batch)
        items = torch.randint(0, self.items, (size * NEGATIVES,), generator=draws)
        whole = self.beside(
            batch, torch.arange(size).repeat(1 + NEGATIVES), torch.cat([batch.sparse["item"].values, items])
        )
        labels = (torch.arange(len(whole)) < size).float()[:, None]
        return F.binary_cross_entropy_with_logits(model(whole), labels)

    def beside(self, users: hb.Batch, which: Tensor, items: Tensor) -> hb.Batch:
        """Users with other items."""
        taken = users.take(which).sparse
        topics = torch.from_numpy(self.topic_of)[items]
        ids = {name: (taken[name].values, cast(Tensor, taken[name].offsets)) for name in ("history", "topics")}
        return hb.Batch(sparse=hb.Jagged.from_dict({**ids, "item": items, "topic": topics}))

    @torch.no_grad()
    def recall(self, model: nn.Module, users: hb.Batch) -> float:
        """Share of users whose next item is among the best `BEST` of all items."""
        model.eval()
        own, hits = users.sparse["item"].values, 0
        if isinstance(model, hb.nn.DLRM):
            scores = self.dlrm_scores(model, users)
        else:
            everything = torch.arange(self.items)
            items = model(self.beside(users, everything * 0, everything), vectors=True)[1]
            scores = iter(model(users, vectors=True)[0] @ items.T)
        for item, of_user in zip(own.tolist(), scores, strict=True):
            hits += int((of_user > of_user[item]).sum()) < BEST
        return hits / len(users)

    def dlrm_scores(self, model: hb.nn.DLRM, users: hb.Batch) -> Any:
        """Logits ``[items]`` of one user after the other: what `DLRM.forward` computes, with items looked up once."""
        of_users = model.embeddings(users.sparse)
        vectors = torch.empty(self.items, 5, model.interaction.dim)
        vectors[:, 0] = model.bottom(torch.ones(1, 1))
        vectors[:, 1] = model.embeddings.weight("item")
        vectors[:, 2] = model.embeddings.weight("topic")[torch.from_numpy(self.topic_of)]
        for history, topics in zip(of_users["history"], of_users["topics"], strict=True):
            scores = list[Tensor]()
            for block in vectors.split(BLOCK):
                block[:, 3], block[:, 4] = history, topics
                inputs = torch.cat([model.interaction(block), block[:, 1:].flatten(1)], dim=1)
                scores.append(model.top(inputs)[:, 0])
            yield torch.cat(scores)


class _MixedNegatives:
    """The loss of `TwoTower`; its negatives are those of the batch, and `DRAWN` items (Yang et al., WWW 2020)."""

    def __init__(self, case: Retrieval, seed: int) -> None:
        self.case, self.draws = case, torch.Generator().manual_seed(seed)
        self.softmax, self.frequencies = hb.nn.InBatchSoftmax(), hb.nn.ItemFrequencies(1 << 18)

    def __call__(self, model: nn.Module, batch: hb.Batch) -> Tensor:
        ids, size = batch.sparse["item"].values, len(batch)
        drawn = torch.randint(0, self.case.items, (DRAWN,), generator=self.draws)
        whole = hb.Jagged.concatenate([batch.sparse, self.case.beside(batch, drawn * 0, drawn).sparse])
        users, items = model(hb.Batch(sparse=whole), vectors=True, users=size)
        of_batch = self.frequencies.train()(ids)
        of_drawn = self.frequencies.eval()(drawn)
        log_drawn = torch.tensor(math.log(DRAWN / self.case.items))
        log_q = torch.logaddexp(torch.cat([of_batch, of_drawn]), log_drawn)
        return self.softmax(users, items, torch.cat([ids, drawn]), log_q, own=torch.arange(size)).mean()


def _distinct(rng: np.random.Generator, count: int, size: int) -> Array:
    """Three distinct numbers below ``count`` for each of ``size``."""
    first = rng.integers(0, count, size)
    second = (first + rng.integers(1, count, size)) % count
    third = rng.integers(0, count - 2, size)
    for other in (np.minimum(first, second), np.maximum(first, second)):
        third += third >= other
    return np.stack([first, second, third], axis=1)
