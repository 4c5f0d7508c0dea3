"""Write raw logs in Criteo's layout from a planted click model. No model can attain a better AUC than this model.

The planted model is a logistic regression. Frequent values of categorical columns, missing values, some numericals, and
some pairs of values of two columns with few values have effects. Rare values have no effects, because no model could
learn such effects. Values follow Zipf's law, fields are missing at different rates, and 26 % of the lines are clicks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from hotbed.auc import auc
from hotbed.checks import Range, check
from hotbed.data.files.criteo import DENSE, SPARSE
from hotbed.data.hashing import mix
from hotbed.errors import SpecError
from hotbed.files import new_file

Floats = NDArray[np.float64]

# fmt: off
FEWEST_SAMPLES = 100
"""Minimum number of lines of a log."""
_CARDINALITIES = (
    500, 300, 50_000, 20_000, 60, 12, 4_000, 200, 3, 8_000, 3_000, 40_000, 2_500,
    26, 4_000, 30_000, 10, 2_000, 600, 4, 35_000, 12, 15, 12_000, 50, 9_000,
)
_MISSING = (
    0, 0, 0.03, 0.03, 0, 0.12, 0, 0, 0, 0, 0, 0.03, 0,
    0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.76, 0, 0.03, 0.44, 0.44,
)
# fmt: on
_DENSE_MISSING = (0.45, 0, 0.21, 0.22, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.76, 0.22)
_DENSE_SCALE = (1.0, 2.5, 2.0, 1.5, 8.0, 4.0, 2.0, 2.0, 4.0, 0.5, 1.0, 0.5, 1.5)
_DENSE_EFFECTS = (0.35, 0.0, -0.2, 0.0, -0.25, 0.0, 0.3, 0.0, 0.0, 0.2, 0.0, 0.0, -0.25)
_PAIRS = ((5, 8), (16, 19), (22, 21))
_ZIPF = 1.1
_INFORMATIVE = (1, 4, 5, 7, 9, 12, 13, 16, 18, 19, 21, 24)  # positions of the columns with effects
_FREQUENT = 20  # number of values with effects in each informative column: the most frequent values
_POSITIVE_RATE = 0.26
_PIECE = 50_000  # lines generated at a time


@dataclass(frozen=True, kw_only=True)
class Attainable:
    """Scores of the true click probabilities. A model can have better scores only by chance."""

    samples: int  # number of lines
    positive_rate: float  # share of clicks
    auc: float
    logloss: float  # mean binary cross-entropy, in nats


@dataclass(frozen=True, kw_only=True)
class PlantedLog:
    """A log written by `write_synthetic_log`, with the attainable scores on all lines and on the last (test) lines."""

    path: Path
    seed: int
    all: Attainable
    test_fraction: float
    test: Attainable

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self) | {"path": str(self.path)}


def write_synthetic_log(
    path: str | Path, samples: int = 200_000, *, seed: int = 0, test_fraction: float = 0.1
) -> PlantedLog:
    """Write a raw log in Criteo's layout from the planted model, and a file of attainable scores next to the log.

    Equal arguments yield equal bytes. The scores of ``NAME.tsv[.gz]`` are in ``NAME.planted.json``.

    Parameters
    ----------
    path
        The log to write. It is compressed if the name ends in ``.gz``.
    samples
        Number of lines.
    seed
        Seed of the model's effects and of the lines.
    test_fraction
        Share of the last lines, which have separate scores. Pass the same value to `prepare`.

    Raises
    ------
    SpecError
        If there are too few lines, or the fraction is out of range.
    """
    check("samples", samples, Annotated[int, Range(least=FEWEST_SAMPLES)], SpecError)
    check("test_fraction", test_fraction, Annotated[float, Range(above=0, below=1)], SpecError)
    path = Path(path)
    model = _PlantedModel(seed)
    probabilities: list[Floats] = []
    clicks: list[NDArray[np.bool_]] = []
    with new_file(path) as file, _open_log(file, compress=path.suffix == ".gz") as stream:
        for piece, start in enumerate(range(0, samples, _PIECE)):
            rng = np.random.default_rng((seed, 1, piece))
            n = min(_PIECE, samples - start)
            dense, ranks = _draw(rng, n)
            p = model.probabilities(dense, ranks)
            clicked = rng.random(n) < p
            stream.write(_lines(clicked, dense, ranks))
            probabilities.append(p)
            clicks.append(clicked)
    p, clicked = np.concatenate(probabilities), np.concatenate(clicks)
    test = round(samples * test_fraction)
    log = PlantedLog(
        path=path,
        seed=seed,
        all=_attainable(p, clicked),
        test_fraction=test_fraction,
        test=_attainable(p[samples - test :], clicked[samples - test :]),
    )
    side = path.with_name(path.name.removesuffix(".gz").removesuffix(".tsv") + ".planted.json")
    side.write_text(json.dumps(log.to_dict(), indent=2) + "\n", encoding="utf-8")
    return log


class _PlantedModel:
    """A click model: effects of values on the log-odds of a click."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng((seed, 0))
        # Rank 0 is a missing value, ranks 1 … _FREQUENT are frequent values, and the next rank is all rarer ones.
        self.values = [np.append(rng.normal(0, 0.5, _FREQUENT + 1), 0.0) for _ in _INFORMATIVE]
        self.pairs = [rng.normal(0, 0.3, (_FREQUENT + 2, _FREQUENT + 2)) for _ in _PAIRS]
        self.intercept = 0.0
        score = self._score(*_draw(np.random.default_rng((seed, 2)), 20_000))
        low, high = -20.0, 20.0
        for _ in range(60):  # bisection: the mean probability increases with the intercept
            self.intercept = (low + high) / 2
            is_low = _sigmoid(score + self.intercept).mean() < _POSITIVE_RATE
            low, high = (self.intercept, high) if is_low else (low, self.intercept)

    def probabilities(self, dense: Floats, ranks: NDArray[np.int64]) -> Floats:
        """Return the click probabilities ``[n]`` of lines with these numericals and value ranks, see `_draw`."""
        return _sigmoid(self._score(dense, ranks) + self.intercept)

    def _score(self, dense: Floats, ranks: NDArray[np.int64]) -> Floats:
        # Missing numericals have the effect of 0, because they become 0 in prepared data.
        score = np.asarray(_DENSE_EFFECTS) @ np.nan_to_num(np.log(dense + 3))
        known = np.minimum(ranks, _FREQUENT + 1)
        for effects, column in zip(self.values, _INFORMATIVE, strict=True):
            score += effects[known[column]]
        for effects, (a, b) in zip(self.pairs, _PAIRS, strict=True):
            score += effects[known[a], known[b]]
        return score


def _draw(rng: np.random.Generator, n: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return numericals ``[13, n]`` (missing: NaN) and value ranks ``[26, n]`` (missing: 0)."""
    dense = np.floor(np.exp(rng.normal(0, 1, (len(DENSE), n)) + np.log(_DENSE_SCALE)[:, None]))
    dense[1] -= 2  # I2 is at least −2 in the real log
    dense[rng.random(dense.shape) < np.asarray(_DENSE_MISSING)[:, None]] = np.nan
    ranks = np.empty((len(SPARSE), n), dtype=np.int64)
    for row, cardinality, missing in zip(ranks, _CARDINALITIES, _MISSING, strict=True):
        # Ranks are drawn by inversion and not by `ZipfLaw`, because the bytes of a log must not change.
        weights = np.cumsum(np.arange(1, cardinality + 1) ** -_ZIPF)
        row[:] = np.searchsorted(weights, rng.random(n) * weights[-1]) + 1
        row[rng.random(n) < missing] = 0
    return dense, ranks


def _lines(clicked: NDArray[np.bool_], dense: Floats, ranks: NDArray[np.int64]) -> bytes:
    """Return the text of the lines. Arrow concatenates the fields without a Python loop."""
    columns = [pa.array(clicked.view(np.int8))]
    columns += [pa.array(np.nan_to_num(x).astype(np.int64), mask=np.isnan(x)) for x in dense]
    fields = [pc.fill_null(pc.cast(c, pa.string()), "") for c in columns]
    for i, (row, cardinality) in enumerate(zip(ranks, _CARDINALITIES, strict=True)):
        # Values are 8 hexadecimal digits, as in the real log, and do not reveal their ranks.
        mixed = mix(np.arange(1, cardinality + 1, dtype=np.uint64) + np.uint64(i << 32))
        words = (mixed >> np.uint64(32)).astype(">u4").tobytes()
        texts = pa.array(["", *words.hex(" ", 4).split(" ")])
        fields.append(texts.take(pa.array(row)))
    lines = pc.binary_join_element_wise(*fields, "\t")
    with_ends = pc.binary_join_element_wise(lines, "", "\n")
    return cast("bytes", with_ends.buffers()[2].to_pybytes())


@contextmanager
def _open_log(path: Path, *, compress: bool) -> Generator[BinaryIO]:
    with path.open("wb") as raw:
        if not compress:
            yield raw
            return
        # The gzip header has no name and time, because equal logs must have equal bytes.
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as stream:
            yield cast("BinaryIO", stream)


def _attainable(p: Floats, clicked: NDArray[np.bool_]) -> Attainable:
    return Attainable(
        samples=len(p),
        positive_rate=float(clicked.mean()),
        auc=auc(torch.from_numpy(p), torch.from_numpy(clicked)),
        logloss=float(-np.where(clicked, np.log(p), np.log1p(-p)).mean()),
    )


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))
