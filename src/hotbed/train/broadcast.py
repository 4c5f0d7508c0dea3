"""Read the data in one process, and send each other process its samples.

What is read once need not be decoded by every process. Batches are sent before their use, by a thread over a process
group of its own, but at most ``ahead`` of them: a rank takes part in that many more exchanges when training stops, as
all ranks do.

For devices that exchange over links of their own (NCCL) the thread sends headers alone, which say how large samples
are; the samples go from the reader's device to the others when steps ask for them (`hotbed.train.sent_batch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Queue
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.comm import Link
from hotbed.data import Loader
from hotbed.data.loader import share_of
from hotbed.train.sent_batch import SentBatch, header_of, messages_of


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
