"""Define the inputs and outputs of kernels: rows and bags of an arena, occurrences of slots, groups of equal slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hotbed.optim import Rule
from hotbed.torch_hooks import version

RUN = 32
"""Occurrences per run of the canonical sum: runs are summed left to right, then the runs of a row left to right."""

LONG = RUN + 1
"""Kind of the first run of a slot that has several, see `RunOrder`."""

BLOCK = 16
"""Columns per block of a reduction over columns: block partials first, then the partials in column order."""

SCALE_BLOCK = 128
"""Columns of an int8 row that share a scale."""

START, FIXED, RAGGED_ROW, BASE, POOLING, OUT, TABLE = range(7)
"""Columns of `BagLayout.features`."""

FIRST_SLOT, WIDE_ROWS, FIRST_WIDE, FIRST_NARROW, FIRST_ROW, ROW_STEP, FIRST_COL = range(7)
"""Columns of `Rows.tables`."""

ACTIVE, LR, MAX_GRAD_NORM, MAX_NORM, L2, DECAY, OWN = range(7)
"""Columns of `RuleStep.hyper`: whether the table is updated, those of `hotbed.optim.COMMON`, the rule's own."""

FREE = -1
"""Key of a place of a cache that has none."""


@dataclass(frozen=True)
class Rows:
    """Hold the rows of an arena.

    A table is here whole or in part: some columns of every ``step``-th row. Slots of a table are numbered in row order.
    Its first rows may be float32 ("wide") while the others have the arena's dtype; a table of a float32 arena has wide
    rows only, and there a slot is a position in ``wide``.

    Attributes
    ----------
    wide
        ``[W, D]`` float32.
    narrow
        ``[S − W, D]`` bfloat16, float16, int8 or float8_e4m3fn; ``[0, D]`` float32 in a float32 arena.
    exponents
        ``[S − W, ⌈D / 128⌉]`` int8 where ``narrow`` is int8, else ``[0, 0]``: a block of 128 columns has the values
        ``narrow · 2^exponent``; −128 in ``narrow`` is NaN.
    tables
        ``[T, 7]`` int64, one row per table, slots ascending: first slot; number of wide rows; its first row in
        ``wide``; in ``narrow``; which row of the table the first slot holds; how many rows further the next one; which
        column of the table column 0 is. Row and column of the table decide the bits of stochastic rounding.
    """

    wide: Tensor
    narrow: Tensor
    exponents: Tensor
    tables: Tensor

    @property
    def dim(self) -> int:
        """Columns ``D``."""
        return self.wide.shape[1]


@dataclass(frozen=True)
class BagLayout:
    """Say where the bags of one arena's features lie in the ids of a batch.

    Attributes
    ----------
    ids
        All ids of the batch, int32 or int64; features of other arenas may lie between.
    features
        ``[F, 7]`` int64, one row per feature: position of its first id; ids per sample, or −1 where it is ragged; its
        row of ``offsets``; slot of its table's row 0; its `POOLING_CODE`; position of its vector among those of a
        sample; its table, as in `Rows.tables`.
    offsets
        ``[ragged features, B + 1]`` int64, relative to the feature's first id.
    weights
        Per-id weights float32, parallel to ``ids``, or None.
    batch_size
        Samples ``B``.
    total
        Ids ``N`` of these features, with those that there is room for behind a ragged feature's (`hotbed.Jagged`).
    has_divisors
        Whether the pooling of any feature divides the sum of a bag's rows.
    width
        Vectors per sample of the tensor that the bags are pooled into (or whose gradient is read), ``[B, width, D]``.
    room
        How many of them come before the one of position 0.
    ids_per_bag
        How many ids every bag of every feature has, where that is one number that the host knows; else None. Kernels
        may be compiled for it.
    limit
        All slots are below it; None where it is not known. Needed where there is room for more ids.
    spans
        First id and number of ids of each feature, where the host knows them; None: they are read from the device.
    groups
        Their occurrences by slot, where somebody has grouped them.
    """

    ids: Tensor
    features: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch_size: int
    total: int
    has_divisors: bool
    width: int
    room: int = 0
    ids_per_bag: int | None = None
    limit: int | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    groups: Groups | None = None

    def versions(self) -> tuple[int, int, int]:
        """Counts of in-place changes of ids, offsets and weights."""
        return version(self.ids), version(self.offsets), 0 if self.weights is None else version(self.weights)


@dataclass(frozen=True)
class Occurrences:
    """List every id of an arena's batch: which slot it reads and which bag it belongs to.

    Attributes
    ----------
    slots
        ``[N]`` int64, or int32 where ``limit`` allows it; in feature, then sample, then bag order.
    bags
        ``[N]`` int64, ``sample · width + room + position``: the row of the gradient ``[…, D]``.
    scale
        ``[N]`` float32 factor of the gradient (weight, mean divisor), or None where it is 1 everywhere.
    segments
        Positions ``0 … N`` (int64, on the host) that cut the occurrences so that all slots of a part are smaller than
        those of the next; None where it is not known. It only helps to sort.
    limit
        All slots are below it, but for those of padding; None where it is not known.
    groups
        These occurrences by slot, where somebody has grouped them.

    Where `BagLayout.total` has room for more ids than there are, as many occurrences may follow as are missing: slot
    ``limit``, bag 0, factor 0. They form a group, to which no rule is applied.
    """

    slots: Tensor
    bags: Tensor
    scale: Tensor | None
    segments: Tensor | None = None
    limit: int | None = None
    groups: Groups | None = None

    @staticmethod
    def concatenate(parts: Sequence[Occurrences], bags: Sequence[int]) -> Occurrences:
        """Occurrences of several batches, one after the other; ``bags`` is the number of bags of each."""
        if len(parts) == 1:
            return parts[0]
        first_bag = [sum(bags[:i]) for i in range(len(bags))]
        scaled = any(p.scale is not None for p in parts)
        scales = [
            torch.ones(len(p.slots), dtype=torch.float32, device=p.slots.device) if p.scale is None else p.scale
            for p in parts
        ]
        return Occurrences(
            torch.cat([p.slots for p in parts]),
            torch.cat([p.bags + first for p, first in zip(parts, first_bag, strict=True)]),
            torch.cat(scales) if scaled else None,
            limit=parts[0].limit if len({p.limit for p in parts}) == 1 else None,
        )


@dataclass(frozen=True, kw_only=True)
class RuleStep:
    """Describe one step of an optimizer over an arena; all but the rule are tensors, so nothing recompiles or waits.

    Attributes
    ----------
    rule
        Which optimizer.
    hyper
        ``[T, 6 + H + C]`` float32, one row per table: 1 where the table is to be updated (else 0); `COMMON`
        hyperparameters; those of ``rule.hyper``; ``1 − β^step`` for those of ``rule.corrected``.
    seeds
        ``[T]`` int64, 32 bits each: seeds of this step's stochastic rounding.
    uses
        Which of `COMMON` (besides ``lr``) any table has switched on; kernels may leave out the others.
    inv_scale
        0-d float32 factor of all gradients (1 / loss scale).
    gate
        0-d; where it is 0 nothing is touched.
    mean_squares
        By group of the occurrences ``[≥ groups]`` float32: the mean square of the gradient over all columns of the row,
        where the arena has only some of them. For row-wise AdaGrad, without limits of norms and L2.
    """

    rule: Rule
    hyper: Tensor
    seeds: Tensor
    uses: frozenset[str]
    inv_scale: Tensor
    gate: Tensor
    mean_squares: Tensor | None = None


@dataclass(frozen=True)
class RunOrder:
    """Give the runs of `Groups` in the order in which a GPU takes them: those of equal length side by side.

    Attributes
    ----------
    starts
        ``[N]`` int64: position in ``order`` where each run starts; only the first ``counts[1]`` are valid.
    kinds
        ``[N]`` int8, rising: 0 for the only occurrence of a slot, `LONG` for the first run of a slot that has several,
        else the occurrences of the run, 1 to `RUN`.
    numbers
        ``[N]`` int32: which group each position in ``order`` is of, counted from 1.
    """

    starts: Tensor
    kinds: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class Groups:
    """Group occurrences by slot, and cut each group into runs of at most `RUN`.

    The buffers have room for ``N`` groups and runs; only the first ``counts`` of them are valid, so that a GPU need
    not tell the host how many there are.

    Attributes
    ----------
    order
        ``[N]`` int64: the occurrences sorted by slot, in their own order where slots are equal.
    rows
        ``[N]`` int64: the slot of each group, ascending.
    run_starts
        ``[N + 1]`` int64: position in ``order`` where each run starts; the entry after the last run is ``N``.
    group_runs
        ``[N + 1]`` int64: first run of each group; the entry after the last group is the number of runs.
    counts
        ``[2]`` int64: number of groups, number of runs.
    runs
        Their order on a GPU; None where a backend has no use for it.
    """

    order: Tensor
    rows: Tensor
    run_starts: Tensor
    group_runs: Tensor
    counts: Tensor
    runs: RunOrder | None = None


@dataclass(frozen=True)
class CacheTags:
    """Hold the keys of a set-associative cache by place: a key may be in any way of one set, which its hash decides.

    Attributes
    ----------
    keys
        ``[sets · ways]`` int64, not negative; `FREE` where a place has none.
    times, counts
        ``[sets · ways]`` int64: when each key was last used, and how often.
    ways
        Places of a set.
    by_count
        Whether the least often used key of a set is evicted (LFU; of equals the least recently used), or the least
        recently used one (LRU).
    """

    keys: Tensor
    times: Tensor
    counts: Tensor
    ways: int
    by_count: bool

    @property
    def sets(self) -> int:
        """Number of sets."""
        return len(self.keys) // self.ways


def renamed(bags: BagLayout, positions: Tensor) -> BagLayout:
    """Replace the ids of bags by others, given in the order of occurrences."""
    features = bags.features.clone()
    features[:, BASE] = 0
    features[:, TABLE] = 0
    runs: list[tuple[int, int]] = []  # features whose ids follow each other are one
    for start, count in spans_of(bags):
        if runs and sum(runs[-1]) == start:
            runs[-1] = runs[-1][0], runs[-1][1] + count
        elif count:
            runs.append((start, count))
    ids = positions
    if runs not in ([], [(0, len(bags.ids))]):
        ids = torch.empty(len(bags.ids), dtype=torch.int64, device=positions.device)
        first = 0
        for start, count in runs:
            ids[start : start + count] = positions[first : first + count]
            first += count
    return replace(bags, ids=ids, features=features)


def spans_of(bags: BagLayout) -> Sequence[tuple[int, int]]:
    """Return first id and number of ids of each feature; of `BagLayout.spans`, or read from the device."""
    if bags.spans is not None:
        return bags.spans
    return [
        (start, bags.batch_size * fixed if fixed >= 0 else int(bags.offsets[row, -1]))
        for start, fixed, row in bags.features[:, [START, FIXED, RAGGED_ROW]].tolist()
    ]
