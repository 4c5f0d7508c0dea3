"""Choose the kernels: by device, or by name; a backend that cannot run here is an error."""

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
"""How often each operation ran, by ``"backend.operation"``; tests use it to assert which backend did the work."""


class Backend(Protocol):
    """List the operations every backend implements; `hotbed.ops.reference` defines what they compute."""

    NAME: str
    TAKES_STRIDED_ROWS: bool
    """Whether `update` takes wide rows and moments that have other values between them, as views of records do."""

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
        """Give every occurrence ``[N]`` the value of its group."""
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

    def interaction(self, vectors: Tensor, width: int) -> Tensor:
        """Compute the dot interaction: ``[B, n, D] → [B, width]``."""
        ...

    def interaction_backward(self, grad: Tensor, vectors: Tensor) -> Tensor:
        """Compute the gradient of the dot interaction ``[B, n, D]``."""
        ...

    def cache_find(self, tags: CacheTags, wanted: Tensor) -> Tensor:
        """Find the place of each wanted key ``[n]``, −1 where it is not in the cache."""
        ...

    def cache_use(self, tags: CacheTags, places: Tensor, now: int) -> None:
        """Note that these places are used now."""
        ...

    def cache_take(self, tags: CacheTags, wanted: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Find a place for each new key; places, and the keys that were there."""
        ...

    def cache_read(self, slab: Tensor, places: Tensor, out: Tensor) -> None:
        """Copy the records at these places out of a cache."""
        ...

    def cache_write(self, slab: Tensor, places: Tensor, records: Tensor) -> None:
        """Copy records to these places of a cache."""
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
                f"no kernels for device '{kind}'; move the model to cpu or cuda, or pass backend='reference'"
            )
        name = "cpu" if kind == "cpu" else "triton"
    if name == "cpu" and kind != "cpu":
        raise BackendError(f"backend 'cpu' cannot work on '{kind}' tensors; use 'triton' or 'reference'")
    if name == "triton" and kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendError("backend 'triton' needs CUDA tensors; for a slow check on the CPU set TRITON_INTERPRET=1")
    return _load(name)


def no_kernel(rule: Rule, backend: str, kernels: Iterable[str]) -> BackendError:
    """Say that a backend has kernels of these rules only: this one was defined outside of hotbed."""
    return BackendError(
        f"backend '{backend}' has no kernel of the rule '{rule.name}', only of {', '.join(kernels)}; make the "
        "EmbeddingCollection with backend='reference', which runs the rule's formula, or add a kernel "
        "(docs/extending.md)"
    )


def host_backend(name: BackendName, device: torch.device) -> BackendName:
    """Return the backend for tensors in the host's memory, beside the one that is meant for this device."""
    return name if device.type == "cpu" or name == "reference" else "auto"


@cache
def _load(name: str) -> Backend:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise BackendError(
            "backend 'triton' needs the triton package; pip install triton (CUDA builds of torch bring it)"
        )
    return cast(Backend, cast(object, importlib.import_module(f"hotbed.ops.{name}")))
