"""Read the data in one process, and send each other process its samples.

What is read once need not be decoded by every process. Batches are sent before their use, by a thread over a process
group of its own, but at most ``ahead`` of them: a rank takes part in that many more exchanges when training stops, as
all ranks do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.comm import Link
from hotbed.data import Loader
from hotbed.data.loader import share_of
from hotbed.jagged import Jagged


class BroadcastLoader:
    """Load this rank's samples of batches that only one rank reads.

    Parameters
    ----------
    loader
        On the reading rank, of whole batches; None on the others.
    link
        The ranks; it is cloned.
    reader
        The rank that reads.
    ahead
        Batches that are sent before their use.
    """

    def __init__(self, loader: Loader | None, link: Link, *, reader: int = 0, ahead: int = 2) -> None:
        self._loader, self._link, self._reader, self._ahead = loader, link.clone(), reader, ahead
        about: dict[str, Any] = {} if loader is None else {"length": len(loader), "position": loader.state_dict()}
        messages = None if loader is None else [packed(None, about)] * self._link.size
        _, about = unpacked(self._exchange(messages))
        self._length: int = about["length"]
        self._state: dict[str, Any] = about["position"]

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        granted: Queue[bool] = Queue()  # True: one more exchange; all ranks grant equally many before they stop
        arrived: Queue[tuple[Batch | None, Any] | BaseException] = Queue()
        for _ in range(self._ahead):
            granted.put(True)
        thread = threading.Thread(target=self._run, args=(granted, arrived), name="hotbed-broadcast", daemon=True)
        thread.start()
        try:
            while True:
                found = arrived.get()
                if isinstance(found, BaseException):
                    raise found
                batch, self._state = found
                if batch is None:
                    return
                granted.put(True)
                yield batch
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

    def _send(self, batch: Batch | None) -> tuple[Batch | None, Any]:
        assert self._loader is not None
        state = self._loader.state_dict()
        size, ranks = 0 if batch is None else len(batch), self._link.size
        shares = [
            None if batch is None else batch.take(torch.arange(size)[share_of(size, r, ranks)]) for r in range(ranks)
        ]
        messages = [packed(share, state) for share in shares]
        self._exchange(messages)
        return shares[self._link.rank], state

    def _receive(self) -> tuple[Batch | None, Any]:
        return unpacked(self._exchange(None))

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


def packed(batch: Batch | None, state: Mapping[str, Any]) -> Tensor:
    """A batch as bytes: the length of a JSON header, the header, and the tensors it describes one after the other."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {"state": dict(state), "batch": None}
    if batch is not None:
        sparse = batch.sparse
        found = {"values": sparse.values, "offsets": sparse.offsets, "id_weights": sparse.weights}
        found |= {"dense": batch.dense, "labels": batch.labels, "weights": batch.weights}
        found |= {f"extra.{name}": column for name, column in batch.extra.items()}
        tensors = {name: t.contiguous() for name, t in found.items() if t is not None}
        header["batch"] = {"names": sparse.names, "fixed": sparse.fixed, "size": len(sparse), "starts": sparse.starts}
    header["tensors"] = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    text = json.dumps(header).encode()
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    return torch.cat([torch.from_numpy(head.copy()), *(t.view(-1).view(torch.uint8) for t in tensors.values())])


def unpacked(message: Tensor) -> tuple[Batch | None, Any]:
    """A batch and the loader's position from what `packed` made of them."""
    length = int.from_bytes(bytes(message[:8].tolist()), "little")
    header = json.loads(message[8 : 8 + length].numpy().tobytes())
    at = 8 + length
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in header["tensors"]:
        kind: torch.dtype = getattr(torch, dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        tensors[name] = message[at : at + nbytes].clone().view(kind).view(shape)  # a clone is aligned
        at += nbytes
    about = header["batch"]
    if about is None:
        return None, header["state"]
    sparse = Jagged(
        about["names"],
        tensors["values"],
        batch_size=about["size"],
        fixed=about["fixed"],
        offsets=tensors.get("offsets"),
        weights=tensors.get("id_weights"),
        starts=tuple(about["starts"]),
    )
    extra = {name.removeprefix("extra."): t for name, t in tensors.items() if name.startswith("extra.")}
    batch = Batch(
        sparse=sparse,
        dense=tensors.get("dense"),
        labels=tensors.get("labels"),
        weights=tensors.get("weights"),
        extra=extra,
    )
    return batch, header["state"]
