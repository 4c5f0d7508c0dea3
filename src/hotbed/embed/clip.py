"""Clip the global norm of the gradients of a model's parameters and tables, over all ranks.

``torch.nn.utils.clip_grad_norm_(model.parameters(), …)`` ignores tables, because tables are not parameters. Here the
gradients of duplicate rows in a global batch are summed before they are squared, as in a dense gradient. Each value of
a table is counted once, on the rank that owns it.

The norm has the same bits in every plan. Squares of a row are summed in blocks of 16 columns (`block_sum`), which plans
do not cut. The order of rows depends on the plan, so these float32 sums are added without rounding: each sum is an
integer times a power of two, and integers are added by exponent. Norms of parameters are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hotbed.comm import Link
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.dense_parallel import is_sharded, local_values
from hotbed.embed.distribute import Distributed
from hotbed.embed.idle_tables import lost_message
from hotbed.embed.plan_names import collections_of
from hotbed.embed.sharded_tables import ShardedTables
from hotbed.errors import NonFiniteError, OptimizerError, SpecError
from hotbed.ops.exact_sum import float_of, no_sums
from hotbed.optim import SparseOptimizer


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale down the gradients of a model's parameters and tables to a maximum global norm.

    Call it between ``backward()`` and the steps of all optimizers, like ``torch.nn.utils.clip_grad_norm_``. With a
    ``GradScaler``, first call its ``unscale_`` for each optimizer. All ranks must call this. The norm and the scaled
    gradients have the same bits in every plan.

    Parameters
    ----------
    model
        The model, not its parameters.
    max_norm
        Maximum norm.
    norm_type
        Must be 2, the Euclidean norm.
    error_if_nonfinite
        Whether to raise an error if the norm is NaN or infinite. In that case, gradients are not changed.

    Returns
    -------
    Tensor
        The norm before clipping, 0-d float32. It is infinite if any value is above 1.8e19, because squares are float32.

    Raises
    ------
    SpecError
        If an argument is out of range, or tables have replicas that are averaged.
    OptimizerError
        If an optimizer of tables steps in backward and has already used the gradients, or tables have no optimizer.
    NonFiniteError
        If the norm is not finite and ``error_if_nonfinite`` is set.

    Examples
    --------
    >>> import hotbed as hb
    >>> import torch
    >>> from torch import nn
    >>> model = nn.ModuleDict({"item": nn.Embedding(1000, 16), "top": nn.Linear(16, 1)})
    >>> model = hb.swap_embeddings(model)
    >>> tables = hb.optim.Adam(model, lr=0.01)
    >>> model["top"](model["item"](torch.tensor([3, 5]))).sum().backward()
    >>> norm = hb.clip_grad_norm_(model, 1.0)
    """
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"clip_grad_norm_ needs the model: got {type(model).__name__}, expected an nn.Module. Call "
            "clip_grad_norm_(model, max_norm)"
        )
    if norm_type != 2:
        raise SpecError(f"norms of tables are Euclidean: got norm_type {norm_type}, expected 2.0. Remove norm_type")
    if not max_norm >= 0:
        raise SpecError(f"max_norm: got {max_norm}, expected at least 0. Use a larger value")
    norm = gradient_norm(model)
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteError(
            f"the norm of the gradients is not finite: got {norm}, expected a finite norm. Lower the learning rate, or "
            "skip the step"
        )
    scale_gradients_(model, clip_factor(norm, max_norm))
    return torch.tensor(norm, dtype=torch.float32, device=_device(model))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor for gradients as in torch: at most 1, and NaN for a NaN norm."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor > 1 else factor


@torch.no_grad()
def gradient_norm(model: nn.Module) -> float:
    """Return the norm of all gradients of a model. All ranks must call this."""
    collections = collections_of(model)
    for path, collection in collections.items():
        if collection.replicas > 1:
            raise SpecError(
                f"replicas of the tables in '{path}' have different gradients: got {collection.replicas} averaged "
                "replicas, expected exact replicas. Set ParallelOptions(exact=True)"
            )
        if lost := collection._updaters.idle.lost():
            raise OptimizerError(lost_message(lost, "clip_grad_norm_", "RowWiseAdagrad", 0.01))
    sums = no_sums(_device(model))
    for optimizer in _optimizers(collections):
        for updater, trained in optimizer.trained_now().items():
            sums += updater.square_sums(trained, optimizer.waiting_factor())
    link = _link(collections)
    if link is not None:
        sums = link.all_gather("norms of gradients", sums).wait().sum(0)
    return math.sqrt(float_of(sums.tolist()) + _dense_square(model))


@torch.no_grad()
def scale_gradients_(model: nn.Module, factor: float) -> None:
    """Multiply all gradients of a model. Gradients of tables are multiplied in the step of their optimizers."""
    if factor == 1:
        return
    for gradient in _dense_gradients(model):
        local_values(gradient).mul_(factor)
    for optimizer in _optimizers(collections_of(model)):
        optimizer.scale_waiting(factor)


def _optimizers(collections: Mapping[str, EmbeddingCollection]) -> list[SparseOptimizer]:
    """List the optimizers of all tables, in the same order on all ranks."""
    own: set[object] = set(collections.values())
    found: dict[SparseOptimizer, None] = {}
    for collection in collections.values():
        updaters = [updater for updater in collection.updaters() if not updater.tables.isdisjoint(collection.tables)]
        for updater in sorted(updaters, key=lambda updater: min(updater.tables)):
            if (optimizer := updater.optimizer()) is not None:
                found[optimizer] = None
    for optimizer in found:
        name = type(optimizer).__name__
        if optimizer.steps_in_backward:
            raise OptimizerError(
                f"gradients of tables are used in backward: got {name}.in_backward(), expected an optimizer that steps "
                "after clip_grad_norm_. Remove in_backward() and call step()"
            )
        if not own.issuperset(trained.collection for trained in optimizer.trained()):
            raise SpecError(
                f"{name} trains tables of a larger model: got a part of it, expected the model of the optimizer. Call "
                "clip_grad_norm_ with that model"
            )
    return list(found)


def _link(collections: Mapping[str, EmbeddingCollection]) -> Link | None:
    """Return the link of the ranks that share the tables, or None."""
    groups = (group for collection in collections.values() for group in collection._groups)
    return next((group.wire.link for group in groups if isinstance(group, ShardedTables)), None)


def _dense_gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _dense_square(model: nn.Module) -> float:
    """Sum the squares of parameter gradients in float64. Shards of FSDP2 are summed over ranks."""
    whole: list[Tensor] = []
    sharded: list[Tensor] = []
    for gradient in _dense_gradients(model):
        values = gradient.coalesce().values() if gradient.is_sparse else local_values(gradient)
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        (sharded if is_sharded(gradient) else whole).append(norm.to(_device(model)))
    own = [_square(norms, model) for norms in (whole, sharded)]
    if sharded:
        if not isinstance(model, Distributed):
            raise SpecError(
                f"parameters are sharded by FSDP: got {type(model).__name__}, expected a model of hotbed.distribute. "
                "Call hotbed.distribute(model, parallel=hotbed.ParallelOptions(dense='fsdp'))"
            )
        own[1] = model.link.all_gather("norms of gradients", own[1]).wait().sum(0)
    return math.fsum(square for of_kind in own for square in of_kind.tolist())


def _square(norms: list[Tensor], model: nn.Module) -> Tensor:
    """Return the sum of squares ``[1]`` float64."""
    if not norms:
        return torch.zeros(1, dtype=torch.float64, device=_device(model))
    return torch.stack(norms).square().sum(0, keepdim=True)


def _device(model: nn.Module) -> torch.device:
    of_tables = [collection.device for collection in collections_of(model).values()]
    return [*of_tables, *(p.device for p in model.parameters()), torch.device("cpu")][0]
