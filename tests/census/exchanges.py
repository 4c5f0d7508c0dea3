"""Let ranks exchange what is on the pretended device, as NCCL would: in a stream, in the order in which it was started.

Values go through Gloo. DDP's reducer, which is C++ and reads memory, is stood in for by hooks that average all
gradients in one bucket when the last is there, by the project's own `mean_over_ranks_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.comm import Handle, Link
from hotbed.embed import dense
from tests.census.device import CUDA, RECORD, OnDevice, host_of
from tests.census.streams import MODEL

ORDER: list[str] = []
"""Names of the exchanges that this rank has started, in order."""


def replace_exchanges() -> None:
    """Put them in the place of NCCL's."""
    by_gloo = Link.exchange

    def exchange(self: Link, what: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Handle[None]:
        ORDER.append(what)
        if not isinstance(outgoing[0], OnDevice):
            return by_gloo(self, what, outgoing, incoming)
        RECORD.note("launch", f"NCCL: {what}", 1 + bool(outgoing[self.rank].numel()))  # a rank's own is copied
        sent, received = [host_of(t) for t in outgoing], [host_of(t) for t in incoming]
        MODEL.operation([t for t in sent if t.numel()], [t for t in received if t.numel()], [])
        by_gloo(self, what, sent, received).wait()
        return Handle(lambda: None)

    link: Any = Link
    link.exchange = exchange
    link.overlaps = property(lambda self: False)
    link.device = property(lambda self: CUDA)
    module: Any = dense
    module._in_ddp = _averaged


def _averaged(model: nn.Module, link: Link) -> nn.Module:
    parameters = [p for p in model.parameters() if p.requires_grad]
    waiting = set(range(len(parameters)))

    def arrived(number: int) -> None:
        waiting.discard(number)
        if waiting:
            return
        waiting.update(range(len(parameters)))
        grads = [p.grad for p in parameters if p.grad is not None]
        bucket = torch.cat([grad.view(-1) for grad in grads])
        dense.mean_over_ranks_(bucket, link)
        averages = bucket.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [a.view(g.shape) for a, g in zip(averages, grads, strict=True)])

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: arrived(number))
    return model
