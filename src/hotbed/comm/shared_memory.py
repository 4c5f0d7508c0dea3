"""Send tensors between processes of one machine through shared memory.

Each process creates an unnamed file in memory (`OwnMemory`, ``memfd_create``). The system frees the file when all
processes that map it have ended, and the limit of ``/dev/shm`` does not apply. Other processes map the whole file once
through ``/proc/PID/fd`` (`PeerMemory`), so a sent tensor remains readable after its sender has ended. The file holds::

    key       random bytes; a reader checks them to know that it opened the right file
    messages  to rank 0, then to rank 1 …: pairs (offset of the bytes, m) for message m, or (…, −m) after its receipt
    blocks    bytes of messages

The sender copies tensors into a free block, and then writes the messages. A receiver polls for its message, copies the
bytes, and marks the message as received. A block is free when all its messages are received. Only receivers block, and
senders with 1,024 unread messages to one rank. A copy of 14 MB takes 0.6 ms, and 9 ms through a loopback socket. Unlike
Gloo, this does not need further threads, which would find no free core (docs/decisions/sharding.md).
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from hotbed.errors import CommError
from hotbed.large_tensors import PAGE_BYTES, with_room
from hotbed.machine import memory_bytes

ADDRESS_BYTES = 64
"""Size of the address of a process's memory."""
MESSAGES = 1024
"""Limit of unread messages to one rank."""
_KEY_BYTES = 16
_ALIGNMENT = 64
"""Alignment of tensors in bytes."""
_MOST_BYTES = 16 << 30
"""Size limit of a process's file. The system allocates pages only when they are needed."""
_PAGES_OF_MESSAGES = 16 * MESSAGES // PAGE_BYTES
_NAME = "hotbed"
_SPIN_S = 1e-3
"""A receiver polls this long without a pause. Later pauses are 5 % of its waiting time, but at most this long."""
_CHECK_S = 0.1
"""Interval at which a waiting process checks whether its peer is alive."""


class _Block:
    """Bytes of one exchange."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.messages: dict[int, int] = {}  # number of the message with these bytes, by receiving rank


class OwnMemory:
    """Memory of this process that other processes on the machine can open.

    Raise OSError if the system is not Linux or refuses the memory.
    """

    def __init__(self, ranks: int) -> None:
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise OSError(f"shared memory is not supported on {sys.platform}")
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size := min(memory_bytes(), _MOST_BYTES) // PAGE_BYTES * PAGE_BYTES)
        os.posix_fallocate(self._file, 0, PAGE_BYTES)  # fails here on systems that cannot allocate
        self._bytes = _map(f"/proc/self/fd/{self._file}", size)
        self._bytes[:_KEY_BYTES] = torch.frombuffer(bytearray(self._key), dtype=torch.uint8)
        self._messages = _as_int64(self._bytes)
        self._end = PAGE_BYTES + _PAGES_OF_MESSAGES * PAGE_BYTES * ranks
        self._sent = [0] * ranks
        self._blocks: list[_Block] = []

    @property
    def address(self) -> Tensor:
        """Address ``[ADDRESS_BYTES]`` uint8, which another process needs to open the memory."""
        text = f"{_network()} {os.getpid()} {self._file} ".encode()
        return torch.frombuffer(bytearray(self._key + text.ljust(ADDRESS_BYTES - _KEY_BYTES)), dtype=torch.uint8)

    def send(self, tensors: Mapping[int, Tensor], peers: Mapping[int, PeerMemory]) -> None:
        """Send a contiguous tensor to each rank. A tensor for several ranks is copied once.

        Raise RuntimeError if a rank has too many unread messages, and has ended or does not read them in time.
        """
        distinct = {(t.data_ptr(), t.nbytes): t for t in tensors.values()}
        starts = list(accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in distinct.values()), initial=0))
        block = self._free_block(starts[-1])
        firsts = {key: block.first + start for key, start in zip(distinct, starts, strict=False)}
        for key, t in distinct.items():
            self._bytes[firsts[key] : firsts[key] + t.nbytes] = flat_bytes(t)
        block.messages = {
            rank: self._write_message(rank, firsts[t.data_ptr(), t.nbytes], peers[rank]) for rank, t in tensors.items()
        }

    def _write_message(self, rank: int, first: int, peer: PeerMemory) -> int:
        """Write a message with the offset of its bytes to a rank. Return the number of the message."""
        self._sent[rank] = number = self._sent[rank] + 1
        messages, at = self._messages, _message_index(rank, number)
        if number > MESSAGES:
            peer.wait_until(lambda: messages[at + 1] < 0)
        messages[at] = first
        _barrier()
        messages[at + 1] = number
        return number

    def _free_block(self, nbytes: int) -> _Block:
        """Return the smallest free block with ``nbytes`` to twice ``nbytes`` of room, or a new block."""
        most = 2 * max(nbytes, PAGE_BYTES)
        fitting = [b for b in self._blocks if nbytes <= b.size <= most and self._is_free(b)]
        if fitting:
            return min(fitting, key=lambda b: b.size)
        size = with_room(nbytes)
        try:
            if self._end + size > len(self._bytes):
                raise OSError(errno.ENOSPC, f"{len(self._bytes):,} bytes at most")
            # Allocate the pages now. If there were none, a later write would kill the process.
            os.posix_fallocate(self._file, self._end, size)
        except OSError as error:
            raise CommError(
                f"shared memory for messages to ranks of this machine: got {size:,} bytes more, in addition to "
                f"{self._end:,}, and the system refused ({error.strerror}). Use smaller batches, or fewer ranks per "
                "machine"
            ) from error
        self._blocks.append(_Block(self._end, size))
        self._end += size
        return self._blocks[-1]

    def _is_free(self, block: _Block) -> bool:
        """Return whether all messages of a block were received, which a later message in the same slot implies."""
        return all(self._messages[_message_index(rank, n) + 1] != n for rank, n in block.messages.items())


class PeerMemory:
    """Messages to this process in the `OwnMemory` of a peer. An address of zeros means that the peer has none.

    Raise OSError if the peer is on another machine, has no memory, or forbids access.
    """

    def __init__(self, address: Tensor, rank: int, timeout: timedelta) -> None:
        key, text = bytes(address[:_KEY_BYTES].tolist()), bytes(address[_KEY_BYTES:].tolist())
        if not any(key):
            raise OSError("the peer has no shared memory")
        network, process, number = text.decode().split()
        if network != _network():
            raise OSError("the peer is on another machine, or in a container with a different network")
        self._number, self._rank, self._timeout = process, rank, timeout.total_seconds()
        path = Path("/proc", process, "fd", number)
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            raise OSError("another process has that number here")
        self._bytes = _map(str(path), path.stat().st_size)
        if bytes(self._bytes[:_KEY_BYTES].tolist()) != key:
            raise OSError("another process has that number here")
        self._messages = _as_int64(self._bytes)
        self._process = _process(int(process))
        self._expected = 0

    def expect(self) -> int:
        """Return the number of the next message. Messages are received in the order of these calls."""
        self._expected += 1
        return self._expected

    def receive(self, number: int, out: Tensor) -> None:
        """Wait for a message, and copy it into a contiguous tensor of the sent size.

        Raise RuntimeError if the sender has ended, or does not send the message in time.
        """
        at = _message_index(self._rank, number)
        self.wait_until(lambda: self._messages[at + 1] == number)
        _barrier()
        first = self._messages[at]
        flat_bytes(out)[:] = self._bytes[first : first + out.nbytes]
        _barrier()
        self._messages[at + 1] = -number

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()`` is true. Raise RuntimeError if the peer has ended, or after the timeout."""
        start = looked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - looked > _CHECK_S:
                looked = now
                ended = self._ended()
                if (ended or now - start > self._timeout) and not ready():
                    raise RuntimeError(ended or f"timed out after {self._timeout:g} s")
            if now - start > _SPIN_S:
                time.sleep(min((now - start) / 20, _SPIN_S))
            else:
                os.sched_yield()
                time.sleep(0)  # releases the GIL

    def _ended(self) -> str:
        """Return a message if the process has ended, otherwise an empty string."""
        return f"process {self._number} has ended" if self._process.has_ended() else ""


class _Process:
    """A peer process, with one descriptor for all links that reports its end."""

    def __init__(self, number: int) -> None:
        self._file = os.pidfd_open(number)
        weakref.finalize(self, os.close, self._file)

    def has_ended(self) -> bool:
        poll = select.poll()  # a new object, because several threads may poll at once
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(0))


_processes: weakref.WeakValueDictionary[int, _Process] = weakref.WeakValueDictionary()


def _process(number: int) -> _Process:
    """Return the process with a PID."""
    found = _processes.get(number)
    if found is None or found.has_ended():  # after its end, a PID may be reused
        _processes[number] = found = _Process(number)
    return found


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as ``[n]`` uint8."""
    # The strides of a tensor with one row may be arbitrary.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _map(path: str, size: int) -> Tensor:
    """Map a file as ``[size]`` uint8. Unlike ``mmap``, torch keeps no descriptor open."""
    try:
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _as_int64(memory: Tensor) -> memoryview:
    """Return the whole memory as int64."""
    return memory.numpy().data.cast("q")


def _message_index(rank: int, number: int) -> int:
    """Return the index of a message to a rank in the memory's int64 values."""
    return (1 + _PAGES_OF_MESSAGES * rank) * PAGE_BYTES // 8 + 2 * (number % MESSAGES)


_lock = threading.Lock()


def _barrier() -> None:
    """Memory barrier: order the reads and writes before this call before those after it.

    The release of a lock orders earlier accesses, and the next acquisition orders later ones.
    """
    for _ in range(2):
        with _lock:
            pass


def _network() -> str:
    """Return an identifier of the kernel's boot and network namespace, which processes of one machine share.

    Processes in different network namespaces count as on different machines. Benchmarks of links rely on this.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"
