"""Find how much memory a step takes besides tables and parameters, for any batch size, from steps of few samples.

A dispatch mode sees every tensor that is made, in forward, backward and the optimizers' steps, and when it is given up
(as in ``torch.distributed._tools.mem_tracker``). A step has phases, forward with backward and each optimizer's step.
The most bytes of each grow in proportion to the samples, beside what does not depend on them: two sizes tell both.

What operations and kernels take for themselves, and give up before they end, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

Phase = Callable[[], object]
_Bytes = np.ndarray[Any, np.dtype[Any]]


class Peak(NamedTuple):
    """Most bytes of tensors that a step makes, at once.

    Attributes
    ----------
    plain
        Of those whose memory is free again when they are given up.
    recycled
        Of those whose memory `hotbed.ops.cpu_runtime` keeps for later ones: it is still there when others are made.
    """

    plain: int
    recycled: int

    @property
    def nbytes(self) -> int:
        """Of both, from the second step on."""
        return self.plain + self.recycled


def peaks_of(phases: Sequence[Phase]) -> list[Peak]:
    """Run the phases of a step; return the most bytes of tensors, made by it, at once in each."""
    return [Peak(*there.max(1, initial=0).tolist()) for there in _timelines(phases)]


def peak_of(step: Callable[[int], Sequence[Phase]], samples: int, most: int) -> Peak:
    """Find the most bytes that a step of so many samples takes.

    Parameters
    ----------
    step
        Gives the phases of a step of a number of samples.
    samples
        Of the step that is meant.
    most
        Samples of the largest step that is run; what more samples take is extrapolated, operation by operation where
        both sizes have the same, so that what is most in a large step need not be most in a small one.
    """
    if samples <= most:
        found = [there.max(1, initial=0) for there in _timelines(step(samples))]
    else:
        found = list[_Bytes]()
        for small, large in zip(_timelines(step(most // 2)), _timelines(step(most)), strict=True):
            if small.shape != large.shape:
                small, large = (there.max(1, initial=0)[:, None] for there in (small, large))
            more = (large - small).clip(min=0) * ((samples - most) / (most - most // 2))
            found.append((large + more).max(1, initial=0))
    return Peak(*np.max(found, axis=0).astype(int).tolist())


def _timelines(phases: Sequence[Phase]) -> list[_Bytes]:
    """Run the phases; of each, bytes of plain and of recycled tensors after every operation ``[2, operations]``."""
    watch, cuts = _Watch(), [0]
    with watch:
        for phase in phases:
            phase()
            cuts.append(watch.operation + 1)
    change = np.zeros((2, watch.operation + 2), dtype=np.int64)
    for nbytes, recycled, made, freed in zip(watch.nbytes, watch.recycled, watch.made, watch.freed, strict=True):
        of = np.array([nbytes * (not recycled), nbytes * recycled])
        change[:, made] += of
        change[:, freed if freed is not None else -1] -= of
    there = change.cumsum(1)
    return [there[:, first:last] for first, last in pairwise(cuts)]


def nbytes_of(values: object) -> int:
    """Bytes of all tensors in plain containers, as of an optimizer's state."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, Tensor))


class _Watch(TorchDispatchMode):
    """Note storages that appear in operations, and when they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []
        self.recycled: list[bool] = []
        self.made: list[int] = []
        self.freed: list[int | None] = []
        self.operation = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @override
    def __enter__(self) -> Self:
        self._from_numpy = torch.from_numpy
        torch.from_numpy = self._of_numpy  # by which `hotbed.ops.cpu_runtime` makes large tensors; no operation does
        return super().__enter__()

    @override
    def __exit__(self, *args: Any) -> None:
        torch.from_numpy = self._from_numpy
        super().__exit__(*args)

    def _of_numpy(self, array: Any) -> Tensor:
        made = self._from_numpy(array)
        self._note(made.untyped_storage(), set(), recycled=True)
        return made

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **dict(kwargs or {}))
        self.operation += 1
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._note(tensor.untyped_storage(), before)
        return made

    def _note(self, storage: torch.UntypedStorage, before: set[int], *, recycled: bool = False) -> None:
        known = self._known.get(id(storage))
        if storage._cdata in before or (known is not None and known() is storage):
            return  # a view, or changed in place
        number = len(self.nbytes)
        self.nbytes.append(storage.nbytes())
        self.recycled.append(recycled)
        self.made.append(self.operation)
        self.freed.append(None)

        def gone(_: object) -> None:
            self.freed[number] = self.operation + 1  # what is going on may still need it

        self._known[id(storage)] = weakref.ref(storage, gone)
