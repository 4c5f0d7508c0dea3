"""Check every id before a kernel uses it as an address, and make the bag layouts for kernels.

`check_batch_ids` raises an error for ids out of range, or drops or hashes them. It raises an error for bags that are
too long, or truncates them. The batch records its checks, so that each is done once. `FeatureBags` makes the layouts of
some features for all batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
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
    """Numbers of ids that were changed or removed before the lookup, by feature."""

    bad: Counter[str]
    """Ids out of range, which were dropped or hashed."""
    truncated: Counter[str]
    """Ids after ``max_len`` of their bag, which were removed."""


def check_batch_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int], discarded: Discarded) -> Jagged:
    """Return a batch in which all ids are valid rows and no bag is too long. Changes are counted in ``discarded``.

    A missing feature raises `BatchError`, like an id out of range with ``on_bad_id="error"`` and a bag that is too long
    with ``on_too_long="error"``.
    """
    wanted = list_claims(features, rows)
    if wanted <= ids.verified:
        return ids
    ids = repair_ids(ids, features, rows, discarded)
    ids.mark_verified(wanted)
    return ids


def repair_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int], discarded: Discarded) -> Jagged:
    """Like `check_batch_ids`, but for ids that are looked up once: the batch does not record the check."""
    if too_long := _features_too_long(ids, features):
        ids = ids.with_features({f.name: _truncate(ids, f, discarded.truncated) for f in too_long})
    if bad := _features_out_of_range(ids, features, rows):
        ids = ids.with_features({f.name: _repair(ids, f, rows[f.table], discarded.bad) for f in bad})
    return ids


def verify_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int]) -> bool:
    """Return whether all ids are valid, and record that in the batch. Raise errors like `check_batch_ids`."""
    out_of_range, too_long = _features_out_of_range(ids, features, rows), _features_too_long(ids, features)
    for feature in out_of_range:
        if feature.on_bad_id == "error":
            _refuse(ids, feature, rows[feature.table])
    for feature in too_long:
        if feature.on_too_long == "error":
            _refuse_length(ids, feature)
    if not out_of_range and not too_long:
        ids.mark_verified(list_claims(features, rows))
    return not out_of_range and not too_long


def list_claims(features: Sequence[Feature], rows: Mapping[str, int]) -> set[tuple[str, int]]:
    """Return the entries of `Jagged.verified` after all checks of these features."""
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


def _truncate(ids: Jagged, feature: Feature, count: Counter[str]) -> Bags:
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
    return keep_ids(bags, keep)


def _refuse_length(ids: Jagged, feature: Feature) -> NoReturn:
    """Raise `BatchError` for the first bag that is too long."""
    lengths = ids[feature.name].lengths()
    sample = int((lengths > (feature.max_len or 0)).nonzero()[0])
    raise BatchError(
        f"feature '{feature.name}': got {int(lengths[sample]):,} ids at sample {sample}, expected at most max_len "
        f"{feature.max_len:,}. Increase `max_len`, or set on_too_long='truncate' or 'keep_last'"
    )


def _features_out_of_range(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int]) -> list[Feature]:
    numbered = {ids.index(f.name): f for f in features}  # raises for a missing feature, even in a batch without ids
    find = find_invalid_on_host if ids.values.is_cpu else find_invalid_on_device
    found = find(ids, {i: rows[f.table] for i, f in numbered.items()}) if len(ids.values) else set[int]()
    return [f for i, f in numbered.items() if i in found]


def find_invalid_on_host(ids: Jagged, limits: Mapping[int, int]) -> set[int]:
    """Return the numbers of features with ids that are negative or not below their limits.

    As unsigned integers, negative ids are larger than all others. So one NumPy pass over maxima is sufficient. It takes
    a quarter of the time of torch's minima and maxima.
    """
    values = ids.values.numpy()
    negative = 1 << (8 * values.itemsize - 1)  # smallest unsigned integer of a negative id
    starts = np.asarray(ids.starts)
    (having,) = np.nonzero(starts[:-1] < starts[1:])
    largest = np.maximum.reduceat(values.view(f"u{values.itemsize}"), starts[having])
    found = dict(zip(having.tolist(), largest.tolist(), strict=True))
    return {i for i, limit in limits.items() if found.get(i, -1) >= min(limit, negative)}


def find_invalid_on_device(ids: Jagged, limits: Mapping[int, int]) -> set[int]:
    """Like `find_invalid_on_host`, for ids on a device. The host synchronizes with the device."""
    if len(set(ids.fixed)) == 1 and ids.fixed[0] is not None:
        of_features = ids.values.view(len(ids.names), -1)
        low, high = of_features.amin(1).tolist(), of_features.amax(1).tolist()
        return {i for i, limit in limits.items() if low[i] < 0 or high[i] >= limit}
    # With many features, two operations per feature would take longer than operations over all ids.
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


def _repair(ids: Jagged, feature: Feature, rows: int, bad: Counter[str]) -> Bags:
    if feature.on_bad_id == "error":
        _refuse(ids, feature, rows)
    bags = ids[feature.name]
    wrong = _out_of_range(bags, rows)
    bad[feature.name] += int(wrong.sum())
    if feature.on_bad_id == "hash":
        return bags._replace(values=hash_ids(bags.values, rows).where(wrong, bags.values))
    return keep_ids(bags, ~wrong)


def keep_ids(bags: Bags, keep: Tensor) -> Bags:
    """Return the bags with only the ids where ``keep`` is True."""
    offsets = torch.zeros(bags.batch_size + 1, dtype=torch.int64, device=keep.device)
    offsets[1:] = torch.bincount(_sample_of_each(bags)[keep], minlength=bags.batch_size).cumsum(0)
    weights = None if bags.weights is None else bags.weights[keep]
    return Bags(bags.values[keep], bags.batch_size, None, offsets, weights)


def _refuse(ids: Jagged, feature: Feature, rows: int) -> NoReturn:
    """Raise `BatchError` for the first id of a feature that is out of range."""
    bags = ids[feature.name]
    first = int(_out_of_range(bags, rows).nonzero()[0])
    value = int(bags.values[first])
    rest = f"0 to {rows - 1:,} for rows {rows:,}. Increase `rows`" if value >= 0 else "at least 0. Use valid ids"
    raise BatchError(
        f"feature '{feature.name}': got id {value:,} at sample {int(_sample_of_each(bags)[first])}, expected {rest}, "
        "or set on_bad_id='drop' or 'hash'"
    )


def _out_of_range(bags: Bags, rows: int) -> Tensor:
    ids = bags.values.long()  # int32 cannot be compared with numbers of rows beyond its range
    return (ids < 0) | (ids >= rows)


def _sample_of_each(bags: Bags) -> Tensor:
    """Return the sample of each id ``[N]``."""
    return torch.repeat_interleave(torch.arange(bags.batch_size, device=bags.values.device), bags.lengths())


def hash_ids(ids: Tensor, rows: int) -> Tensor:
    """Map any ids to ``0 … rows − 1`` by the 64-bit finalizer of MurmurHash3 and the remainder.

    The dtype is kept, unless ``rows`` is beyond the range of int32.
    """
    x = ids.long()
    for multiplier in (-0xAE502812AA7333, -0x3B314601E57A13AD):  # 0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53 as int64
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * multiplier
    x = (x ^ ((x >> 33) & 0x7FFFFFFF)) & 0x7FFFFFFFFFFFFFFF
    x = x % rows
    return x.to(ids.dtype) if rows <= torch.iinfo(ids.dtype).max else x


class FeatureBags:
    """Makes the bag layouts of some features for all batches.

    ``features`` maps each feature to the position of its vector in a sample's output. ``slots`` has the slot of row 0
    and the number in `Rows.tables` by table. With ``single``, each id is a bag, and there is one feature. If that
    feature is padded, padding is empty bags.
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
        """Bag-layout tensors of the last batch, on the device."""
        return [] if self._last is None else [self._last[1]]

    @property
    def tables(self) -> set[str]:
        """Tables of the features."""
        return {f.table for f in self.features}

    def layout(self, ids: Jagged, width: int, room: int) -> BagLayout:
        """Return the layout of a batch's bags.

        ``width`` and ``room`` are as in `BagLayout`. They have no effect if each id is a bag.
        """
        at = self._found(ids)
        starts = ids.starts
        spans = tuple([(starts[i], starts[i + 1] - starts[i]) for i in at])
        total = sum([count for _, count in spans])
        batch_size, offsets = (total, None) if self.single else (len(ids), ids.offsets)
        first, padded = self._first, False
        if self.single and first is not None and first.padding is not None and ids.fixed[at[0]] != first.max_len:
            padded, offsets = True, _pad_offsets(ids.bags_of(first.name), first)
            batch_size = offsets.shape[1] - 1
        if offsets is None:
            offsets = torch.empty(0, batch_size + 1, dtype=torch.int64, device=ids.values.device)
        entries, ids_per_bag = self._entries(ids, at, padded)
        return BagLayout(
            ids.values,
            entries,
            offsets,
            None if ids.weights is None else convert_weights(ids.weights),
            batch_size,
            total,
            self._has_divisors,
            1 if self.single else width,
            0 if self.single else room,
            ids_per_bag,
            spans=None if ids.has_room else spans,
        )

    def _found(self, ids: Jagged) -> list[int]:
        """Return the indices of the features in a batch. Batches have equal names, so the last result is cached."""
        last = self._at  # another thread may make a layout, too
        if last is None or last[0] != ids.names:
            self._at = last = ids.names, [ids.index(f.name) for f in self.features]
        return last[1]

    def _entries(self, ids: Jagged, at: list[int], padded: bool) -> tuple[Tensor, int | None]:
        """Return `BagLayout.features` and ``ids_per_bag``.

        Fixed features have equal positions in all batches, so the last result is cached.
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


def bag_ends(ids: Jagged, feature: Feature | None, sizes: Sequence[int]) -> list[int]:
    """Return the ends of consecutive groups of samples in the bags of an output of a lookup.

    The output belongs to all pooled features (None), with one bag per sample, or to a feature with one bag per id.
    """
    ends = list(accumulate(sizes))
    if feature is None:
        return ends
    if feature.padding is not None:
        return [end * (feature.max_len or 0) for end in ends]
    bags = ids.bags_of(feature.name)
    return [end * (bags.fixed or 0) for end in ends] if bags.offsets is None else bags.offsets[ends].tolist()


def _pad_offsets(bags: Bags, feature: Feature) -> Tensor:
    """Return offsets ``[1, B · L + 1]`` of bags with at most one id. Position l of sample b is bag ``b · L + l``.

    For ``[[4, 1], [3]]`` and L = 3 the result is ``[0, 1, 2, 2, 3, 3, 3]`` with padding on the right, and ``[0, 0, 1,
    2, 2, 2, 3]`` with padding on the left.
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


def convert_weights(weights: Tensor) -> Tensor:
    """Convert per-id weights to float32. Copy trained weights, because they may change before the tables' step."""
    values = weights.detach().to(torch.float32)
    return values.clone() if weights.requires_grad and values.data_ptr() == weights.data_ptr() else values


def refuse_other_ids(ids: object) -> NoReturn:
    """Raise `BatchError` for ids that are not a `Jagged`, with the matching conversion."""
    type_name = type(ids).__name__
    if is_keyed(ids):
        how = FROM_KEYED
    elif isinstance(ids, Mapping):
        how = "Jagged.from_dict(ids), with ids [B], [B, k], a list of bags, or (values, offsets [B + 1]) by feature"
    elif isinstance(ids, Tensor):
        how = "Jagged.from_dict({'FEATURE': ids}), for ids [B] or [B, k]; with nn.EmbeddingBag's offsets [B] "
        how += "{'FEATURE': (ids, torch.cat([offsets, torch.tensor([len(ids)])]))}"
    else:
        how = "Jagged.from_dict({'FEATURE': …, …})"
    raise BatchError(f"ids: got {type_name}, expected hotbed.Jagged. Use {how}")
