"""Read the data in one process, and send each other process its samples.

What is read once need not be decoded by every process. Batches are sent before their use, by a thread over a process
group of its own, but at most ``ahead`` of them: a rank takes part in that many more exchanges when training stops, as
all ranks do.

Devices that exchange over links of their own (NCCL) get a header over the host's link, and then their bytes from the
reader's device. The header is text on the host: every rank knows the sizes before the bytes are sent, so no host waits
for a device. Over NCCL only the step's thread may start exchanges, in an order that all ranks have. So the loader
yields a `SentBatch`, and `hotbed.train.prefetch` lets it be `received` between two steps, in the stream of preparation.
The bytes of all ranks lie in page-locked memory of the reader, one rank's behind the other's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.comm import Link
from hotbed.data import Loader
from hotbed.data.loader import share_of
from hotbed.store.memory import staging


class BroadcastLoader:
    """Load this rank's samples of batches that only one rank reads."""

    def __init__(
        self,
        loader: Loader | None,
        link: Link,
        *,
        reader: int = 0,
        ahead: int = 2,
        device: torch.device | None = None,  # NCCL sends samples there, as `SentBatch`
        check: Callable[[Batch], object] = lambda batch: None,  # called on the host, before samples are sent
    ) -> None:
        self._loader, self._link, self._reader, self._ahead = loader, link.clone(), reader, ahead
        self._device, self._check = None if link.overlaps else device, check
        # Headers are sent meanwhile, by another thread.
        self._of_devices = self._link if self._device is None else link.clone()
        about: dict[str, Any] = {} if loader is None else {"length": len(loader), "position": loader.state_dict()}
        messages = None if loader is None else [_message(None, about)] * self._link.size
        _, about = _read(self._exchange(messages))
        self.queue_depth = 0  # batches that had arrived when the consumer requested the last one
        self._length: int = about["length"]
        self._state: dict[str, Any] = about["position"]

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        granted: Queue[bool] = Queue()  # True: one more exchange; all ranks grant equally many before they stop
        arrived: Queue[tuple[Batch | SentBatch | None, Any] | BaseException] = Queue()
        for _ in range(self._ahead):
            granted.put(True)
        thread = threading.Thread(target=self._run, args=(granted, arrived), name="hotbed-broadcast", daemon=True)
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
                granted.put(True)
                yield cast("Batch", batch)  # what moves batches to devices knows what else it may be
        finally:
            granted.put(False)
            thread.join()

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, as the reader's loader gave it with the last batch."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        if self._loader is not None:
            self._loader.load_state_dict(state)
        self._state = dict(state)

    def _run(self, granted: Queue[bool], arrived: Queue[Any]) -> None:
        try:
            batches = None if self._loader is None else iter(self._loader)
            while granted.get():
                found = self._receive() if batches is None else self._send(next(batches, None))
                arrived.put(found)
                if found[0] is None:
                    return
        except BaseException as error:
            arrived.put(error)

    def _send(self, batch: Batch | None) -> tuple[Batch | SentBatch | None, Any]:
        assert self._loader is not None
        state = self._loader.state_dict()
        size, ranks = 0 if batch is None else len(batch), self._link.size
        shares = [
            None if batch is None else batch.take(torch.arange(size)[share_of(size, r, ranks)]) for r in range(ranks)
        ]
        if self._device is None:
            self._exchange([_message(share, state) for share in shares])
            return shares[self._link.rank], state
        for share in shares:
            if share is not None:
                self._check(share)
        messages, content, sizes = messages_of(shares, state, self._device)
        self._exchange(messages)
        return self._announced(header_of(messages[self._link.rank]), content, sizes)

    def _receive(self) -> tuple[Batch | SentBatch | None, Any]:
        message = self._exchange(None)
        return _read(message) if self._device is None else self._announced(header_of(message))

    def _announced(
        self, header: dict[str, Any], content: Tensor | None = None, sizes: Sequence[int] = ()
    ) -> tuple[SentBatch | None, Any]:
        if header["batch"] is None:
            return None, header["about"]
        return SentBatch(self._of_devices, self._reader, header, header["nbytes"], content, sizes), header["about"]

    def _exchange(self, messages: list[Tensor] | None) -> Tensor:
        """Send every rank its message, or receive this rank's from the reader."""
        link = self._link
        sizes = torch.tensor([0] * link.size if messages is None else [len(m) for m in messages])
        incoming = [1 if r == self._reader else 0 for r in range(link.size)]
        outgoing = [0] * link.size if messages is None else [1] * link.size
        size = link.all_to_all("sizes of batches", sizes[: sum(outgoing)], outgoing, incoming).wait()
        expected = [int(size[0]) if r == self._reader else 0 for r in range(link.size)]
        whole = torch.empty(0, dtype=torch.uint8) if messages is None else torch.cat(messages)
        sent = [0] * link.size if messages is None else [len(m) for m in messages]
        return link.all_to_all("batches", whole, sent, expected).wait()


def _message(batch: Batch | None, about: Mapping[str, Any]) -> Tensor:
    """A batch, or none, and the position beside it as bytes ``[n]``."""
    import pyarrow as pa

    from hotbed.data.batch_ipc import batch_to_buffer

    message = batch_to_buffer(batch, about)
    return torch.from_dlpack(pa.Array.from_buffers(pa.uint8(), message.size, [None, message]))


def _read(message: Tensor) -> tuple[Batch | None, dict[str, Any]]:
    """What `_message` was made of; views of the message."""
    from hotbed.data.batch_ipc import batch_from_buffer

    return batch_from_buffer(message.numpy())


# -- samples from device to device -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentBatch:
    """A batch that is sent when all ranks ask for it."""

    link: Link  # the ranks
    reader: int  # the rank that has read it
    header: Mapping[str, Any]  # of this rank's samples, see `hotbed.data.batch_ipc.pack_batch`
    nbytes: int  # of this rank's samples
    # content, sizes: on the reader: bytes of all ranks in page-locked memory, and how many each rank's are
    content: Tensor | None = None
    sizes: Sequence[int] = ()

    def __len__(self) -> int:
        return self.header["batch"]["size"]

    def received(self, device: torch.device) -> Batch:
        """Exchange the bytes in the current stream, for which the host does not wait; all ranks must call this.

        The host has checked what `Jagged.verified` says of the ids, and labels, before they were sent.
        """
        from hotbed.data.batch_ipc import unpack_batch

        size = self.link.size
        if self.content is None:
            whole, sent = torch.empty(0, dtype=torch.uint8, device=device), [0] * size
        else:
            whole, sent = self.content.to(device, non_blocking=True), list(self.sizes)
        expected = [self.nbytes if rank == self.reader else 0 for rank in range(size)]
        return unpack_batch(self.header, self.link.all_to_all("batches", whole, sent, expected).wait())


def messages_of(
    shares: Sequence[Batch | None], about: Mapping[str, Any], device: torch.device
) -> tuple[list[Tensor], Tensor, list[int]]:
    """Return what tells each rank of its samples, all their bytes, and how many each rank's are."""
    from hotbed.data.batch_ipc import pack_batch

    headers: list[dict[str, Any]] = []
    places: list[tuple[int, Tensor]] = []
    sizes: list[int] = []
    for share in shares:
        header, own, nbytes = ({"batch": None}, [], 0) if share is None else pack_batch(share)
        places += [(sum(sizes) + start, t) for start, t in own]
        sizes.append(nbytes)
        headers.append({**header, "nbytes": nbytes, "about": dict(about)})
    content = staging((sum(sizes),), torch.uint8, device)
    for start, t in places:
        content[start : start + t.nbytes].copy_(t.contiguous().view(-1).view(torch.uint8))
    return [_bytes_of(header) for header in headers], content, sizes


def _bytes_of(header: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)


def header_of(message: Tensor) -> dict[str, Any]:
    """Read what `messages_of` wrote for this rank."""
    return json.loads(message.numpy().tobytes())
