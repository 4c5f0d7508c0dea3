"""Every id is checked before a kernel reads memory with it; what is out of range is refused, dropped or hashed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from hotbed.bags import Bags
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.specs import Feature


def checked_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int], bad: Counter[str]) -> Jagged:
    """Return ids that are all valid rows.

    Parameters
    ----------
    ids
        As they came.
    features
        Whose ids to check; others are left alone.
    rows
        Rows by table.
    bad
        By feature, how many ids were dropped or hashed; counted up here.

    Raises
    ------
    BatchError
        For a missing feature, or an id out of range of a feature with ``on_bad_id="error"``.
    """
    wanted = {(f.name, rows[f.table]) for f in features}
    if wanted <= ids.verified:
        return ids
    for feature in _features_out_of_range(ids, features, rows):
        ids = _repaired(ids, feature, rows[feature.table], bad)
    ids.mark_verified(wanted)
    return ids


def verified_ids(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int]) -> bool:
    """Mark ids as verified if all are in range; raise as `checked_ids` does, but repair nothing."""
    out_of_range = _features_out_of_range(ids, features, rows)
    for feature in out_of_range:
        if feature.on_bad_id == "error":
            _refuse(ids, feature, rows[feature.table])
    if not out_of_range:
        ids.mark_verified({(f.name, rows[f.table]) for f in features})
    return not out_of_range


def _features_out_of_range(ids: Jagged, features: Sequence[Feature], rows: Mapping[str, int]) -> list[Feature]:
    at = [ids.index(f.name) for f in features]
    if not len(ids.values):
        return []
    limits = [rows[f.table] for f in features]
    if len(set(ids.fixed)) == 1 and ids.fixed[0] is not None:
        low, high = (t.tolist() for t in torch.aminmax(ids.values.view(len(ids.names), -1), dim=1))
        return [f for f, i, limit in zip(features, at, limits, strict=True) if low[i] < 0 or high[i] >= limit]
    bad: list[Feature] = []
    for feature, i, limit in zip(features, at, limits, strict=True):
        values = ids.values[ids.starts[i] : ids.starts[i + 1]]
        if len(values):
            low, high = torch.aminmax(values)
            if int(low) < 0 or int(high) >= limit:
                bad.append(feature)
    return bad


def _repaired(ids: Jagged, feature: Feature, rows: int, bad: Counter[str]) -> Jagged:
    if feature.on_bad_id == "error":
        _refuse(ids, feature, rows)
    bags = ids[feature.name]
    wrong = _out_of_range(bags, rows)
    bad[feature.name] += int(wrong.sum())
    if feature.on_bad_id == "hash":
        return ids.with_feature(feature.name, bags._replace(values=hashed(bags.values, rows).where(wrong, bags.values)))
    sample = _sample_of_each(bags)
    kept = torch.zeros(len(ids) + 1, dtype=torch.int64, device=wrong.device)
    kept[1:] = torch.bincount(sample[~wrong], minlength=len(ids)).cumsum(0)
    weights = None if bags.weights is None else bags.weights[~wrong]
    return ids.with_feature(feature.name, Bags(bags.values[~wrong], len(ids), None, kept, weights))


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
    return (bags.values < 0) | (bags.values >= rows)


def _sample_of_each(bags: Bags) -> Tensor:
    """Sample that each id belongs to ``[N]``."""
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
