"""Compute samples instead of storing them: `ZipfSource`, with tables of any size and ids by Zipf's law.

The source is for measurements of tables without data. Lookups are skewed as in real logs, and labels depend on some of
the ids, so that a model can learn. Sample i is a pure function of (seed, i).

A random number is a pure function of a stream's key and a counter i: output i of SplitMix64 with the key as seed. So
any part of a stream can be computed without the rest of the stream. `ZipfLaw` converts random numbers to ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.checks import Count, Range, Size, check, check_known
from hotbed.data.columns import SparseColumn
from hotbed.data.hashing import Hashes, mix
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.files import read_text
from hotbed.jagged import Jagged
from hotbed.parsing import TextError, parse_yaml

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_EXPONENT = 16
"""Largest exponent of Zipf's law."""

MOST_COLUMNS = 100_000
"""Limit of the number of columns if the list of rows is repeated (``times``)."""

_STEP = np.uint64(0x9E3779B97F4A7C15)  # of SplitMix64's state


@cache
def stream_key(*names: int) -> np.uint64:
    """Return the key of the random stream that the integers ``names`` identify (all at least 0, the last above 0)."""
    return np.random.SeedSequence(names).generate_state(1, np.uint64)[0]


def random_words(key: np.uint64, counters: Hashes) -> Hashes:
    """Return random 64-bit words of a stream at these counters ``[n]``."""
    state = counters * _STEP
    state += key  # in place, to save a copy
    return mix(state)


def random_uniform(key: np.uint64, counters: Hashes) -> Floats:
    """Return random float64 in [0, 1) of a stream at these counters ``[n]``. They are multiples of 2⁻⁵³."""
    return (random_words(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class ZipfLaw:
    """Zipf's law over ranks 0 … ``rows`` − 1: rank r has a probability in proportion to (r + 1)^−s.

    s is the exponent. The law is uniform for s = 0. Ranks are sampled by rejection-inversion (Hörmann and Derflinger,
    "Rejection-inversion to generate variates from monotone discrete distributions", ACM TOMACS 6(3), 1996). A point
    under the continuous curve x^−s is drawn by inversion and rounded to the nearest rank. The point is rejected if it
    lies above the discrete law. More than 85 % of the points are accepted. No table of probabilities is needed.
    ``expm1`` and ``log1p`` keep the integral accurate for exponents near 1.
    """

    def __init__(self, rows: int, exponent: float) -> None:
        check("rows", rows, Annotated[int, Range(least=1, most=1 << 52, note=" (2⁵²)")], SpecError)
        check("exponent", exponent, Annotated[float, Range(least=0, most=MAX_EXPONENT)], SpecError)
        self.rows = rows
        self.exponent = exponent
        # No point of the first rank is rejected, because its interval begins where the area is 1 = 1^−s.
        self._first = float(self._area(np.array([1.5]))[0]) - 1.0
        self._last = float(self._area(np.array([rows + 0.5]))[0])
        # All points within this distance below a rank are accepted. It is smallest at rank 2.
        below_2 = self._area(np.array([2.5])) - 2.0**-exponent
        self._sure = float(2.0 - self._inverse(below_2)[0])

    def draw(self, names: tuple[int, ...], counters: Hashes) -> Integers:
        """Return independent ranks ``[n]``, computed at these counters of the stream with these names."""
        ranks = np.empty(len(counters), dtype=np.int64)
        left: slice | Integers = slice(None)  # positions without an accepted rank; a slice saves copies at first
        for attempt in itertools.count(1):
            ranks[left], accepted = self._propose(random_uniform(stream_key(*names, attempt), counters[left]))
            left = np.flatnonzero(~accepted) if isinstance(left, slice) else left[~accepted]
            if not len(left):
                break
        return ranks

    def _propose(self, u: Floats) -> tuple[Integers, NDArray[np.bool_]]:
        u *= self._first - self._last
        u += self._last
        x = self._inverse(u)
        rank = np.clip(np.floor(x + 0.5), 1, self.rows)
        accepted = rank - x <= self._sure
        unsure = np.flatnonzero(~accepted)
        r = rank[unsure]
        accepted[unsure] = u[unsure] >= self._area(r + 0.5) - r**-self.exponent
        return rank.astype(np.int64) - 1, accepted

    def _area(self, x: Floats) -> Floats:
        """Return ∫ t^−s dt from 1 to x."""
        log = np.log(x)
        return log if self.exponent == 1 else np.expm1((1 - self.exponent) * log) / (1 - self.exponent)

    def _inverse(self, area: Floats) -> Floats:
        log = area if self.exponent == 1 else np.log1p((1 - self.exponent) * area) / (1 - self.exponent)
        return np.exp(log)


RANKED = 10
"""Number of occurrences that a value needs, so that its rank is reliable."""


def fit_exponent(counts: NDArray[Any]) -> float | None:
    """Estimate the exponent s of Zipf's law from the counts ``[K]`` of values, in descending order.

    Each value should have at least `RANKED` occurrences. Ranks r are 1 … K. With the maximum-likelihood estimate, the
    mean of ln r over all occurrences equals its expectation Σ r^−s ln r / Σ r^−s (Clauset, Shalizi and Newman,
    "Power-law distributions in empirical data", SIAM Review 51(4), 2009, section 3.1). Return None if K is below 2.
    """
    if len(counts) < 2:
        return None
    ln_rank = np.log(np.arange(1, len(counts) + 1))
    mean = counts.astype(np.float64) @ ln_rank / counts.sum()
    low, high = 0.0, 64.0
    for _ in range(40):  # bisection: the expectation decreases with the exponent
        middle = (low + high) / 2
        law = np.exp(-middle * ln_rank)
        low, high = (middle, high) if law @ ln_rank / law.sum() > mean else (low, middle)
    return (low + high) / 2


# fmt: off
CRITEO_1TB = {
    "criteo_1tb_t15": (
        7_912_889, 33_823, 17_139, 7_339, 20_046, 4, 7_105, 1_382, 63, 5_554_114, 582_469, 245_828, 11,
        2_209, 10_667, 104, 4, 968, 15, 8_165_896, 2_675_940, 7_156_453, 302_516, 12_022, 97, 35,
    ),
    "criteo_1tb_t3": (
        45_833_188, 36_747, 17_246, 7_414, 20_244, 4, 7_115, 1_442, 63, 29_275_261, 1_572_176, 345_139, 11,
        2_209, 11_268, 128, 4, 975, 15, 48_937_457, 11_316_796, 40_094_537, 452_104, 12_607, 105, 36,
    ),
    "criteo_1tb_t0": (
        227_605_432, 39_061, 17_296, 7_425, 20_266, 4, 7_123, 1_544, 64, 130_229_467, 3_067_956, 405_283, 11,
        2_209, 11_939, 155, 4, 977, 15, 292_775_614, 40_790_948, 187_188_510, 590_152, 12_974, 109, 37,
    ),
}
# fmt: on
"""Table rows of columns C1 … C26 of the Criteo 1TB log if only values with at least 15, 3 or 1 occurrences have ids."""

_IDS, _DENSE, _LABEL, _EFFECT, _WEIGHT = range(1, 6)  # first names of streams, see `stream_key`
_EVERY = 4  # the label depends on every fourth sparse and dense column
MOST_SAMPLES = 1 << 40
"""Limit of the samples of a split. There is a limit because loaders list all chunks."""
_SPARSE_EFFECT, _DENSE_EFFECT, _INTERCEPT = 0.8, 0.3, -1.2  # in log-odds, so that about a quarter of the labels are 1

_KEYS = {"rows": None, "dense": 13, "ids": 1, "times": 1}
"""Keys of a file that describes tables, with their defaults."""


class _Shape(NamedTuple):
    rows: dict[str, int]
    dense: int
    ids: tuple[int, ...]  # per sample, by column


class ZipfSource(Source):
    """Computed samples. Row r of a table is looked up with a probability in proportion to (r + 1)^−exponent.

    Rows are numbered by descending popularity, as in data written by `hotbed.prepare`. Ids are int32, or int64 if a
    table has more than 2³¹ rows. Columns are independent of each other. Dense inputs are uniform with mean 0 and
    variance 1. Labels follow a logistic regression over every fourth column, with a separate effect for each row.

    Parameters
    ----------
    path
        A preset or a file. The presets ``criteo_1tb_t15``, ``criteo_1tb_t3`` and ``criteo_1tb_t0`` have 13 dense inputs
        and 26 tables with the rows of the Criteo 1TB log. A YAML or JSON file has the keys ``rows`` (numbers of table
        rows by column, or a list for columns C1, C2, …), ``dense`` (number of dense inputs, default 13), ``ids`` (ids
        per sample: one number, or a list with one number per column, default 1) and ``times`` (number of repetitions of
        these lists, default 1).
    train_samples, valid_samples, test_samples
        Number of samples in each split. A split with 0 samples does not exist.
    exponent
        Exponent of Zipf's law. 0 makes all rows equally likely.
    seed
        Seed of the samples and of the effects on labels.
    chunk_samples
        Samples per chunk, the unit of reading and shuffling. The value does not change the samples.

    Raises
    ------
    DataError
        If the preset or file does not exist, or a value in the file is out of range.
    SpecError
        If an argument is out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        train_samples: int,
        valid_samples: int = 0,
        test_samples: int = 0,
        exponent: float = 1.05,
        seed: int = 0,
        chunk_samples: int = 65_536,
    ) -> None:
        for name, value, limit in (
            ("chunk_samples", chunk_samples, Range(least=1, most=MOST_SAMPLES)),
            ("train_samples", train_samples, Range(least=1, most=MOST_SAMPLES)),
            ("valid_samples", valid_samples, Range(least=0, most=MOST_SAMPLES)),
            ("test_samples", test_samples, Range(least=0, most=MOST_SAMPLES)),
            ("seed", seed, Range(least=0)),
        ):
            check(f"ZipfSource: {name}", value, Annotated[int, limit], SpecError)
        shape = _read_shape(path)
        self.schema = Schema(
            sparse=tuple(
                SparseColumn(name=name, rows=rows, ids=ids)
                for (name, rows), ids in zip(shape.rows.items(), shape.ids, strict=True)
            ),
            dense=tuple(f"I{i}" for i in range(1, shape.dense + 1)),
        )
        self.chunk_samples = chunk_samples
        self.seed = seed
        self._each = dict(zip(shape.rows, shape.ids, strict=True))
        sizes = {"train": train_samples, "valid": valid_samples, "test": test_samples}
        self._sizes = {split: size for split, size in sizes.items() if size}
        self.splits = tuple(self._sizes)
        self._columns = {name: (i, ZipfLaw(rows, exponent)) for i, (name, rows) in enumerate(shape.rows.items())}
        self._dtype = np.int32 if max(shape.rows.values()) <= 1 << 31 else np.int64

    def _chunks(self, split: str) -> Sequence[int]:
        full, rest = divmod(self._sizes[split], self.chunk_samples)
        return [self.chunk_samples] * full + [rest] * (rest > 0)

    def _read(self, split: str, i: int) -> Batch:
        n = min(self.chunk_samples, self._sizes[split] - i * self.chunk_samples)
        before = [self._sizes[earlier] for earlier in self.splits[: self.splits.index(split)]]
        first = sum(before) + i * self.chunk_samples  # samples are numbered over all splits
        counters = np.arange(first, first + n, dtype=np.uint64)
        names = [column.name for column in self.schema.sparse]
        fixed = [self._each[name] for name in names]
        ids = np.empty(n * sum(fixed), dtype=self._dtype)
        columns = dict(zip(names, np.split(ids, n * np.cumsum(fixed)[:-1]), strict=True))
        for (name, column), each in zip(columns.items(), fixed, strict=True):
            column[:] = self._ids(name, np.arange(first * each, (first + n) * each, dtype=np.uint64))
        dense = np.empty((n, len(self.schema.dense)), dtype=np.float32)
        for j in range(len(self.schema.dense)):
            dense[:, j] = (2 * random_uniform(stream_key(_DENSE, self.seed, j + 1), counters) - 1) * 3**0.5
        made = {name: columns[name][:: self._each[name]] for name in names}  # the first id of each sample
        clicked = random_uniform(stream_key(_LABEL, self.seed, 1), counters) < self._probability(counters, made, dense)
        return Batch(
            sparse=Jagged(names, torch.from_numpy(ids), batch_size=n, fixed=fixed),
            dense=torch.from_numpy(dense) if self.schema.dense else None,
            labels=torch.from_numpy(clicked.astype(np.float32)[:, None]),
        )

    def _ids(self, name: str, counters: Hashes) -> NDArray[np.int64]:
        i, zipf = self._columns[name]
        return zipf.draw((_IDS, self.seed, i), counters)

    def _probability(
        self, counters: Hashes, made: Mapping[str, NDArray[Any]], dense: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        score = np.full(len(counters), _INTERCEPT)
        # Columns that `only` has removed are included, because it must not change the labels.
        for name, (i, _) in list(self._columns.items())[::_EVERY]:
            ids = made[name] if name in made else self._ids(name, counters * np.uint64(self._each[name]))
            effect = random_uniform(stream_key(_EFFECT, self.seed, i + 1), ids.astype(np.uint64))
            score += _SPARSE_EFFECT * (2 * effect - 1)
        for j in range(0, dense.shape[1], _EVERY):
            sign = 1.0 if int(stream_key(_WEIGHT, self.seed, j + 1)) & 1 else -1.0
            score += _DENSE_EFFECT * sign * dense[:, j]
        return 1 / (1 + np.exp(-score))


def _read_shape(path: str | Path) -> _Shape:
    if str(path) in CRITEO_1TB:
        preset = CRITEO_1TB[str(path)]
        return _Shape({f"C{i}": rows for i, rows in enumerate(preset, start=1)}, 13, (1,) * len(preset))
    try:
        given: object = parse_yaml(read_text(Path(path)))
    except FileNotFoundError:
        raise DataError(
            f"'{path}' is neither a file nor one of {', '.join(CRITEO_1TB)}{did_you_mean(str(path), CRITEO_1TB)}"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is neither YAML nor JSON: {error}") from None
    except TextError as error:
        raise DataError(f"{path} {error}") from None
    values = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    for key in values:
        check_known(f"{path}: key", key, _KEYS, DataError)
    rows, dense, ids, times = (values.get(key, default) for key, default in _KEYS.items())
    check(f"{path}: rows", rows, list[Any] | dict[Any, Any], DataError, "Write e.g. rows: {C1: 1000, C2: 50}.")
    if not rows:
        raise DataError(f"{path}: rows: got {rows!r}, expected at least one column, e.g. {{C1: 1000, C2: 50}}")
    check(f"{path}: dense", dense, Size, DataError)
    check(f"{path}: times", times, Count, DataError)
    by_column = cast("list[Any]", ids) if isinstance(ids, list) else [ids]
    for each in by_column:
        check(f"{path}: ids", each, Count, DataError)
    if isinstance(rows, list):
        listed = cast("list[Any]", rows)
        if len(listed) * times > MOST_COLUMNS:
            raise DataError(
                f"{path}: rows × times: got {len(listed) * times:,} columns, expected at most {MOST_COLUMNS:,}"
            )
        rows = {f"C{i}": value for i, value in enumerate(listed * times, start=1)}
    elif times != 1:
        raise DataError(f"{path}: times: got {times} with a mapping of rows, expected 1. Write rows as a list")
    of_tables = {str(name): value for name, value in cast("dict[Any, Any]", rows).items()}
    of_columns = by_column * (times if isinstance(ids, list) else len(of_tables))
    if len(of_columns) != len(of_tables):
        raise DataError(f"{path}: ids: got {len(of_columns):,} numbers, expected 1 or {len(of_tables):,}")
    return _Shape(of_tables, dense, tuple(of_columns))
