"""Define six planted logs, each hard in its own way: drift, rare ids, skewed numbers, histories, few rows, many rows.

Names and types of columns are unlike each other and unlike hotbed's own, as they are in the wild.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from typing_extensions import override

from benchmarks.first_contact.planted import Array, Layout, Planted, Roles, effects, zipf

_DAY = 86_400
_MONDAY = 1_704_067_200  # 2024-01-01 in seconds


class Drift(Planted):
    """Items come and go, and what they are worth moves: one file in the order of time, with a timestamp."""

    name = "drift"
    layout: ClassVar[Layout] = "file"
    roles = Roles("is_clicked", ids=("Customer-Nr", "article", "land", "device.type", "placement"), numbers=("age",))
    _counts: ClassVar = {"Customer-Nr": 20_000, "article": 4_000, "land": 30, "device.type": 4, "placement": 60}

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self._effects, self._moves = effects(rng, self._counts), effects(rng, self._counts)
        self._taste = {name: rng.normal(size=(self._counts[name], 4)) for name in ("Customer-Nr", "article")}

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size = len(time)
        ids = {name: zipf(rng, count, size) for name, count in self._counts.items()}
        alive = self._counts["article"] // 4  # the others are not yet there, or gone
        ids["article"] = (zipf(rng, alive, size) * 7) % alive + (time * 3 * alive).astype(np.int64)
        age = rng.integers(18, 80, size)
        weight = {"Customer-Nr": 0.5, "article": 0.7, "land": 0.3, "device.type": 0.3, "placement": 0.5}
        logits = 0.02 * (45 - age) + 0.25 * (
            self._taste["Customer-Nr"][ids["Customer-Nr"]] * self._taste["article"][ids["article"]]
        ).sum(1)
        for name, of in ids.items():
            logits += weight[name] * (self._effects[name][of] + (1.2 * (time - 0.5)) * self._moves[name][of])
        when = _MONDAY * 1_000_000 + (time * 60 * _DAY * 1e6).astype(np.int64)
        columns = {
            "event_time": pa.array(when, pa.timestamp("us", tz="UTC")),
            "Customer-Nr": pa.array(ids["Customer-Nr"] + 10_000_000),
            "article": pa.array([f"A{i:05d}" for i in ids["article"]]),
            "land": pa.array([f"L{i}" for i in ids["land"]]).dictionary_encode(),
            "device.type": pa.array(ids["device.type"].astype(np.int8)),
            "placement": pa.array(ids["placement"].astype(np.int16)),
            "age": pa.array(age.astype(np.float32)),
        }
        return columns, logits

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked)


class RareIds(Planted):
    """Most ids are seen once or twice; what can be learnt is in the categories that they belong to."""

    name = "rare ids"
    layout: ClassVar[Layout] = "files"
    roles = Roles("target", ids=("userId", "movieId", "genre", "studio", "campaign"))
    rate = 0.4

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self._users, self._movies = self.total // 2, self.total // 3
        self._genre_of = rng.integers(0, 40, self._movies)
        self._studio_of = rng.integers(0, 400, self._movies)
        counts = {"user": self._users, "movie": self._movies, "genre": 40, "studio": 400, "campaign": 1_000}
        self._effects = effects(rng, counts)

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size = len(time)
        user = (self._users * rng.random(size) ** 1.5).astype(np.int64)
        movie = (self._movies * rng.random(size) ** 2).astype(np.int64)
        campaign = zipf(rng, 1_000, size)
        genre, studio = self._genre_of[movie], self._studio_of[movie]
        of = self._effects
        logits = 0.5 * of["user"][user] + 0.5 * of["movie"][movie] + 0.6 * of["genre"][genre]
        logits += 0.5 * of["studio"][studio] + 0.4 * of["campaign"][campaign]
        logits += 0.3 * of["campaign"][campaign] * of["genre"][genre]
        columns = {
            "userId": pa.array([f"{(i * 2654435761) & 0xFFFFFFFFFF:010x}" for i in user.tolist()]),
            "movieId": pa.array(movie * 1_000_003 + 10**12),
            "genre": pa.array([f"genre {i}" for i in genre], pa.large_string()),
            "studio": pa.array(studio.astype(np.int32)),
            "campaign": pa.array(campaign.astype(np.uint16)),
        }
        return columns, logits

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked.astype(np.int64))


class Skewed(Planted):
    """Numbers as they come: prices over six decades, counts, balances of both signs, dates, missing values."""

    name = "skewed numbers"
    layout: ClassVar[Layout] = "files"
    numbers = ("preis (€)", "page views", "balance", "member since", "last_seen", "score", "share")
    roles = Roles("Bought", ids=("shop", "channel"), numbers=numbers)
    options = ("--label", "Bought")
    rate = 0.1

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self._effects = effects(rng, {"shop": 300, "channel": 6, "slope": 6})

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size = len(time)
        shop, channel = zipf(rng, 300, size), zipf(rng, 6, size)
        price = np.exp(rng.normal(3.5, 1.8, size))
        views = np.floor(rng.pareto(0.9, size)).clip(0, 1e6)
        balance = rng.standard_t(2, size) * 1_000
        days = rng.exponential(400, size).clip(0, 5_000)
        seconds_ago = np.exp(rng.normal(9, 2, size))
        score, share = rng.normal(size=size), rng.beta(0.5, 2, size)
        missing = rng.random(size) < 0.15
        now = _MONDAY + time * 30 * _DAY
        logits = 0.5 * self._effects["shop"][shop] + 0.4 * self._effects["channel"][channel]
        slope = -0.8 + 0.4 * self._effects["slope"][channel]
        logits += np.where(missing, 0.7, slope * np.tanh((np.log(price) - 3.5) / 1.5))
        logits += 0.9 * np.sin(np.log1p(views)) + 0.5 * np.tanh(balance / 800)
        logits += 0.8 * np.exp(-days / 200) - 0.25 * np.tanh((np.log(seconds_ago) - 9) / 2)
        logits += 0.4 * score + 0.8 * (share > 0.3)
        columns = {
            "shop": pa.array([f"shop-{i}" for i in shop]),
            "channel": pa.array([f"ch{i}" for i in channel]).dictionary_encode(),
            "preis (€)": pa.array(price, mask=missing),
            "page views": pa.array(views.astype(np.int64)),
            "balance": pa.array(balance),
            "member since": pa.array(((now / _DAY) - days).astype(np.int32), pa.date32()),
            "last_seen": pa.array((now - seconds_ago).astype(np.int64)),
            "score": pa.array(score.astype(np.float32)),
            "share": pa.array(share.astype(np.float32)),
        }
        return columns, logits

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked.astype(np.int8))


class Histories(Planted):
    """What a user has seen before, as lists of up to 200 ids of the same kind as the item that is shown."""

    name = "histories"
    layout: ClassVar[Layout] = "files"
    roles = Roles("y", ids=("item", "country"), lists=("seen items", "tags"), numbers=("hour",))
    _items, _tags = 3_000, 200

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self._effects = effects(rng, {"item": self._items, "country": 50, "tag": self._tags})
        self._groups = rng.integers(0, 20, self._items)
        centers = rng.normal(size=(20, 6))
        self._taste = centers[self._groups] + 0.3 * rng.normal(size=(self._items, 6))
        self._of_group = [np.flatnonzero(self._groups == g) for g in range(20)]

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size = len(time)
        item, country = zipf(rng, self._items, size), zipf(rng, 50, size)
        lengths = np.floor(np.exp(rng.normal(2.5, 1, size))).clip(0, 200).astype(np.int64)
        owner = np.repeat(np.arange(size), lengths)
        liked = rng.integers(0, 20, size)  # a group of items that a user likes more than others
        own = rng.random(len(owner)) < 0.5
        seen = zipf(rng, self._items, len(owner))
        members = np.array([len(of) for of in self._of_group])[liked[owner]]
        pick = (rng.random(len(owner)) * members).astype(np.int64)
        first = np.cumsum([0, *(len(of) for of in self._of_group)])[:-1]
        seen = np.where(own, np.concatenate(self._of_group)[first[liked[owner]] + pick], seen)
        total = np.zeros((size, 6))
        np.add.at(total, owner, self._taste[seen])
        mean = total / np.maximum(lengths, 1)[:, None]
        tags = rng.integers(0, 6, size)
        tag = zipf(rng, self._tags, int(tags.sum()))
        of_tags = np.bincount(np.repeat(np.arange(size), tags), self._effects["tag"][tag], size) / np.maximum(tags, 1)
        hour = rng.integers(0, 24, size)
        logits = 0.6 * (mean * self._taste[item]).sum(1) + 0.5 * self._effects["item"][item] + 0.6 * of_tags
        logits += 0.3 * self._effects["country"][country] + 0.3 * np.cos(hour / 24 * 2 * np.pi)
        columns = {
            "item": pa.array(item + 500),
            "seen items": _lists(seen + 500, lengths),
            "tags": _lists(np.array([f"#{t}" for t in range(self._tags)])[tag], tags),
            "country": pa.array([f"{i:02d}" for i in country]),
            "hour": pa.array(hour.astype(np.float64)),
        }
        return columns, logits

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked.astype(np.float64))


class Tiny(Planted):
    """2,000 rows to learn from: a file as pandas writes it, with its index."""

    name = "tiny"
    layout: ClassVar[Layout] = "train and test"
    roles = Roles("label", ids=("plan", "city", "os"), numbers=("Alter", "income", "visits"))
    rate = 0.3

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self._effects = effects(rng, {"plan": 5, "city": 60, "os": 4})

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size = len(time)
        ids = {"plan": zipf(rng, 5, size), "city": zipf(rng, 60, size), "os": zipf(rng, 4, size)}
        age, income = rng.normal(40, 12, size), np.exp(rng.normal(10, 0.8, size))
        visits = rng.poisson(np.exp(rng.normal(0.5, 1, size)))
        logits = 0.7 * np.tanh((age - 40) / 12) - 0.8 * np.tanh((np.log(income) - 10) / 0.8)
        logits += 0.4 * np.log1p(visits)
        for name, of in ids.items():
            logits += 0.6 * self._effects[name][of]
        columns = {
            "plan": pa.array([f"plan {i}" for i in ids["plan"]]),
            "city": pa.array([f"city {i}" for i in ids["city"]]),
            "os": pa.array(ids["os"].astype(np.int64)),
            "Unnamed: 0": pa.array(np.round(time * self.total - 0.5).astype(np.int64)),
            "Alter": pa.array(age),
            "income": pa.array(income),
            "visits": pa.array(visits.astype(np.float64)),
        }
        return columns, logits

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked.astype(np.uint8))


class Large(Planted):
    """Millions of rows of a shop: ids from a handful to a million, and how they fit each other."""

    name = "large"
    layout: ClassVar[Layout] = "files"
    _counts: ClassVar = {"visitor": 1_000_000, "sku": 100_000, "brand": 3_000, "store": 200, "os": 8, "slot": 12}
    roles = Roles("click", ids=tuple(_counts), numbers=("discount", "stock", "rank", "margin"))
    rate = 0.15

    @override
    def prepare(self, rng: np.random.Generator) -> None:
        self._effects = effects(rng, self._counts)
        self._taste = {name: rng.normal(size=(self._counts[name], 4)) for name in ("visitor", "brand", "store")}

    @override
    def draw(self, rng: np.random.Generator, time: Array) -> tuple[dict[str, Any], Array]:
        size = len(time)
        ids = {name: zipf(rng, count, size) for name, count in self._counts.items()}
        discount, margin = rng.random(size) ** 2, rng.normal(size=size)
        stock, rank = np.floor(np.exp(rng.normal(3, 1.5, size))), rng.integers(1, 50, size)
        logits = 1.2 * discount - 0.3 * np.log(rank) + 0.2 * np.tanh(np.log1p(stock) - 3) + 0.1 * margin
        for name, of in ids.items():
            logits += 0.35 * self._effects[name][of]
        visitor, brand, store = (self._taste[name][ids[name]] for name in ("visitor", "brand", "store"))
        logits += 0.25 * ((visitor + store) * brand).sum(1)
        columns: dict[str, Any] = {name: pa.array(of * 31 + 7) for name, of in ids.items()}
        columns["os"] = pa.array(np.array([f"os-{i}" for i in range(8)])[ids["os"]])
        columns |= {
            "discount": pa.array(discount.astype(np.float32)),
            "stock": pa.array(stock),
            "rank": pa.array(rank.astype(np.float32)),
            "margin": pa.array(margin),
        }
        return columns, logits

    @override
    def label(self, clicked: Array) -> Any:
        return pa.array(clicked.astype(np.int32))


def _lists(values: Array, lengths: Array) -> Any:
    return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), pa.array(values))


_ROWS: dict[type[Planted], int] = {
    Drift: 200_000,
    RareIds: 200_000,
    Skewed: 200_000,
    Histories: 150_000,
    Tiny: 2_000,
    Large: 5_000_000,
}
LOGS: dict[str, type[Planted]] = {log.name: log for log in _ROWS}
"""All planted logs by name."""
_MIN_TEST, _MAX_TEST = 25_000, 500_000


def planted(name: str, *, scale: float = 1.0, seed: int = 0) -> Planted:
    """Make a planted log; its training rows are scaled, but for the tiny one, and its test is never too small."""
    log = LOGS[name]
    rows = _ROWS[log] if log is Tiny else max(1_000, round(_ROWS[log] * scale))
    valid = rows // 5 if log is Tiny else rows // 8
    train = rows - valid if log is Tiny else rows
    test = valid if log.layout == "file" else min(max(valid, _MIN_TEST), _MAX_TEST)
    return log(train, valid, test, seed=seed)
