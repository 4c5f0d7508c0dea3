"""Capture and replay on the pretended device, as CUDA graphs do: operations are repeated, and no line of Python is.

While a graph is captured, every operation on the device is noted with the memory and the numbers that it was given;
nothing stays changed by it. A replay computes the same operations on the same memory. So a number that Python would
have changed since is what it was, memory that was freed since is an error, and what lies in the graph's own memory is
poisoned before, but for what the graph captured right before this one has just left there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.census.streams import MODEL

FORBIDDEN = "operation not permitted when stream is capturing"
"""What CUDA says."""


@dataclass(frozen=True)
class _Outside:
    """A tensor in memory that is not the graphs', which must live as long as they are replayed."""

    storage: StorageWeakRef
    dtype: torch.dtype
    place: tuple[int, tuple[int, ...], tuple[int, ...]]

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("a graph was replayed that uses memory which has been freed")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Change the leaves of what operations take and give: dataclasses and named tuples, too."""
    if is_dataclass(tree) and not isinstance(tree, (type, _Outside)):
        return replace(tree, **{f.name: mapped(getattr(tree, f.name), change) for f in fields(tree) if f.init})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(value, change) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(value, change) for value in tree)
    if isinstance(tree, Mapping):
        return {key: mapped(value, change) for key, value in tree.items()}
    return change(tree)


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def look(leaf: Any) -> Any:
        found.extend([leaf] if isinstance(leaf, Tensor) else [])
        return leaf

    mapped(tree, look)
    return found


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    captured: list[Graph]
    last: Graph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self.work: list[tuple[Callable[..., None], Any]] = []
        self.made: dict[int, Tensor] = {}
        self.outside: dict[int, _Outside] = {}
        self.written: set[int] = set()
        self.replays = 0
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def capture_begin(self, *pool: Any, capture_error_mode: str = "global", **_: Any) -> None:
        assert GRAPHS.capturing is None
        GRAPHS.capturing, self._random = self, torch.get_rng_state()
        MODEL.begin_capture()

    def capture_end(self) -> None:
        GRAPHS.capturing = None
        torch.set_rng_state(self._random)
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        MODEL.end_capture()
        GRAPHS.captured.append(self)

    def add(self, work: Callable[..., None], given: Any, made: Sequence[Tensor]) -> None:
        """Note an operation: ``work(given)`` computes it, ``made`` is new memory among what it was given."""
        for tensor in made:
            self.made.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        self.work.append((work, mapped(given, self._kept)))

    def touch(self, tensors: Sequence[Tensor]) -> None:
        """Remember what is in memory that is about to be used."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if storage.nbytes() and address not in self._before and address not in self.made:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[address] = whole, whole.clone()

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.untyped_storage().nbytes():
            return leaf
        storage = leaf.untyped_storage()
        if any(storage.data_ptr() in graph.made for graph in (self, *GRAPHS.captured)):
            return leaf
        place = leaf.storage_offset(), tuple(leaf.size()), tuple(leaf.stride())
        found = _Outside(StorageWeakRef(storage), leaf.dtype, place)
        self.outside[storage.data_ptr()] = found
        return found

    @torch.no_grad()
    def replay(self) -> None:
        assert GRAPHS.capturing is None
        outside = {address: found.tensor() for address, found in self.outside.items()}
        MODEL.operation(outside.values(), [t for address, t in outside.items() if address in self.written], [])
        order = GRAPHS.captured
        before = order[order.index(self) - 1] if order.index(self) else None
        for graph in order:
            if graph is not before or GRAPHS.last is not before:
                for tensor in graph.made.values():
                    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)  # NaN, −1
        for work, given in self.work:
            work(mapped(given, lambda leaf: leaf.tensor() if isinstance(leaf, _Outside) else leaf))
        GRAPHS.last = self
        self.replays += 1


@dataclass
class Graphs:
    """All graphs, in the order in which they were captured, and that which is captured now."""

    captured: list[Graph]
    capturing: Graph | None = None
    last: Graph | None = None


GRAPHS = Graphs([])


def forbid(what: str) -> None:
    """Fail as CUDA does if a graph is captured now."""
    if GRAPHS.capturing is not None:
        raise RuntimeError(f"{FORBIDDEN}: {what}")


def tell(reads: Sequence[Tensor], writes: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Tell the model of streams of an operation, now and in each replay."""
    if GRAPHS.capturing is not None:
        GRAPHS.capturing.written.update(t.untyped_storage().data_ptr() for t in writes)
    MODEL.operation(reads, writes, new)


def run(work: Callable[..., None], given: Any) -> None:
    """Do work on tensors of the host in dataclasses, tuples and so on, now and in each replay."""
    if GRAPHS.capturing is not None:
        GRAPHS.capturing.touch(leaves(given))
        GRAPHS.capturing.add(work, given, ())
    work(given)


def computed(func: Any, args: Any, kwargs: Any, *, is_view: bool, allocates: bool) -> Any:
    """Compute an operation on the host, now and in each replay."""
    graph = GRAPHS.capturing
    if graph is None or is_view:
        return func(*args, **kwargs)
    graph.touch(leaves((args, kwargs)))
    result = func(*args, **kwargs)
    given = {id(t) for t in leaves((args, kwargs))}
    new = [t for t in leaves(result) if id(t) not in given and not t._is_view()]
    graph.add(_nothing if allocates else _again, (func, args, kwargs, new), new)
    return result


def _nothing(_: Any) -> None:
    pass


def _again(given: Any) -> None:
    func, args, kwargs, new = given
    before = {id(t) for t in leaves((args, kwargs))}
    found = [t for t in leaves(func(*args, **kwargs)) if id(t) not in before and not t._is_view()]
    for into, value in zip(new, found, strict=True):
        into.copy_(value)


def replace_graphs() -> None:
    """Put these graphs in the place of CUDA's."""
    cuda: Any = torch.cuda
    cuda.CUDAGraph = Graph
    cuda.graph_pool_handle = lambda: (0, 1)
    cuda.synchronize = cuda.empty_cache = torch._C._host_emptyCache = lambda *_: None
