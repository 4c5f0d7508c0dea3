"""Train by batches that are moved to the device ahead, as TorchRec's pipelines do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed.errors import SpecError


class Multistreamable(ABC):
    """Base of batches whose memory may be used by several streams of a GPU."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work of a stream that uses it is done."""


class Pipelineable(Multistreamable):
    """Base of batches that a pipeline moves to a device."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> Pipelineable:
        """Copy to a device."""


class TrainPipelineBase:
    """Take training steps; the next batch is read and moved to the device while one is computed.

    A step calls ``optimizer.zero_grad()``, the model, ``backward()`` of the sum of its losses and ``optimizer.step()``.
    In ``eval()`` mode, only the model is called.

    Parameters
    ----------
    model
        Called with a batch; returns losses and an output.
    optimizer
        Trains what backward does not.
    device
        Where batches are computed.
    custom_model_fwd
        Called instead of the model.
    **ignored
        Further options of TorchRec's pipelines, which change when they exchange, not what they compute.
    """

    ahead = 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
        **ignored: Any,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = custom_model_fwd or model
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Forget the batches that were read, and start with another iterator."""
        self._batches: deque[Any] = deque()
        self._source: Iterator[Any] | None = None
        self._is_exhausted = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Take a step with the next batch and return the output of the model."""
        if dataloader_iter is not self._source:
            self._source, self._is_exhausted = dataloader_iter, False
        self._fill(dataloader_iter, 1)
        if not self._batches:
            raise StopIteration
        batch = self._ready(self._batches.popleft())
        if self._model.training:
            self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        self._fill(dataloader_iter, self.ahead)
        if self._model.training:
            losses.sum().backward()
            self._optimizer.step()
        return output

    def _fill(self, batches: Iterator[Any], count: int) -> None:
        """Read batches until as many are waiting."""
        while len(self._batches) < count and not self._is_exhausted:
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            with torch.cuda.stream(self._stream):  # no stream for None
                self._batches.append(batch.to(self._device, non_blocking=True) if hasattr(batch, "to") else batch)

    def _ready(self, batch: Any) -> Any:
        """Let the step wait for a batch that a stream of its own moves."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            if hasattr(batch, "record_stream"):
                batch.record_stream(current)
        return batch


class TrainPipelineSparseDist(TrainPipelineBase):
    """Take training steps as `TrainPipelineBase` does, with two batches read ahead.

    Ids are exchanged in the step itself; `hotbed.Trainer` exchanges them a batch ahead.
    """

    ahead = 2

    def detach(self) -> nn.Module:
        """Return the model."""
        return self._model

    def attach(self, model: nn.Module | None = None) -> None:
        """Train a model from now on."""
        if model is not None:
            self._model, self._forward = model, model


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: object = None, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Copy a state to a device; the state of a distributed model is whole on every rank.

    ``pg`` is accepted for TorchRec's sake.
    """
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state_dict.items()}


@torch.no_grad()
def state_dict_gather(src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
    """Copy a state into the tensors of another one, by name; tensors on ``meta`` stay without values."""
    for name, value in dst.items():
        if name not in src:
            raise SpecError(f"the state has no '{name}', expected one of {', '.join(src)}. Gather equal models.")
        value.copy_(src[name])
