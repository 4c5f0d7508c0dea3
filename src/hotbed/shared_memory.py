"""Send tensors between processes of one machine through memory that both have mapped.

Each process has a file in memory without a name (`OwnMemory`; ``memfd_create``), which ends with the processes that
have mapped it, whatever ends them, and which no limit of ``/dev/shm`` concerns. Others map it by ``/proc/PID/fd``
(`PeerMemory`), whole and once, so that what was sent is there when its sender has ended. It holds::

    key       by which who opens it knows that it is the right one
    messages  to rank 0, then to rank 1 …: pairs of where the bytes of message m are, and m; −m once they were copied
    blocks    bytes of messages

The sender copies tensors into a free block, then notes the messages; a receiver looks until one is there, copies, and
marks it as taken; a block is free when all its messages are. Nobody waits but who receives, and who has sent a rank
1,024 messages that it has not taken. A copy of 14 MB takes 0.6 ms, through a socket of the loopback interface 9; and
messages do not depend on other threads of these processes, which find no free core (docs/log.md).
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
"""Size of what a process tells others of its memory."""
MESSAGES = 1024
"""To one rank, that it need not have taken."""
_KEY_BYTES = 16
_LINE = 64
"""Each tensor begins at a multiple of it."""
_MOST_BYTES = 16 << 30
"""Of a process's memory; pages are taken when they are needed."""
_PAGES_OF_MESSAGES = 16 * MESSAGES // PAGE_BYTES
_NAME = "hotbed"
_SPIN_S = 1e-3
"""How long a receiver looks without a pause; then it sleeps a twentieth of the time it has waited, at most this."""
_LOOK_S = 0.1
"""After which it looks whether the sender lives."""


class _Block:
    """Bytes of one exchange."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.messages: dict[int, int] = {}  # by rank, the number of the message that sent these bytes


class OwnMemory:
    """Memory of this process that others of the machine may open; Linux only. OSError if the system gives none."""

    def __init__(self, ranks: int) -> None:
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise OSError(f"no memory is shared on {sys.platform}")
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._file = os.memfd_create(_NAME)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size := min(memory_bytes(), _MOST_BYTES) // PAGE_BYTES * PAGE_BYTES)
        os.posix_fallocate(self._file, 0, PAGE_BYTES)  # a system that cannot, says so here
        self._bytes = _mapped(f"/proc/self/fd/{self._file}", size)
        self._bytes[:_KEY_BYTES] = torch.frombuffer(bytearray(self._key), dtype=torch.uint8)
        self._messages = _numbers(self._bytes)
        self._end = PAGE_BYTES + _PAGES_OF_MESSAGES * PAGE_BYTES * ranks
        self._sent = [0] * ranks
        self._blocks: list[_Block] = []

    @property
    def address(self) -> Tensor:
        """What another process needs to open it ``[ADDRESS_BYTES]`` uint8."""
        told = f"{_network()} {os.getpid()} {self._file} ".encode()
        return torch.frombuffer(bytearray(self._key + told.ljust(ADDRESS_BYTES - _KEY_BYTES)), dtype=torch.uint8)

    def send(self, tensors: Mapping[int, Tensor], peers: Mapping[int, PeerMemory]) -> None:
        """Send each rank a contiguous tensor; one that is sent to several is copied once.

        RuntimeError if there is no room for a message, and the rank has ended or has not taken earlier ones in time.
        """
        distinct = {(t.data_ptr(), t.nbytes): t for t in tensors.values()}
        starts = list(accumulate((-(-t.nbytes // _LINE) * _LINE for t in distinct.values()), initial=0))
        block = self._free_block(starts[-1])
        firsts = {key: block.first + start for key, start in zip(distinct, starts, strict=False)}
        for key, t in distinct.items():
            self._bytes[firsts[key] : firsts[key] + t.nbytes] = flat_bytes(t)
        block.messages = {
            rank: self._noted(rank, firsts[t.data_ptr(), t.nbytes], peers[rank]) for rank, t in tensors.items()
        }

    def _noted(self, rank: int, first: int, peer: PeerMemory) -> int:
        """Tell a rank where bytes for it are; return the number of the message."""
        self._sent[rank] = number = self._sent[rank] + 1
        messages, at = self._messages, _place(rank, number)
        if number > MESSAGES:
            peer.wait_until(lambda: messages[at + 1] < 0)
        messages[at] = first
        _order()
        messages[at + 1] = number
        return number

    def _free_block(self, nbytes: int) -> _Block:
        """Find the smallest free block that has room, at most twice as much, or make one."""
        most = 2 * max(nbytes, PAGE_BYTES)
        fitting = [b for b in self._blocks if nbytes <= b.size <= most and self._is_free(b)]
        if fitting:
            return min(fitting, key=lambda b: b.size)
        size = with_room(nbytes)
        try:
            if self._end + size > len(self._bytes):
                raise OSError(errno.ENOSPC, f"{len(self._bytes):,} bytes at most")
            # Takes the pages now: where there are none, writing to them later would end the process.
            os.posix_fallocate(self._file, self._end, size)
        except OSError as error:
            raise CommError(
                f"there is no memory for {size:,} bytes more that this rank sends to others of its machine "
                f"({error.strerror}), beside {self._end:,}; take smaller batches, or fewer ranks per machine"
            ) from error
        self._blocks.append(_Block(self._end, size))
        self._end += size
        return self._blocks[-1]

    def _is_free(self, block: _Block) -> bool:
        """Whether all its messages were taken; where there is a later one in the place of a message, it was."""
        return all(self._messages[_place(rank, n) + 1] != n for rank, n in block.messages.items())


class PeerMemory:
    """Messages to this process in the `OwnMemory` of another, by its address; zeros if it has none.

    OSError if the memory is of another machine, or this process may not open it.
    """

    def __init__(self, address: Tensor, rank: int, timeout: timedelta) -> None:
        key, told = bytes(address[:_KEY_BYTES].tolist()), bytes(address[_KEY_BYTES:].tolist())
        if not any(key):
            raise OSError("it has none")
        network, process, number = told.decode().split()
        if network != _network():
            raise OSError("it is of another machine, or of a container with a network of its own")
        self._number, self._rank, self._timeout = process, rank, timeout.total_seconds()
        path = Path("/proc", process, "fd", number)
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
            raise OSError("another process has that number here")
        self._bytes = _mapped(str(path), path.stat().st_size)
        if bytes(self._bytes[:_KEY_BYTES].tolist()) != key:
            raise OSError("another process has that number here")
        self._messages = _numbers(self._bytes)
        self._process = _process(int(process))
        self._expected = 0

    def expect(self) -> int:
        """Return the number of the next message: they are sent in the order in which they are expected."""
        self._expected += 1
        return self._expected

    def receive(self, number: int, out: Tensor) -> None:
        """Wait for a message, and copy it into a contiguous tensor as large as what was sent.

        RuntimeError if the sender has ended, or has not sent it in time.
        """
        at = _place(self._rank, number)
        self.wait_until(lambda: self._messages[at + 1] == number)
        _order()
        first = self._messages[at]
        flat_bytes(out)[:] = self._bytes[first : first + out.nbytes]
        _order()
        self._messages[at + 1] = -number

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait for what the other process does; RuntimeError if it has ended, or not done it in time."""
        start = looked = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                ended = self._ended()
                if (ended or now - start > self._timeout) and not ready():
                    raise RuntimeError(ended or f"timed out after {self._timeout:g} s")
            if now - start > _SPIN_S:
                time.sleep(min((now - start) / 20, _SPIN_S))
            else:
                os.sched_yield()
                time.sleep(0)  # lets other threads of Python run

    def _ended(self) -> str:
        """Say that the process has ended; empty while it lives."""
        return f"process {self._number} has ended" if self._process.has_ended() else ""


class _Process:
    """Another process; one descriptor, which tells when it has ended, serves all links."""

    def __init__(self, number: int) -> None:
        self._file = os.pidfd_open(number)
        weakref.finalize(self, os.close, self._file)

    def has_ended(self) -> bool:
        poll = select.poll()  # a new one, for several threads may ask at once
        poll.register(self._file, select.POLLIN)
        return bool(poll.poll(0))


_processes: weakref.WeakValueDictionary[int, _Process] = weakref.WeakValueDictionary()


def _process(number: int) -> _Process:
    """Find a process by its number."""
    found = _processes.get(number)
    if found is None or found.has_ended():  # then the number may be another's
        _processes[number] = found = _Process(number)
    return found


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as ``[n]`` uint8."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # strides of one row may be any


def _mapped(path: str, size: int) -> Tensor:
    """Map a file ``[size]`` uint8; unlike Python's own maps this one keeps no descriptor open."""
    try:
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _numbers(memory: Tensor) -> memoryview:
    """Return all of a memory as int64."""
    return memory.numpy().data.cast("q")


def _place(rank: int, number: int) -> int:
    """Find where a message to a rank is among the numbers of a memory."""
    return (1 + _PAGES_OF_MESSAGES * rank) * PAGE_BYTES // 8 + 2 * (number % MESSAGES)


_lock = threading.Lock()


def _order() -> None:
    """Let what follows be neither written nor read before what came before, on CPUs that reorder it.

    A lock's release keeps what is before it before, its next acquisition what is after it after.
    """
    for _ in range(2):
        with _lock:
            pass


def _network() -> str:
    """Name what processes of one machine, and of one container, have in common: boot and network of the kernel.

    Processes of two networks are on two machines to all that they send each other; benchmarks of links rely on it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"
