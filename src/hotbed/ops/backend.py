"""Select the kernels of a backend by device or by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from hotbed.checks import check
from hotbed.errors import BackendError
from hotbed.ops.layout import BagLayout, CacheTags, Groups, Occurrences, Rows, RuleStep
from hotbed.optim import Rule

BackendName = Literal["auto", "reference", "cpu", "triton"]

launches: Counter[str] = Counter()
"""Number of calls by ``"backend.operation"``. Tests use it to check which backend ran."""


class Backend(Protocol):
    """Operations that every backend implements. `hotbed.ops.reference` defines their results."""

    NAME: str
    TAKES_STRIDED_ROWS: bool
    """Whether `update` supports strided wide rows and moments, such as views of records."""
    SUMS_LEAVES: bool
    """Whether sums of groups follow `Occurrences.leaf`. Only backends without it need `add_along_tree`."""

    def initial_values_(self, out: Tensor, *, seed: int, rows: range | Tensor, cols: range, bound: float) -> None:
        """Fill ``out [rows, cols]`` with the table's initial values."""
        ...

    def lookup(self, rows: Rows, bags: BagLayout, out: Tensor) -> None:
        """Pool the rows of each bag into ``out [B, width, D]``."""
        ...

    def gather(self, rows: Rows, slots: Tensor, out: Tensor) -> None:
        """Copy the rows at slots ``[n]`` to ``out [n, D]`` float32."""
        ...

    def weight_gradient(self, rows: Rows, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        """Write the gradient of the per-id weights into ``out [N]``."""
        ...

    def occurrences(self, bags: BagLayout) -> Occurrences:
        """List slot, bag and gradient factor of every id."""
        ...

    def group(self, occurrences: Occurrences) -> Groups:
        """Group occurrences of equal slots and cut the groups into runs."""
        ...

    def spread(self, groups: Groups, values: Tensor) -> Tensor:
        """Return the value of the group of every occurrence, ``[N]``."""
        ...

    def segment_sum(
        self, occurrences: Occurrences, groups: Groups, grad: Tensor, places: Tensor | None, out: Tensor
    ) -> None:
        """Sum the gradient of each distinct slot into a row of ``out [n, D]``."""
        ...

    def square_blocks(
        self, occurrences: Occurrences, groups: Groups, grad: Tensor, inv_scale: Tensor, out: Tensor
    ) -> None:
        """Sum the squares of each distinct slot's gradient in blocks of 16 columns ``[n, ⌈D / 16⌉]``."""
        ...

    def update(
        self,
        step: RuleStep,
        rows: Rows,
        state: Mapping[str, Tensor],
        occurrences: Occurrences,
        groups: Groups,
        grad: Tensor,
    ) -> None:
        """Sum the gradient of each distinct slot and apply the rule to its row, once."""
        ...

    def add_along_tree(self, keys: Tensor, places: Tensor, count: Tensor, leaves: int, values: Tensor) -> None:
        """Add the rows of equal slots of ``values [n, D]`` along the tree over virtual ranks, in place."""
        ...

    def interaction(self, vectors: Tensor, width: int) -> Tensor:
        """Compute the dot interaction: ``[B, n, D] → [B, width]``."""
        ...

    def interaction_backward(self, grad: Tensor, vectors: Tensor) -> Tensor:
        """Compute the gradient of the dot interaction ``[B, n, D]``."""
        ...

    def cache_find(self, tags: CacheTags, wanted: Tensor) -> Tensor:
        """Find the position of each wanted key ``[n]``. It is −1 for keys that are not in the cache."""
        ...

    def cache_use(self, tags: CacheTags, places: Tensor, now: int) -> None:
        """Record the use of these positions at time ``now``."""
        ...

    def cache_take(self, tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Assign a position to each new key. Return the positions and the evicted keys."""
        ...

    def cache_read(self, slab: Tensor, places: Tensor, out: Tensor) -> None:
        """Copy the records at these positions out of a cache."""
        ...

    def cache_write(self, slab: Tensor, places: Tensor, records: Tensor) -> None:
        """Copy records to these positions of a cache."""
        ...


@cache
def select(device: torch.device | str, name: BackendName = "auto") -> Backend:
    """Return the kernels for a device: Numba for CPU tensors and Triton for CUDA tensors with ``"auto"``.

    ``"reference"`` runs on any device. ``"triton"`` runs on CPU tensors only with ``TRITON_INTERPRET=1``.
    """
    kind = torch.device(device).type
    check("backend", name, BackendName, BackendError)
    if name == "auto":
        if kind not in ("cpu", "cuda"):
            raise BackendError(
                f"device: got '{kind}', expected cpu or cuda. Move the model to cpu or cuda, or use backend='reference'"
            )
        name = "cpu" if kind == "cpu" else "triton"
    if name == "cpu" and kind != "cpu":
        raise BackendError(f"backend 'cpu': got '{kind}' tensors, expected cpu. Use 'triton' or 'reference'")
    if name == "triton" and kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendError(
            "backend 'triton': got cpu tensors, expected cuda. For a slow check on the CPU, set TRITON_INTERPRET=1"
        )
    return _load(name)


def no_kernel(rule: Rule, backend: str, kernels: Iterable[str]) -> BackendError:
    """Return an error for a rule without a kernel in this backend, because it was defined outside of hotbed."""
    return BackendError(
        f"backend '{backend}': got the rule '{rule.name}', expected one with a kernel: {', '.join(kernels)}. Use "
        "EmbeddingCollection(…, backend='reference'), which runs the rule's formula, or add a kernel "
        "(docs/extending.md)"
    )


def host_backend(name: BackendName, device: torch.device) -> BackendName:
    """Return the backend for tensors in host memory, if ``name`` is the backend for ``device``."""
    return name if device.type == "cpu" or name == "reference" else "auto"


@cache
def _load(name: str) -> Backend:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise BackendError(
            "backend 'triton' needs the triton package. Run: pip install triton (CUDA builds of torch include it)"
        )
    return cast(Backend, cast(object, importlib.import_module(f"hotbed.ops.{name}")))
