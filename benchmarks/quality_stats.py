"""Scores of one run, and paired differences between runs with intervals that hold for new seeds *and* new samples.

A difference ΔAUC = AUC(configuration) − AUC(fp32) is uncertain for two reasons:

- *Seeds.* With other initial values, training samples and rounding, Δ comes out otherwise. All configurations of a seed
  share the first two, so differences are taken seed by seed; their mean over S seeds has a t interval with S − 1
  degrees of freedom. All of it is for this test set.
- *Test set.* Other test samples would give another Δ for the very same models. The test set is cut into B blocks. Their
  Δs, each averaged over the seeds, are independent draws, so their mean has a t interval with B − 1 degrees of freedom.
  (An AUC is unbiased on a block as on the whole. DeLong's variance estimates the same without blocks, but needs every
  prediction of every run; B numbers per run can be kept, so that seeds can be added later.)

Neither interval alone is sound: the first ignores that all seeds are tested on the same samples, the second that only a
few models were trained. The two errors are independent, so the half-widths are added as squares (MOVER: Zou and Donner
2008, with symmetric intervals). Some of the seeds' noise is in the blocks as well, so the result errs on the wide side.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from hotbed.train.metrics import auc

_Z = 1.959964
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


@dataclass(frozen=True)
class Scores:
    """How good one model is on the test set, and on each of its blocks in order."""

    auc: float
    logloss: float
    block_auc: list[float]
    block_logloss: list[float]

    @staticmethod
    def of(logits: Tensor, labels: Tensor, blocks: int) -> Scores:
        """Score logits ``[N]`` against labels ``[N]``; block k is the k-th of ``blocks`` equal parts in order."""
        loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
        pairs = zip(logits.tensor_split(blocks), labels.tensor_split(blocks), strict=True)
        return Scores(
            auc(logits, labels),
            float(loss.mean()),
            [round(auc(*pair), 8) for pair in pairs],
            [round(float(part.mean()), 8) for part in loss.tensor_split(blocks)],
        )


@dataclass(frozen=True)
class Difference:
    """A mean paired difference and the half-widths of its 95 % intervals; infinite where there is one seed or block."""

    mean: float
    seeds: float
    test: float

    @property
    def half_width(self) -> float:
        """Half-width of the interval for new seeds and new test samples."""
        return math.hypot(self.seeds, self.test)


def paired_difference(
    whole: Sequence[tuple[float, float]], blocks: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> Difference:
    """Difference between two configurations over the seeds that both have.

    Parameters
    ----------
    whole
        Per seed: the metric of the configuration and of what it is compared with, on the whole test set.
    blocks
        Per seed: the same on each block.
    """
    of_seed = [a - b for a, b in whole]
    of_block = [statistics.mean(column) for column in zip(*(map(float.__sub__, a, b) for a, b in blocks), strict=True)]
    return Difference(statistics.mean(of_seed), half_width(of_seed), half_width(of_block))


def half_width(values: Sequence[float]) -> float:
    """Half-width of the 95 % t interval of a mean: t · s / √n."""
    if len(values) < 2:
        return math.inf
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(df: int) -> float:
    """97.5 % quantile of Student's t; from 10 degrees of freedom on by its expansion (Abramowitz and Stegun 26.7.5)."""
    if df <= len(_T):
        return _T[df - 1]
    z = _Z
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / df + g2 / df**2 + g3 / df**3
