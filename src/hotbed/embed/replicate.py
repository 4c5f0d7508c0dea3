"""Two-dimensional sparse parallelism: groups of ranks, each with a full copy of all tables.

Ranks form a mesh of M replicas × N shards. A row of it is a *group*, which shares one plan and exchanges ids, rows and
gradients as if it were alone; a column holds the same tiles M times. What keeps the copies together is either an
average every few steps (`hotbed.embed.sync`), or, exactly, the gradients of all groups in every update
(`gathered_pieces`). Dense parameters know nothing of it: they are data-parallel over all ranks.

Source: "Two-dimensional Sparse Parallelism for Large Scale DLRM Training" (arXiv 2508.03854).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.errors import SpecError
from hotbed.ops import Occurrences

Layout = Literal["groups", "replicas"]
"""What neighbouring ranks are: of one group, or replicas of the same tiles."""


class Replicas:
    """The groups that hold copies of the tables, as one rank sees them; all processes must make it together.

    Parameters
    ----------
    base
        All T ranks.
    count
        Replicas M, a divisor of T.
    sync_every
        Steps between averages.
    layout
        Which ranks are neighbours.
    exact
        Whether copies are updated alike, instead of averaged.

    Attributes
    ----------
    mesh
        The ranks by ``("replica", "shard")``.
    link, shards
        The ranks that hold the same tiles as this one, by replica; the ranks of the own group.
    thread
        What averages in the background.
    of_thread
        `link` and `shards` over process groups of its own.
    syncs, rows
        How often copies were averaged, the tables of each dim of a collection by themselves; and how many rows of this
        rank.
    sync_s, waited_s
        Seconds that it took, and seconds of these that steps waited for.
    """

    def __init__(self, base: Link, count: int, sync_every: int, layout: Layout, *, exact: bool) -> None:
        ranks = torch.arange(base.size)
        mesh = ranks.view(count, -1) if layout == "groups" else ranks.view(-1, count).T
        self.mesh = DeviceMesh(base.device.type, mesh, mesh_dim_names=("replica", "shard"))
        self.exact, self.sync_every = exact, sync_every
        self.link = self._along("replica", base)
        self.shards = self._along("shard", base)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-sync")
        self.of_thread = self.link.clone(), self.shards.clone()
        self.syncs = self.rows = 0
        self.sync_s = self.waited_s = 0.0

    def _along(self, dim: Literal["replica", "shard"], base: Link) -> Link:
        """The link of this rank's line of the mesh, over a process group of its own."""
        lines: list[list[int]] = (self.mesh.mesh if dim == "shard" else self.mesh.mesh.T).tolist()
        own = next(line for line in lines if base.rank in line)
        return Link(self.mesh.get_group(dim), base.timeout, of=base, names=own, beside=lines).clone()

    @property
    def sync_bytes(self) -> int:
        """Bytes that this rank has sent to other replicas."""
        return sum(sum(link.sent_bytes.values()) for link in (self.link, self.of_thread[0]))


def check_replicas(size: int, replicas: int, sync_every: int, *, exact: bool) -> None:
    """Raise `SpecError` for numbers that make no mesh of ``size`` ranks."""
    if replicas < 1 or size % replicas:
        raise SpecError(
            f"replicas is {replicas}, must divide the {size} ranks; choose one of "
            f"{', '.join(str(m) for m in range(1, size + 1) if size % m == 0)}, or start other processes"
        )
    if sync_every < 1:
        raise SpecError(f"sync_every is {sync_every}, must be at least 1; 1 averages replicas after every step")
    for what, value, usual in (("sync_every", sync_every, 1), ("exact", exact, False)):
        if value != usual and replicas == 1:
            raise SpecError(f"{what} is {value}, but replicas is 1; set replicas, or leave {what} out")
    if exact and sync_every > 1:
        raise SpecError(
            f"sync_every is {sync_every}, but exact replicas are equal after every step; leave one of the two out"
        )


def gathered_pieces(
    pieces: Sequence[tuple[Arena, Occurrences, Tensor]], arenas: Sequence[Arena], link: Link
) -> list[tuple[Arena, Occurrences, Tensor]]:
    """Gradients that arrived at the same tiles of any replica, at all of them; all ranks must call this.

    Each rank's sums stay by themselves, replica after replica, so that they are added in the order of one group whose
    ranks are numbered so.

    Parameters
    ----------
    pieces
        By arena, what arrived here: slots and sums, by rank of the group.
    arenas
        Of this rank, by kind.
    link
        Replicas.
    """
    here = {arena: (occurrences, grad) for arena, occurrences, grad in pieces}
    device = arenas[0].store.device
    own = torch.tensor([len(here[a][0].slots) if a in here else 0 for a in arenas], dtype=torch.int64, device=device)
    counts: list[list[int]] = link.all_gather("numbers of gradients", own).wait().T.tolist()
    found: list[tuple[Arena, Occurrences, Tensor]] = []
    for arena, of_replicas in zip(arenas, counts, strict=True):
        if not sum(of_replicas):
            continue
        slots = torch.empty(0, dtype=torch.int64, device=device)
        sums = arena.store.empty((0, arena.store.dim), torch.float32)
        if arena in here:
            occurrences, grad = here[arena]
            assert occurrences.scale is None  # what arrives was summed by its sender
            slots, sums = occurrences.slots, grad[occurrences.bags]
        slots = gathered("gradients' places", slots, of_replicas, link)
        sums = gathered("gradients of replicas", sums, of_replicas, link)
        found.append((arena, Occurrences(slots, torch.arange(len(slots), device=device), None), sums))
    return found


def gathered(what: str, values: Tensor, counts: Sequence[int], link: Link) -> Tensor:
    """Rows of all replicas ``[Σ counts, …]``, of which each has so many."""
    found = values.new_empty(sum(counts), *values.shape[1:])
    link.exchange(what, [values.contiguous()] * link.size, list(found.split(list(counts)))).wait()
    return found
