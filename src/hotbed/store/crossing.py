"""`DeviceStaging`: records of the host as a device reads and writes them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.store import memory
from hotbed.store.records import Over, Records, Traffic, Use


class DeviceStaging(Over):
    """Records in the host's memory or in a file, given and taken as tensors of a device.

    They cross in page-locked memory. Copies to the device are asynchronous, those from it wait for the device.

    Parameters
    ----------
    below
        Where they are.
    device
        Where they are wanted; for the CPU this does nothing.
    """

    def __init__(self, below: Records, device: torch.device) -> None:
        super().__init__(below)
        self.device = device
        self._to_bytes = self._from_bytes = 0

    @property
    @override
    def traffic(self) -> Traffic:
        return replace(self.below.traffic, to_device_bytes=self._to_bytes, from_device_bytes=self._from_bytes)

    @property
    def crosses(self) -> bool:
        """Whether there is anything to do."""
        return self.device.type != "cpu"

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        if not self.crosses:
            return self.below.read(slots, out, use=use)
        found = memory.staging(out.shape, torch.uint8, self.device)
        there = self.below.read(slots.cpu(), found, use=use)
        at = there.nonzero()[:, 0]
        self._to_bytes += len(at) * self.record_bytes
        if len(at) == len(there):
            out.copy_(found, non_blocking=True)
        elif len(at):  # only what there is crosses
            sent = memory.staging((len(at), self.record_bytes), torch.uint8, self.device)
            torch.index_select(found, 0, at, out=sent)
            came = sent.to(self.device, non_blocking=True)
            out.view(torch.int32).index_copy_(0, at.to(self.device), came.view(torch.int32))
        return there.to(self.device)

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        if not self.crosses:
            self.below.write(slots, records)
            return
        if not len(slots):
            return
        sent = memory.staging(records.shape, torch.uint8, self.device)
        sent.copy_(records)
        self._from_bytes += sent.nbytes
        self.below.write(slots.cpu(), sent)

    @override
    def prefetch(self, slots: Tensor) -> None:
        self.below.prefetch(slots.cpu())

    @override
    def to(self, device: torch.device) -> None:
        self.device = device
