"""Check every id before a kernel reads memory with it, and lay bags out as kernels take them.

An id out of range is refused, dropped or hashed, a bag that is too long refused or cut off (`checked_ids`); what was
found is remembered by the batch, so that it is checked once. `BagPlaces` then finds the bags of some features in batch
after batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from hotbed.errors import BatchError
from hotbed.jagged import FROM_KEYED, Bags, Jagged, is_keyed, offsets_of
from hotbed.ops import BagLayout
from hotbed.ops.layout import FIXED, RAGGED_ROW, START
from hotbed.specs import ANY_ID, POOLING_CODE, Feature
from hotbed.store.memory import to_device


class Discarded(NamedTuple):
    """Counts of ids that were not looked up unchanged, by feature."""

    bad: Counter[str]
    """Out of range, and dropped or hashed."""
    truncated: Counter[str]
    """Beyond ``max_len`` of their bag, and cut off."""


def checked_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int], discarded: Discarded) -> Jagged:
    """Repair or refuse ids: return ids that are all valid rows, in bags that are not too long.

    What is discarded is counted in ``discarded``. A missing feature, an id out of range of a feature with
    ``on_bad_id="error"`` and a bag too long of one with ``on_too_long="error"`` raise `BatchError`.
    """
    wanted = claims(features, rows)
    if wanted <= ids.verified:
        return ids
    ids = repaired_ids(ids, features, rows, discarded)
    ids.mark_verified(wanted)
    return ids


def repaired_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int], discarded: Discarded) -> Jagged:
    """Do what `checked_ids` does, for ids that are looked up once: whether they are valid is not remembered."""
    if too_long := _features_too_long(ids, features):
        ids = ids.with_features({f.name: _truncated(ids, f, discarded.truncated) for f in too_long})
    if bad := _features_out_of_range(ids, features, rows):
        ids = ids.with_features({f.name: _repaired(ids, f, rows[f.table], discarded.bad) for f in bad})
    return ids


def verified_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int]) -> bool:
    """Mark ids as verified if nothing is to be repaired; raise as `checked_ids` does, but repair nothing."""
    out_of_range, too_long = _features_out_of_range(ids, features, rows), _features_too_long(ids, features)
    for feature in out_of_range:
        if feature.on_bad_id == "error":
            _refuse(ids, feature, rows[feature.table])
    for feature in too_long:
        if feature.on_too_long == "error":
            _refuse_length(ids, feature)
    if not out_of_range and not too_long:
        ids.mark_verified(claims(features, rows))
    return not out_of_range and not too_long


def claims(features: Sequence[Feature], rows: Mapping[str, int]) -> set[tuple[str, int]]:
    """List what `Jagged.verified` must contain."""
    return {(f.name, rows[f.table]) for f in features} | {
        (f.name, -f.max_len) for f in features if f.max_len is not None
    }


def _features_too_long(ids: Jagged, features: Sequence[Feature]) -> list[Feature]:
    limited = [f for f in features if f.max_len is not None]
    if not limited or not len(ids):
        return []
    longest = None if ids.offsets is None else ids.offsets.diff(dim=1).amax(dim=1).tolist()

    def length(i: int) -> int:
        fixed = ids.fixed[i]
        if fixed is not None:
            return fixed
        assert longest is not None
        return longest[ids.ragged_rows[i]]

    return [f for f in limited if length(ids.index(f.name)) > (f.max_len or 0)]


def _truncated(ids: Jagged, feature: Feature, count: Counter[str]) -> Bags:
    if feature.on_too_long == "error":
        _refuse_length(ids, feature)
    bags = ids[feature.name]
    lengths = bags.lengths()
    first = lengths.cumsum(0) - lengths
    place = torch.arange(len(bags.values), device=lengths.device) - torch.repeat_interleave(first, lengths)
    if feature.on_too_long == "keep_last":
        place = torch.repeat_interleave(lengths, lengths) - 1 - place
    keep = place < (feature.max_len or 0)
    count[feature.name] += int((~keep).sum())
    return kept(bags, keep)


def _refuse_length(ids: Jagged, feature: Feature) -> NoReturn:
    """Raise for the first bag that is too long."""
    lengths = ids[feature.name].lengths()
    sample = int((lengths > (feature.max_len or 0)).nonzero()[0])
    raise BatchError(
        f"feature {feature.name}: {int(lengths[sample]):,} ids at sample {sample}, more than max_len "
        f"{feature.max_len:,}; raise `max_len`, or set on_too_long='truncate'|'keep_last'"
    )


def _features_out_of_range(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int]) -> list[Feature]:
    numbered = {ids.index(f.name): f for f in features}  # of a batch without ids, too: a feature that is missing raises
    find = beyond_on_host if ids.values.is_cpu else beyond_on_device
    found = find(ids, {i: rows[f.table] for i, f in numbered.items()}) if len(ids.values) else set[int]()
    return [f for i, f in numbered.items() if i in found]


def beyond_on_host(ids: Jagged, limits: Mapping[int, int]) -> set[int]:
    """Find features that have negative ids, or ids that are not below their limits; by number of the feature.

    As unsigned numbers, negative ids are the largest. One pass of NumPy finds the largest of all features, in a quarter
    of the time of torch's smallest and largest ids (docs/log.md).
    """
    values = ids.values.numpy()
    negative = 1 << (8 * values.itemsize - 1)  # the least unsigned number that is a negative id
    starts = np.asarray(ids.starts)
    (having,) = np.nonzero(starts[:-1] < starts[1:])
    largest = np.maximum.reduceat(values.view(f"u{values.itemsize}"), starts[having])
    found = dict(zip(having.tolist(), largest.tolist(), strict=True))
    return {i for i, limit in limits.items() if found.get(i, -1) >= min(limit, negative)}


def beyond_on_device(ids: Jagged, limits: Mapping[int, int]) -> set[int]:
    """Find the same as `beyond_on_host`, and wait for the device."""
    if len(set(ids.fixed)) == 1 and ids.fixed[0] is not None:
        of_features = ids.values.view(len(ids.names), -1)
        low, high = of_features.amin(1).tolist(), of_features.amax(1).tolist()
        return {i for i, limit in limits.items() if low[i] < 0 or high[i] >= limit}
    # Two operations for each feature would cost more than all ids do, where there are many features.
    largest = torch.full((len(ids.names),), ANY_ID, dtype=torch.int64)
    largest[list(limits)] = torch.tensor(list(limits.values()), dtype=torch.int64) - 1
    starts = torch.tensor(ids.starts)
    to = ids.values.device
    limit = torch.repeat_interleave(largest.to(to), starts.diff().to(to), output_size=len(ids.values))
    wrong = (ids.values < 0) | (ids.values > limit)
    if not bool(wrong.any()):
        return set()
    found = torch.searchsorted(starts, wrong.nonzero()[:, 0].cpu(), right=True).sub(1).unique()
    return set(found.tolist()) & limits.keys()


def _repaired(ids: Jagged, feature: Feature, rows: int, bad: Counter[str]) -> Bags:
    if feature.on_bad_id == "error":
        _refuse(ids, feature, rows)
    bags = ids[feature.name]
    wrong = _out_of_range(bags, rows)
    bad[feature.name] += int(wrong.sum())
    if feature.on_bad_id == "hash":
        return bags._replace(values=hashed(bags.values, rows).where(wrong, bags.values))
    return kept(bags, ~wrong)


def kept(bags: Bags, keep: Tensor) -> Bags:
    """Select the ids where ``keep`` is set."""
    offsets = torch.zeros(bags.batch_size + 1, dtype=torch.int64, device=keep.device)
    offsets[1:] = torch.bincount(_sample_of_each(bags)[keep], minlength=bags.batch_size).cumsum(0)
    weights = None if bags.weights is None else bags.weights[keep]
    return Bags(bags.values[keep], bags.batch_size, None, offsets, weights)


def _refuse(ids: Jagged, feature: Feature, rows: int) -> NoReturn:
    """Raise for the first id of a feature that is out of range."""
    bags = ids[feature.name]
    first = int(_out_of_range(bags, rows).nonzero()[0])
    value = int(bags.values[first])
    what = f"is ≥ rows {rows:,}; raise `rows`" if value >= 0 else "is negative; valid ids start at 0"
    raise BatchError(
        f"feature {feature.name}: id {value:,} at sample {int(_sample_of_each(bags)[first])} {what}, or set "
        "on_bad_id='drop'|'hash'"
    )


def _out_of_range(bags: Bags, rows: int) -> Tensor:
    ids = bags.values.long()  # int32 cannot be compared with more rows than it can count
    return (ids < 0) | (ids >= rows)


def _sample_of_each(bags: Bags) -> Tensor:
    """Find the sample that each id belongs to ``[N]``."""
    return torch.repeat_interleave(torch.arange(bags.batch_size, device=bags.values.device), bags.lengths())


def hashed(ids: Tensor, rows: int) -> Tensor:
    """Map any ids to ``0 … rows − 1``: 64-bit finalizer of MurmurHash3, then the remainder.

    The dtype stays, unless it is int32 and there are more rows than it can count.
    """
    x = ids.long()
    for multiplier in (-0xAE502812AA7333, -0x3B314601E57A13AD):  # 0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53 as int64
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * multiplier
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) & 0x7FFFFFFFFFFFFFFF
    x = x % rows
    return x.to(ids.dtype) if rows <= torch.iinfo(ids.dtype).max else x


class BagPlaces:
    """The places of some features' bags in batch after batch.

    ``features`` come with the position of each one's vector among those of a sample; ``slots`` has, by table, the slot
    of its row 0 and its number in `Rows.tables`. If every id is a bag of its own (``single``), there is one feature; if
    that is padded, further bags are empty.
    """

    def __init__(
        self, features: Mapping[Feature, int], slots: Mapping[str, tuple[int, int]], *, single: bool = False
    ) -> None:
        self.features = dict(features)
        self.single = single
        self._first = next(iter(self.features), None)
        self._last: tuple[object, Tensor, int | None] | None = None
        self._at: tuple[tuple[str, ...], list[int]] | None = None
        self._has_divisors = any(POOLING_CODE[f.pooling] for f in features)
        # `BagLayout.features`, with zeros where the batch decides.
        self._fixed = torch.tensor(
            [
                [0, 0, 0, slots[f.table][0], POOLING_CODE[f.pooling], position, slots[f.table][1]]
                for f, position in features.items()
            ],
            dtype=torch.int64,
            device="cpu",
        )

    @property
    def entries(self) -> list[Tensor]:
        """What kernels were told of the last batch's bags, on the device."""
        return [] if self._last is None else [self._last[1]]

    @property
    def tables(self) -> set[str]:
        """Tables of the features."""
        return {f.table for f in self.features}

    def layout(self, ids: Jagged, width: int, room: int) -> BagLayout:
        """Lay out the bags of a batch; features are found by name.

        ``width`` and ``room`` are as in `BagLayout`, and of no effect where every id is a bag.
        """
        at = self._found(ids)
        starts = ids.starts
        spans = tuple([(starts[i], starts[i + 1] - starts[i]) for i in at])
        total = sum([count for _, count in spans])
        batch_size, offsets = (total, None) if self.single else (len(ids), ids.offsets)
        first, padded = self._first, False
        if self.single and first is not None and first.padding is not None and ids.fixed[at[0]] != first.max_len:
            padded, offsets = True, _padded_offsets(ids.bags_of(first.name), first)
            batch_size = offsets.shape[1] - 1
        if offsets is None:
            offsets = torch.empty(0, batch_size + 1, dtype=torch.int64, device=ids.values.device)
        entries, ids_per_bag = self._entries(ids, at, padded)
        return BagLayout(
            ids.values,
            entries,
            offsets,
            None if ids.weights is None else id_weights(ids.weights),
            batch_size,
            total,
            self._has_divisors,
            1 if self.single else width,
            0 if self.single else room,
            ids_per_bag,
            spans=None if ids.has_room else spans,
        )

    def _found(self, ids: Jagged) -> list[int]:
        """Find the features in a batch by name; batches have the same names, so the last result is kept."""
        last = self._at  # another thread may make a layout, too
        if last is None or last[0] != ids.names:
            self._at = last = ids.names, [ids.index(f.name) for f in self.features]
        return last[1]

    def _entries(self, ids: Jagged, at: list[int], padded: bool) -> tuple[Tensor, int | None]:
        """Make `BagLayout.features` and ``ids_per_bag``.

        Fixed features keep their places from batch to batch, so the last result is kept.
        """
        places = (ids.names, ids.fixed, ids.starts, ids.values.device)
        last = self._last  # another thread may make a layout, too
        if last is None or last[0] != places:
            entries = self._fixed.clone()
            fixed = [-1 if k is None else k for k in ids.fixed]
            if self.single:
                fixed = [-1 if padded else 1] * len(fixed)
            rows = [0] * len(fixed) if padded else ids.ragged_rows
            for column, values in ((START, ids.starts), (FIXED, fixed), (RAGGED_ROW, rows)):
                entries[:, column] = torch.tensor(values, dtype=torch.int64, device="cpu")[at]
            counts = {fixed[i] for i in at}
            count = counts.pop() if len(counts) == 1 else -1
            self._last = last = places, to_device(entries, ids.values.device), count if count > 0 else None
        return last[1:]


def _padded_offsets(bags: Bags, feature: Feature) -> Tensor:
    """Offsets ``[1, B · L + 1]`` of bags of one id or none: place l of sample b is bag ``b · L + l``.

    Of ``[[4, 1], [3]]`` and L = 3: ``[0, 1, 2, 2, 3, 3, 3]`` to the right, ``[0, 0, 1, 2, 2, 2, 3]`` to the left.
    """
    length = feature.max_len or 0
    lengths = bags.lengths()[:, None]
    before = torch.arange(length, device=lengths.device)
    if feature.padding == "left":
        before = (before - length + lengths).clamp_(min=0)
    else:
        before = torch.minimum(before, lengths)
    offsets = torch.empty(1, len(lengths) * length + 1, dtype=torch.int64, device=lengths.device)
    ends = offsets_of(lengths[:, 0]) if bags.offsets is None else bags.offsets
    torch.add(ends[:-1, None], before, out=offsets[0, :-1].view(-1, length))
    offsets[0, -1] = ends[-1]
    return offsets


def id_weights(weights: Tensor) -> Tensor:
    """Convert per-id weights to float32; trained ones are copied, for they may change before the tables' step."""
    values = weights.detach().to(torch.float32)
    return values.clone() if weights.requires_grad and values.data_ptr() == weights.data_ptr() else values


def refuse_other_ids(ids: object) -> NoReturn:
    """Raise `BatchError` for ids that are no `Jagged`, and say how to make one of them."""
    kind = type(ids).__name__
    if is_keyed(ids):
        how = FROM_KEYED
    elif isinstance(ids, Mapping):
        how = "Jagged.from_dict(ids): by feature ids [B], [B, k], a list of bags, or (values, offsets [B + 1])"
    elif isinstance(ids, Tensor):
        how = "Jagged.from_dict({'FEATURE': ids}), for ids [B] or [B, k]; with nn.EmbeddingBag's offsets [B] "
        how += "{'FEATURE': (ids, torch.cat([offsets, torch.tensor([len(ids)])]))}"
    else:
        how = "Jagged.from_dict({'FEATURE': …, …})"
    raise BatchError(f"the ids are {kind}, must be hotbed.Jagged; make it by {how}")
