"""The average of replicas: rows and moments of the same tiles, over the ranks that hold them.

A thread does it, over process groups of its own: it begins when a step is over, and whoever next needs the rows waits
for it (`Sync.finish`), which in training is after the exchange of the next batch's ids.

Only rows that some replica has touched since the last sync can differ, so each replica says which it has touched (as
numbers or as a bitmap, whichever is smaller) and only these are averaged; where a replica has touched so many that this
saves nothing, all are. The result is the same, to the bit, because of how the mean is taken:
``x₀ + ((x₁ − x₀) + (x₂ − x₀) + …) / M`` is x₀ exactly where all are equal. (A plain mean of three equal values is not.)

Every replica averages one share of a bucket and sends it to the others, so a value is computed once and all have its
bits. Narrow rows are averaged as float32 and then rounded stochastically, with the same random bits everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.embed.placement import Placement
from hotbed.embed.push import push_rows
from hotbed.embed.replicate import Replicas, gathered
from hotbed.embed.rounding import rounding_bits
from hotbed.ops import Occurrences, RuleStep
from hotbed.ops.random import step_seeds
from hotbed.store import DenseStore

BUCKET_BYTES = 8 << 20
"""Size of what is averaged at once: as much memory as a sync takes, some times over."""
Message = Literal["numbers", "bitmap", "nothing"]


class Sync:
    """The average of one part's tiles.

    Parameters
    ----------
    replicas
        The ranks, and how often.
    arenas, copies
        Of this rank, by kind.
    """

    def __init__(self, replicas: Replicas, arenas: Sequence[Arena], copies: Sequence[Arena]) -> None:
        self._replicas, self._arenas, self._copies = replicas, arenas, copies
        self._steps = 0
        self._touched: dict[Arena, Tensor] = {}
        self._seeds: dict[Arena, Tensor] = {}
        self._under_way: Future[None] | None = None

    def stepped(
        self,
        steps: Mapping[Arena, RuleStep],
        found: Mapping[Arena, tuple[Occurrences, Tensor]],
        placement: Placement,
    ) -> None:
        """Note what a step has touched; begin to average if it is time."""
        for arena in self._arenas:
            device = arena.store.device
            if arena not in self._touched:
                self._touched[arena] = torch.zeros(arena.store.slots, dtype=torch.bool, device=device)
            self._touched[arena] = self._touched[arena].to(device)
            self._seeds[arena] = steps[arena].seeds
        for arena, (occurrences, _) in found.items():
            self._touched[arena][occurrences.slots] = True
        self._steps += 1
        if self._steps == self._replicas.sync_every:
            self.start(placement)

    def start(self, placement: Placement) -> None:
        """Begin to average, if any step was taken since the last time; all ranks must call this."""
        if not self._steps:
            return
        self._steps = 0
        device = placement.copies.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def work() -> None:
            begin = time.perf_counter()
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self._average(placement)
            self._replicas.sync_s += time.perf_counter() - begin

        self._under_way = self._replicas.thread.submit(work)

    def finish(self) -> None:
        """Wait for what was begun; raises what went wrong there."""
        if self._under_way is None:
            return
        begin = time.perf_counter()
        under_way, self._under_way = self._under_way, None
        under_way.result()
        self._replicas.waited_s += time.perf_counter() - begin

    def _average(self, placement: Placement) -> None:
        link, shards = self._replicas.of_thread
        counts = torch.stack([self._touched[arena].sum() for arena in self._arenas])
        by_arena: list[list[int]] = link.all_gather("numbers of touched rows", counts).wait().T.tolist()
        averaged: dict[Arena, Tensor] = {}
        for arena, of_replicas in zip(self._arenas, by_arena, strict=True):
            touched = self._touched[arena]
            slots = touched_anywhere(touched, of_replicas, row_bytes(arena), link)
            touched.zero_()
            seeds = step_seeds(self._seeds[arena], torch.tensor(-1, device=touched.device))
            for bucket in slots.split(max(BUCKET_BYTES // row_bytes(arena), 1)):
                if len(bucket):
                    average_rows(arena, bucket, seeds, link)
            arena.updates += len(slots) > 0
            averaged[arena] = slots
            self._replicas.rows += len(slots)
        if placement.has_readers:
            push_rows(placement, self._arenas, self._copies, averaged, shards)
        self._replicas.syncs += 1


def row_bytes(arena: Arena) -> int:
    """Bytes of a row and its moments on the wire."""
    store = _dense(arena)
    return 4 * (store.dim + sum(1 if store.moment_is_per_row(m) else store.dim for m in store.moments))


def choose(counts: Sequence[int], slots: int, bytes_per_row: int) -> Message:
    """How replicas say which of their rows they have touched: ``"nothing"`` where all rows are averaged.

    Parameters
    ----------
    counts
        Rows touched, by replica: no fewer than the largest of these will be averaged.
    slots
        Rows that each has.
    bytes_per_row
        On the wire.
    """
    others = len(counts) - 1
    numbers, bitmap = others * max(counts) * (4 if slots < 1 << 31 else 8), others * -(-slots // 8)
    rows = 2 * others * bytes_per_row / len(counts)
    if min(numbers, bitmap) + rows * max(counts) >= rows * slots:
        return "nothing"
    return "numbers" if numbers <= bitmap else "bitmap"


def touched_anywhere(touched: Tensor, counts: Sequence[int], bytes_per_row: int, link: Link) -> Tensor:
    """Slots that any replica has touched, rising; all slots where it would cost more to say which.

    Parameters
    ----------
    touched
        Whether each slot was touched here ``[S]``.
    counts
        How many were, by replica.
    bytes_per_row
        On the wire.
    link
        Replicas.
    """
    slots = len(touched)
    if not sum(counts):
        return torch.empty(0, dtype=torch.int64, device=touched.device)
    message = choose(counts, slots, bytes_per_row)
    if message == "nothing":
        return torch.arange(slots, device=touched.device)
    if message == "numbers":
        own = touched.nonzero()[:, 0].to(torch.int32 if slots < 1 << 31 else torch.int64)
        return gathered("touched rows", own, counts, link).long().unique()
    bits = torch.arange(8, dtype=torch.uint8, device=touched.device)
    padded = torch.nn.functional.pad(touched, (0, -slots % 8)).view(-1, 8)
    own = (padded.to(torch.uint8) << bits).sum(1, dtype=torch.uint8)
    theirs = link.all_gather("bitmap of touched rows", own).wait()
    return (((theirs[:, :, None] >> bits) & 1).any(0).view(-1)[:slots]).nonzero()[:, 0]


def average_rows(arena: Arena, slots: Tensor, seeds: Tensor, link: Link) -> None:
    """Average rows and their moments over replicas.

    Parameters
    ----------
    arena
        Where they are.
    slots
        Which ``[n]``, the same on all replicas.
    seeds
        Of each piece, for rounding.
    link
        Replicas.
    """
    store = _dense(arena)
    moments = list(store.moments)
    values = [store.read(slots), *(store.read(slots, name) for name in moments)]
    flat = torch.cat([v.reshape(-1) for v in values])
    over_replicas_(flat, _mean, "rows of replicas", link)
    rows, *means = (m.view(v.shape) for m, v in zip(flat.split([v.numel() for v in values]), values, strict=True))
    _raise_exponents(arena, slots, link)
    store.write(slots, rows, random=rounding_bits(arena, slots, seeds))
    for name, mean in zip(moments, means, strict=True):
        store.write(slots, mean, name)


def _raise_exponents(arena: Arena, slots: Tensor, link: Link) -> None:
    """The scales of int8 rows only grow, so an average has the largest of the replicas'."""
    store = _dense(arena)
    exponents, places = store.arrays().get("exponents"), store.places(slots).get("exponents")
    if exponents is None or places is None or not len(places):
        return
    if store.on_change is not None:
        store.on_change(slots)
    own = exponents[places]
    over_replicas_(own.view(-1), lambda theirs: theirs.amax(0), "scales of rows", link)
    exponents[places] = own


def _dense(arena: Arena) -> DenseStore:
    """Replicas that are averaged are in the device's memory; `hotbed.distribute` sees to it."""
    assert isinstance(arena.store, DenseStore)
    return arena.store


def over_replicas_(values: Tensor, reduced: Callable[[Tensor], Tensor], what: str, link: Link) -> None:
    """Reduce a flat tensor over replicas, in place: each one reduces a share ``[M, n] → [n]`` and sends it to all."""
    share = -(-len(values) // link.size)
    parts = values.split([max(min(share, len(values) - r * share), 0) for r in range(link.size)])
    theirs = values.new_empty(link.size, len(parts[link.rank]))
    link.exchange(what, parts, list(theirs)).wait()
    link.exchange(what, [reduced(theirs)] * link.size, parts).wait()


def _mean(theirs: Tensor) -> Tensor:
    """In replica order; exact where all are equal."""
    first = theirs[0]
    change = theirs[1] - first
    for other in theirs[2:]:
        change = change + (other - first)
    return first + change / len(theirs)
