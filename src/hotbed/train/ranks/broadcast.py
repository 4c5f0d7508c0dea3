"""Read the data on one rank, and send each other rank its samples, so that data is decoded only once.

A thread with its own process group sends up to ``ahead`` batches before training needs them. If training stops early,
the threads of all ranks still finish the exchanges of these batches.

Each rank receives a payload over the host's link: a header of its samples, and then their bytes. Over NCCL the payload
has only the header, and the bytes come from the reader's device. The header has all sizes, so no host waits for a
device. Only the step's thread may start exchanges over NCCL, in an order that is equal on all ranks. So the loader then
yields a `SentBatch`, and `hotbed.train.prefetch` calls `SentBatch.received` between two steps.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Queue
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.comm import Link
from hotbed.data import Loader
from hotbed.store.memory import staging
from hotbed.virtual_ranks import VirtualRanks

_PREFIX_BYTES = 8
"""Bytes of the length at the beginning of a payload."""


@dataclass(frozen=True)
class SentBatch:
    """The header of a batch. The samples are sent when all ranks call `received`."""

    link: Link
    reader: int  # rank that has read the batch
    header: Mapping[str, Any]  # header of this rank's samples, see `hotbed.data.batch_ipc.pack_batch`
    content: Tensor | None = None  # on the reader, the bytes of all ranks in page-locked memory
    sizes: Sequence[int] = ()  # on the reader, the number of bytes of each rank

    def __len__(self) -> int:
        return self.header["batch"]["size"]

    def received(self, device: torch.device) -> Batch:
        """Exchange the bytes in the current stream, and return this rank's samples on the device.

        All ranks must call this. The host does not wait for the exchange. Labels and ids need no checks, because the
        reader has checked them (`Jagged.verified`).
        """
        from hotbed.data.batch_ipc import unpack_batch

        size = self.link.size
        if self.content is None:
            content, sent = torch.empty(0, dtype=torch.uint8, device=device), [0] * size
        else:
            content, sent = self.content.to(device, non_blocking=True), list(self.sizes)
        expected = [self.header["nbytes"] if rank == self.reader else 0 for rank in range(size)]
        return unpack_batch(self.header, self.link.all_to_all("batches", content, sent, expected).wait())


class BroadcastLoader:
    """Load this rank's samples of each batch. Only the rank ``reader`` has a ``loader`` and reads batches.

    For ``virtual_ranks`` see `Loader`. With a ``device``, batches are `SentBatch`, because NCCL sends the samples to
    the device. The reader then calls ``check`` for the samples of each rank before it sends them.
    """

    def __init__(
        self,
        loader: Loader | None,
        link: Link,
        *,
        reader: int = 0,
        ahead: int = 2,
        device: torch.device | None = None,
        check: Callable[[Batch], object] = lambda batch: None,
        virtual_ranks: int | None = None,
    ) -> None:
        self._loader, self._link, self._reader, self._ahead = loader, link.clone(), reader, ahead
        self._device, self._check = None if link.overlaps else device, check
        self._virtual = [VirtualRanks(rank, link.size, virtual_ranks) for rank in range(link.size)]
        # Samples have a link of their own, because a thread sends headers at the same time.
        self._sample_link = self._link if self._device is None else link.clone()
        info: dict[str, Any] = {} if loader is None else {"length": len(loader), "position": loader.state_dict()}
        info, _ = self._exchange(None if loader is None else [_encode(info)] * link.size)
        self.queue_depth = 0  # number of batches that had arrived when the last batch was requested
        self._length: int = info["length"]
        self._state: dict[str, Any] = info["position"]

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        # True allows the thread one more exchange, and False ends the thread. All ranks allow equally many exchanges.
        permits: Queue[bool] = Queue()
        arrived: Queue[tuple[Batch | SentBatch | None, Any] | BaseException] = Queue()
        for _ in range(self._ahead):
            permits.put(True)
        thread = threading.Thread(target=self._run, args=(permits, arrived), name="hotbed-broadcast", daemon=True)
        thread.start()
        try:
            while True:
                self.queue_depth = arrived.qsize()
                found = arrived.get()
                if isinstance(found, BaseException):
                    raise found
                batch, self._state = found
                if batch is None:
                    return
                permits.put(True)
                yield cast("Batch", batch)  # `move_batch` also accepts a `SentBatch`
        finally:
            permits.put(False)
            thread.join()

    def state_dict(self) -> dict[str, Any]:
        """Return the reader's position in the data after the last batch."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue reading from a position that `state_dict` returned."""
        if self._loader is not None:
            self._loader.load_state_dict(state)
        self._state = dict(state)

    def _run(self, permits: Queue[bool], arrived: Queue[Any]) -> None:
        try:
            batches = None if self._loader is None else iter(self._loader)
            while permits.get():
                found = self._receive(None) if batches is None else self._send(next(batches, None))
                arrived.put(found)
                if found[0] is None:
                    return
        except BaseException as error:
            arrived.put(error)

    def _send(self, batch: Batch | None) -> tuple[Batch | SentBatch | None, Any]:
        assert self._loader is not None
        state, ranks = self._loader.state_dict(), self._link.size
        shares: list[Batch | None] = [None] * ranks
        if batch is not None:
            samples = torch.arange(len(batch))
            shares = [
                replace(batch.take(samples[of.share(len(batch))]), slices=of.slices(len(batch))) for of in self._virtual
            ]
        for share in shares:
            if share is not None and self._device is not None:
                self._check(share)
        headers, content, sizes = _pack(shares, state, self._device or torch.device("cpu"))
        if self._device is not None:
            return self._receive([_encode(header) for header in headers], content, sizes)
        return self._receive([_encode(h, part) for h, part in zip(headers, content.split(sizes), strict=True)])

    def _receive(
        self, payloads: list[Tensor] | None, content: Tensor | None = None, sizes: Sequence[int] = ()
    ) -> tuple[Batch | SentBatch | None, Any]:
        """Exchange the payloads of a batch; return this rank's samples (None at the end) and the reader's position."""
        from hotbed.data.batch_ipc import unpack_batch

        header, own = self._exchange(payloads)
        if header["batch"] is None:
            return None, header["about"]
        if self._device is None:
            return unpack_batch(header, own), header["about"]
        return SentBatch(self._sample_link, self._reader, header, content, sizes), header["about"]

    def _exchange(self, payloads: list[Tensor] | None) -> tuple[dict[str, Any], Tensor]:
        """On the reader, send a payload to each rank. On all ranks, return the header and the bytes for this rank."""
        link = self._link
        sent = [0] * link.size if payloads is None else [len(payload) for payload in payloads]
        outgoing = [0 if payloads is None else 1] * link.size
        incoming = [1 if r == self._reader else 0 for r in range(link.size)]
        size = link.all_to_all("sizes of batches", torch.tensor(sent)[: sum(outgoing)], outgoing, incoming).wait()
        expected = [int(size[0]) * n for n in incoming]
        content = torch.empty(0, dtype=torch.uint8) if payloads is None else torch.cat(payloads)
        received = link.all_to_all("batches", content, sent, expected).wait()
        header, own = received[_PREFIX_BYTES:].tensor_split([int(received[:_PREFIX_BYTES].view(torch.int64)[0])])
        return json.loads(header.numpy().tobytes()), own


def _encode(header: Mapping[str, Any], content: Tensor | None = None) -> Tensor:
    """Return a payload ``[n]`` uint8: the length of the header's JSON text, this text, and the bytes of a batch.

    Spaces pad the text, so that the bytes are aligned.
    """
    from hotbed.data.batch_ipc import ALIGNMENT

    text = json.dumps(header).encode()
    text += b" " * (-(_PREFIX_BYTES + len(text)) % ALIGNMENT)
    parts = [torch.tensor([len(text)]).view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    return torch.cat(parts if content is None else [*parts, content])


def _pack(
    shares: Sequence[Batch | None], about: Mapping[str, Any], device: torch.device
) -> tuple[list[dict[str, Any]], Tensor, list[int]]:
    """Return the header of each rank, the bytes of all ranks in one tensor, and the number of bytes by rank.

    ``shares`` has the samples of each rank. Every header contains ``about``, the reader's position.
    """
    from hotbed.data.batch_ipc import pack_batch

    headers: list[dict[str, Any]] = []
    tensors: list[tuple[int, Tensor]] = []
    sizes: list[int] = []
    for share in shares:
        header, own, nbytes = ({"batch": None}, [], 0) if share is None else pack_batch(share)
        tensors += [(sum(sizes) + start, t) for start, t in own]
        sizes.append(nbytes)
        headers.append({**header, "nbytes": nbytes, "about": dict(about)})
    content = staging((sum(sizes),), torch.uint8, device)
    for start, t in tensors:
        content[start : start + t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
    return headers, content, sizes
