"""Send a rank's samples over the devices' own links: a header over the host's, then bytes from device to device.

The header is plain text on the host, so every rank knows the sizes before the bytes are sent, and no host waits for a
device. Over NCCL only the step's thread may start exchanges, in an order that all ranks have: so a loader yields a
`SentBatch`, and who prepares batches (`hotbed.train.pipeline`) lets it be `received`, between two steps, in the stream
of preparation. The bytes of all ranks lie in page-locked memory of the reader, one rank's behind the other's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.comm import Link
from hotbed.store.memory import staging


@dataclass(frozen=True)
class SentBatch:
    """A batch that is sent when all ranks ask for it."""

    link: Link  # the ranks
    reader: int  # the rank that has read it
    header: Mapping[str, Any]  # of this rank's samples, see `hotbed.data.batch_ipc.packed`
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
        from hotbed.data.batch_ipc import unpacked

        size = self.link.size
        if self.content is None:
            whole, sent = torch.empty(0, dtype=torch.uint8, device=device), [0] * size
        else:
            whole, sent = self.content.to(device, non_blocking=True), list(self.sizes)
        expected = [self.nbytes if rank == self.reader else 0 for rank in range(size)]
        return unpacked(self.header, self.link.all_to_all("batches", whole, sent, expected).wait())


def messages_of(
    shares: Sequence[Batch | None], about: Mapping[str, Any], device: torch.device
) -> tuple[list[Tensor], Tensor, list[int]]:
    """Return what tells each rank of its samples, all their bytes, and how many each rank's are."""
    from hotbed.data.batch_ipc import packed

    headers: list[dict[str, Any]] = []
    places: list[tuple[int, Tensor]] = []
    sizes: list[int] = []
    for share in shares:
        header, own, nbytes = ({"batch": None}, [], 0) if share is None else packed(share)
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
