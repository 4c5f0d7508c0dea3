"""Batches with every edge the kernels can meet, and plain Python that says what should come out."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.ops import Backend, BagLayout, Groups, Occurrences

DIMS = (1, 3, 16, 17, 40, 128)
RUN, BLOCK = 32, 16


@dataclass(frozen=True)
class Kernels:
    """A backend, and the device its tensors must be on."""

    name: str
    device: torch.device
    ops: Backend

    def put(self, value: Any) -> Any:
        """A copy on the device of a tensor, or of everything in a dict, tuple or dataclass."""
        if isinstance(value, torch.Tensor):
            return value.clone().to(self.device)
        if isinstance(value, dict):
            return {key: self.put(v) for key, v in value.items()}
        if isinstance(value, tuple):
            return tuple(self.put(v) for v in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self.put(getattr(value, f.name)) for f in fields(value)})
        return value


@dataclass(frozen=True)
class Bags:
    """One feature: the table it reads (by position), ids per sample or a list of lengths, and its pooling."""

    table: int
    lengths: int | list[int]
    mean: bool = False


@dataclass(frozen=True)
class Case:
    """Tables (rows of each), features, samples; `weights`: per-id weights."""

    tables: list[int]
    features: list[Bags]
    batch: int
    weights: bool = False
    dtype: torch.dtype = torch.int64

    @property
    def slots(self) -> int:
        return sum(self.tables)

    @property
    def bases(self) -> Tensor:
        return torch.tensor([0, *self.tables]).cumsum(0)[:-1]

    def layout(self, seed: int = 0) -> BagLayout:
        """Random ids; ids of another arena lie before each feature and would be out of range here."""
        gen = torch.Generator().manual_seed(seed)
        ids, rows, offsets, position, total = [], [], [], 0, 0
        for feature in self.features:
            ids.append(torch.full((3,), 2**30))
            position += 3
            ragged = isinstance(feature.lengths, list)
            row = [position, -1 if ragged else feature.lengths, len(offsets), int(self.bases[feature.table])]
            rows.append([*row, int(feature.mean)])
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
        )


_MIXED = [Bags(0, 1), Bags(1, [2, 0, 1, 5, 1], mean=True), Bags(1, 3), Bags(2, [0, 0, 40, 0, 1]), Bags(0, 2, mean=True)]

CASES = {
    "one_hot": Case([9, 4, 30], [Bags(0, 1), Bags(1, 1), Bags(2, 1)], 21),
    "multi_hot": Case([9, 4], [Bags(1, 3), Bags(0, 2, mean=True)], 5, dtype=torch.int32),
    "ragged": Case([50], [Bags(0, [3, 0, 1, 0, 7]), Bags(0, [0, 2, 0, 0, 0], mean=True)], 5),
    "mixed": Case([7, 20, 3], _MIXED, 5),
    "mixed_int32": Case([7, 20, 3], _MIXED, 5, dtype=torch.int32),
    "weighted": Case([7, 20, 3], _MIXED, 5, weights=True),
    "one_row": Case([1], [Bags(0, 40)], 30),
    "empty_bags": Case([5], [Bags(0, [0, 0, 0]), Bags(0, 0, mean=True)], 3, weights=True),
    "no_samples": Case([5, 5], [Bags(0, 1), Bags(1, [], mean=True)], 0),
}


def naive_bags(bags: BagLayout) -> list[list[tuple[list[int], list[float], bool]]]:
    """Slots, weights and pooling of every bag, ``[feature][sample]``."""
    out = []
    for start, fixed, row, base, mean in bags.features.tolist():
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


def embedding_bag(weight: Tensor, bags: BagLayout) -> Tensor:
    """`lookup` by ``torch.nn.functional.embedding_bag``, feature by feature; differentiable."""
    columns = []
    for of_feature in naive_bags(bags):
        slots = torch.tensor([s for bag in of_feature for s in bag[0]], dtype=torch.int64)
        weights = torch.tensor([w for bag in of_feature for w in bag[1]], dtype=weight.dtype)
        lengths = torch.tensor([len(bag[0]) for bag in of_feature], dtype=torch.int64)
        pooled = torch.nn.functional.embedding_bag(
            slots, weight, lengths.cumsum(0) - lengths, mode="sum", per_sample_weights=weights
        )
        columns.append(pooled / lengths.clamp(min=1)[:, None] if of_feature and of_feature[0][2] else pooled)
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

    values = grad[occurrences.bags].numpy()
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
