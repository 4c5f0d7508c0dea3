"""Check kernels for races in Triton's interpreter, where they otherwise run one program after the other, in order.

Inside `checking`, the programs of a launch run in a drawn order, and every address that they touch is noted:

- an address that two programs write, or that one writes and another reads, is a race (atomic operations aside);
- so are two lanes of one store that write different values to one address;
- an address outside of the tensors that the launch was given is out of bounds, and ends the launch;
- what a masked load leaves out without `other`, and what ``torch.empty`` holds, is garbage: NaN, or large numbers, so
  that a result that depends on it is not what it should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Addresses = NDArray[np.uint64]


@dataclass
class Found:
    """What was seen: faults as "kernel: what", and how much was checked."""

    faults: list[str] = field(default_factory=list)
    launches: int = 0
    programs: int = 0
    addresses: int = 0


class OutOfBoundsError(Exception):
    """A kernel touches what it was not given."""


@dataclass
class _Launch:
    """A launch: the spans ``[n, 2]`` of its tensors' memory, and who touched what, a pair for each load and store."""

    kernel: str
    spans: Addresses
    reads: list[tuple[int, Addresses]] = field(default_factory=list)
    writes: list[tuple[int, Addresses]] = field(default_factory=list)
    order: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    number: int = -1

    @property
    def program(self) -> int:
        return int(self.order[self.number])


class _Checker:
    """Takes the interpreter's calls; one launch at a time."""

    def __init__(self, seed: int) -> None:
        self.found = Found()
        self.generator = np.random.default_rng(seed)
        self.launch = _Launch("", np.zeros((0, 2), np.uint64))
        self.has_other = True

    def begin(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        spans = sorted((start, start + nbytes) for start, nbytes in storages.items() if nbytes)
        self.launch = _Launch(kernel, np.array(spans, np.uint64).reshape(-1, 2))

    def end(self) -> None:
        launch = self.launch
        self.found.launches += 1
        self.found.programs += len(launch.order)
        (writers, written), (readers, read) = _pairs(launch.writes), _pairs(launch.reads)
        if (shared := len(written) - len(np.unique(written))) > 0:
            self.fault(f"{shared} addresses are written by several programs")
        at = np.searchsorted(written, read)
        at[at == len(written)] = 0
        if len(written) and (racing := (written[at] == read) & (writers[at] != readers)).any():
            self.fault(f"{racing.sum()} addresses are written by one program and read by another")

    def fault(self, what: str) -> None:
        self.found.faults.append(f"{self.launch.kernel}: {what}")

    def touch(self, pointers: Any, mask: Any, write: bool) -> None:
        """Check and note the addresses of a load or store."""
        every = np.asarray(pointers.data).astype(np.uint64)
        some = every[np.broadcast_to(np.asarray(mask.data).astype(bool), every.shape)]
        size = np.uint64(_dtype(pointers).itemsize)
        self.found.addresses += some.size
        spans = self.launch.spans
        if some.size and len(spans):
            span = np.maximum(np.searchsorted(spans[:, 0], some, side="right"), 1) - 1
            inside = (some >= spans[span, 0]) & (some + size <= spans[span, 1])
        else:
            inside = np.zeros(some.shape, bool)
        if not inside.all():
            what = f"{'writes' if write else 'reads'} {(~inside).sum()} addresses out of bounds"
            self.fault(what)
            raise OutOfBoundsError(f"{self.launch.kernel} {what}")
        (self.launch.writes if write else self.launch.reads).append((self.launch.program, np.unique(some)))

    def lanes(self, pointers: Any, value: Any, mask: Any) -> None:
        """Check that lanes of a store which share an address agree on its value."""
        every = np.asarray(pointers.data)
        live = np.broadcast_to(np.asarray(mask.data).astype(bool), every.shape)
        values = np.ascontiguousarray(np.broadcast_to(np.asarray(value.data), every.shape)[live])
        bits = values.view(f"u{values.dtype.itemsize}") if values.dtype != np.bool_ else values
        pairs = np.unique(np.stack([every[live].astype(np.uint64), bits.astype(np.uint64)]), axis=1)
        if len(np.unique(pairs[0])) != pairs.shape[1]:
            self.fault("lanes of one store write different values to one address")

    def garbage(self, pointers: Any) -> Any:
        """What a masked load without `other` may give."""
        dtype, data = _dtype(pointers), np.asarray(pointers.data)
        drawn = self.generator.integers(1, 255, data.size * dtype.itemsize, dtype=np.uint8)
        values = drawn.view(dtype) if dtype != np.bool_ else drawn > 127
        return interpreter.TensorHandle(values.reshape(data.shape), pointers.get_element_ty())


def _dtype(pointers: Any) -> np.dtype[Any]:
    return np.dtype(interpreter._get_np_dtype(pointers.get_element_ty()))


def _pairs(touched: list[tuple[int, Addresses]]) -> tuple[NDArray[np.int64], Addresses]:
    """Programs and addresses, each pair once, by address."""
    if not touched:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    programs = np.concatenate([np.full(len(addresses), program) for program, addresses in touched])
    addresses = np.concatenate([addresses for _, addresses in touched])
    order = np.lexsort((programs, addresses))
    programs, addresses = programs[order], addresses[order]
    new = np.ones(len(order), bool)
    new[1:] = (addresses[1:] != addresses[:-1]) | (programs[1:] != programs[:-1])
    return programs[new], addresses[new]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@contextmanager
def checking(seed: int = 0) -> Iterator[Found]:
    """Check all launches of Triton's interpreter; programs run in an order that `seed` decides."""
    checker = _Checker(seed)
    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    arguments, call, semantic_load = grid._init_args_hst, grid.__call__, TritonSemantic.load

    def checked_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        found = arguments(self, args, kwargs)
        checker.begin(self.fn.__name__, [*_tensors(found[0]), *_tensors(found[1].values())])
        return found

    def checked_call(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        checker.end()

    def shuffled(self: Any, *dims: int) -> None:
        set_dim(self, *dims)
        checker.launch.order = checker.generator.permutation(int(np.prod(dims)))

    def next_program(self: Any, *_: int) -> None:
        checker.launch.number += 1
        set_index(self, *(int(i) for i in np.unravel_index(checker.launch.program, self.grid_dim)))

    def noted_load(self: Any, pointer: Any, mask: Any, other: Any, *rest: Any) -> Any:
        checker.has_other = other is not None
        return semantic_load(self, pointer, mask, other, *rest)

    def checked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        checker.touch(pointers, mask, write=False)
        if not checker.has_other and not np.asarray(mask.data).all():
            other = checker.garbage(pointers)
        return load(self, pointers, mask, other, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        checker.touch(pointers, mask, write=True)
        checker.lanes(pointers, value, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch = checker.launch
        before = len(launch.writes)
        checker.touch(pointers, mask, write=True)
        del launch.writes[before:]
        return atomic(self, operation, pointers, value, mask, *rest)

    changes = [
        (grid, "_init_args_hst", checked_arguments),
        (grid, "__call__", checked_call),
        (builder, "set_grid_dim", shuffled),
        (builder, "set_grid_idx", next_program),
        (builder, "create_masked_load", checked_load),
        (builder, "create_masked_store", checked_store),
        (builder, "create_atomic_rmw", checked_atomic),
        (TritonSemantic, "load", noted_load),
    ]
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_poisoned())
        yield checker.found


@contextmanager
def _poisoned() -> Iterator[None]:
    """Let ``torch.empty`` give NaN and the largest integers."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
