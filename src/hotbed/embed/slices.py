"""Look up the samples of a process once, while the dense part computes its virtual ranks one after the other.

A process may compute several virtual ranks (`hotbed.virtual_ranks`). The dense part of a model then runs once per
virtual rank, so its products have the same shapes on any number of processes. The lookups of all virtual ranks of a
process are one lookup: ids are exchanged once, and a row that several virtual ranks need is sent once. For example,
with virtual ranks of 2 and 3 samples::

    lookup of 5 samples -> vectors [5, F, D]
    virtual rank 0: vectors [0:2] -> forward, loss, backward -> gradients [2, F, D]
    virtual rank 1: vectors [2:5] -> forward, loss, backward -> gradients [3, F, D]
    gradients [5, F, D] -> backward of the lookup: sums of rows by virtual rank, then along the tree

`Slicer` does this for a batch, and `DenseTree` sums the gradients of dense parameters along the same tree.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from hotbed.batch import Batch, Embeddings
from hotbed.comm import Link, share_sizes
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.dense_parallel import average_ranks, mean_over_ranks_
from hotbed.embed.distribute import Distributed
from hotbed.embed.plan_names import collections_of
from hotbed.errors import SpecError
from hotbed.virtual_ranks import VirtualRanks, subtrees

EXCHANGED_VALUES = 1 << 23
"""Number of values of dense gradients that are exchanged at once."""


class Slicer:
    """Divides the batches of a process into its virtual ranks. All ranks must create and use it together."""

    def __init__(self, model: Distributed, *, is_random: bool = True) -> None:
        self._collections = list(collections_of(model).values())
        swapped = [c for c in self._collections if c.is_swapped]
        if swapped or model.wire.options.dense == "fsdp":
            why = "tables of swap_embeddings look up single features" if swapped else "of FSDP"
            raise SpecError(
                f"parallel.virtual_ranks: got {model.virtual.total}, expected {model.virtual.size}, the number of "
                f"processes, because {why}. Set parallel.virtual_ranks to {model.virtual.size}"
            )
        self._model, self._virtual, self.tree = model, model.virtual, DenseTree(model, model.virtual, model.dense_link)
        self.states: list[tuple[Tensor, Tensor]] = []
        """States of torch's generators by own virtual rank, e.g. for dropout. None are kept unless ``is_random``."""
        if is_random:  # seeds follow the seed of the first rank
            seed = torch.tensor([torch.initial_seed() - (1 << 63)], device=model.link.device)
            seed = int(model.link.broadcast("seeds", seed, 0).wait()) + (1 << 63)
            self.states = [_seeded_states(seed + v) for v in model.virtual.own]
        self.buffers = [
            buffer
            for module in model.module.modules()
            if not getattr(module, "buffers_are_constant", False)
            for buffer in module.buffers(recurse=False)
        ]
        """Buffers that a forward pass may change. Virtual rank 0 sets their values, as rank 0 does in DDP."""
        self.rooms = dict.fromkeys(self._collections, 0)
        """Room of the last call of each collection, which is the room of the next lookup."""

    def share_buffers(self) -> None:
        """Send the buffers of virtual rank 0 to all processes."""
        virtual = self._virtual
        for buffer in self.buffers if virtual.size > 1 else ():
            self._model.link.broadcast("buffers", buffer, 0).wait()

    @contextmanager
    def divide(self, batch: Batch, *, last: bool) -> Generator[SlicedBatch]:
        """Look up a batch. Inside the context, each virtual rank gets the vectors of its samples.

        ``last`` is the last part of a batch, if the gradients of several parts are added.
        """
        batches = batch.divide(self._virtual)
        sizes, lookups = [len(own) for own in batches], list[SlicedLookup]()
        for collection in self._collections:
            collection.slices = sizes, self._virtual
            try:
                whole = collection(batch.sparse, room=self.rooms[collection])
            finally:
                collection.slices = None
            lookup = SlicedLookup(self, collection, whole, sizes)
            for number, own in enumerate(batches):
                own.sparse.put_prefetched(collection, _OwnIds(lookup, number))
            lookups.append(lookup)
        self._model.is_sliced = True
        for collection in self._collections:
            collection.is_sliced = True
        try:
            yield SlicedBatch(batches, lookups, self, last=last)
        except BaseException:
            self.tree.clear()
            raise
        finally:
            self._model.is_sliced = False
            for collection in self._collections:
                collection.is_sliced = False


def _seeded_states(seed: int) -> tuple[Tensor, Tensor]:
    """Return the states of the generators of CPU and CUDA after ``torch.manual_seed(seed)``."""
    seed %= 1 << 64
    has_cuda = torch.cuda.is_available()
    cuda = torch.Generator("cuda").manual_seed(seed).get_state() if has_cuda else torch.empty(0, dtype=torch.uint8)
    return torch.Generator().manual_seed(seed).get_state(), cuda


def set_states(states: tuple[Tensor, Tensor]) -> None:
    """Set torch's default generators to the states of CPU and CUDA. An empty state is not set."""
    torch.set_rng_state(states[0])
    if len(states[1]):
        torch.cuda.set_rng_state(states[1])


def states_now() -> tuple[Tensor, Tensor]:
    """Return the states of torch's default generators of CPU and CUDA (or ``[0]``)."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0, dtype=torch.uint8)
    return torch.get_rng_state(), cuda


class VirtualBatch:
    """A batch of one virtual rank. `SlicedBatch` has several."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield the samples of each virtual rank. The caller runs the forward pass of one before it gets the next."""
        return iter(self.batches)

    @contextmanager
    def gradients_of(self, number: int) -> Generator[None]:
        """Inside the context, the backward pass of a virtual rank runs."""
        yield

    def end(self) -> None:
        """End the backward pass. All ranks must call this."""


class SlicedBatch(VirtualBatch):
    """A batch with the samples of each virtual rank of this process, and its lookups."""

    def __init__(
        self,
        batches: list[Batch],
        lookups: list[SlicedLookup],
        slicer: Slicer,
        *,
        last: bool,
    ) -> None:
        super().__init__(batches)
        self._lookups, self._slicer, self._tree, self._last = lookups, slicer, slicer.tree, last

    @override
    def __iter__(self) -> Iterator[Batch]:
        before = [buffer.clone() for buffer in self._slicer.buffers]
        first = before
        for number, batch in enumerate(self.batches):
            for buffer, value in zip(self._slicer.buffers, before, strict=True):
                buffer.copy_(value)
            if self._slicer.states:
                set_states(self._slicer.states[number])
            yield batch
            if self._slicer.states:
                self._slicer.states[number] = states_now()
            if number == 0:
                first = [buffer.clone() for buffer in self._slicer.buffers]
        for buffer, value in zip(self._slicer.buffers, first, strict=True):
            buffer.copy_(value)

    @contextmanager
    @override
    def gradients_of(self, number: int) -> Generator[None]:
        self._tree.before(number)
        yield
        self._tree.after(number, last=self._last)

    @override
    def end(self) -> None:
        """Pass the gradients of all virtual ranks to the lookups, and average dense gradients after the last part."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for lookup in self._lookups:
            lookup.collect(outputs, gradients)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        if self._last:
            self._tree.average()
        self._slicer.share_buffers()


class SlicedLookup:
    """The vectors ``whole`` of a batch in a collection, and their gradients by virtual rank."""

    def __init__(
        self, slicer: Slicer, collection: EmbeddingCollection, whole: Embeddings, sizes: Sequence[int]
    ) -> None:
        self._slicer, self._collection, self._whole = slicer, collection, whole
        self._outputs, self._cuts = whole.outputs(), whole.cuts(sizes)
        self._is_trained = any(output.requires_grad for output in self._outputs)
        self._samples = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
        self._gradients: list[Sequence[Tensor | None]] = [[None] * len(self._outputs) for _ in sizes]

    def embeddings(self, number: int, room: int) -> Embeddings:
        """Return the vectors of a virtual rank."""
        self._slicer.rooms[self._collection] = room
        found = self.take(number)
        if self._is_trained:
            found = _TakeSlice.apply(self._collection.anchor, self, number)
        return self._whole.part(self._samples[number], found)

    def take(self, number: int) -> tuple[Tensor, ...]:
        """Return the vectors of a virtual rank without gradients. Autograd does not regard them as views."""
        found = [output.detach()[cuts[number]].detach() for output, cuts in zip(self._outputs, self._cuts, strict=True)]
        # Bits of products may depend on the alignment.
        return tuple(own if own.data_ptr() % 64 == 0 else own.clone() for own in found)

    def keep(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of the vectors of a virtual rank."""
        self._gradients[number] = gradients

    def collect(self, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        """Append the outputs with gradients, and their gradients."""
        for i, output in enumerate(self._outputs):
            found = [of_rank[i] for of_rank in self._gradients]
            if not output.requires_grad or (found and all(gradient is None for gradient in found)):
                continue  # not trained, or no loss depends on it
            parts = [
                torch.zeros_like(output[cut]) if gradient is None else gradient
                for gradient, cut in zip(found, self._cuts[i], strict=True)
            ]
            outputs.append(output)
            gradients.append(torch.cat(parts) if parts else torch.zeros_like(output))


class _OwnIds(NamedTuple):
    """The ids of one virtual rank: a `SlicedIds`."""

    lookup: SlicedLookup
    number: int

    def embeddings(self, room: int) -> Embeddings:
        return self.lookup.embeddings(self.number, room)


class _TakeSlice(torch.autograd.Function):
    """Return the vectors of a virtual rank. The backward pass keeps their gradients in the `SlicedLookup`."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, lookup: SlicedLookup, number: int) -> tuple[Tensor, ...]:
        ctx.lookup, ctx.number = lookup, number
        ctx.set_materialize_grads(False)
        return lookup.take(number)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[None, None, None]:
        ctx.lookup.keep(ctx.number, grad_outputs)
        return None, None, None


Gradients = list[Tensor | None]
"""Gradients of a model's parameters, in the order of the parameters. None: no gradient."""


class DenseTree:
    """Sums the gradients of dense parameters over virtual ranks, along the tree.

    Call `before` and `after` around the backward pass of each virtual rank, in order, and `average` after the last one.
    A process adds complete nodes of the tree as soon as it has them, so it keeps at most one gradient per level.
    """

    def __init__(self, model: nn.Module, virtual: VirtualRanks, link: Link) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._virtual, self._link = virtual, link
        self._nodes = [subtrees(virtual.block(rank)) for rank in range(virtual.size)]
        self._parts: list[Gradients] = []  # by own virtual rank, if a step has several parts
        self._waiting: list[tuple[int, Gradients]] = []  # first virtual rank and gradients of incomplete nodes
        self._done: list[Gradients] = []  # of complete nodes

    def before(self, number: int) -> None:
        """Let the backward pass of a virtual rank add to its gradients of earlier parts of the batch."""
        earlier: Gradients = [None] * len(self._parameters)
        if number < len(self._parts):
            earlier = self._parts[number]
        for parameter, gradient in zip(self._parameters, earlier, strict=True):
            parameter.grad = gradient

    def after(self, number: int, *, last: bool) -> None:
        """Take the gradients of a virtual rank, and add them to the tree after the ``last`` part of the batch."""
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if not last:
            self._parts[number : number + 1] = [gradients]
            return
        leaf, waiting = self._virtual.own[number], self._waiting
        while len(waiting) > 1 and waiting[-2][0] ^ waiting[-1][0] < waiting[-1][0] ^ leaf:
            self._add_last_two()
        waiting.append((leaf, gradients))
        if leaf == self._nodes[self._virtual.rank][len(self._done)].stop - 1:
            while len(waiting) > 1:
                self._add_last_two()
            self._done.append(waiting.pop()[1])

    def clear(self) -> None:
        """Drop all gradients, because the step failed."""
        self._parts, self._waiting, self._done = [], [], []

    def _add_last_two(self) -> None:
        _, right = self._waiting.pop()
        leaf, left = self._waiting.pop()
        for a, b in zip(left, right, strict=True):
            if a is not None and b is not None:
                a.add_(b)
        self._waiting.append((leaf, [b if a is None else a for a, b in zip(left, right, strict=True)]))

    @torch.no_grad()
    def average(self) -> None:
        """Set each parameter's gradient to the mean over virtual ranks. All ranks must call this."""
        done, self._done, self._parts = self._done, [], []
        has = torch.tensor([any(of[i] is not None for of in done) for i in range(len(self._parameters))])
        if self._virtual.size > 1:
            has = self._link.all_gather("parameters with gradients", has.to(torch.uint8)).wait().any(0)
        chosen = has.nonzero()[:, 0].tolist()
        for of_one_dtype in self._by_dtype(chosen):
            for bucket in _buckets([(i, self._parameters[i].numel()) for i in of_one_dtype]):
                self._average(bucket, done)

    def _by_dtype(self, chosen: Sequence[int]) -> list[list[int]]:
        found: dict[object, list[int]] = {}
        for i in chosen:
            found.setdefault((self._parameters[i].dtype, self._parameters[i].device), []).append(i)
        return list(found.values())

    def _average(self, bucket: Sequence[int], done: Sequence[Gradients]) -> None:
        parameters = [self._parameters[i] for i in bucket]
        sizes = [p.numel() for p in parameters]
        sums = parameters[0].new_full((len(done), sum(sizes)), -0.0)  # the neutral element of additions
        for row, node in zip(sums, done, strict=True):
            for i, place in zip(bucket, row.split(sizes), strict=True):
                if (gradient := node[i]) is not None:
                    place.copy_(gradient.reshape(-1))
        mean = mean_of_nodes(sums, self._nodes, self._virtual.total, self._link)
        for parameter, values in zip(parameters, mean.split(sizes), strict=True):
            parameter.grad = values.view_as(parameter)


def _buckets(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Divide numbered parameters into buckets of about `EXCHANGED_VALUES` values."""
    found: list[list[int]] = []
    free = 0
    for number, size in sizes:
        if size > free:
            found.append([])
            free = max(EXCHANGED_VALUES, size)
        found[-1].append(number)
        free -= size
    return found


def mean_of_nodes(sums: Tensor, nodes: Sequence[Sequence[range]], total: int, link: Link) -> Tensor:
    """Average over ``total`` virtual ranks. ``sums [own nodes, n]`` has the sums of this rank's nodes of the tree.

    ``nodes`` has the nodes of all ranks. Each rank adds one share of the values. All ranks must call this.
    """
    if link.size > 1 and all(len(of_rank) == 1 for of_rank in nodes) and total % link.size == 0:
        mean_over_ranks_(sums[0], link, total)  # perhaps in several hops
        return sums[0]
    leaves = [node.start for of_rank in nodes for node in of_rank]
    count = sums.shape[1]
    if link.size == 1:
        return average_ranks(sums, leaves, total)
    sizes = share_sizes(count, link.size)
    theirs = sums.new_empty(len(leaves), sizes[link.rank])
    what, width = "gradients of dense parameters", sums.element_size()
    outgoing = [part.contiguous() for part in sums.split(sizes, dim=1)]
    incoming = theirs.split([len(of_rank) for of_rank in nodes])
    link.exchange(what, outgoing, incoming, lambda s, r: len(nodes[s]) * sizes[r] * width).wait()
    mean = average_ranks(theirs, leaves, total)
    found = sums.new_empty(count)
    link.exchange(what, [mean] * link.size, found.split(sizes), lambda s, _: sizes[s] * width).wait()
    return found
