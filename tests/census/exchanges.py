"""Let ranks exchange what is on the pretended device, as NCCL would: in a stream, in the order in which it was started.

Values go through Gloo. DDP's reducer, which is C++ and reads memory, is stood in for by hooks that average all
gradients in one bucket when the last is there, by the project's own `mean_over_ranks_`.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hotbed.comm import Handle, Link, Sizes, Tensors
from hotbed.embed import dense_parallel as dense
from tests.census.device import CUDA, OnDevice, host_of
from tests.census.record import RECORD
from tests.census.streams import MODEL

ORDER: list[str] = []
"""Names of the exchanges that this rank has started, in order."""


def replace_exchanges() -> None:
    """Put them in the place of NCCL's."""
    by_gloo = Link.exchange

    def exchange(self: Link, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        if threading.current_thread() is threading.main_thread():  # a thread's exchanges, over Gloo, have no such order
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
    module._wrap_in_ddp = _StandIn


class _StandIn(DistributedDataParallel):
    """Average all gradients in one bucket when the last is there."""

    def __init__(self, model: nn.Module, link: Link) -> None:
        nn.Module.__init__(self)
        self.module, self._is_on, self._link = model, True, link
        self._parameters_here = [p for p in model.parameters() if p.requires_grad]
        self._waiting = set(range(len(self._parameters_here)))
        for number, parameter in enumerate(self._parameters_here):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @override
    @contextmanager
    def no_sync(self) -> Generator[None]:
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def _arrived(self, number: int, _: Tensor) -> None:
        if not self._is_on:
            return
        self._waiting.discard(number)
        if self._waiting:
            return
        self._waiting.update(range(len(self._parameters_here)))
        grads = [p.grad for p in self._parameters_here if p.grad is not None]
        bucket = torch.cat([grad.view(-1) for grad in grads])
        dense.mean_over_ranks_(bucket, self._link)
        averages = bucket.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [a.view(g.shape) for a, g in zip(averages, grads, strict=True)])
