"""The contenders, and what each has to be able to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from benchmarks.peers.workloads import STEPS, WORKLOADS


class Embedding(Protocol):
    """Embedding tables with an optimizer. Made from a `Workload`."""

    def prepare(self, ids: Tensor) -> Any:
        """A new batch from ids ``[tables · batch · pooling]``; not timed."""
        ...

    def lookup(self, batch: Any) -> Tensor:
        """Pooled vectors, ``[B, tables, D]`` or the same memory ``[B, tables · D]``; timed."""
        ...

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        """Backward from the gradient ``[B, tables, D]``, and the optimizer's step; timed."""
        ...


class Step(Protocol):
    """A DLRM with its optimizers. Made from a `Workload`."""

    def prepare(self, ids: Tensor, dense: Tensor, labels: Tensor) -> Any:
        """A new batch; not timed."""
        ...

    def logits(self, batch: Any) -> Tensor:
        """Logits ``[B, 1]``; timed, as is all that follows."""
        ...

    def zero_grad(self) -> None:
        """Forget gradients."""
        ...

    def update(self) -> None:
        """Step of all optimizers that do not work in backward."""
        ...


@dataclass(frozen=True)
class Side:
    """A contender: the module with its classes ``Embedding`` and ``Step``, its environment, and further arguments."""

    module: str
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Set to 1, torch asks for transparent huge pages for what it allocates."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

EMBEDDING_SIDES = {
    "hotbed": Side("hotbed_side"),
    "hotbed_one_thread": Side("hotbed_side", ONE_THREAD),
    "fbgemm_default": Side("fbgemm_side"),
    "fbgemm_hugepages": Side("fbgemm_side", {HUGE_PAGES: "1"}),
    "plain": Side("plain_side"),
}
STEP_SIDES = {
    "hotbed": Side("hotbed_side"),
    "torchrec": Side("torchrec_side"),
    "plain": Side("plain_side"),
}
SHARDED_EMBEDDING_SIDES = {
    **{
        name: side
        for scheme in ("table", "row", "column")
        for name, side in {
            f"hotbed_{scheme}": Side("hotbed_side", ONE_THREAD, {"scheme": scheme}),
            f"torchrec_{scheme}": Side("torchrec_side", ONE_THREAD, {"scheme": scheme}),
            f"torchrec_{scheme}_hugepages": Side("torchrec_side", {**ONE_THREAD, HUGE_PAGES: "1"}, {"scheme": scheme}),
        }.items()
    },
    "hotbed_column_apart": Side("hotbed_side", ONE_THREAD, {"scheme": "column", "per_shard_statistics": True}),
}
"""Tables are sharded over ranks; those with one scheme follow each other, for a ratio is of neighbours in time."""

SHARDED_STEP_SIDES = {
    **{name: side for name, side in SHARDED_EMBEDDING_SIDES.items() if HUGE_PAGES not in side.environment},
    "hotbed_alone": Side("hotbed_side", ONE_THREAD),
}
"""The last has all tables on each rank, which exchange nothing: what sharding costs is told by it."""


def sides_of(section: str) -> dict[str, Side]:
    """Who is compared in a section of the result."""
    if WORKLOADS[section].ranks > 1:
        return SHARDED_STEP_SIDES if section in STEPS else SHARDED_EMBEDDING_SIDES
    return STEP_SIDES if section in STEPS else EMBEDDING_SIDES
