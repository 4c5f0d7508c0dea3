"""Batches with every edge the kernels can meet, and plain Python that says what should come out."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.ops import Backend, BagLayout, Groups, Occurrences, Rows

from .formats import bits, decode

DIMS = (1, 3, 16, 17, 40, 200)
RUN, BLOCK = 32, 16


@dataclass(frozen=True)
class Kernels:
    """A backend, and the device its tensors must be on."""

    name: str
    device: torch.device
    ops: Backend

    def put(self, value: Any) -> Any:
        """A copy on the device of a tensor, or of everything in a dict, tuple or dataclass."""
        return _copied(value, self.device)

    def back(self, value: Any) -> Any:
        """A copy on the CPU."""
        return _copied(value, torch.device("cpu"))


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, dict):
        return {key: _copied(v, device) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_copied(v, device) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _copied(getattr(value, f.name), device) for f in fields(value)})
    return value


def random_rows(
    tables: list[int],
    wide: list[int],
    dim: int,
    dtype: torch.dtype,
    seed: int = 1,
    origins: list[tuple[int, int, int]] | None = None,
) -> Rows:
    """Random rows of tables of which the first `wide` are float32 (all, where that is the dtype).

    The tables are not in the same order in ``wide`` as in ``narrow``. ``origins`` has first row, row step and first
    column of each; (0, 1, 0) by default.
    """
    gen = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        wide = tables
    narrow = [rows - w for rows, w in zip(tables, wide, strict=True)]
    first_wide = [sum(wide[t + 1 :]) for t in range(len(tables))]
    if not sum(narrow):
        dtype, first_wide = torch.float32, _starts(tables)
    places = zip(_starts(tables), wide, first_wide, _starts(narrow), strict=True)
    q = torch.randint(-127, 128, (sum(narrow), dim), generator=gen, dtype=torch.int8)
    blocks = -(-dim // 128)
    exponents = torch.randint(-9, -4, (sum(narrow), blocks), generator=gen, dtype=torch.int8)
    return Rows(
        torch.randn(sum(wide), dim, generator=gen),
        q if dtype == torch.int8 else torch.randn(sum(narrow), dim, generator=gen).to(dtype),
        exponents if dtype == torch.int8 else torch.empty(0, 0, dtype=torch.int8),
        torch.tensor(
            [[*place, *origin] for place, origin in zip(places, origins or [(0, 1, 0)] * len(tables), strict=True)]
        ),
    )


def without_narrow(rows: Rows, dtype: torch.dtype) -> Rows:
    """A float32 arena as one of this dtype of which all rows are prefix."""
    blocks = -(-rows.dim // 128) if dtype == torch.int8 else 0
    exponents = torch.empty(0, blocks, dtype=torch.int8)
    return replace(rows, narrow=torch.empty(0, rows.dim, dtype=dtype), exponents=exponents)


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def is_narrow(rows: Rows) -> np.ndarray:
    """Whether each slot's row is narrow ``[S]``."""
    return _places(rows)[0]


def values_of(rows: Rows) -> np.ndarray:
    """The rows of all slots as float32 ``[S, D]``, decoded by hand."""
    narrow, at = _places(rows)
    out = np.empty((len(at), rows.wide.shape[1]), np.float32)
    out[~narrow] = rows.wide.numpy()[at[~narrow]]
    out[narrow] = decode(rows.narrow, rows.exponents)[at[narrow]]
    return out


def raw_of(rows: Rows) -> np.ndarray:
    """Bits and exponents of the rows of all slots, as integers ``[S, D + ⌈D / 128⌉]``."""
    narrow, at = _places(rows)
    out = np.zeros((len(at), rows.dim + -(-rows.dim // 128)), np.int64)
    out[~narrow, : rows.dim] = bits(rows.wide)[at[~narrow]]
    out[narrow, : rows.dim] = bits(rows.narrow)[at[narrow]]
    if rows.narrow.dtype == torch.int8:
        out[narrow, rows.dim :] = rows.exponents.numpy()[at[narrow]]
    return out


def _places(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Whether each slot's row is narrow, and which row of ``wide`` or ``narrow`` it is."""
    slots = len(rows.wide) + len(rows.narrow)
    tables = [*rows.tables[:, :4].tolist(), [slots, 0, 0, 0]]
    narrow, at = [], []
    for (first, wide, first_wide, first_narrow), (end, *_) in pairwise(tables):
        narrow += [row >= wide for row in range(end - first)]
        at += [first_wide + row if row < wide else first_narrow + row - wide for row in range(end - first)]
    return np.array(narrow, dtype=bool), np.array(at, dtype=np.int64)


@dataclass(frozen=True)
class Bags:
    """One feature: the table it reads (by position), ids per sample or a list of lengths, and its pooling."""

    table: int
    lengths: int | list[int]
    mean: bool = False


@dataclass(frozen=True)
class Case:
    """Tables (rows of each), features, samples.

    `wide`: rows of each table that are float32 where the others are narrow; `places`: position of each feature's vector
    among those of a sample; `room`, `spare`: vectors of others before and behind these; `weights`: per-id weights.
    """

    tables: list[int]
    features: list[Bags]
    batch: int
    wide: list[int]
    weights: bool = False
    dtype: torch.dtype = torch.int64
    places: list[int] | None = None
    room: int = 0
    spare: int = 0

    @property
    def slots(self) -> int:
        return sum(self.tables)

    @property
    def width(self) -> int:
        return self.room + max(self.positions) + 1 + self.spare

    @property
    def positions(self) -> list[int]:
        return list(range(len(self.features))) if self.places is None else self.places

    @property
    def ids_per_bag(self) -> int | None:
        """Of every feature, where it is one number."""
        counts = {f.lengths for f in self.features if isinstance(f.lengths, int)}
        known = len(counts) == 1 and all(isinstance(f.lengths, int) for f in self.features)
        return (counts.pop() or None) if known else None

    def rows(self, dim: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Rows:
        """Random rows of this dtype behind float32 ones."""
        return random_rows(self.tables, self.wide, dim, dtype, seed)

    def layout(self, seed: int = 0) -> BagLayout:
        """Random ids; ids of another arena lie before each feature and would be out of range here."""
        gen = torch.Generator().manual_seed(seed)
        first_slots = torch.tensor([0, *self.tables]).cumsum(0).tolist()
        ids, rows, offsets, position, total = [], [], [], 0, 0
        for feature, place in zip(self.features, self.positions, strict=True):
            ids.append(torch.full((3,), 2**30))
            position += 3
            ragged = isinstance(feature.lengths, list)
            row = [position, -1 if ragged else feature.lengths, len(offsets), first_slots[feature.table]]
            rows.append([*row, int(feature.mean), place, feature.table])
            count = sum(feature.lengths) if isinstance(feature.lengths, list) else self.batch * feature.lengths
            if isinstance(feature.lengths, list):
                offsets.append(torch.tensor([0, *feature.lengths]).cumsum(0))
            ids.append(torch.randint(0, self.tables[feature.table], (count,), generator=gen))
            position += count
            total += count
        values = torch.cat(ids).to(self.dtype)
        return BagLayout(
            values,
            torch.tensor(rows),
            torch.stack(offsets) if offsets else torch.empty(0, self.batch + 1, dtype=torch.int64),
            torch.randn(len(values), generator=gen) if self.weights else None,
            self.batch,
            total,
            any(f.mean for f in self.features),
            self.width,
            self.room,
            self.ids_per_bag,
        )


_FEATURES = [
    Bags(0, 1),
    Bags(1, [2, 0, 1, 5, 1], mean=True),
    Bags(1, 3),
    Bags(2, [0, 0, 40, 0, 1]),
    Bags(0, 2, mean=True),
]
_MIXED = Case([7, 20, 3], _FEATURES, 5, wide=[2, 8, 0], places=[3, 0, 5, 1, 4], room=1, spare=1)

CASES = {
    "one_hot": Case([9, 4, 30], [Bags(0, 1), Bags(1, 1), Bags(2, 1)], 21, wide=[3, 4, 0]),
    "multi_hot": Case(
        [9, 4], [Bags(1, 3), Bags(0, 2, mean=True)], 5, wide=[0, 2], dtype=torch.int32, places=[1, 0], room=2
    ),
    "ragged": Case([50], [Bags(0, [3, 0, 1, 0, 7]), Bags(0, [0, 2, 0, 0, 0], mean=True)], 5, wide=[25], spare=3),
    "mixed": _MIXED,
    "mixed_int32": replace(_MIXED, dtype=torch.int32),
    "weighted": replace(_MIXED, weights=True),
    "one_row": Case([1], [Bags(0, 40)], 30, wide=[0]),
    "fixed": Case([9, 4], [Bags(0, 6, mean=True), Bags(1, 6)], 5, wide=[2, 0], weights=True, room=1),
    "empty_bags": Case([5], [Bags(0, [0, 0, 0]), Bags(0, 0, mean=True)], 3, wide=[1], weights=True, room=1),
    "no_samples": Case([5, 5], [Bags(0, 1), Bags(1, [], mean=True)], 0, wide=[5, 0], places=[2, 0]),
}


def naive_bags(bags: BagLayout) -> list[list[tuple[list[int], list[float], bool]]]:
    """Slots, weights and pooling of every bag, ``[feature][sample]``."""
    out = []
    for start, fixed, row, base, mean, _, _ in bags.features.tolist():
        of_feature = []
        for b in range(bags.batch_size):
            first, stop = (b * fixed, (b + 1) * fixed) if fixed >= 0 else bags.offsets[row, b : b + 2].tolist()
            slots = [int(i) + base for i in bags.ids[start + first : start + stop]]
            weights = (
                [1.0] * len(slots) if bags.weights is None else bags.weights[start + first : start + stop].tolist()
            )
            of_feature.append((slots, weights, bool(mean)))
        out.append(of_feature)
    return out


def places_of(bags: BagLayout) -> list[int]:
    """Where the vector of each feature is among the ``width`` of a sample."""
    return [bags.room + feature[5] for feature in bags.features.tolist()]


def naive_lookup(values: np.ndarray, bags: BagLayout) -> np.ndarray:
    """Float32 vectors ``[B, F, D]``, one operation after the other, from rows ``[S, D]``."""
    out = np.zeros((bags.batch_size, len(bags.features), values.shape[1]), np.float32)
    for f, of_feature in enumerate(naive_bags(bags)):
        for b, (slots, weights, mean) in enumerate(of_feature):
            for i, (slot, weight) in enumerate(zip(slots, weights, strict=True)):
                row = values[slot] if bags.weights is None else values[slot] * np.float32(weight)
                out[b, f] = row if i == 0 else out[b, f] + row
            if mean and slots:
                out[b, f] /= np.float32(len(slots))
    return out


def embedding_bag(weight: Tensor, bags: BagLayout, weights: Tensor | None = None) -> Tensor:
    """Vectors ``[B, F, D]`` by ``torch.nn.functional.embedding_bag``, feature by feature; differentiable.

    `weights` replaces the per-id weights, parallel to the ids.
    """
    columns = []
    if weights is None:
        weights = torch.ones(len(bags.ids)) if bags.weights is None else bags.weights
    for feature, of_feature in zip(bags.features.tolist(), naive_bags(bags), strict=True):
        slots = torch.tensor([s for bag in of_feature for s in bag[0]], dtype=torch.int64)
        lengths = torch.tensor([len(bag[0]) for bag in of_feature], dtype=torch.int64)
        pooled = torch.nn.functional.embedding_bag(
            slots,
            weight,
            lengths.cumsum(0) - lengths,
            mode="sum",
            per_sample_weights=weights[feature[0] : feature[0] + len(slots)].to(weight.dtype),
        )
        columns.append(pooled / lengths.clamp(min=1)[:, None] if feature[4] else pooled)
    return torch.stack(columns, dim=1)


def occurrences_of(slots: list[int], bags: int, scaled: bool, seed: int = 0) -> Occurrences:
    """These slots in this order, in random bags, with random factors."""
    gen = torch.Generator().manual_seed(seed)
    scale = torch.randn(len(slots), generator=gen) if scaled else None
    return Occurrences(
        torch.tensor(slots, dtype=torch.int64), torch.randint(0, bags, (len(slots),), generator=gen), scale
    )


def naive_runs(slots: list[int]) -> dict[int, list[list[int]]]:
    """Positions of each slot's occurrences, cut into runs; slots ascending."""
    return {
        slot: [at[i : i + RUN] for i in range(0, len(at), RUN)]
        for slot in sorted(set(slots))
        for at in [[i for i, s in enumerate(slots) if s == slot]]
    }


def naive_sum(occurrences: Occurrences, grad: Tensor) -> dict[int, np.ndarray]:
    """The canonical sum of each slot, in float32, one addition after the other."""

    def left_to_right(rows: list[np.ndarray]) -> np.ndarray:
        acc = rows[0]
        for row in rows[1:]:
            acc = acc + row
        return acc

    values = grad[occurrences.bags].float().numpy()
    if occurrences.scale is not None:
        values = values * occurrences.scale.numpy()[:, None]
    return {
        slot: left_to_right([left_to_right([values[i] for i in run]) for run in runs])
        for slot, runs in naive_runs(occurrences.slots.tolist()).items()
    }


def naive_block_sum(x: np.ndarray) -> np.ndarray:
    """Sum of a float32 vector: halving trees of 16 columns, then the blocks in column order."""
    total = np.float32(0)
    for start in range(0, len(x), BLOCK):
        block = np.zeros(BLOCK, np.float32)
        block[: len(x) - start] = x[start : start + BLOCK]
        while len(block) > 1:
            block = block[: len(block) // 2] + block[len(block) // 2 :]
        total = block[0] if start == 0 else total + block[0]
    return total


def valid(groups: Groups) -> tuple[list[int], list[int], list[int], list[int]]:
    """Order, rows, run starts and group runs without what is beyond the valid entries."""
    count, runs = groups.counts.tolist()
    return (
        groups.order.tolist(),
        groups.rows[:count].tolist(),
        groups.run_starts[: runs + 1].tolist(),
        groups.group_runs[: count + 1].tolist(),
    )
