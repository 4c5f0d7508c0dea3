"""Train replicas of all tables in groups of ranks, and keep the replicas equal (2D sparse parallelism).

Ranks form a mesh of M replicas × N shards. A row of the mesh is a *group* with one plan and one copy of all tables. A
group exchanges ids, rows and gradients only among its ranks. A column of the mesh has the same tiles M times. Replicas
are either averaged every few steps (`Sync`), or, exactly, every update uses the gradients of all groups
(`gather_gradients`). Dense parameters are data-parallel over all ranks. For example, four ranks in two replicas with
``layout="groups"``::

    replica 0   ranks 0 1     each group: one plan for 2 ranks, one copy of every table
    replica 1   ranks 2 3     the same tiles: ranks 0 and 2, ranks 1 and 3

Source: "Two-dimensional Sparse Parallelism for Large Scale DLRM Training" (arXiv 2508.03854).

A background thread with separate process groups averages replicas. It starts after a step, and the next reader of the
rows waits for it (`Sync.finish`). In training, that is after the exchange of the next batch's ids.

Only rows that some replica has updated since the last average can differ. So replicas exchange the slots of updated
rows, as numbers or as a bitmap, whichever is smaller, and average these rows. If that saves nothing, all rows are
averaged. Both have the same bits, because the mean is ``x₀ + ((x₁ − x₀) + (x₂ − x₀) + …) / M``, which is x₀ if all
values are equal. A plain mean of three equal values may differ from that value.

Each replica averages one share of a bucket and sends the result to the others, so all replicas have the same bits.
Low-precision rows are averaged as float32 and then rounded stochastically with the same random bits on all replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hotbed.comm import Link, share_sizes
from hotbed.config.parallel_memory import ParallelOptions
from hotbed.embed.arena import Arena, rounding_bits
from hotbed.embed.gather import push_rows
from hotbed.embed.row_sums import kernels_of
from hotbed.embed.shard_routing import Locator
from hotbed.errors import SpecError
from hotbed.ops import Occurrences, RuleStep
from hotbed.ops.layout import ACTIVE, FREE
from hotbed.ops.rows import step_seeds
from hotbed.store import DenseStore, RowStore
from hotbed.store.base import Values
from hotbed.store.device_selection import list_set_bits, sort_slots
from hotbed.store.memory import to_device, to_host
from hotbed.store.slot_lists import UpdatedSlotList
from hotbed.virtual_ranks import VirtualRanks, tree_size


class Replicas:
    """The mesh of ranks with replicas of the tables. All processes must create it together.

    A *replica* is a copy of all tables that a group of ranks trains.

    ``base`` links all T ranks. The number of replicas M must divide T.
    """

    def __init__(self, base: Link, options: ParallelOptions) -> None:
        ranks = torch.arange(base.size)
        count = options.replicas
        mesh = ranks.view(count, -1) if options.layout == "groups" else ranks.view(-1, count).T
        # the ranks by ("replica", "shard")
        self.mesh = DeviceMesh(base.device.type, mesh, mesh_dim_names=("replica", "shard"))
        self.exact, self.sync_every = options.exact, options.sync_every
        self.link = self._link_along("replica", base)  # ranks that hold the same tiles as this one, by replica
        self.shards = self._link_along("shard", base)  # ranks of the own group
        # The background thread uses `link` and `shards` with separate process groups.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-sync")
        self.of_thread = self.link.clone(), self.shards.clone()
        # number of averages so far, each of the tables of one dim of a collection, and number of averaged rows
        self.syncs = self.rows = 0
        # seconds of averaging, and seconds that steps waited for it
        self.sync_s = self.waited_s = 0.0

    def _link_along(self, dim: Literal["replica", "shard"], base: Link) -> Link:
        """Return the link to the ranks along one dimension of the mesh, with a separate process group."""
        lines: list[list[int]] = (self.mesh.mesh if dim == "shard" else self.mesh.mesh.T).tolist()
        own = next(line for line in lines if base.rank in line)
        return Link(self.mesh.get_group(dim), base.timeout, parent=base, names=own, all_groups=lines).clone()

    @property
    def sync_bytes(self) -> int:
        """Bytes that this rank has sent to other replicas."""
        return sum(sum(link.sent_bytes.values()) for link in (self.link, self.of_thread[0]))


def check_replicas(size: int, options: ParallelOptions) -> None:
    """Raise `SpecError` for options that do not define a mesh of ``size`` ranks."""
    replicas, sync_every, exact = options.replicas, options.sync_every, options.exact
    if replicas < 1 or size % replicas:
        raise SpecError(
            f"replicas: got {replicas}, expected a divisor of the {size} ranks. Choose one of "
            f"{', '.join(str(m) for m in range(1, size + 1) if size % m == 0)}, or start another number of processes"
        )
    if sync_every < 1:
        raise SpecError(
            f"sync_every: got {sync_every}, expected at least 1. Use 1 to average replicas after every step"
        )
    for what, value, usual in (("sync_every", sync_every, 1), ("exact", exact, False)):
        if value != usual and replicas == 1:
            raise SpecError(f"{what}: got {value} with replicas 1. Set replicas, or remove {what}")
    if exact and sync_every > 1:
        raise SpecError(
            f"sync_every: got {sync_every} with exact replicas, which are equal after every step. Remove one of the two"
        )


def gather_gradients(
    gradients: Sequence[tuple[Arena, Occurrences, Tensor]], arenas: Sequence[Arena], link: Link, virtual: VirtualRanks
) -> list[tuple[Arena, Occurrences, Tensor]]:
    """Gather the received gradients of the same tiles from all replicas. All ranks must call this.

    The sums of each rank stay separate and keep their virtual ranks. So they are added in the same order as in one
    group with all ranks. ``gradients`` has the slots and sums that this rank has received, by arena.
    """
    here = {arena: (occurrences, grad) for arena, occurrences, grad in gradients}
    device = arenas[0].store.device
    own = torch.tensor([len(here[a][0].slots) if a in here else 0 for a in arenas], dtype=torch.int64, device=device)
    counts: list[list[int]] = link.all_gather("numbers of gradients", own).wait().T.tolist()
    found: list[tuple[Arena, Occurrences, Tensor]] = []
    for arena, of_replicas in zip(arenas, counts, strict=True):
        if not sum(of_replicas):
            continue
        places, leaves = torch.empty(0, dtype=torch.int64, device=device), tree_size(virtual.total)
        sums = arena.store.empty((0, arena.store.dim), torch.float32)
        if arena in here:
            occurrences, grad = here[arena]
            assert occurrences.scale is None  # the sender has summed these gradients
            places, sums = occurrences.slots * leaves, grad[occurrences.bags]
            if occurrences.leaf is not None:
                places += occurrences.leaf
        places = gather_from_groups("gradients' places", places, of_replicas, link)
        sums = gather_from_groups("gradients of replicas", sums, of_replicas, link)
        slots, leaf = torch.div(places, leaves, rounding_mode="floor"), places % leaves if leaves > 2 else None
        rows = torch.arange(len(slots), device=device)
        found.append((arena, Occurrences(slots, rows, None, leaf=leaf, leaves=leaves), sums))
    return found


def gather_from_groups(what: str, values: Tensor, counts: Sequence[int], link: Link) -> Tensor:
    """Gather rows of all replicas ``[Σ counts, …]``. ``counts`` has the number of rows of each replica."""
    found = values.new_empty(sum(counts), *values.shape[1:])
    link.exchange(what, [values.contiguous()] * link.size, list(found.split(list(counts)))).wait()
    return found


BUCKET_BYTES = 8 << 20
"""Bytes that are averaged at once. Ranks with copies of rows receive all averaged rows in one exchange."""
ListFormat = Literal["numbers", "bitmap", "nothing"]


class Sync:
    """Averages the tiles of one table group over replicas."""

    def __init__(self, replicas: Replicas, arenas: Sequence[Arena], copies: Sequence[Arena]) -> None:
        self._replicas, self._arenas, self._copies = replicas, arenas, copies
        self._steps = 0
        self._updated = {arena: UpdatedSlotList() for arena in arenas}
        self._seeds: dict[Arena, Tensor] = {}
        self._running: Future[None] | None = None

    def record_step(
        self,
        steps: Mapping[Arena, RuleStep],
        found: Mapping[Arena, tuple[Occurrences, Tensor]],
        locator: Locator,
    ) -> None:
        """Record the slots that a step has updated. Start an average every ``sync_every`` steps."""
        for arena in self._arenas:
            self._seeds[arena] = steps[arena].seeds
        for arena, (occurrences, _) in found.items():
            self._updated[arena].add(_mask_frozen(arena, occurrences.slots, steps[arena]))
        self._steps += 1
        if self._steps == self._replicas.sync_every:
            self.start(locator)

    def start(self, locator: Locator) -> None:
        """Start an average if any step followed the last one. All ranks must call this."""
        if not self._steps:
            return
        self._steps = 0
        device = locator.copies.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def average() -> None:
            begin = time.perf_counter()
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._average(locator)
            self._replicas.sync_s += time.perf_counter() - begin

        self._running = self._replicas.thread.submit(average)
        if not self._replicas.link.overlaps:
            self.finish()

    def finish(self) -> None:
        """Wait for a running average. If it failed, every call raises its error."""
        if self._running is not None:
            begin = time.perf_counter()
            self._running.result()
            self._replicas.waited_s += time.perf_counter() - begin

    def _average(self, locator: Locator) -> None:
        link, shards = self._replicas.of_thread
        device = locator.copies.device
        updated = {arena: self._updated[arena].take(device) for arena in self._arenas}
        counts = to_device(torch.tensor([len(slots) for slots in updated.values()], device="cpu"), device)
        all_counts = link.all_gather("numbers of touched rows", counts).wait()
        group_by_arena: list[list[int]] = to_host(all_counts).T.tolist()
        averaged: dict[Arena, Tensor] = {}
        for arena, of_replicas in zip(self._arenas, group_by_arena, strict=True):
            slots = find_updated_slots(arena.store, updated[arena], of_replicas, link)
            seeds = step_seeds(self._seeds[arena].to(device), torch.full((), -1, device=device))
            for bucket in slots.split(max(BUCKET_BYTES // stored_row_bytes(arena.store), 1)):
                if len(bucket):
                    average_rows(arena, bucket, seeds, link)
            arena.updates += len(slots) > 0
            averaged[arena] = slots
            self._replicas.rows += len(slots)
        if locator.has_readers:
            push_rows(locator, self._arenas, self._copies, averaged, shards)
        self._replicas.syncs += 1


def _mask_frozen(arena: Arena, slots: Tensor, step: RuleStep) -> Tensor:
    """Replace padding, and slots of tables that the step does not update, with `FREE`, without synchronization."""
    active = step.hyper[:, ACTIVE] != 0
    if slots.device.type == "cpu" and bool(active.all()) and kernels_of(arena).SUMS_LEAVES:  # then without padding
        return slots
    is_updated = active[arena.locate(slots)[0]] & (slots < arena.store.slots)
    return torch.where(is_updated, slots, FREE)


def stored_row_bytes(store: RowStore) -> int:
    """Return the number of bytes of a row and its moments in an exchange."""
    return 4 * (store.dim + sum(1 if store.moment_is_per_row(m) else store.dim for m in store.moment_names))


def choose_list_format(counts: Sequence[int], slots: int, bytes_per_row: int) -> ListFormat:
    """Choose the format in which replicas exchange updated slots. ``"nothing"`` means that all rows are averaged.

    ``counts`` has the number of updated rows by replica. At least the maximum of them will be averaged.
    """
    others = len(counts) - 1
    numbers, bitmap = others * max(counts) * (4 if slots < 1 << 31 else 8), others * -(-slots // 8)
    rows = 2 * others * bytes_per_row / len(counts)
    if min(numbers, bitmap) + rows * max(counts) >= rows * slots:
        return "nothing"
    return "numbers" if numbers <= bitmap else "bitmap"


def find_updated_slots(store: RowStore, updated: Tensor, counts: Sequence[int], link: Link) -> Tensor:
    """Return the slots that any replica has updated, in ascending order, or all slots if that is cheaper.

    ``updated`` are the ascending slots of this rank, and ``counts`` the numbers of updated slots by replica.
    """
    slots = store.slots
    if not sum(counts):
        return updated
    list_format = choose_list_format(counts, slots, stored_row_bytes(store))
    if list_format == "nothing" and isinstance(store, DenseStore):  # in other stores, some rows may not exist
        return torch.arange(slots, device=updated.device)
    if list_format == "numbers":
        own = updated.to(torch.int32 if slots < 1 << 31 else torch.int64)
        return sort_slots(gather_from_groups("touched rows", own, counts, link).long())
    bits = torch.arange(8, dtype=torch.uint8, device=updated.device)
    mask = torch.zeros(slots + -slots % 8, dtype=torch.uint8, device=updated.device)
    mask[updated] = 1
    own = (mask.view(-1, 8) << bits).sum(1, dtype=torch.uint8)
    union = reduce(torch.bitwise_or, link.all_gather("bitmap of touched rows", own).wait())
    return list_set_bits(((union[:, None] >> bits) & 1).view(-1)[:slots].bool())


def average_rows(arena: Arena, slots: Tensor, seeds: Tensor, link: Link) -> None:
    """Average rows and moments in place. ``slots`` must be equal on all replicas. ``seeds`` are for rounding."""
    own = arena.store.values(slots)
    values = [own.rows, *own.moments.values()]
    flat = torch.cat([v.reshape(-1) for v in values])
    reduce_over_replicas_(flat, _mean, "rows of replicas", link)
    rows, *means = (m.view(v.shape) for m, v in zip(flat.split([v.numel() for v in values]), values, strict=True))
    if own.scales is not None:  # scales only grow, so use the maximum over replicas
        reduce_over_replicas_(own.scales.view(-1), lambda theirs: theirs.amax(0), "scales of rows", link)
    moments = dict(zip(own.moments, means, strict=True))
    arena.store.put(slots, Values(rows, moments, own.scales), random=rounding_bits(arena, slots, seeds))


def reduce_over_replicas_(values: Tensor, reduced: Callable[[Tensor], Tensor], what: str, link: Link) -> None:
    """Reduce a flat tensor over replicas in place. Each replica reduces a share ``[M, n] → [n]`` and sends it."""
    shares = values.split(share_sizes(len(values), link.size))
    theirs = values.new_empty(link.size, len(shares[link.rank]))
    link.exchange(what, shares, list(theirs)).wait()
    link.exchange(what, [reduced(theirs)] * link.size, shares).wait()


def _mean(theirs: Tensor) -> Tensor:
    """Average ``[M, n]`` in replica order. If all values are equal, return that value, even for −0 and infinities."""
    first = theirs[0]
    change = theirs[1] - first
    for other in theirs[2:]:
        change = change + (other - first)
    return torch.where((theirs == first).all(0), first, first + change / len(theirs))
