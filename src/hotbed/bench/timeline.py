"""Where the time of a training step goes, told by hooks around the modules of a DLRM.

A `Timeline` collects marks; the time between two marks belongs to the part that the later one names. Marks are taken
as the step passes them: before and after each module, and in backward where autograd reaches a tensor. Autograd runs
what was recorded last first, so the order is: loss, top MLP, interaction, bottom MLP, lookup.

==================== ================================================================================================
mark                 taken when
==================== ================================================================================================
a module's name      its forward is over
top backward         the gradient of the interaction's result is there
interaction backward the gradient of its vectors is there
bottom backward      a gradient of the bottom MLP's first layer is there
lookup backward      ``loss.backward()`` is over
dense optimizer      its ``step`` is over
sparse update        the sparse optimizer's ``step`` is over
other                anything else is over: the loss, what lies between modules, ``zero_grad``
==================== ================================================================================================

Hooks read clocks (on CUDA: record events) and change nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.nn import DLRM

PARTS = (
    *("lookup", "bottom", "interaction", "top"),
    *("top backward", "interaction backward", "bottom backward", "lookup backward"),
    *("dense optimizer", "sparse update", "other"),
)
"""All parts, in the order of a step."""


class Timeline:
    """Marks of one step at a time.

    Parameters
    ----------
    device
        On ``cuda`` marks are events, timed by the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks = []
        self.mark("")

    def mark(self, part: str) -> None:
        """Say what the time since the last mark was spent on."""
        if not self._cuda:
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def seconds(self) -> dict[str, float]:
        """Seconds of each part of the step that just ended; together they are the step."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        total: dict[str, float] = defaultdict(float)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            total[part] += before.elapsed_time(after) / 1e3 if self._cuda else after - before
        return {part: total[part] for part in PARTS}


def watch(model: DLRM, timeline: Timeline) -> None:
    """Mark every step of a model."""

    def mark(part: str) -> Callable[..., None]:
        return lambda *_: timeline.mark(part)

    def mark_gradient(part: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], result: Tensor | None = None) -> None:
            (args[0] if result is None else result).register_hook(mark(part))

        return hook

    modules = {"lookup": model.embeddings, "bottom": model.bottom, "interaction": model.interaction, "top": model.top}
    for name, module in modules.items():
        module.register_forward_pre_hook(mark("other"))
        module.register_forward_hook(mark(name))
    model.top.register_forward_hook(mark_gradient("other"))
    model.interaction.register_forward_hook(mark_gradient("top backward"))
    model.interaction.register_forward_pre_hook(mark_gradient("interaction backward"))
    model.bottom.register_forward_hook(mark_gradient("other"))
    for parameter in next(model.bottom.children()).parameters():
        parameter.register_post_accumulate_grad_hook(mark("bottom backward"))
