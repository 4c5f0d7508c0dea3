"""Train one model per configuration on a log with a known truth and on real logs, and score it on the test set.

Kernels run on one thread and several models are trained at once, one per core. On two cores that is 1.6 times as fast
as one model after the other on both (410,000 against 256,000 samples/s over six configurations): steps are short, and
threads wait for each other.

*The planted log* is endless, made batch by batch from counters; nothing is written to disk. A sample has one id per
table and a few numericals. Ids follow Zipf's law with exponent 1, and id 0 is a table's most frequent: of 300,000 rows
the first 5,000 take 68 % of the lookups, the last 200,000 take 9 %. The log-odds of a click

    bias + Σ_f effect(id_f) + Σ_{f<g} ⟨factor(id_f), factor(id_g)⟩ + a function of the numericals

have an effect and factors of every row, also of rows that are seen a few times only: what a model loses on rare rows it
loses in AUC. The click probabilities are known, so the AUC that no model can beat (but by luck) is known too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.quality_results import Config, Scores
from hotbed.commands.demo import demo_recipe
from hotbed.config import Recipe, ScheduleRecipe
from hotbed.data import Loader, SplitBinarySource
from hotbed.train.build import build_trainer
from hotbed.train.metrics import Metrics, Predictions

Split = Literal["train", "test"]

ROWS = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 150_000, 200_000, 300_000)
DENSE = 4
PIECE = 65_536
"""Samples that are drawn at once. Part of the log's definition: piece k of a seed has its own random generator."""

_BIAS = -3.0
_EFFECT_STD = 0.1
_FACTORS = 2
_FACTOR_MEAN, _FACTOR_STD = 0.08, 0.18  # without a mean no model of this size finds the products in 20 M samples
_OF_DENSE = (0.4, -0.3, 0.2, 0.0)
_OF_PRODUCT = 0.2

OTHER_SEED = 1_000_000
"""Added to the seed of initial values by the configuration that tells the noise between seeds."""


# -- the planted log -----------------------------------------------------------------------------------------------


class PlantedLog:
    """The log.

    Parameters
    ----------
    rows
        Rows of each table.
    seed
        Seed of the truth. Samples have seeds of their own.

    Attributes
    ----------
    effects, factors
        ``[R]`` and ``[R, 2]`` of all tables' rows, one table after the other.
    """

    def __init__(self, rows: Sequence[int] = ROWS, seed: int = 0) -> None:
        self.rows, self.seed = tuple(rows), seed
        self.names = tuple(f"t{i}" for i in range(len(rows)))
        rng = np.random.default_rng((seed, 0))
        self.effects = torch.from_numpy(rng.normal(0, _EFFECT_STD, sum(rows)).astype(np.float32))
        self.factors = torch.from_numpy(rng.normal(_FACTOR_MEAN, _FACTOR_STD, (sum(rows), _FACTORS)).astype(np.float32))
        # Σ_{f<g} ⟨u_f, u_g⟩ = (|Σ u|² − Σ |u|²) / 2, so that sums over the features are all that is needed.
        self._sums = torch.cat([(self.effects - self.factors.square().sum(1) / 2)[:, None], self.factors], 1)

    def batches(self, split: Split, samples: int, size: int, *, seed: int = 0) -> Iterator[hb.Batch]:
        """The first ``samples`` samples of a split, with the true log-odds ``[B]`` in ``extra["truth"]``.

        Parameters
        ----------
        split
            Splits have no sample in common.
        samples
            How many; any number of them begins with the same samples.
        size
            Samples per batch; the last of a piece of 65,536 may be smaller. It does not change the samples.
        seed
            Another seed is another draw from the same truth.
        """
        for piece, start in enumerate(range(0, samples, PIECE)):
            ids, dense, truth, labels = self._piece(split, seed, piece)
            end = min(PIECE, samples - start)
            for at in range(0, end, size):
                part = slice(at, min(at + size, end))
                n = part.stop - at
                yield hb.Batch(
                    sparse=hb.Jagged(self.names, torch.from_numpy(ids[:, part].reshape(-1)), batch_size=n),
                    dense=dense[part],
                    labels=labels[part, None],
                    extra={"truth": truth[part]},
                )

    def _piece(self, split: Split, seed: int, piece: int) -> tuple[np.ndarray, Tensor, Tensor, Tensor]:
        """Ids ``[F, PIECE]`` int32, numericals, log-odds and labels of a piece."""
        rng = np.random.default_rng((self.seed, 1 if split == "train" else 2, seed, piece))
        rows = np.asarray(self.rows, dtype=np.int32)[:, None]
        # If ln(rank) is uniform, the chance of rank k is ln((k + 1) / k), nearly proportional to 1 / k.
        ranks = np.exp(rng.random((len(rows), PIECE), dtype=np.float32) * np.log(rows + np.float32(1)))
        ids = np.minimum(ranks.astype(np.int32) - 1, rows - 1)
        dense = torch.from_numpy(rng.standard_normal((PIECE, DENSE), dtype=np.float32))
        first = np.cumsum(rows, dtype=np.int32)[:, None] - rows
        sums = F.embedding_bag(torch.from_numpy(np.ascontiguousarray((ids + first).T)), self._sums, mode="sum")
        truth = _BIAS + sums[:, 0] + (sums[:, 1:] ** 2).sum(1) / 2
        truth += dense @ torch.tensor(_OF_DENSE) + _OF_PRODUCT * dense[:, 2] * dense[:, 3]
        labels = torch.from_numpy(rng.random(PIECE, dtype=np.float32)) < truth.sigmoid()
        return ids, dense, truth, labels.float()

    def attainable(self, samples: int, *, seed: int = 0) -> Metrics:
        """Metrics of the true click probabilities on the first test samples."""
        predictions = Predictions()
        for batch in self.batches("test", samples, PIECE, seed=seed):
            assert batch.labels is not None
            predictions.add(batch.extra["truth"][:, None], batch.labels)
        return predictions.metrics()


def share(batch: hb.Batch, rank: int, size: int) -> hb.Batch:
    """A rank's samples."""
    return batch.take(torch.arange(len(batch) * rank // size, len(batch) * (rank + 1) // size))


# -- training ------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Scores of a model, and the bytes of its tables and their moments per row."""

    scores: Scores
    row_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlantedSettings:
    """How models are trained on the planted log; learning rates were chosen for fp32, on 10 M samples."""

    samples: int = 20_000_000
    test_samples: int = 64 * 16_384
    rows: tuple[int, ...] = ROWS
    blocks: int = 64
    batch_size: int = 4_096
    dim: int = 16
    bottom: tuple[int, ...] = (64, 16)
    top: tuple[int, ...] = (64, 1)
    sparse_lr: float = 0.02
    dense_lr: float = 0.004
    warmup_steps: int = 100
    hot_rows: int = 5_000

    @property
    def steps(self) -> int:
        """Steps of a run; a piece of the log that is no multiple of the batch size ends with a smaller batch."""
        whole, rest = divmod(self.samples, PIECE)
        return whole * -(-PIECE // self.batch_size) + -(-rest // self.batch_size)

    @property
    def schedule(self) -> ScheduleRecipe:
        """Warm-up, constant up to half of the steps, then linear to 0."""
        half = max(self.steps // 2, self.warmup_steps)
        return ScheduleRecipe(
            warmup_steps=self.warmup_steps, decay_start=half, decay_end=max(self.steps, half) + 1, decay_power=1
        )


@dataclass(frozen=True, kw_only=True)
class RealSettings:
    """How models are trained on a real log: by the recipe of the demo."""

    recipe: str = "demo.yaml"
    blocks: int = 20
    hot_rows: int = 250


class Contestant:
    """A DLRM on the planted log, trained as a configuration says."""

    def __init__(self, config: Config, log: PlantedLog, settings: PlantedSettings, seed: int) -> None:
        self.config = config
        seed += OTHER_SEED * config.reseeded
        hot = settings.hot_rows if config.hot else 0
        tables = [
            hb.Table(name, rows, settings.dim, dtype=config.dtype, fp32_rows=min(hot, rows))
            for name, rows in zip(log.names, log.rows, strict=True)
        ]
        torch.manual_seed(seed)
        features = [hb.Feature(name, table=name) for name in log.names]
        self.model = hb.nn.DLRM(tables, features, DENSE, bottom=settings.bottom, top=settings.top, seed=seed)
        self.optimizers = (
            torch.optim.Adam(self.model.parameters(), lr=settings.dense_lr, fused=True),
            hb.optim.RowWiseAdagrad(self.model, lr=settings.sparse_lr),
        )
        factor = settings.schedule.factor
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(o, lambda taken: factor(taken + 1)) for o in self.optimizers
        ]

    def step(self, batch: hb.Batch) -> None:
        """Train on a batch."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.compute == "bf16"):
            logits = self.model(batch)
        loss = F.binary_cross_entropy_with_logits(logits.float(), _labels(batch))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()

    def scores(self, batches: Iterable[hb.Batch], blocks: int) -> Scores:
        """Score in float32."""
        return Scores.of(*_predict(self.model, batches), blocks)


def train_planted(
    configs: Sequence[Config],
    log: PlantedLog,
    settings: PlantedSettings,
    seed: int,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> list[Trained]:
    """Train all configurations side by side on the same batches, and score them on the same test set.

    Parameters
    ----------
    configs
        What to train.
    log, settings
        On what, and how.
    seed
        Of initial values and of the training samples.
    workers
        Models trained at once.
    advance
        Called with the samples done, summed over the configurations.

    Returns
    -------
    list[Trained]
        In the order of the configurations.
    """
    contestants = [Contestant(config, log, settings, seed) for config in configs]
    with ThreadPoolExecutor(workers) as pool:
        for batch in log.batches("train", settings.samples, settings.batch_size, seed=seed):
            list(pool.map(Contestant.step, contestants, repeat(batch)))
            advance(len(batch) * len(contestants))
        test = list(log.batches("test", settings.test_samples, settings.batch_size))
        scores = list(pool.map(Contestant.scores, contestants, repeat(test), repeat(settings.blocks)))
    return [Trained(of_one, _row_bytes(one.model)) for of_one, one in zip(scores, contestants, strict=True)]


def train_real(
    configs: Sequence[Config],
    data: Path,
    settings: RealSettings,
    seed: int,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> list[Trained]:
    """Train the demo's recipe on a prepared log in the order of time; seeds differ in initial values only.

    Parameters and result are those of `train_planted`; ``data`` is the prepared log.
    """
    source = SplitBinarySource(data)
    recipes: list[Recipe] = []
    for config in configs:
        recipe = demo_recipe(data, source.samples("train"), seed + OTHER_SEED * config.reseeded)
        rows = replace(recipe.data, dtype=config.dtype, fp32_rows=settings.hot_rows if config.hot else 0)
        train = replace(recipe.train, device="cpu", precision=config.compute)
        recipes.append(replace(recipe, data=rows, train=train))
    trainers = [build_trainer(recipe, source) for recipe in recipes]  # one by one: they seed torch's generator

    def run(i: int) -> Scores:
        loader = Loader(source, "train", recipes[i].train.batch_size, shuffle=recipes[i].data.shuffle)
        trainers[i].fit(loader)
        advance(trainers[i].samples)
        return Scores.of(*_predict(trainers[i].model, Loader(source, "test", 4_096)), settings.blocks)

    with ThreadPoolExecutor(workers) as pool:
        scores = list(pool.map(run, range(len(configs))))
    return [Trained(of_one, _row_bytes(trainer.model)) for of_one, trainer in zip(scores, trainers, strict=True)]


@torch.no_grad()
def _predict(model: nn.Module, batches: Iterable[hb.Batch]) -> tuple[Tensor, Tensor]:
    """Logits and labels ``[N]``."""
    model.eval()
    parts = [(model(batch)[:, 0], _labels(batch)[:, 0]) for batch in batches]
    return torch.cat([logits for logits, _ in parts]), torch.cat([labels for _, labels in parts])


def _labels(batch: hb.Batch) -> Tensor:
    assert batch.labels is not None
    return batch.labels


def _row_bytes(model: nn.Module) -> float:
    """Bytes of rows and moments per row."""
    collections = [module for module in model.modules() if isinstance(module, hb.EmbeddingCollection)]
    rows = sum(table.rows for collection in collections for table in collection.tables.values())
    return sum(collection.nbytes for collection in collections) / rows
