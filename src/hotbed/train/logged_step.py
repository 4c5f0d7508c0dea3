"""Measure the steps that are logged: seconds of their parts, and norms of gradients.

Other steps are not measured, nor are those on GPUs: a clock of the host would time the queueing of kernels there, and
reading a norm would be a wait. Nothing that is measured changes a bit of the step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hotbed.batch import Embeddings
from hotbed.embed import EmbeddingCollection, collections_of
from hotbed.optim import SparseOptimizer


class LoggedStep:
    """Seconds of the parts of a step, and norms of its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Squared gradients of this rank's looked-up vectors, summed over measured steps, by collection path and table
        # name, and the number of these steps. The gradients are those of this rank's loss. A resumed run counts from 0.
        self.squares, self.steps = defaultdict[tuple[str, str], float](float), 0
        self._seconds, self._found = defaultdict[str, float](float), dict[str, float]()
        self._last: float | None = None
        self._hooks: list[RemovableHandle] = []
        self._gradients: list[tuple[str, list[str | None], Tensor]] = []

    def begin(self) -> None:
        """Measure the step that begins."""
        self.end()
        self._found.clear()
        self._seconds.clear()
        if not _is_compiled(self._model):
            for path, collection in collections_of(self._model).items():
                self._hooks += [
                    collection.register_forward_pre_hook(self._before_lookup),
                    collection.register_forward_hook(partial(self._looked_up, path)),
                ]
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Count the seconds since the last mark to a part, if the step is measured."""
        if self._last is not None:
            now = time.perf_counter()
            self._seconds[part] += now - self._last
            self._last = now

    def at_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Take the norms of the gradients of a step that is measured, before they are used; no part has the time."""
        if self._last is None:
            return
        self._found = dense_gradient_norm(optimizers)
        self.steps += bool(self._hooks)
        for path, tables, grad in self._gradients:
            of_features = torch.linalg.vector_norm(grad, dim=(0, 2), dtype=torch.float32).double().square()
            for table, square in zip(tables, of_features.tolist(), strict=True):
                if table is not None:
                    self.squares[path, table] += square
        self._gradients.clear()
        self._last = time.perf_counter()

    def record(self) -> dict[str, float]:
        """Return the entries for a record of training, once."""
        seconds = {f"step_{part}_s": s for part, s in self._seconds.items()}
        found = {**self._found, **seconds}
        self._found.clear()
        self._seconds.clear()
        return found

    def norms(self, add: Callable[..., list[float]], ranks: int) -> dict[tuple[str, str], float | None]:
        """Return √(mean squared norm) of the gradients of each table's vectors; all ranks must call this."""
        tables = [(path, table) for path, c in collections_of(self._model).items() for table in c.tables]
        sums = add(*(self.squares[of] for of in tables)) if tables else []
        return {
            of: math.sqrt(total / self.steps) / ranks if self.steps and total else None
            for of, total in zip(tables, sums, strict=True)
        }

    def end(self) -> None:
        """End the measurement of a step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.clear()
        self._last = None

    def _before_lookup(self, *_: object) -> None:
        self.mark("forward")

    def _looked_up(self, path: str, collection: EmbeddingCollection, _: object, found: Embeddings) -> None:
        """Count the time of a lookup, and let backward leave the gradients of its vectors here."""
        self.mark("lookup")
        table_of = {f.name: f.table for f in collection.features}
        for names, vectors in found.looked_up():
            if vectors.requires_grad:
                tables = [
                    table_of[name] if collection.handles[table_of[name]].requires_grad else None for name in names
                ]
                vectors.register_hook(partial(self._arrived, path, tables))

    def _arrived(self, path: str, tables: list[str | None], grad: Tensor) -> None:
        """Keep a gradient ``[…, D]`` or, of pooled features, ``[B, features, D]`` until all have arrived.

        ``tables`` are of the features; None for one that is not trained.
        """
        if self._last is not None:
            self._gradients.append((path, tables, grad.detach().reshape(-1, len(tables), grad.shape[-1])))


def dense_gradient_norm(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Return ``grad_norm_dense``, the Euclidean norm of the last step's gradients of all that is no table.

    Nothing where there are no gradients, or ranks hold shards of them; elsewhere all ranks have the same.
    """
    dense = [optimizer for optimizer in optimizers if not isinstance(optimizer, SparseOptimizer)]
    grads = [p.grad for o in dense for group in o.param_groups for p in group["params"] if p.grad is not None]
    if not grads or any(isinstance(grad, DTensor) for grad in grads):
        return {}
    return {"grad_norm_dense": nn.utils.get_total_norm(grads).item()}


def _is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has the model, whose one graph hooks of its modules would break."""
    return model._compiled_call_impl is not None
