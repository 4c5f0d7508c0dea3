"""Plant one log for each thing that a model is made for; what is planted stands in each class's docstring."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from typing_extensions import override

from benchmarks.first_contact.planted import Array, Layout, Planted, Roles, effects, intercept_of, zipf


class Log(Planted):
    """A planted log whose ids are numbered from 0, so that they are rows of tables as they are."""

    layout: ClassVar[Layout] = "files"
    rate = 0.3
    counts: ClassVar[dict[str, int]]
    """Rows of the table of each feature of one id."""
    tables: ClassVar[dict[str, str]] = {}
    """For each list, the feature whose table it shares."""
    longest: ClassVar[int] = 0
    """Most ids of a history."""
    second: ClassVar[str | None] = None
    """Another label, which is among the columns of `draw`, as is its probability under ``"p"``."""

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked.astype(np.int8))


class _Topics(Log):
    """Items belong to topics, which no column says."""

    roles = Roles("click", ids=("item",), lists=("history",))
    tables: ClassVar = {"history": "item"}
    topics: ClassVar[int] = 1

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self.effects = effects(rng, self.counts)["item"]
        self.topic_of = rng.permutation(np.arange(self.counts["item"]) % self.topics)
        self.of_topic = np.argsort(self.topic_of, kind="stable").reshape(self.topics, -1)

    def items(self, rng: np.random.Generator, topics: Array) -> Array:
        """An item of each of these topics, some of them more often than others."""
        members = self.of_topic.shape[1]
        return self.of_topic[topics.ravel(), zipf(rng, members, topics.size)].reshape(topics.shape)

    def columns(self, history: Array, lengths: Array, item: Array) -> dict[str, Any]:
        """Columns, of histories ``[B, L]`` whose newest ids, at the end, are kept."""
        kept = np.arange(history.shape[1]) >= history.shape[1] - lengths[:, None]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return {"item": pa.array(item), "history": pa.ListArray.from_arrays(offsets, pa.array(history[kept]))}


def mix(rng: np.random.Generator, *choices: Array) -> Array:
    """One of several arrays ``[B]`` for each sample, at equal shares."""
    return np.stack(choices)[rng.integers(len(choices), size=len(choices[0])), np.arange(len(choices[0]))]


class Interests(_Topics):
    """A history of 8 to 24 items mixes two to six topics of 100, and every fourth item is of any.

    What a candidate is worth grows with the number m of items of its topic in the history as 1 − 0.6^m, plus what the
    item itself is worth. Their order says nothing.
    """

    name = "interests"
    counts: ClassVar = {"item": 500}
    topics = 100
    longest = 24

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size, rows = len(time), np.arange(len(time))
        liked = rng.integers(0, self.topics, (size, 6))
        count = rng.integers(2, 7, size)
        which = (rng.random((size, self.longest)) * count[:, None]).astype(np.int64)
        noise = rng.random((size, self.longest)) < 0.25
        topics = np.where(noise, rng.integers(0, self.topics, noise.shape), np.take_along_axis(liked, which, 1))
        lengths = rng.integers(8, self.longest + 1, size)
        own = liked[rows, (rng.random(size) * count).astype(np.int64)]
        candidate = mix(rng, own, rng.integers(0, self.topics, size))
        kept = np.arange(self.longest) >= self.longest - lengths[:, None]
        same = ((topics == candidate[:, None]) & kept).sum(1)
        item = self.items(rng, candidate)
        logits = 3.5 * (1 - 0.6**same) + 0.4 * self.effects[item]
        return self.columns(self.items(rng, topics), lengths, item), logits


class Drift(_Topics):
    """A user likes three topics of 20 at a time, one of which is given up for another now and then.

    An item of the candidate's topic that was seen k items before the newest counts 0.8^k; what a candidate is worth
    grows with the hyperbolic tangent of their sum. Candidates are of present interests, of former ones, or of any.
    """

    name = "drift"
    counts: ClassVar = {"item": 100}
    topics = 20
    longest = 20

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size, rows = len(time), np.arange(len(time))
        liked = rng.integers(0, self.topics, (size, 3))
        topics = np.empty((size, self.longest), np.int64)
        for place in range(self.longest):
            change = rng.random(size) < 0.2
            liked[rows[change], rng.integers(0, 3, change.sum())] = rng.integers(0, self.topics, change.sum())
            any_topic = rng.integers(0, self.topics, size)
            topics[:, place] = np.where(rng.random(size) < 0.1, any_topic, liked[rows, rng.integers(0, 3, size)])
        lengths = rng.integers(8, self.longest + 1, size)
        former = topics[rows, self.longest - 1 - (rng.random(size) * lengths).astype(np.int64)]
        candidate = mix(rng, liked[rows, rng.integers(0, 3, size)], former, rng.integers(0, self.topics, size))
        age = self.longest - 1 - np.arange(self.longest)
        same = (topics == candidate[:, None]) & (age < lengths[:, None])
        item = self.items(rng, candidate)
        logits = 3.5 * np.tanh((same * 0.8**age).sum(1)) + 0.4 * self.effects[item]
        return self.columns(self.items(rng, topics), lengths, item), logits


class Order(_Topics):
    """Every topic of 20 has one that follows it, and a history follows it six times of ten, else goes anywhere.

    A candidate of the topic that follows the newest item is worth 3, one that follows the item before that 1. Others
    follow an older item, or are of any topic.
    """

    name = "order"
    counts: ClassVar = {"item": 100}
    topics = 20
    longest = 15

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        super().prepare(rng)
        self.next = np.roll(np.arange(self.topics), -1)[np.argsort(rng.permutation(self.topics))]

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size, rows = len(time), np.arange(len(time))
        topics = rng.integers(0, self.topics, (size, self.longest))
        for place in range(1, self.longest):
            follows = rng.random(size) < 0.6
            topics[:, place] = np.where(follows, self.next[topics[:, place - 1]], topics[:, place])
        lengths = rng.integers(3, self.longest + 1, size)
        older = topics[rows, self.longest - 1 - (rng.random(size) * lengths).astype(np.int64)]
        anything = rng.integers(0, self.topics, size)
        candidate = mix(rng, self.next[topics[:, -1]], self.next[older], anything)
        item = self.items(rng, candidate)
        logits = 3.0 * (candidate == self.next[topics[:, -1]]) + 1.0 * (candidate == self.next[topics[:, -2]])
        return self.columns(self.items(rng, topics), lengths, item), logits + 0.4 * self.effects[item]


class Crosses(Log):
    """What a place, an audience and an ad are worth together: a sum of four products of three factors each.

    Beside them what each id is worth by itself, two more columns with nothing else, and a number.
    """

    name = "crosses"
    counts: ClassVar = {"place": 25, "audience": 25, "ad": 25, "device": 6, "campaign": 200}
    roles = Roles("click", ids=tuple(counts), numbers=("hour",))

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self.effects = effects(rng, self.counts)
        self.factors = {name: rng.normal(size=(self.counts[name], 4)) for name in ("place", "audience", "ad")}

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        ids = {name: zipf(rng, count, len(time)) for name, count in self.counts.items()}
        hour = rng.random(len(time))
        factors = [of[ids[name]] for name, of in self.factors.items()]
        logits = 0.7 * (factors[0] * factors[1] * factors[2]).sum(1) + 0.5 * np.sin(6 * hour)
        for name, of in ids.items():
            logits += 0.3 * self.effects[name][of]
        return {**{name: pa.array(of) for name, of in ids.items()}, "hour": pa.array(hour)}, logits


class Slopes(Log):
    """How much each of five numbers matters is a slope of the user's, plus one of the item's, as with tastes for price.

    Beside them what each id is worth by itself.
    """

    name = "slopes"
    counts: ClassVar = {"user": 300, "item": 100, "channel": 12}
    numbers = ("price", "distance", "rating", "age", "discount")
    roles = Roles("click", ids=tuple(counts), numbers=numbers)

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self.effects = effects(rng, self.counts)
        self.slopes = {name: rng.normal(size=(self.counts[name], len(self.numbers))) for name in ("user", "item")}

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        ids = {name: zipf(rng, count, len(time)) for name, count in self.counts.items()}
        x = rng.normal(size=(len(time), len(self.numbers)))
        logits = 0.5 * sum((of[ids[name]] * x).sum(1) for name, of in self.slopes.items())
        for name, of in ids.items():
            logits = logits + 0.4 * self.effects[name][of]
        columns = {name: pa.array(of) for name, of in ids.items()}
        return columns | {name: pa.array(x[:, i]) for i, name in enumerate(self.numbers)}, logits


class Pairs(Log):
    """A factorization machine (Rendle 2010, equation 1): what each id is worth, and products of factors of all pairs.

    There are six columns of ids, with four factors each, and nothing else.
    """

    name = "pairs"
    counts: ClassVar = {"user": 1_000, "item": 500, "shop": 200, "city": 50, "hour": 24, "channel": 12}
    roles = Roles("click", ids=tuple(counts))

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self.effects = effects(rng, self.counts)
        self.factors = {name: rng.normal(size=(count, 4)) for name, count in self.counts.items()}

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        ids = {name: zipf(rng, count, len(time)) for name, count in self.counts.items()}
        factors = np.stack([of[ids[name]] for name, of in self.factors.items()])
        pairs = (factors.sum(0) ** 2 - (factors**2).sum(0)).sum(1) / 2
        alone = sum(of[ids[name]] for name, of in self.effects.items())
        return {name: pa.array(of) for name, of in ids.items()}, 0.25 * pairs + 0.5 * alone


class _TwoLabels(Log):
    """A log whose second label is drawn by logits that are in its column."""

    second: ClassVar[str]
    of_first: ClassVar[bool] = False
    """Whether only samples with the first label have the second."""

    @property
    def second_intercept(self) -> float:
        """What is added to the logits of the second label."""
        return self.intercept

    @override
    def chunks(self, split: str) -> Iterator[tuple[Any, Array, Array]]:
        """As in `Planted`, with the second label drawn, too, and its probabilities in the column ``"p"``."""
        rng = np.random.default_rng([self.seed, 4, list(self.sizes).index(split)])
        for table, probability, clicked in super().chunks(split):
            given = 1 / (1 + np.exp(-(table[self.second].to_numpy() + self.second_intercept)))
            drawn = rng.random(len(given)) < given
            if self.of_first:
                given, drawn = probability * given, clicked & drawn
            place = table.column_names.index(self.second)
            table = table.set_column(place, self.second, self.label(drawn))
            yield table.append_column("p", pa.array(given)), probability, clicked


class Conflict(_TwoLabels):
    """Two labels of numbers, as Ma et al. (KDD 2018, section 3.2) plant them, with a correlation of one half.

    Each is a linear function of 24 numbers, plus sines of it; the weights of the two have this cosine. Beside them
    what a channel is worth, to both alike.
    """

    name = "conflict"
    counts: ClassVar = {"channel": 12}
    numbers = tuple(f"x{i}" for i in range(24))
    roles = Roles("like", ids=tuple(counts), numbers=numbers)
    second = "share"
    correlation, sines = 0.5, 6

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        size = len(self.numbers)
        basis = np.linalg.qr(rng.normal(size=(size, 2)))[0].T
        self.weights = basis[0], self.correlation * basis[0] + np.sqrt(1 - self.correlation**2) * basis[1]
        self.rates, self.phases = rng.uniform(1, 4, self.sines), rng.uniform(0, 2 * np.pi, self.sines)
        self.effects = effects(rng, self.counts)["channel"]

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        x, channel = rng.normal(size=(len(time), len(self.numbers))), zipf(rng, self.counts["channel"], len(time))
        logits: list[Array] = []
        for weights in self.weights:
            along = x @ weights
            waves = np.sin(along[:, None] * self.rates + self.phases).sum(1)
            logits.append(along + waves + 0.3 * self.effects[channel])
        columns = {"channel": pa.array(channel)} | {name: pa.array(x[:, i]) for i, name in enumerate(self.numbers)}
        return columns | {self.second: pa.array(logits[1])}, logits[0]


class Tasks(_TwoLabels):
    """Clicks, a fifth of the samples, and purchases, of one click in ten.

    Either goes by how a user's taste and an item fit: in two dimensions that both share, in two of their own. Price
    attracts few clicks, and matters more for purchases.
    """

    name = "tasks"
    counts: ClassVar = {"user": 300, "item": 100, "channel": 12}
    roles = Roles("click", ids=tuple(counts), numbers=("price", "hour"))
    rate = 0.2
    second, of_first = "purchase", True
    of_clicks = 0.1

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self.effects, self.others = effects(rng, self.counts), effects(rng, self.counts)
        self.taste = {name: rng.normal(size=(self.counts[name], 6)) for name in ("user", "item")}

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        ids = {name: zipf(rng, count, len(time)) for name, count in self.counts.items()}
        price, hour = rng.normal(size=len(time)), rng.random(len(time))
        fit = self.taste["user"][ids["user"]] * self.taste["item"][ids["item"]]
        click = 0.6 * (fit[:, :2].sum(1) + fit[:, 2:4].sum(1)) - 0.3 * price + 0.4 * np.sin(6 * hour)
        purchase = 0.6 * (fit[:, :2].sum(1) + fit[:, 4:].sum(1)) - 0.9 * price
        for name, of in ids.items():
            click += 0.3 * self.effects[name][of]
            purchase += 0.3 * self.others[name][of]
        columns = {**{name: pa.array(of) for name, of in ids.items()}, "price": pa.array(price), "hour": pa.array(hour)}
        return columns | {"purchase": pa.array(purchase)}, click

    @functools.cached_property
    @override
    def second_intercept(self) -> float:
        """Puts the share of clicks that end in a purchase, nearly, where `of_clicks` says."""
        columns, logits = self.draw(np.random.default_rng([self.seed, 5]), np.linspace(0, 1, 50_000, endpoint=False))
        clicks = 1 / (1 + np.exp(-(logits + self.intercept)))
        purchases = columns["purchase"].to_numpy()[np.random.default_rng(0).random(50_000) < clicks]
        return intercept_of(purchases, self.of_clicks)


LOGS: dict[str, type[Log]] = {
    log.name: log for log in (Interests, Drift, Order, Crosses, Slopes, Pairs, Tasks, Conflict)
}
"""All logs of one label or two, by name."""
