"""Define every operation in plain PyTorch.

The reference runs on any device and is slow. The tests of all kernels compare with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Mapping

import torch
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.layout import (
    ACTIVE,
    BASE,
    BLOCK,
    DECAY,
    FIXED,
    FREE,
    L2,
    LR,
    MAX_GRAD_NORM,
    MAX_NORM,
    OUT,
    OWN,
    POOLING,
    RAGGED_ROW,
    RUN,
    START,
    BagLayout,
    CacheTags,
    Groups,
    Occurrences,
    Rows,
    RuleStep,
)
from hotbed.ops.rows import cells_of, random_bits, read_rows, table_of, write_rows
from hotbed.optim import COMMON, Rule
from hotbed.optim.rule import Steps, sqrt
from hotbed.specs import divisors

NAME = "reference"
TAKES_STRIDED_ROWS = True
SUMS_LEAVES = True

__all__ = [
    "NAME",
    "SUMS_LEAVES",
    "TAKES_STRIDED_ROWS",
    "add_along_tree",
    "cache_find",
    "cache_read",
    "cache_take",
    "cache_use",
    "cache_write",
    "divisors",
    "gather",
    "group",
    "initial_values_",
    "interaction",
    "interaction_backward",
    "lookup",
    "occurrences",
    "segment_sum",
    "spread",
    "square_blocks",
    "update",
    "weight_gradient",
]

# -- initial values --------------------------------------------------------------------------------------------------


def initial_values_(out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
    """Fill ``out`` with the initial values of a rectangle of a table.

    Element (r, c) is ``float(k − 2²³) · float32(bound / 2²³)``. k is the upper 24 bits of a 32-bit hash of (seed, r,
    c), see `hotbed.ops.rows`. It needs only one float32 multiplication, so every backend computes the same bits.

    Parameters
    ----------
    out
        ``[len(rows), len(cols)]`` float32.
    seed
        32-bit seed of the table.
    rows, cols
        Rows and columns of the table. Ranges may have a step. Rows can also be a tensor ``[n]`` int64.
    bound
        Values are uniform on ``[−bound, bound)``. With bound 0, they are 0, never −0.
    """
    launches["reference.initial_values"] += 1
    if bound == 0:
        out.zero_()
        return
    row = (
        torch.arange(rows.start, rows.stop, rows.step, dtype=torch.int64, device=out.device)
        if isinstance(rows, range)
        else rows
    )
    col = torch.arange(cols.start, cols.stop, cols.step, dtype=torch.int64, device=out.device)
    k = random_bits(torch.tensor(seed, device=out.device), row, col) >> 8
    out.copy_((k - (1 << 23)).float() * torch.tensor(bound / (1 << 23), dtype=torch.float32, device=out.device))


# -- lookup ----------------------------------------------------------------------------------------------------------


def lookup(rows: Rows, bags: BagLayout, out: Tensor) -> None:
    """Pool the rows of each bag into ``out [B, width, D]`` at ``room + position``. Other elements do not change.

    A bag's vector is the float32 sum of its rows, multiplied by their weights, in bag order. The sum starts with the
    first row. Some poolings divide the sum (`divisors`). The vector of an empty bag is zero. It is rounded to the
    nearest value in the dtype of ``out`` (float32, bfloat16 or float16).
    """
    launches["reference.lookup"] += 1
    for feature in bags.features.tolist():
        first, lengths = _bounds(bags, feature)
        pooled = torch.zeros(bags.batch_size, rows.dim, dtype=torch.float32, device=out.device)
        for j in range(int(lengths.max()) if len(lengths) else 0):
            live = lengths > j
            at = first[live] + j
            each = read_rows(rows, bags.ids[at].long() + feature[BASE])
            if bags.weights is not None:
                each = each * bags.weights[at, None]
            pooled[live] = each if j == 0 else pooled[live] + each
        if feature[POOLING]:
            pooled /= divisors(feature[POOLING], lengths)[:, None]
        out[:, bags.room + feature[OUT]] = pooled.to(out.dtype)


def gather(rows: Rows, slots: Tensor, out: Tensor) -> None:
    """Copy the rows at slots ``[n]`` of any tables, in any order, to ``out [n, D]`` float32."""
    launches["reference.gather"] += 1
    out.copy_(read_rows(rows, slots))


def weight_gradient(rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
    """Compute the gradient of the per-id weights: each id's row times the gradient of its bag's vector.

    Columns are added as in `block_sum`. The sum is divided as in `lookup`. ``width`` and ``room`` of ``bags`` describe
    ``grad […, D]``. ``out`` is parallel to ``bags.ids``. Entries for ids of other arenas do not change.
    """
    launches["reference.weight_gradient"] += 1
    for feature in bags.features.tolist():
        _, lengths = _bounds(bags, feature)
        sample = torch.repeat_interleave(torch.arange(bags.batch_size, device=out.device), lengths)
        at = slice(feature[START], feature[START] + len(sample))
        each = read_rows(rows, bags.ids[at].long() + feature[BASE])
        dots = block_sum(each * grad[sample * bags.width + bags.room + feature[OUT]].float())
        out[at] = dots / divisors(feature[POOLING], lengths)[sample] if feature[POOLING] else dots


def _bounds(bags: BagLayout, feature: list[int]) -> tuple[Tensor, Tensor]:
    """Return the position of the first id and the number of ids of each bag of a feature, both ``[B]``."""
    if feature[FIXED] >= 0:
        sample = torch.arange(bags.batch_size, device=bags.ids.device)
        return feature[START] + sample * feature[FIXED], torch.full_like(sample, feature[FIXED])
    offsets = bags.offsets[feature[RAGGED_ROW]]
    return feature[START] + offsets[:-1], offsets.diff()


# -- segments --------------------------------------------------------------------------------------------------------


def occurrences(bags: BagLayout) -> Occurrences:
    """List slot, bag and gradient factor of every id, in feature, then sample, then bag order."""
    launches["reference.occurrences"] += 1
    slots: list[Tensor] = []
    owners: list[Tensor] = []
    scales: list[Tensor] = []
    for feature in bags.features.tolist():
        first, lengths = _bounds(bags, feature)
        sample = torch.repeat_interleave(torch.arange(bags.batch_size, device=first.device), lengths)
        at = slice(feature[START], feature[START] + len(sample))
        slots.append(bags.ids[at].long() + feature[BASE])
        owners.append(sample * bags.width + bags.room + feature[OUT])
        scale = (
            torch.ones(len(sample), dtype=torch.float32, device=first.device)
            if bags.weights is None
            else bags.weights[at]
        )
        scales.append(scale / divisors(feature[POOLING], lengths)[sample] if feature[POOLING] else scale)
    scaled = bags.weights is not None or bags.has_divisors
    return Occurrences(torch.cat(slots), torch.cat(owners), torch.cat(scales) if scaled else None)


def group(occurrences: Occurrences) -> Groups:
    """Group equal slots by a stable sort and cut each group into runs of `RUN` occurrences.

    Occurrences of several virtual ranks are sorted by slot and then by virtual rank, and runs are cut between these.
    """
    launches["reference.group"] += 1
    slots, leaves = occurrences.slots, occurrences.leaves if occurrences.leaf is not None else 1
    total = len(slots)
    keys = slots if occurrences.leaf is None else slots.long() * leaves + occurrences.leaf
    ordered, order = torch.sort(keys, stable=True)
    keys, lengths = torch.unique_consecutive(ordered, return_counts=True)
    runs = (lengths + RUN - 1) // RUN
    key_runs = torch.nn.functional.pad(runs.cumsum(0), (1, 0))
    of_key = torch.repeat_interleave(torch.arange(len(keys), device=slots.device), runs)
    within = torch.arange(len(of_key), device=slots.device) - key_runs[of_key]
    run_starts = (lengths.cumsum(0) - lengths)[of_key] + within * RUN
    run_starts = torch.nn.functional.pad(run_starts, (0, 1), value=total)
    rows, keys_of_group = torch.unique_consecutive(keys // leaves, return_counts=True)
    group_runs = key_runs[torch.nn.functional.pad(keys_of_group.cumsum(0), (1, 0))]

    def padded(t: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(t, (0, size - len(t)))

    return Groups(
        order,
        padded(rows, total),
        padded(run_starts, total + 1),
        padded(group_runs, total + 1),
        torch.tensor([len(rows), len(of_key)], device=slots.device),
        run_leaves=None if occurrences.leaf is None else padded(keys[of_key] % leaves, total),
    )


def spread(groups: Groups, values: Tensor) -> Tensor:
    """Return ``values[g]`` for every occurrence of group g, ``[N]`` in the original order.

    The first entries of ``values [≥ number of groups]`` int64 belong to the groups.
    """
    launches["reference.spread"] += 1
    count = int(groups.counts[0])
    lengths = groups.run_starts[groups.group_runs[: count + 1]].diff()
    out = torch.empty_like(groups.order)
    out[groups.order] = torch.repeat_interleave(values[:count], lengths)
    return out


# -- segment sum and update ------------------------------------------------------------------------------------------


def segment_sum(occurrences: Occurrences, groups: Groups, grad: Tensor, places: Tensor | None, out: Tensor) -> None:
    """Sum the gradient ``[…, D]`` of each distinct slot, as in `update` but without ``step.inv_scale``.

    The sum of a slot is the *canonical sum*. The float32 gradients of its occurrences, multiplied by their factors, are
    added left to right in runs of `RUN`. The runs are then added left to right. With `Groups.run_leaves`, this gives
    the sum of each virtual rank, and these sums are added along the tree. The sum of group g is written to row
    ``places[g]`` of ``out [n, D]`` float32, or to row g without ``places``. ``places`` are distinct. Other rows do not
    change.
    """
    launches["reference.segment_sum"] += 1
    count = int(groups.counts[0])
    if count:
        to = slice(count) if places is None else places[:count]
        out[to] = _canonical_sum(occurrences, groups, grad.float())


def add_along_tree(keys: Tensor, places: Tensor, count: Tensor, leaves: int, values: Tensor) -> None:
    """Add the values of each slot along the binary tree over virtual ranks, in place.

    The sum of a slot is written to the row of its first entry. Rows of its other entries are then undefined. Other rows
    do not change. `hotbed.virtual_ranks.tree_additions` defines the additions of a slot. They are in float32.

    Parameters
    ----------
    keys
        ``[N]`` int64. The first ``count`` entries are ``slot · leaves + virtual rank``, ascending and distinct. The
        others are ignored, and so are the other entries of ``places``.
    places
        ``[N]`` int64, distinct. The value of entry i is row ``places[i]`` of ``values``.
    count
        Number of entries, one int64 on the device.
    leaves
        Number of leaves of the tree, see `hotbed.virtual_ranks.tree_size`.
    values
        ``[n, D]`` float32, contiguous.
    """
    launches["reference.add_along_tree"] += 1
    total = int(count)
    keys, places = keys[:total], places[:total]
    for level in range(leaves.bit_length() - 1):
        starts_node, starts_half = _starts(keys >> level + 1), _starts(keys >> level)
        first = starts_node.nonzero().flatten()[starts_node.cumsum(0) - 1]  # first entry of each entry's node
        right = starts_half & ~starts_node
        left, right = places[first[right]], places[right]
        values[left] = values[left] + values[right]


def _starts(ascending: Tensor) -> Tensor:
    """Return a mask of the entries that differ from the previous entry."""
    return ascending != torch.nn.functional.pad(ascending[:-1], (min(len(ascending), 1), 0), value=-1)


def square_blocks(occurrences: Occurrences, groups: Groups, grad: Tensor, inv_scale: Tensor, out: Tensor) -> None:
    """Sum the squares of each distinct slot's gradient in blocks of 16 columns, for column shards.

    The sum of a slot is multiplied by ``inv_scale`` before it is squared. ``out`` is ``[≥ groups, ⌈D / 16⌉]`` float32.
    Columns of a block are added in halving trees.
    """
    launches["reference.square_blocks"] += 1
    count = int(groups.counts[0])
    if count:
        total = _canonical_sum(occurrences, groups, grad.float()) * inv_scale
        out[:count] = blocks_of(total * total)


def update(
    step: RuleStep, rows: Rows, state: Mapping[str, Tensor], occurrences: Occurrences, groups: Groups, grad: Tensor
) -> None:
    """Sum the gradient of each distinct slot and apply the rule to its row, once.

    The gradient of a row is the canonical sum of `segment_sum` times ``step.inv_scale``. `apply_rule` applies the rule.
    A low-precision row is then rounded stochastically (`round_stochastic`). Its random bits are a hash of
    (``step.seeds``, row, column), see `random_bits`. Rows and moments (``state``: ``[S]`` or ``[S, D]`` by name) are
    updated in place.
    """
    launches["reference.update"] += 1
    count = int(groups.counts[0])
    if count == 0 or not bool(step.gate):
        return
    slots = groups.rows[:count]
    total = _canonical_sum(occurrences, groups, grad.float()) * step.inv_scale
    table = table_of(rows, slots)
    active = (step.hyper[table, ACTIVE] != 0) & (slots < len(rows.wide) + len(rows.narrow))  # larger slots are padding
    slots, total, table = slots[active], total[active], table[active]
    moments = {m.name: state[m.name][slots] for m in step.rule.moments}
    mean_squares = None if step.mean_squares is None else step.mean_squares[:count][active]
    new = apply_rule(step.rule, read_rows(rows, slots), moments, total, step.hyper[table], mean_squares)
    for name, moment in moments.items():
        state[name][slots] = moment
    write_rows(rows, slots, new, random_bits(step.seeds[table], *cells_of(rows, slots, table)))


def _canonical_sum(occurrences: Occurrences, groups: Groups, grad: Tensor) -> Tensor:
    """Return the canonical sum of each group's gradients, ``[U, D]``."""

    def left_to_right(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        acc = values[starts]
        for j in range(1, int(lengths.max())):
            live = lengths > j
            acc[live] = acc[live] + values[starts[live] + j]
        return acc

    count, runs = groups.counts.tolist()
    each = grad.flatten(0, -2)[occurrences.bags[groups.order]]
    if occurrences.scale is not None:
        each = each * occurrences.scale[groups.order, None]
    run_starts = groups.run_starts[: runs + 1]
    group_runs = groups.group_runs[: count + 1]
    per_run = left_to_right(each, run_starts[:-1], run_starts.diff())
    if groups.run_leaves is None:
        return left_to_right(per_run, group_runs[:-1], group_runs.diff())
    of_run = torch.repeat_interleave(torch.arange(count, device=grad.device), group_runs.diff())
    keys, runs_of_key = torch.unique_consecutive(of_run << 32 | groups.run_leaves[:runs], return_counts=True)
    values = left_to_right(per_run, runs_of_key.cumsum(0) - runs_of_key, runs_of_key)
    add_along_tree(keys, torch.arange(len(keys), device=grad.device), torch.tensor(len(keys)), 1 << 32, values)
    return values[_starts(keys >> 32)]


# -- rules -----------------------------------------------------------------------------------------------------------


def apply_rule(
    rule: Rule,
    w: Tensor,  # rows [U, D] float32
    moments: dict[str, Tensor],  # of these rows, by name, [U] or [U, D]
    g: Tensor,  # summed gradients [U, D]
    hyper: Tensor,  # [U, 6 + H + C]: row of `RuleStep.hyper` for each row
    mean_squares: Tensor | None = None,  # [U], see `RuleStep`
) -> Tensor:
    """Return rows ``[U, D]`` float32 after one step. Moments are updated in place.

    The order is: ``g ← g · min(1, max_grad_norm / ‖g‖)``; ``g ← g + l2 · w``; ``w ← w − decay · w``; the rule;
    ``w ← w · min(1, max_norm / ‖w‖)``. An operation is skipped if its hyperparameter is off (∞ or 0).
    """
    # The rule divides its sum by the number of columns. Mean squares are already divided, so their number is 1.
    steps = rule_steps(rule, w, moments, g, hyper, w.shape[1] if mean_squares is None else 1)
    sums = None
    while True:
        try:
            terms = next(steps) if sums is None else steps.send(sums)
            sums = block_sum(terms) if mean_squares is None else mean_squares
        except StopIteration as end:
            return end.value


def rule_steps(
    rule: Rule,
    w: Tensor,
    moments: dict[str, Tensor],
    g: Tensor,
    hyper: Tensor,
    dim: int,  # columns of whole rows
    uses: Collection[str] = COMMON,  # as in `RuleStep`; norms without a limit are not requested
) -> Steps:
    """Run `apply_rule` as a generator for column shards, so that the caller can sum over all columns.

    ``w``, ``moments`` and ``g`` have only the columns of this shard.
    """
    if "max_grad_norm" in uses:
        g = yield from _limit_norm(g, hyper[:, MAX_GRAD_NORM])
    l2, decay = hyper[:, L2, None], hyper[:, DECAY, None]
    g = torch.where(l2 == 0, g, g + l2 * w)
    w = torch.where(decay == 0, w, w - decay * w)
    own = dict(zip((*rule.hyper, *(f"1 - {name}^t" for name in rule.corrected)), hyper[:, OWN:].T, strict=True))
    named = {name: values[:, None] for name, values in {"lr": hyper[:, LR], **own}.items()}
    new = rule.formula(w, moments, g, named, dim)
    w = (yield from new) if isinstance(new, Generator) else new
    if "max_norm" in uses:
        w = yield from _limit_norm(w, hyper[:, MAX_NORM])
    return w


def sums_rows(rule: Rule, uses: Collection[str]) -> bool:
    """Return whether `rule_steps` sums over columns."""
    return inspect.isgeneratorfunction(rule.formula) or not {"max_grad_norm", "max_norm"}.isdisjoint(uses)


def block_sum(x: Tensor) -> Tensor:
    """Sum over the last dim ``D``, in halving trees inside blocks of `BLOCK` columns, then over blocks in order."""
    return sum_of_blocks(blocks_of(x))


def blocks_of(x: Tensor) -> Tensor:
    """Sum blocks of `BLOCK` columns with halving trees, ``[…, ⌈D / 16⌉]``."""
    if x.shape[-1] % BLOCK:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    x = x.unflatten(-1, (-1, BLOCK))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_of_blocks(blocks: Tensor) -> Tensor:
    """Sum the blocks of each row in column order."""
    total = blocks[..., 0]
    for b in range(1, blocks.shape[-1]):
        total = total + blocks[..., b]
    return total


def _limit_norm(x: Tensor, limit: Tensor) -> Steps:
    """Scale rows ``[U, D]`` down to norms of at most ``limit [U]``."""
    norm = sqrt((yield x * x))
    return torch.where((norm > limit)[:, None], x * (limit / norm)[:, None], x)


# -- interaction -----------------------------------------------------------------------------------------------------


def interaction(vectors: Tensor, width: int) -> Tensor:
    """Compute the dot interaction of DLRM (Naumov et al. 2019): ``[B, n, D] → [B, width]``.

    The n vectors of a sample are multiplied pairwise. The result is the first vector, which is the dense vector, then
    the strict lower triangle of the Gram matrix row by row. Zeros pad it to ``width ≥ D + n (n − 1) / 2``.
    """
    launches["reference.interaction"] += 1
    gram = vectors @ vectors.transpose(1, 2)
    i, j = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=vectors.device)
    out = torch.cat([vectors[:, 0], gram[:, i, j]], dim=1)
    return torch.nn.functional.pad(out, (0, width - out.shape[1]))


def interaction_backward(grad: Tensor, vectors: Tensor) -> Tensor:
    """Compute the gradient ``[B, n, D]`` of `interaction` from ``grad [B, width]``."""
    launches["reference.interaction_backward"] += 1
    n, dim = vectors.shape[1:]
    i, j = torch.tril_indices(n, n, -1, device=vectors.device)
    gram = grad.new_zeros(len(grad), n, n)
    gram[:, i, j] = grad[:, dim : dim + len(i)]
    out = (gram + gram.transpose(1, 2)) @ vectors
    out[:, 0] += grad[:, :dim]
    return out


# -- cache -----------------------------------------------------------------------------------------------------------


# Everything is integer arithmetic, so all backends agree to the bit.

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2⁶⁴ over the golden ratio, as an int64."""
_LOW = 0xFFFFFFFF


def sets_of(keys: Tensor, sets: int) -> Tensor:
    """Return the set of each key ``[n]``.

    The key is multiplied by `_GOLDEN`, the upper half is mixed into the lower half, and the result is taken modulo
    ``sets``. Products wrap at 64 bits, and the result is unsigned. ``sets`` is below 2³¹.
    """
    mixed = keys * _GOLDEN
    mixed = mixed ^ ((mixed >> 32) & _LOW)
    # torch has no unsigned division, so the two halves below 2³² are divided separately.
    high, low = (mixed >> 32) & _LOW, mixed & _LOW
    return (high % sets * ((1 << 32) % sets) + low) % sets


def cache_find(tags: CacheTags, wanted: Tensor) -> Tensor:
    """Find the position of each wanted key ``[n]`` int64. It is −1 for keys that are not in the cache."""
    launches["reference.cache_find"] += 1
    first = sets_of(wanted, tags.sets) * tags.ways
    at = first[:, None] + torch.arange(tags.ways, device=wanted.device)
    here = tags.keys[at] == wanted[:, None]
    return torch.where(here.any(1), first + here.int().argmax(1), -1)


def cache_use(tags: CacheTags, places: Tensor, now: int) -> None:
    """Record a use at time ``now`` for each entry of ``places [n]``. −1 is skipped."""
    launches["reference.cache_use"] += 1
    places = places[places >= 0]
    tags.times[places] = now
    tags.counts.index_add_(0, places, torch.ones_like(places))


def cache_take(tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
    """Assign a position to each of these distinct keys ``[n]``, one after the other, and count one use at time ``now``.

    No key may be in the cache, and no time in ``tags`` may be later than ``now``. ``tags`` is updated in place. A key
    gets the first free position of its set, else the position of the key to evict by ``tags.by_count`` (ties: the
    first). A key that is used now is never evicted. `FREE` in ``wanted`` is skipped. Return the position of each key
    ``[n]``, or −1 without a position, and the evicted key or `FREE`.
    """
    launches["reference.cache_take"] += 1
    places, evicted = torch.full_like(wanted, -1), torch.full_like(wanted, FREE)
    for i, (key, of) in enumerate(zip(wanted.tolist(), sets_of(wanted, tags.sets).tolist(), strict=True)):
        ranked: list[tuple[int, int, int]] = []
        if key == FREE:
            continue
        for at in range(of * tags.ways, (of + 1) * tags.ways):
            time, count = int(tags.times[at]), int(tags.counts[at])
            if tags.keys[at] == FREE:
                ranked.append((-1, -1, at))
            elif time < now:
                ranked.append((count if tags.by_count else 0, time, at))
        if ranked:
            place = min(ranked)[2]
            places[i], evicted[i] = place, tags.keys[place]
            tags.keys[place], tags.times[place], tags.counts[place] = key, now, 1
    return places, evicted


def cache_read(slab: Tensor, places: Tensor, out: Tensor) -> None:
    """Copy the records ``slab[places]`` to ``out [n, bytes]`` uint8. Rows for position −1 do not change.

    If rows of ``slab`` and ``out`` have different sizes, only the first bytes are copied (also in `cache_write`).
    """
    launches["reference.cache_read"] += 1
    here = places >= 0
    size = min(slab.shape[1], out.shape[1])
    out[here, :size] = slab[places[here], :size]


def cache_write(slab: Tensor, places: Tensor, records: Tensor) -> None:
    """Copy records ``[n, bytes]`` uint8 to distinct positions ``slab[places]``. Position −1 is skipped."""
    launches["reference.cache_write"] += 1
    here = places >= 0
    size = min(slab.shape[1], records.shape[1])
    slab[places[here], :size] = records[here, :size]
