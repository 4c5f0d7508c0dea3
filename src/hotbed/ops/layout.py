"""Define the inputs and outputs of kernels: rows and bags of an arena, occurrences of slots, groups of equal slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.optim import Rule
from hotbed.torch_private import version

RUN = 32
"""Number of occurrences per run of the canonical sum.

The occurrences of a run are added left to right. The runs of a row are then added left to right.
"""

LONG = RUN + 1
"""Value in `RunOrder.kinds` for the first run of a slot with several runs."""

BLOCK = 16
"""Number of columns per block of a sum over columns. Blocks are summed first, and their sums in column order."""

SCALE_BLOCK = 128
"""Number of columns of an int8 row that share a scale."""

START, FIXED, RAGGED_ROW, BASE, POOLING, OUT, TABLE = range(7)
"""Columns of `BagLayout.features`."""

FIRST_SLOT, WIDE_ROWS, FIRST_WIDE, FIRST_NARROW, FIRST_ROW, ROW_STEP, FIRST_COL = range(7)
"""Columns of `Rows.tables`."""

ACTIVE, LR, MAX_GRAD_NORM, MAX_NORM, L2, DECAY, OWN = range(7)
"""Columns of `RuleStep.hyper`: whether the table is updated, the `hotbed.optim.COMMON` columns, the rule's own."""

FREE = -1
"""Key of an empty position of a cache."""


@dataclass(frozen=True)
class Rows:
    """Hold the rows of an arena.

    An arena holds several tables, each whole or in part: some columns of every ``step``-th row. Slots of a table are
    numbered in row order. The first rows of a table may be float32 ("wide") while the others have the arena's dtype.
    A float32 arena has only wide rows, and its slots are positions in ``wide``.
    """

    wide: Tensor  # [W, D] float32
    narrow: Tensor  # [S − W, D] bfloat16, float16, int8 or float8_e4m3fn; [0, D] float32 in a float32 arena
    # [S − W, ⌈D / 128⌉] int8 for int8 rows, else [0, 0]. A block of 128 columns has the values narrow · 2^exponent;
    # −128 in `narrow` is NaN.
    exponents: Tensor
    # [T, 7] int64, one row per table, slots ascending: first slot; number of wide rows; first row in `wide`; first row
    # in `narrow`; table row of the first slot; row step; table column of column 0. Row and column of the table
    # determine the bits of stochastic rounding.
    tables: Tensor

    @property
    def dim(self) -> int:
        """Return the number of columns ``D``."""
        return self.wide.shape[1]


class LeafBags(NamedTuple):
    """The bags of each virtual rank of a process. A virtual rank is a leaf of the tree (`hotbed.virtual_ranks`)."""

    ends: tuple[int, ...]  # exclusive end of the bags of each virtual rank of this process
    first: int  # first virtual rank of this process
    leaves: int  # number of leaves of the tree


@dataclass(frozen=True)
class BagLayout:
    """Describe where the bags of one arena's features lie in the ids of a batch."""

    ids: Tensor  # all ids of the batch, int32 or int64; ids of features of other arenas may lie between
    # [F, 7] int64, one row per feature: position of its first id; ids per sample, −1 if ragged; row in `offsets`; slot
    # of row 0 of its table; `POOLING_CODE`; position of its vector in a sample; table number in `Rows.tables`
    features: Tensor
    offsets: Tensor  # [ragged features, B + 1] int64, relative to the feature's first id
    weights: Tensor | None  # per-id weights, float32, parallel to `ids`
    batch_size: int  # samples B
    # number N of ids of these features, including the padding behind a ragged feature's ids (`hotbed.Jagged`)
    total: int
    has_divisors: bool  # whether the pooling of any feature divides the sum of a bag's rows
    width: int  # vectors per sample of the pooled output (or of its gradient) [B, width, D]
    room: int = 0  # number of output vectors before position 0
    ids_per_bag: int | None = None  # common length of all bags, if the host knows one; kernels may be compiled for it
    limit: int | None = None  # upper bound of all slots, if known; required if there is padding
    # first id and number of ids of each feature; None: read from the device
    spans: tuple[tuple[int, int], ...] | None = None
    groups: Groups | None = None  # occurrences by slot, if they are already grouped
    leaf_bags: LeafBags | None = None  # None: all bags belong to one virtual rank

    def versions(self) -> tuple[int, int, int]:
        """Return the numbers of in-place changes of ids, offsets and weights."""
        return version(self.ids), version(self.offsets), 0 if self.weights is None else version(self.weights)


@dataclass(frozen=True)
class Occurrences:
    """List every id of an arena's batch: the slot that it reads and the bag that it belongs to.

    An *occurrence* is one use of a row in a batch. The gradients of a row's occurrences are summed before its update.

    If `BagLayout.total` counts padding, each padding id is an occurrence with slot ``limit``, bag 0 and factor 0. These
    occurrences form a group to which no rule is applied.
    """

    slots: Tensor  # [N] int64, or int32 if `limit` allows it; in feature, then sample, then bag order
    bags: Tensor  # [N] int64, sample · width + room + position: row of the gradient […, D]
    scale: Tensor | None  # [N] float32 factor of the gradient (weight, mean divisor); None: 1
    # cuts of the occurrences into parts with ascending slots, if known, to sort faster: for slots 3, 1, 7, 8 they are
    # [0, 2, 4], because parts 3, 1 and 7, 8 do not overlap (int64, on the host)
    segments: Tensor | None = None
    limit: int | None = None  # upper bound of all slots except padding, if known
    groups: Groups | None = None  # these occurrences by slot, if they are already grouped
    leaf: Tensor | None = None  # [N] int64, virtual rank of each occurrence; None: all of one virtual rank
    leaves: int = 1  # number of leaves of the tree of virtual ranks

    def take(self, chosen: Tensor) -> Occurrences:
        """Select the occurrences of a mask ``[N]``."""
        at = chosen.nonzero()[:, 0]
        scale, leaf = (None if t is None else t[at] for t in (self.scale, self.leaf))
        return Occurrences(self.slots[at], self.bags[at], scale, limit=self.limit, leaf=leaf, leaves=self.leaves)

    @staticmethod
    def concatenate(parts: Sequence[Occurrences], bags: Sequence[int]) -> Occurrences:
        """Concatenate the occurrences of several batches. ``bags`` has the number of bags of each batch."""
        if len(parts) == 1:
            return parts[0]
        assert all(part.leaf is None for part in parts)  # sums over virtual ranks come first
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
    """Describe one step of an optimizer over an arena.

    Everything but the rule is a tensor, so that no kernel is recompiled and the host does not wait.
    """

    rule: Rule
    # [T, 6 + H + C] float32, one row per table: 1 if the table is updated, else 0; `COMMON` hyperparameters;
    # hyperparameters of `rule.hyper`; 1 − β^step for each name in `rule.corrected`
    hyper: Tensor
    seeds: Tensor  # [T] int64, 32 bits each: seeds of this step's stochastic rounding
    uses: frozenset[str]  # entries of `COMMON` (except lr) that any table uses; kernels may omit the others
    inv_scale: Tensor  # 0-d float32 factor of all gradients (1 / loss scale)
    gate: Tensor  # 0-d; if it is 0, nothing is updated
    # [≥ groups] float32: mean square of the gradient over all columns of the row of each group, if the arena has only
    # some columns. For row-wise AdaGrad, without limits of norms and L2.
    mean_squares: Tensor | None = None


@dataclass(frozen=True)
class RunOrder:
    """Order the runs of `Groups` for a GPU: runs of equal length are adjacent."""

    starts: Tensor  # [N] int64: position in `order` where each run starts; only the first `counts[1]` are valid
    # [N] int8, ascending: 0 for the only occurrence of a slot, `LONG` for the first of several runs of a slot, else the
    # number of occurrences of the run (1 to `RUN`)
    kinds: Tensor
    numbers: Tensor  # [N] int32: group of each position in `order`, counted from 1


@dataclass(frozen=True)
class Groups:
    """Group occurrences by slot, and cut each group into runs of at most `RUN`.

    The buffers have room for ``N`` groups and runs. The first ``counts`` are valid. Therefore the host does not
    synchronize with a GPU to get the number of groups.
    """

    order: Tensor  # [N] int64: occurrences sorted by slot (stable)
    rows: Tensor  # [N] int64: slot of each group, ascending
    run_starts: Tensor  # [N + 1] int64: position in `order` where each run starts; the entry after the last run is N
    group_runs: Tensor  # [N + 1] int64: first run of each group; the entry after the last group is the number of runs
    counts: Tensor  # [2] int64: number of groups, number of runs
    runs: RunOrder | None = None  # order of the runs on a GPU; None if the backend does not use it
    # [N] int64: virtual rank of each run, if the occurrences belong to several. A run belongs to one virtual rank. The
    # runs of a virtual rank are added left to right, and the virtual ranks of a group along the tree.
    run_leaves: Tensor | None = None


@dataclass(frozen=True)
class CacheTags:
    """Hold the keys of a set-associative cache by position.

    The hash of a key determines its set. The key can be in any way of the set.
    """

    keys: Tensor  # [sets · ways] int64, not negative; `FREE` for an empty position
    times: Tensor  # [sets · ways] int64: time of the last use of each key
    counts: Tensor  # [sets · ways] int64: number of uses of each key
    ways: int  # number of positions of a set
    # evict the least often used key of a set (LFU; ties: least recently used), else the least recently used (LRU)
    by_count: bool

    @property
    def sets(self) -> int:
        """Return the number of sets."""
        return len(self.keys) // self.ways


def replace_bag_ids(bags: BagLayout, positions: Tensor) -> BagLayout:
    """Replace the ids of bags by ``positions``, which are in the order of occurrences."""
    features = bags.features.clone()
    features[:, BASE] = 0
    features[:, TABLE] = 0
    runs: list[tuple[int, int]] = []  # spans of features with adjacent ids are concatenated
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
    """Return first id and number of ids of each feature, from `BagLayout.spans` or from the device."""
    if bags.spans is not None:
        return bags.spans
    return [
        (start, bags.batch_size * fixed if fixed >= 0 else int(bags.offsets[row, -1]))
        for start, fixed, row in bags.features[:, [START, FIXED, RAGGED_ROW]].tolist()
    ]
