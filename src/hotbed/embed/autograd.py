"""The lookup as autograd sees it: forward pools rows, backward leaves gradients with the optimizer's updaters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hotbed.embed.part import Request
from hotbed.embed.updater import TableUpdater
from hotbed.errors import OptimizerError


class PooledLookup(torch.autograd.Function):
    """Forward: one launch per request. Backward: hand bags and gradients to the updaters; tables get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        requests: Sequence[Request],
        outputs: Sequence[Tensor],
        updaters: Iterable[TableUpdater],
    ) -> tuple[Tensor, ...]:
        """Fill the outputs ``[B, width, D]`` and return each without its room.

        Parameters
        ----------
        anchor
            Makes autograd record the call if it requires a gradient.
        weights
            Per-id weights of the batch, in case they require a gradient; requests carry their values.
        requests
            What to look up.
        outputs
            Uninitialised; in a list, so that autograd takes what is returned for new tensors.
        updaters
            Who is to receive gradients.
        """
        ctx.requests, ctx.updaters = requests, updaters
        ctx.versions = [request.bags.versions() for request in requests]
        ctx.updates = [request.source.updates for request in requests]
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        for source, bags, output, _ in requests:
            source.store.lookup(bags, outputs[output])
        room = {output: bags.room for _, bags, output, _ in requests}
        # No view where there is no room: autograd lets nobody change a Function's view in place.
        return tuple(out[:, room[i] :] if room[i] else out for i, out in enumerate(outputs))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Leave the gradients where the optimizer's step finds them."""
        updaters = list(ctx.updaters)
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = torch.zeros(ctx.weights.shape, dtype=torch.float32, device=ctx.weights.device)
        for request, versions, updates in zip(ctx.requests, ctx.versions, ctx.updates, strict=True):
            source, bags, output, trained = request
            grad = grad_outputs[output]
            if grad is None:
                continue  # nothing depends on this output
            rows, width = _rows_of(grad)
            bags = replace(bags, width=width, room=0)
            if of_weights is not None:
                if source.updates != updates:
                    raise OptimizerError(
                        "rows were updated between the lookup and its backward, which needs them as they were for the "
                        "gradient of the per-id weights; call backward before the optimizer's step"
                    )
                source.store.weight_gradient(bags, rows, of_weights)
            if trained and updaters and ctx.needs_input_grad[0]:
                contribution = source.contribution(bags, versions, rows)
                for updater in updaters:
                    updater.receive(contribution)
        return None, None if of_weights is None else of_weights.to(ctx.weights.dtype), None, None, None


def _rows_of(grad: Tensor) -> tuple[Tensor, int]:
    """A gradient ``[B, F, D]`` as rows ``[…, D]`` and how many of them there are per sample; copied only if it must."""
    batch, features, dim = grad.shape
    if batch == 0 or grad.stride(2) != 1 or grad.stride(1) != dim or grad.stride(0) % dim:
        return grad.contiguous().view(batch * features, dim), features
    width = grad.stride(0) // dim if batch > 1 else features
    return grad.as_strided(((batch - 1) * width + features, dim), (dim, 1)), width
